//! What passes a port, both ways, as the kernel saw it.

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, anyhow, bail};
use pcap_file::pcap::{PcapPacket, PcapWriter};
use roce_common::wire::{self, Opcode, Packet, Verdict};

use crate::{endpoint::Tap, lab::Port};

/// Longest frame kept whole.
const BUFFER: usize = 9_216;
/// What is kept of a frame where only its headers matter: a page for the payload of every packet takes an emulated CPU more than the
/// rest of the capture.
const HEADERS: usize = 128;

/// A frame younger than this when it is read is the newest: then others are let gather for [`GATHERING`], or a busy CPU would wake the
/// capture for every one of them.
const FRESH: Duration = Duration::from_millis(2);
const GATHERING: Duration = Duration::from_millis(5);

/// A RoCEv2 packet on the wire.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Wall-clock time.
    pub at: Duration,
    /// What the parser made of it.
    pub packet: Packet,
    /// Ethernet header onwards, as much as the capture keeps.
    pub frame: Vec<u8>,
    /// Bytes of the whole frame.
    pub wire_len: usize,
}

impl Seen {
    /// Whether it is a CNP.
    pub fn is_cnp(&self) -> bool {
        self.packet.bth.opcode == Opcode::CNP
    }
}

/// A running capture of the RoCEv2 packets at a port.
#[derive(Debug)]
pub struct Capture {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Vec<Seen>>>>,
}

impl Capture {
    /// Begins, and keeps whole frames.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn start(port: &Port) -> Result<Self> {
        Self::keeping(port, BUFFER)
    }

    /// Begins, and keeps of every frame what its headers take.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn headers(port: &Port) -> Result<Self> {
        Self::keeping(port, HEADERS)
    }

    fn keeping(port: &Port, kept: usize) -> Result<Self> {
        let tap = port.ns.run(|| Tap::open(port.index).with_context(|| format!("cannot capture on {}", port.name)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("capture".into()).spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut seen = Vec::new();
                let mut buffer = vec![0; BUFFER];
                loop {
                    // What was on its way when the end was asked for is still taken.
                    let last = stop.load(Ordering::Relaxed);
                    let Some((n, at)) = tap.next(&mut buffer)? else {
                        if last {
                            break;
                        }
                        continue;
                    };
                    let frame = buffer.get(..n).unwrap_or_default();
                    if let Verdict::Roce(packet) = wire::parse(frame) {
                        seen.push(Seen { at, packet, frame: frame[..n.min(kept)].to_vec(), wire_len: n });
                    }
                    if SystemTime::UNIX_EPOCH.elapsed().is_ok_and(|now| now.saturating_sub(at) < FRESH) {
                        thread::sleep(GATHERING);
                    }
                }
                match tap.dropped()? {
                    0 => Ok(seen),
                    n => bail!("the capture lost {n} frames"),
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends it, once nothing has passed for a moment, and hands out what it saw, in order.
    ///
    /// # Errors
    /// When frames were lost.
    pub fn finish(mut self) -> Result<Vec<Seen>> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the capture was finished before")?;
        thread.join().map_err(|_| anyhow!("the capture panicked"))?
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Writes packets into a pcap file.
///
/// # Errors
/// When it cannot be written.
pub fn save<'a>(packets: impl IntoIterator<Item = &'a Seen>, path: &Path) -> Result<()> {
    let mut writer = PcapWriter::new(File::create(path)?)?;
    for seen in packets {
        writer.write_packet(&PcapPacket::new(seen.at, seen.wire_len as u32, &seen.frame))?;
    }
    Ok(())
}
