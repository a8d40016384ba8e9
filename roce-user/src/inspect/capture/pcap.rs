//! The pcap format.

use anyhow::{Result, anyhow, bail};
use roce_common::units::Nanos;

use super::{Frame, MOST_KEPT, Reading, Sink};
use crate::inspect::link::LinkLayer;

const HEADER: usize = 24;
const RECORD_HEADER: usize = 16;

/// What the magic number says.
#[derive(Clone, Copy)]
pub(super) struct Format {
    big_endian: bool,
    nanos_per_tick: u64,
}

impl Format {
    /// `None` for any other magic number.
    pub(super) fn of(magic: [u8; 4]) -> Option<Self> {
        let (big_endian, nanos_per_tick) = match magic {
            [0xa1, 0xb2, 0xc3, 0xd4] => (true, 1_000),
            [0xd4, 0xc3, 0xb2, 0xa1] => (false, 1_000),
            [0xa1, 0xb2, 0x3c, 0x4d] => (true, 1),
            [0x4d, 0x3c, 0xb2, 0xa1] => (false, 1),
            _ => return None,
        };
        Some(Self { big_endian, nanos_per_tick })
    }

    fn u32(self, bytes: &[u8], at: usize) -> u32 {
        super::pcapng::u32_at(bytes, at, self.big_endian).unwrap_or_default()
    }
}

impl<S: Sink> Reading<'_, S> {
    /// Reads a pcap file.
    pub(super) fn pcap(mut self, format: Format) -> Result<Option<String>> {
        let Some(header) = self.source.array::<HEADER>(self.sink)? else { return Err(self.bad_header()) };
        // Two halves of 16 bits.
        let (major, minor) = match format.u32(&header, 4) {
            version if format.big_endian => (version >> 16, version & 0xffff),
            version => (version & 0xffff, version >> 16),
        };
        if (major, minor) != (2, 4) {
            bail!(
                "its header is damaged or of an ancient kind: pcap version {major}.{minor}, and 2.4 is understood; \
                 try editcap -F pcapng FILE NEW"
            );
        }
        // The upper bits may tell the length of a frame check sequence.
        let link = LinkLayer::new(format.u32(&header, 20) & 0xffff).map_err(|unsupported| anyhow!("{unsupported}"))?;
        let interface = self.interfaces.add("", Ok(link)).map_err(|fault| anyhow!("{fault}"))?;
        loop {
            let at = self.source.position();
            let Some(record) = self.source.array::<RECORD_HEADER>(self.sink)? else {
                return Ok(if self.at_end()? { None } else { self.ended(at) });
            };
            let kept = format.u32(&record, 8) as usize;
            if kept > MOST_KEPT {
                return Ok(Some(self.damaged(at, too_long(kept))));
            }
            let Some(bytes) = self.source.take(kept, self.sink)? else { return Ok(self.ended(at)) };
            *self.packets += 1;
            let fraction = u64::from(format.u32(&record, 4)) * format.nanos_per_tick;
            let frame = Frame {
                number: *self.packets,
                interface,
                interface_name: self.interfaces.name(interface),
                link,
                time: Nanos(u64::from(format.u32(&record, 0)) * Nanos::SECOND.0 + fraction),
                bytes,
                wire_len: kept.max(format.u32(&record, 12) as usize),
                tunnel: None,
            };
            if !self.sink.frame(&frame)? {
                return Ok(None);
            }
        }
    }
}

/// A length that no capture program writes.
pub(super) fn too_long(kept: usize) -> String {
    format!("it claims that {kept} bytes of it were kept, more than any capture program keeps ({MOST_KEPT})")
}
