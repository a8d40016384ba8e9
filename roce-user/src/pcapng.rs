//! Writing pcapng files (draft-ietf-opsawg-pcapng): one section, Ethernet or other interfaces, nanoseconds, little-endian.

use std::io::{self, Write};

pub(crate) const SECTION_HEADER: u32 = 0x0a0d_0d0a;
pub(crate) const BYTE_ORDER: u32 = 0x1a2b_3c4d;
pub(crate) const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
pub(crate) const ENHANCED_PACKET: u32 = 6;

const COMMENT: u16 = 1;
const SHB_USERAPPL: u16 = 4;
pub(crate) const IF_NAME: u16 = 2;
pub(crate) const IF_TSRESOL: u16 = 9;
/// As a negative power of ten.
const NANOSECONDS: u8 = 9;
const EPB_FLAGS: u16 = 2;
const EPB_DROPCOUNT: u16 = 4;
const ISB_STARTTIME: u16 = 2;
const ISB_ENDTIME: u16 = 3;
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;

/// Link type of Ethernet.
pub const ETHERNET: u16 = 1;

/// Which way a packet passed its interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Received.
    In,
    /// Sent.
    Out,
}

/// A packet and what is said of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Packet<'a> {
    /// Number of its interface, in the order of [`Writer::interface`].
    pub interface: u32,
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
    /// Bytes on the wire.
    pub wire_len: u32,
    /// The first of them.
    pub bytes: &'a [u8],
    /// Which way it went, where that is known.
    pub way: Option<Way>,
    /// Packets lost between the one before and this.
    pub lost_before: u64,
    /// Comments.
    pub comments: &'a [String],
}

/// What is said of an interface at the end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Statistics<'a> {
    /// Number of the interface.
    pub interface: u32,
    /// First and last moment, nanoseconds since 1970.
    pub span_ns: (u64, u64),
    /// Packets that passed.
    pub received: u64,
    /// Of those, packets that the capture lost.
    pub dropped: u64,
    /// A comment.
    pub comment: &'a str,
}

/// A file that is being written.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    interfaces: u32,
}

impl<W: Write> Writer<W> {
    /// Begins a file with a comment on the whole, empty for none.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(out: W, comment: &str) -> io::Result<Self> {
        let mut writer = Self { out, interfaces: 0 };
        let mut body = Vec::new();
        body.extend(BYTE_ORDER.to_le_bytes());
        // Version 1.0, a section of unknown length.
        body.extend([1, 0, 0, 0]);
        body.extend([0xff; 8]);
        option(&mut body, SHB_USERAPPL, concat!("roce ", env!("CARGO_PKG_VERSION")).as_bytes());
        if !comment.is_empty() {
            option(&mut body, COMMENT, comment.as_bytes());
        }
        end_of_options(&mut body);
        writer.block(SECTION_HEADER, &body)?;
        Ok(writer)
    }

    /// Describes an interface and returns its number.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn interface(&mut self, link: u16, name: &str, snaplen: u32) -> io::Result<u32> {
        let mut body = Vec::new();
        body.extend(link.to_le_bytes());
        body.extend([0; 2]);
        body.extend(snaplen.to_le_bytes());
        option(&mut body, IF_NAME, name.as_bytes());
        option(&mut body, IF_TSRESOL, &[NANOSECONDS]);
        end_of_options(&mut body);
        self.block(INTERFACE_DESCRIPTION, &body)?;
        self.interfaces += 1;
        Ok(self.interfaces - 1)
    }

    /// Adds a packet.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn packet(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        let mut body = Vec::new();
        body.extend(packet.interface.to_le_bytes());
        body.extend(halves(packet.unix_ns));
        body.extend((packet.bytes.len() as u32).to_le_bytes());
        body.extend(packet.wire_len.to_le_bytes());
        body.extend(packet.bytes);
        body.resize(body.len().next_multiple_of(4), 0);
        let without_options = body.len();
        if let Some(way) = packet.way {
            let flags: u32 = if way == Way::In { 1 } else { 2 };
            option(&mut body, EPB_FLAGS, &flags.to_le_bytes());
        }
        if packet.lost_before != 0 {
            option(&mut body, EPB_DROPCOUNT, &packet.lost_before.to_le_bytes());
        }
        for comment in packet.comments {
            option(&mut body, COMMENT, comment.as_bytes());
        }
        if body.len() != without_options {
            end_of_options(&mut body);
        }
        self.block(ENHANCED_PACKET, &body)
    }

    /// Adds what is to be said of an interface at the end.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn statistics(&mut self, s: &Statistics<'_>) -> io::Result<()> {
        let mut body = Vec::new();
        body.extend(s.interface.to_le_bytes());
        body.extend(halves(s.span_ns.1));
        option(&mut body, ISB_STARTTIME, &halves(s.span_ns.0));
        option(&mut body, ISB_ENDTIME, &halves(s.span_ns.1));
        option(&mut body, ISB_IFRECV, &s.received.to_le_bytes());
        option(&mut body, ISB_IFDROP, &s.dropped.to_le_bytes());
        if !s.comment.is_empty() {
            option(&mut body, COMMENT, s.comment.as_bytes());
        }
        end_of_options(&mut body);
        self.block(INTERFACE_STATISTICS, &body)
    }

    /// Ends the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.flush()?;
        Ok(self.out)
    }

    fn block(&mut self, kind: u32, body: &[u8]) -> io::Result<()> {
        let len = (body.len() as u32 + 12).to_le_bytes();
        [&kind.to_le_bytes()[..], &len, body, &len].into_iter().try_for_each(|part| self.out.write_all(part))
    }
}

/// A time as two 32-bit numbers, the upper half first in either byte order.
fn halves(ns: u64) -> [u8; 8] {
    let mut bytes = [0; 8];
    let (high, low) = bytes.split_at_mut(4);
    high.copy_from_slice(&((ns >> 32) as u32).to_le_bytes());
    low.copy_from_slice(&(ns as u32).to_le_bytes());
    bytes
}

/// Adds an option, cut to the length that its field can say, at a boundary of characters.
fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let mut len = value.len().min(usize::from(u16::MAX));
    while len < value.len() && value[len] & 0xc0 == 0x80 {
        len -= 1;
    }
    body.extend(code.to_le_bytes());
    body.extend((len as u16).to_le_bytes());
    body.extend(&value[..len]);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend([0; 4]);
}
