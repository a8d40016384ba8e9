//! The thread that keeps packets and writes recordings.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use roce_common::abi::{CaptureHead, Event};
use zerocopy::FromBytes as _;

use super::{Captured, Folder, Recording, Trigger, Window};
use crate::{
    agent::monotonic,
    events::{Log, Record},
};

/// How often the ring buffer is looked at. It holds 26,000 packets of the usual size, so 2.6 million a second may pass.
const LOOK: Duration = Duration::from_millis(10);
/// Triggers that may wait for the thread; those beyond are passed over.
const WAITING: usize = 1_024;

/// Where the packets come from.
pub trait Source: Send {
    /// Hands all records that wait to `take`.
    fn drain(&mut self, take: &mut dyn FnMut(&[u8]));

    /// Packets so far that did not fit.
    ///
    /// # Errors
    /// When the counter cannot be read.
    fn lost(&mut self) -> Result<u64>;
}

/// A running capture. Dropping it ends it; what is being recorded is written first.
#[derive(Debug)]
pub struct Recorder {
    triggers: SyncSender<Trigger>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Begins. What is written, and what cannot be, goes to the log of events.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(folder: Folder, source: impl Source + 'static, log: Arc<Log>) -> Result<Self> {
        let (triggers, from) = mpsc::sync_channel(WAITING);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let window = Window::new(folder.settings().before, folder.settings().after);
        let mut work = Work { folder, source, log, window, lost: 0, untold: 0, complained: None };
        let thread = thread::Builder::new()
            .name("roce-capture".into())
            .spawn(move || work.run(&from, &stopped))
            .context("cannot start the thread of the capture")?;
        Ok(Self { triggers, stop, thread: Some(thread) })
    }

    /// Where to tell it what happened.
    pub fn triggers(&self) -> Triggers {
        Triggers(self.triggers.clone())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has written what it has written.
            let _ended = thread.join();
        }
    }
}

/// Tells a capture what happened, and never waits.
#[derive(Clone, Debug)]
pub struct Triggers(SyncSender<Trigger>);

impl Triggers {
    /// An event of the BPF programs; most are no trigger.
    pub fn tell(&self, event: &Event) {
        if let Some(trigger) = Trigger::of(event) {
            // With a thousand waiting, one more would start no recording of its own.
            let _passed_over = self.0.try_send(trigger);
        }
    }
}

struct Work<S> {
    folder: Folder,
    source: S,
    log: Arc<Log>,
    window: Window,
    /// Packets so far that did not fit the ring buffer, and those of them that no packet has told of yet.
    lost: u64,
    untold: u64,
    /// The last complaint: it is not repeated until something could be written.
    complained: Option<String>,
}

impl<S: Source> Work<S> {
    fn run(&mut self, from: &Receiver<Trigger>, stop: &AtomicBool) {
        loop {
            let last = stop.load(Ordering::Relaxed);
            // Packets that led to these triggers were in the ring before them.
            let triggers: Vec<Trigger> = from.try_iter().collect();
            let mut done = self.take_packets();
            done.extend(triggers.into_iter().filter_map(|t| self.window.trigger(t)));
            let now = monotonic();
            done.extend(if last { self.window.close(now) } else { self.window.advance(now) });
            done.iter().for_each(|recording| self.store(recording));
            if last {
                return;
            }
            thread::sleep(LOOK);
        }
    }

    fn take_packets(&mut self) -> Vec<Recording> {
        match self.source.lost() {
            Ok(total) => {
                self.untold += total.saturating_sub(self.lost);
                self.lost = total;
            }
            Err(error) => self.complain(format!("{error:#}")),
        }
        let (window, untold, mut done) = (&mut self.window, &mut self.untold, Vec::new());
        self.source.drain(&mut |record| {
            let Ok((head, rest)) = CaptureHead::read_from_prefix(record) else { return };
            let Some(bytes) = rest.get(..head.captured as usize) else { return };
            let packet = Captured { head, bytes: bytes.into(), lost_before: std::mem::take(untold) };
            done.extend(window.packet(packet));
        });
        done
    }

    fn store(&mut self, recording: &Recording) {
        match self.folder.store(&self.log.iface(), recording) {
            Ok(path) => {
                self.complained = None;
                self.log.push(Record::capture(path, recording.trigger.to_string()));
            }
            Err(error) => self.complain(format!("{error:#}")),
        }
    }

    fn complain(&mut self, text: String) {
        if self.complained.as_ref() != Some(&text) {
            log::error!("{text}");
            self.log.push(Record::notice(text.clone()));
            self.complained = Some(text);
        }
    }
}
