//! Replays the frames of a capture through an interface.

use std::{
    fs::File,
    io::{Read, Seek},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use pcap_file::{
    DataLink,
    pcap::PcapReader,
    pcapng::{
        Block, PcapNgReader,
        blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
    },
};

use crate::{
    endpoint::{Sender, Sent},
    lab::Port,
};

/// Magic number of a pcapng section header block.
const PCAPNG: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// A frame and when it was captured, counted from the first one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Time since the first frame.
    pub at: Duration,
    /// Ethernet header onwards.
    pub bytes: Vec<u8>,
}

/// How fast to replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// As fast as the interface takes them.
    Flat,
    /// With the capture's own gaps.
    Original,
}

/// MAC addresses to write over those of the capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Macs {
    /// Source.
    pub src: Option<[u8; 6]>,
    /// Destination.
    pub dst: Option<[u8; 6]>,
}

/// What a replay did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Replayed {
    /// Frames the interface took.
    pub sent: u64,
    /// Frames it refused.
    pub refused: u64,
}

/// Reads every frame of a pcap or pcapng file.
///
/// # Errors
/// When the file is neither, was not captured on Ethernet, or holds a frame cut by the snap length: half a frame
/// cannot be replayed.
pub fn read(path: &Path) -> Result<Vec<Frame>> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut magic = [0; 4];
    file.read_exact(&mut magic).with_context(|| format!("{} is too short for a capture", path.display()))?;
    file.rewind()?;
    let mut frames = if magic == PCAPNG { read_pcapng(file) } else { read_pcap(file) }
        .with_context(|| format!("cannot read {}", path.display()))?;
    let start = frames.first().map_or(Duration::ZERO, |f| f.at);
    for frame in &mut frames {
        frame.at = frame.at.saturating_sub(start);
    }
    Ok(frames)
}

fn whole(bytes: &[u8], wire: u32, number: usize) -> Result<()> {
    if bytes.len() < wire as usize {
        bail!("frame {number} was cut to {} of {wire} bytes", bytes.len());
    }
    Ok(())
}

fn read_pcap(file: File) -> Result<Vec<Frame>> {
    let mut reader = PcapReader::new(file)?;
    if reader.header().datalink != DataLink::ETHERNET {
        bail!("link type {:?}, not Ethernet", reader.header().datalink);
    }
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet?;
        whole(&packet.data, packet.orig_len, frames.len() + 1)?;
        frames.push(Frame { at: packet.timestamp, bytes: packet.data.into_owned() });
    }
    Ok(frames)
}

fn read_pcapng(file: File) -> Result<Vec<Frame>> {
    let mut reader = PcapNgReader::new(file)?;
    let mut frames = Vec::new();
    let mut interfaces: Vec<(DataLink, u64)> = Vec::new();
    while let Some(block) = reader.next_block() {
        match block? {
            Block::SectionHeader(_) => interfaces.clear(),
            Block::InterfaceDescription(i) => interfaces.push((i.linktype, ticks_per_second(&i))),
            Block::EnhancedPacket(packet) => {
                let &(link, ticks) = interfaces
                    .get(packet.interface_id as usize)
                    .with_context(|| format!("frame {} names no interface", frames.len() + 1))?;
                if link != DataLink::ETHERNET {
                    bail!("link type {link:?}, not Ethernet");
                }
                whole(&packet.data, packet.original_len, frames.len() + 1)?;
                // pcap-file 2.0 hands out the raw tick count as nanoseconds.
                let raw = packet.timestamp.as_nanos();
                let nanos = raw * 1_000_000_000 / u128::from(ticks);
                frames.push(Frame { at: Duration::from_nanos(nanos as u64), bytes: packet.data.into_owned() });
            }
            _ => {}
        }
    }
    Ok(frames)
}

/// Resolution of an interface's timestamps; microseconds where it says nothing.
fn ticks_per_second(interface: &InterfaceDescriptionBlock<'_>) -> u64 {
    let exponent = interface.options.iter().find_map(|o| match o {
        InterfaceDescriptionOption::IfTsResol(r) => Some(*r),
        _ => None,
    });
    match exponent {
        None => 1_000_000,
        Some(r) if r & 0x80 != 0 => 1u64.checked_shl(u32::from(r & 0x7f)).unwrap_or(u64::MAX),
        Some(r) => 10u64.checked_pow(u32::from(r)).unwrap_or(u64::MAX),
    }
}

/// Sends the frames through `port`, in order.
///
/// # Errors
/// Without CAP_NET_RAW, or when the interface is gone.
pub fn replay(port: &Port, frames: &[Frame], pace: Pace, macs: Macs) -> Result<Replayed> {
    let longest = frames.iter().map(|f| f.bytes.len()).max().unwrap_or(0);
    let sender =
        port.ns.run(|| Sender::open(port.index, longest).with_context(|| format!("cannot send on {}", port.name)))?;
    let start = Instant::now();
    let mut done = Replayed::default();
    for frame in frames {
        let mut bytes = frame.bytes.clone();
        for (at, mac) in [(0, macs.dst), (6, macs.src)] {
            if let (Some(mac), Some(room)) = (mac, bytes.get_mut(at..at + 6)) {
                room.copy_from_slice(&mac);
            }
        }
        if pace == Pace::Original {
            thread::sleep(frame.at.saturating_sub(start.elapsed()));
        }
        let sent = loop {
            match sender.send(&bytes) {
                Sent::Blocked => {}
                other => break other,
            }
        };
        match sent {
            Sent::Taken => done.sent += 1,
            _ => done.refused += 1,
        }
    }
    Ok(done)
}
