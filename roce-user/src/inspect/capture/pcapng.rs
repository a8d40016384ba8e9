//! The pcapng format: sections, interfaces and the three kinds of packet block; every other block is left out.

use anyhow::{Result, bail};
use roce_common::units::Nanos;

use super::{Frame, Interfaces, MOST_KEPT, Reading, Sink, pcap::too_long};
use crate::{
    inspect::{link::LinkLayer, source::MOST_AT_ONCE},
    pcapng::{BYTE_ORDER, ENHANCED_PACKET, IF_NAME, IF_TSRESOL, INTERFACE_DESCRIPTION, SECTION_HEADER},
};

const OBSOLETE_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
/// Type, length, and the length again at the end.
const FRAMING: usize = 12;
/// An option of an interface description.
const IF_TSOFFSET: u16 = 14;
const DIFFERENT_LENGTHS: &str = "its block has two different lengths";

/// An interface of the current section.
struct Interface {
    /// Its number in the table of all.
    number: u32,
    snaplen: u32,
    clock: Clock,
}

/// How an interface counts time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Clock {
    ticks_per_second: u64,
    /// Seconds to add.
    offset: i64,
}

/// The number at `at` of a block.
pub(super) fn u32_at(bytes: &[u8], at: usize, big_endian: bool) -> Option<u32> {
    let bytes: [u8; 4] = *bytes.get(at..)?.first_chunk()?;
    Some(if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) })
}

fn u16_at(bytes: &[u8], at: usize, big_endian: bool) -> Option<u16> {
    let bytes: [u8; 2] = *bytes.get(at..)?.first_chunk()?;
    Some(if big_endian { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
}

/// The section that is being read.
#[derive(Default)]
struct Section {
    big_endian: bool,
    interfaces: Vec<Interface>,
}

/// The head of a block.
#[derive(Clone, Copy)]
struct Head {
    kind: u32,
    len: usize,
}

impl Head {
    /// Whether its block is looked into.
    const fn is_read(self) -> bool {
        matches!(self.kind, SECTION_HEADER | INTERFACE_DESCRIPTION | OBSOLETE_PACKET | SIMPLE_PACKET | ENHANCED_PACKET)
    }
}

impl<S: Sink> Reading<'_, S> {
    /// Reads a pcapng file.
    pub(super) fn pcapng(mut self) -> Result<Option<String>> {
        let mut section = Section::default();
        let mut first = true;
        loop {
            let at = self.source.position();
            let Some(head) = self.source.peek(FRAMING, self.sink)? else {
                if first {
                    return Err(self.bad_header());
                }
                return Ok(if self.at_end()? { None } else { self.ended(at) });
            };
            let head = match section.head(head) {
                Ok(head) => head,
                Err(fault) if first => bail!("the capture's header is damaged: {fault}"),
                Err(fault) => return Ok(Some(self.damaged(at, fault))),
            };
            if !head.is_read() {
                match self.skip_block(head, &section)? {
                    None => return Ok(self.ended(at)),
                    Some(true) => continue,
                    Some(false) => return Ok(Some(self.damaged(at, DIFFERENT_LENGTHS))),
                }
            }
            let Some(block) = self.source.take(head.len, self.sink)? else {
                return if first { Err(self.bad_header()) } else { Ok(self.ended(at)) };
            };
            let told = match section.u32(block, head.len - 4) {
                Some(len) if len as usize == head.len => {
                    let body = &block[8..head.len - 4];
                    let of_file = *self.packets - self.before + 1;
                    match head.kind {
                        SECTION_HEADER => {
                            self.interfaces.start_section();
                            section.begin(body)
                        }
                        INTERFACE_DESCRIPTION => section.describe(body, self.interfaces),
                        kind => match section.packet(kind, body) {
                            Ok((interface, packet)) => {
                                *self.packets += 1;
                                if let Some(link) = self.interfaces.link_of(interface.number, of_file) {
                                    let frame = Frame {
                                        number: *self.packets,
                                        interface: interface.number,
                                        interface_name: self.interfaces.name(interface.number),
                                        link,
                                        time: interface.clock.time(packet.ticks),
                                        bytes: packet.bytes,
                                        wire_len: packet.bytes.len().max(packet.wire_len as usize),
                                        tunnel: None,
                                    };
                                    if !self.sink.frame(&frame)? {
                                        return Ok(None);
                                    }
                                }
                                Ok(())
                            }
                            Err(fault) => Err(fault),
                        },
                    }
                }
                _ => Err(DIFFERENT_LENGTHS.to_owned()),
            };
            match told {
                Ok(()) => first = false,
                Err(fault) if first => bail!("the capture's header is damaged: {fault}"),
                Err(fault) => return Ok(Some(self.damaged(at, fault))),
            }
        }
    }

    /// Leaves out a block. `None`: the stream ended in it; false: it has two different lengths.
    fn skip_block(&mut self, head: Head, section: &Section) -> Result<Option<bool>> {
        if !self.source.skip(head.len as u64 - 4, self.sink)? {
            return Ok(None);
        }
        let Some(end) = self.source.array::<4>(self.sink)? else { return Ok(None) };
        Ok(Some(section.u32(&end, 0) == Some(head.len as u32)))
    }
}

impl Section {
    fn u32(&self, bytes: &[u8], at: usize) -> Option<u32> {
        u32_at(bytes, at, self.big_endian)
    }

    fn u16(&self, bytes: &[u8], at: usize) -> Option<u16> {
        u16_at(bytes, at, self.big_endian)
    }

    /// Reads the head of a block, its first [`FRAMING`] bytes; that of a section header tells the order of bytes. The
    /// error says what cannot be.
    fn head(&mut self, bytes: &[u8]) -> Result<Head, String> {
        let kind = self.u32(bytes, 0).unwrap_or_default();
        if kind == SECTION_HEADER {
            self.big_endian = match (u32_at(bytes, 8, true), u32_at(bytes, 8, false)) {
                (Some(BYTE_ORDER), _) => true,
                (_, Some(BYTE_ORDER)) => false,
                _ => return Err("a section does not tell its order of bytes".to_owned()),
            };
        }
        let head = Head { kind, len: self.u32(bytes, 4).unwrap_or_default() as usize };
        if head.len < FRAMING || !head.len.is_multiple_of(4) || head.is_read() && head.len > MOST_AT_ONCE {
            return Err(format!("a block of type {kind:#x} claims to be {} bytes long", head.len));
        }
        Ok(head)
    }

    /// A section begins.
    fn begin(&mut self, body: &[u8]) -> Result<(), String> {
        self.interfaces.clear();
        match self.u16(body, 4) {
            Some(1) => Ok(()),
            Some(version) => Err(format!("pcapng version {version}, and 1 is understood")),
            None => Err("the header of a section is too short".to_owned()),
        }
    }

    /// An interface is described.
    fn describe(&mut self, body: &[u8], interfaces: &mut Interfaces) -> Result<(), String> {
        let (Some(link), Some(snaplen)) = (self.u16(body, 0), self.u32(body, 4)) else {
            return Err("the description of an interface is too short".to_owned());
        };
        let mut name = String::new();
        let mut clock = Clock { ticks_per_second: 1_000_000, offset: 0 };
        let mut at = 8;
        while let (Some(code @ 1..), Some(len)) = (self.u16(body, at), self.u16(body, at + 2)) {
            let len = usize::from(len);
            // What is cut off is not there.
            let Some(value) = body.get(at + 4..at + 4 + len) else { break };
            match (code, value) {
                (IF_NAME, value) => name = String::from_utf8_lossy(value).into_owned(),
                (IF_TSRESOL, &[resolution]) => clock.ticks_per_second = ticks_per_second(resolution),
                (IF_TSOFFSET, value) if value.len() == 8 => {
                    let (a, b) = (self.u32(value, 0).unwrap_or_default(), self.u32(value, 4).unwrap_or_default());
                    let (high, low) = if self.big_endian { (a, b) } else { (b, a) };
                    clock.offset = (u64::from(high) << 32 | u64::from(low)).cast_signed();
                }
                _ => {}
            }
            at += 4 + len.next_multiple_of(4);
        }
        let number = interfaces.add(&name, LinkLayer::new(link.into()))?;
        self.interfaces.push(Interface { number, snaplen, clock });
        Ok(())
    }

    /// Reads a packet block's body; the error says what cannot be. Options, which may hold anything, are not looked at.
    fn packet<'a>(&self, kind: u32, body: &'a [u8]) -> Result<(&Interface, Packet<'a>), String> {
        let short = || "its block is too short".to_owned();
        let number = |at| self.u32(body, at).ok_or_else(short);
        let (interface, packet) = if kind == SIMPLE_PACKET {
            // It belongs to the first interface and has no time; its data ends where snap length or padding say.
            let wire_len = number(0)?;
            let snaplen = self.interfaces.first().map_or(0, |i| i.snaplen);
            let snaplen = if snaplen == 0 { u32::MAX } else { snaplen };
            let data = body.get(4..).ok_or_else(short)?;
            let bytes = data.get(..wire_len.min(snaplen) as usize).unwrap_or(data);
            (0, Packet { ticks: 0, wire_len, bytes })
        } else {
            let interface = match kind {
                ENHANCED_PACKET => number(0)?,
                // The obsolete block: 16 bits of interface, 16 bits of drops.
                _ if self.big_endian => number(0)? >> 16,
                _ => number(0)? & 0xffff,
            };
            let kept = number(12)? as usize;
            let data = body.get(20..).ok_or_else(short)?;
            let bytes = data.get(..kept).ok_or_else(|| {
                format!("it claims that {kept} bytes of it were kept, and its block has room for {}", data.len())
            })?;
            let ticks = u64::from(number(4)?) << 32 | u64::from(number(8)?);
            (interface, Packet { ticks, wire_len: number(16)?, bytes })
        };
        if packet.bytes.len() > MOST_KEPT {
            return Err(too_long(packet.bytes.len()));
        }
        match self.interfaces.get(interface as usize) {
            Some(interface) => Ok((interface, packet)),
            None => Err(format!("it is of interface {interface}, which the file does not describe")),
        }
    }
}

/// A packet of a block.
struct Packet<'a> {
    ticks: u64,
    wire_len: u32,
    bytes: &'a [u8],
}

/// The `if_tsresol` option: a negative power of ten, or of two with the top bit set.
fn ticks_per_second(resolution: u8) -> u64 {
    let exponent = u32::from(resolution & 0x7f);
    let base: u64 = if resolution & 0x80 == 0 { 10 } else { 2 };
    base.checked_pow(exponent).unwrap_or(u64::MAX)
}

impl Clock {
    fn time(self, ticks: u64) -> Nanos {
        let nanos = match self.ticks_per_second {
            1_000_000_000 => ticks,
            1_000_000 => ticks.saturating_mul(1_000),
            // Never 0: a power of ten or two.
            per_second => {
                let nanos = u128::from(ticks) * u128::from(Nanos::SECOND.0) / u128::from(per_second);
                u64::try_from(nanos).unwrap_or(u64::MAX)
            }
        };
        let offset = self.offset.unsigned_abs().saturating_mul(Nanos::SECOND.0);
        Nanos(if self.offset < 0 { nanos.saturating_sub(offset) } else { nanos.saturating_add(offset) })
    }
}
