//! The agent's side of the socket: a thread of its own, so that no reader delays the agent.

use std::{
    io,
    os::unix::net::UnixListener as StdListener,
    rc::Rc,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    runtime,
    sync::watch,
    task::{JoinSet, LocalSet},
    time::{sleep, timeout},
};

use super::{EventLine, Kind, Log, REQUEST_BYTES, Request, Wall, address, control};
use crate::export::SCHEMA;

/// Most readers at a time.
const READERS: usize = 16;
/// Records written to a reader at once.
const BATCH: usize = 256;
/// How often the log is looked at for a reader that follows it: one look takes what a flood of events brings meanwhile.
const LOOK: Duration = Duration::from_millis(20);
/// How long a reader may take to say what it wants.
const ASKED: Duration = Duration::from_secs(2);
/// How long readers may take to hear the last of an agent that ends.
const GOODBYE: Duration = Duration::from_millis(300);
/// A stranger is refused; the next connection is taken this much later, so that strangers cost next to nothing.
const STRANGER_PAUSE: Duration = Duration::from_millis(5);

/// Serves a log until it is dropped.
#[derive(Debug)]
pub struct Server {
    log: Arc<Log>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the log of an interface of the calling thread's network namespace.
    ///
    /// # Errors
    /// Somebody has the name, or no thread can be started.
    pub fn start(iface: &str, ifindex: u32) -> Result<Self> {
        let listener = match address(ifindex).and_then(|a| StdListener::bind_addr(&a)) {
            Ok(listener) => listener,
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                bail!(
                    "{iface}: another process holds the socket for its events (@roce-events-{ifindex}): stop it first"
                )
            }
            Err(e) => return Err(e).with_context(|| format!("{iface}: cannot open the socket for its events")),
        };
        listener.set_nonblocking(true).context("cannot wait on the socket for events")?;
        let log = Arc::new(Log::new(iface));
        let (stop, stopped) = watch::channel(false);
        let runtime = runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
        let served = Arc::clone(&log);
        let thread = thread::Builder::new()
            .name("roce-events".into())
            .spawn(move || {
                let tasks = LocalSet::new();
                runtime.block_on(tasks.run_until(serve(listener, served, stopped)));
                // Whoever does not read is not waited for.
                runtime.shutdown_background();
            })
            .context("cannot start the thread that serves events")?;
        Ok(Self { log, stop, thread: Some(thread) })
    }

    /// The log that is served.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.log.close();
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked serves nobody any more; that is all there is to it.
            let _ended = thread.join();
        }
    }
}

async fn serve(listener: StdListener, log: Arc<Log>, mut stop: watch::Receiver<bool>) {
    let listener = match UnixListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return log::error!("cannot serve events: {error}"),
    };
    // An agent without root, by capabilities, is read by its own user.
    let ours = nix::unistd::geteuid().as_raw();
    let mut readers = JoinSet::new();
    let places = Rc::new(());
    loop {
        let accepted = tokio::select! {
            _ = stop.changed() => break,
            accepted = listener.accept() => accepted,
        };
        while readers.try_join_next().is_some() {}
        let stream = match accepted {
            Ok((stream, _)) => stream,
            // Out of descriptors, say: later perhaps.
            Err(error) => {
                log::debug!("cannot take a reader of events: {error}");
                sleep(STRANGER_PAUSE).await;
                continue;
            }
        };
        let trusted = stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == ours);
        if !trusted {
            refuse(&stream, "only root and the agent's own user may read events");
            drop(stream);
            sleep(STRANGER_PAUSE).await;
        } else if Rc::strong_count(&places) > READERS {
            refuse(&stream, "it has as many readers as it takes");
        } else {
            let (log, place) = (Arc::clone(&log), Rc::clone(&places));
            readers.spawn_local(async move {
                // A reader that went away is nobody's trouble.
                if let Err(error) = read(stream, &log).await {
                    log::debug!("a reader of events: {error}");
                }
                drop(place);
            });
        }
    }
    let _slow_ones_are_left = timeout(GOODBYE, async { while readers.join_next().await.is_some() {} }).await;
}

/// Says no, if the socket takes that much at once.
fn refuse(stream: &UnixStream, why: &str) {
    let line = format!("{}\n", json!({"schema": SCHEMA, "kind": control::REFUSED, "text": why}));
    if let Err(error) = stream.try_write(line.as_bytes()) {
        log::debug!("a refused reader of events: {error}");
    }
}

/// Serves one reader.
async fn read(stream: UnixStream, log: &Log) -> io::Result<()> {
    let (from, mut to) = stream.into_split();
    let mut asked = String::new();
    let mut from = BufReader::new(from.take(REQUEST_BYTES));
    timeout(ASKED, from.read_line(&mut asked)).await??;
    let request: Request = serde_json::from_str(&asked)?;
    if request.story {
        // Before the first look, a second after the start, nothing is known.
        let mut told = json!({"schema": SCHEMA, "kind": control::STORY, "iface": log.iface()});
        if let Some(story) = log.story() {
            (told["flows"], told["findings"]) = (json!(story.flows), json!(story.findings));
        }
        to.write_all(format!("{told}\n").as_bytes()).await?;
        return to.shutdown().await;
    }
    let kinds: Vec<Kind> =
        Kind::ALL.iter().copied().filter(|k| request.kinds.is_empty() || request.kinds.contains(k)).collect();
    let mut cursor = log.start();
    let mut text = String::new();
    loop {
        let batch = log.read(&mut cursor, &kinds, BATCH);
        let wall = Wall::now();
        text.clear();
        if batch.lost != 0 {
            let line = json!({"schema": SCHEMA, "kind": control::LOST, "iface": batch.iface, "lost": batch.lost});
            text += &format!("{line}\n");
        }
        for (seq, record) in &batch.records {
            text += &serde_json::to_string(&EventLine::new(&batch.iface, Some(*seq), record, wall))?;
            text.push('\n');
        }
        let done = batch.records.len() < BATCH && (batch.closed || !request.follow);
        if done {
            text += &format!("{}\n", json!({"schema": SCHEMA, "kind": control::END, "iface": batch.iface}));
        }
        to.write_all(text.as_bytes()).await?;
        if done {
            return to.shutdown().await;
        }
        if batch.records.len() < BATCH {
            sleep(LOOK).await;
            // Notices a reader that is gone though nothing is written.
            if to.as_ref().ready(tokio::io::Interest::WRITABLE).await?.is_write_closed() {
                return Ok(());
            }
        }
    }
}
