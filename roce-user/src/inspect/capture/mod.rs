//! Capture files: pcap and pcapng of either byte order, packed with gzip or not, read packet by packet in bounded memory.
//!
//! Nothing in a file is believed. A length is compared with what any capture program writes before a byte is taken for it,
//! and where a file contradicts itself or ends early, everything before that place counts and the place is named.

mod interfaces;
mod pcap;
mod pcapng;

use anyhow::{Result, anyhow, bail};
use roce_common::{abi::Tap, units::Nanos, wire::Tunnel};

use super::{
    link::LinkLayer,
    source::{Idle, Source},
};
pub(super) use interfaces::{Interfaces, MOST as MOST_INTERFACES};

/// The longest packet that capture programs keep (tcpdump's and Wireshark's limit): a longer one is a damaged length.
const MOST_KEPT: usize = 262_144;

/// A frame as captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    /// Its number, counted from 1 as Wireshark counts: through the file, and on through files that are read as one.
    pub(super) number: u64,
    /// Number of the interface, or of the tap of a tunnel network.
    pub(super) interface: u32,
    /// Name of the interface; empty where it is that of a tunnel network.
    pub(super) interface_name: &'a str,
    /// What its first byte is.
    pub(super) link: LinkLayer,
    /// When it was captured, since 1970.
    pub(super) time: Nanos,
    /// The bytes kept.
    pub(super) bytes: &'a [u8],
    /// How long it was on the wire.
    pub(super) wire_len: usize,
    /// The tunnel out of which the frame was taken.
    pub(super) tunnel: Option<Tunnel>,
}

/// Who takes the frames.
pub(super) trait Sink: Idle {
    /// Takes the next frame; false when no more are wanted.
    ///
    /// # Errors
    ///
    /// What was made of it cannot be written.
    fn frame(&mut self, frame: &Frame<'_>) -> Result<bool>;
}

/// What was learnt of a capture besides its frames.
#[derive(Default)]
pub(super) struct Capture {
    /// Names of the interfaces, or their numbers.
    pub(super) interfaces: Vec<String>,
    /// Why it was not read to its end.
    pub(super) incomplete: Option<String>,
}

impl Capture {
    /// The name of a tap; empty where there is none.
    pub(super) fn tap_name(&self, tap: Tap) -> &str {
        self.interfaces.get(tap.ifindex() as usize).map_or("", String::as_str)
    }
}

/// A file in the making, common to both formats.
struct Reading<'a, S> {
    source: &'a mut Source,
    sink: &'a mut S,
    interfaces: &'a mut Interfaces,
    /// Packets read so far, in files read before this one too.
    packets: &'a mut u64,
    /// Packets before this file.
    before: u64,
}

/// Reads a capture from `source` to its end; `packets` is the number of packets before it and is counted on. Returns why
/// it was not read to its end, where it was not.
///
/// # Errors
///
/// It is no capture, or of a kind that is not understood, or what the sink made of it cannot be written. The error does
/// not name the file: the caller does.
pub(super) fn read(
    source: &mut Source,
    interfaces: &mut Interfaces,
    packets: &mut u64,
    sink: &mut impl Sink,
) -> Result<Option<String>> {
    let magic = match source.peek(4, sink)? {
        Some(bytes) => *bytes.first_chunk().unwrap_or(&[0; 4]),
        None => return Err(too_short(source, sink)?),
    };
    let before = *packets;
    interfaces.start_file();
    let reading = Reading { source, sink, interfaces, packets, before };
    let incomplete = match magic {
        [0x0a, 0x0d, 0x0d, 0x0a] => reading.pcapng()?,
        magic => match pcap::Format::of(magic) {
            Some(format) => reading.pcap(format)?,
            None => bail!("{}", other_format(magic)),
        },
    };
    let read = *packets - before;
    match (incomplete, interfaces.unreadable()) {
        (_, Some(unreadable)) if interfaces.unread() == read => bail!("{unreadable}"),
        (Some(incomplete), Some(unreadable)) => Ok(Some(format!("{incomplete}; {unreadable}"))),
        (incomplete, unreadable) => Ok(incomplete.or(unreadable)),
    }
}

/// A stream that ends within its first four bytes.
fn too_short(source: &mut Source, sink: &mut impl Idle) -> Result<anyhow::Error> {
    if let Some(failure) = source.failure() {
        return Ok(packing_or_disk(failure));
    }
    let n = source.available();
    let start = source.peek(n, sink)?.unwrap_or_default();
    Ok(match start {
        [] => anyhow!("the file is empty"),
        [0xa1, ..] | [0xd4 | 0x4d, ..] | [0x0a, 0x0d, ..] => {
            anyhow!("the capture is truncated: it ends inside its header")
        }
        _ => anyhow!("it is not a capture: neither pcap nor pcapng"),
    })
}

/// An error that the reader met, in words.
fn packing_or_disk(failure: &std::io::Error) -> anyhow::Error {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    match failure.kind() {
        UnexpectedEof => anyhow!("its gzip stream is truncated"),
        InvalidData | InvalidInput => anyhow!("its gzip stream is damaged ({failure})"),
        _ => anyhow!("{failure}"),
    }
}

/// What a file that is neither pcap nor pcapng is, and what to do.
fn other_format(magic: [u8; 4]) -> &'static str {
    match magic {
        [0xa1, 0xb2, 0xcd, 0x34] | [0x34, 0xcd, 0xb2, 0xa1] => {
            "it is a \"modified\" pcap with longer packet headers; convert it: editcap -F pcapng FILE NEW"
        }
        [0x1c, 0x00, 0x01, 0xac | 0xab] | [0xac | 0xab, 0x01, 0x00, 0x1c] => {
            "it is a pcap of an Ixia device; convert it: editcap -F pcapng FILE NEW"
        }
        [b's', b'n', b'o', b'o'] => "it is a snoop capture; convert it: editcap -F pcapng FILE NEW",
        [b'R', b'T', b'S', b'S'] | [b'G', b'M', b'B', b'U'] => {
            "it is a capture of Microsoft Network Monitor; convert it: editcap -F pcapng FILE NEW"
        }
        [b'T', b'R', b'S', b'N'] | [b'X', b'C', b'P', 0] => {
            "it is a capture of Sniffer; convert it: editcap -F pcapng FILE NEW"
        }
        [0x28, 0xb5, 0x2f, 0xfd] => "it is packed with zstd; unpack it: zstd -d FILE",
        [0x04, 0x22, 0x4d, 0x18] => "it is packed with lz4; unpack it: lz4 -d FILE",
        [0xfd, b'7', b'z', b'X'] => "it is packed with xz; unpack it: xz -d FILE",
        [b'B', b'Z', b'h', _] => "it is packed with bzip2; unpack it: bzip2 -d FILE",
        [b'P', b'K', 3, 4] => "it is a zip archive; unpack it: unzip FILE",
        _ => "it is not a capture, neither pcap nor pcapng",
    }
}

impl<S: Sink> Reading<'_, S> {
    /// Packets of this file.
    fn of_this_file(&self) -> u64 {
        *self.packets - self.before
    }

    /// The next packet cannot be read: how that is said.
    fn damaged(&self, at: u64, what: impl std::fmt::Display) -> String {
        format!("packet {} at byte {at} is damaged: {what}; nothing behind it was read", self.of_this_file() + 1)
    }

    /// The stream ended inside the packet that begins at byte `at`: how that is said. `None` where a person ended it.
    fn ended(&self, at: u64) -> Option<String> {
        if self.source.was_interrupted() {
            return None;
        }
        let next = self.of_this_file() + 1;
        if let Some(failure) = self.source.failure() {
            return Some(format!("{}: nothing from packet {next} on was read", packing_or_disk(failure)));
        }
        let end = self.source.position() + self.source.available() as u64;
        Some(format!(
            "it ends at byte {end}, inside packet {next} that begins at byte {at}: truncated, or that packet's length is \
             damaged"
        ))
    }

    /// Whether the stream is at its end: nothing is left and nothing went wrong.
    fn at_end(&mut self) -> Result<bool> {
        Ok(!self.source.has(1, self.sink)? && self.source.failure().is_none())
    }

    /// Says why the header cannot be read.
    fn bad_header(&self) -> anyhow::Error {
        match self.source.failure() {
            Some(failure) => packing_or_disk(failure),
            None => anyhow!("the capture is truncated: it ends inside its header"),
        }
    }
}
