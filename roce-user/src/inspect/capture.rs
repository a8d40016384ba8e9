//! Capture files: pcap and pcapng of either byte order, read frame by frame in bounded memory.

use std::{
    fs::File,
    io::{Chain, Cursor, ErrorKind, Read},
    path::Path,
};

use anyhow::{Context, Result, bail};
use pcap_file::{
    DataLink, Endianness, PcapError, TsResolution,
    pcap::PcapReader,
    pcapng::{PcapNgReader, blocks::interface_description::InterfaceDescriptionOption},
};
use roce_common::units::Nanos;

use super::link::LinkLayer;

/// A frame as captured.
pub(super) struct Frame<'a> {
    /// Its number, counted from 1 as Wireshark counts: through the file, and on through files that are read as one.
    pub(super) number: u64,
    /// Number of the interface, counted through the file.
    pub(super) interface: u32,
    /// What its first byte is.
    pub(super) link: LinkLayer,
    /// When it was captured.
    pub(super) time: Nanos,
    /// The bytes kept.
    pub(super) bytes: &'a [u8],
    /// How long it was on the wire.
    pub(super) wire_len: usize,
}

/// What was learnt of a file besides its frames.
#[derive(Default)]
pub(super) struct Capture {
    /// Names of the interfaces, or their numbers.
    pub(super) interfaces: Vec<String>,
    /// Why it was not read to its end.
    pub(super) incomplete: Option<String>,
}

/// The file with the bytes already read from it put back.
type Input = Chain<Cursor<Vec<u8>>, File>;

/// Calls `each` for every frame of the file. The error does not name the file: the caller does.
pub(super) fn read(path: &Path, mut each: impl FnMut(&Frame<'_>)) -> Result<Capture> {
    let mut file = File::open(path)?;
    let mut magic = Vec::new();
    file.by_ref().take(4).read_to_end(&mut magic)?;
    let kind = match magic[..] {
        [] => bail!("the file is empty"),
        [0xa1, 0xb2, 0xc3, 0xd4] | [0xa1, 0xb2, 0x3c, 0x4d] | [0xd4, 0xc3, 0xb2, 0xa1] | [0x4d, 0x3c, 0xb2, 0xa1] => {
            Kind::Pcap
        }
        [0x0a, 0x0d, 0x0d, 0x0a] => Kind::PcapNg,
        [0x1f, 0x8b, ..] => bail!("it is compressed with gzip; decompress it first"),
        [0x28, 0xb5, 0x2f, 0xfd] => bail!("it is compressed with zstd; decompress it first"),
        _ => bail!("it is not a capture: neither pcap nor pcapng"),
    };
    let input = Cursor::new(magic).chain(file);
    match kind {
        Kind::Pcap => read_pcap(input, &mut each),
        Kind::PcapNg => read_pcapng(input, &mut each),
    }
}

enum Kind {
    Pcap,
    PcapNg,
}

/// Says what is wrong with a file whose header cannot be read.
fn bad_header(error: PcapError) -> anyhow::Error {
    match error {
        PcapError::IoError(e) if e.kind() == ErrorKind::UnexpectedEof => {
            anyhow::anyhow!("the capture is truncated: it ends inside its header")
        }
        PcapError::IoError(e) => e.into(),
        other => anyhow::Error::new(other).context("the capture's header is damaged"),
    }
}

/// What an error behind `records` good records means: why the file was not read to its end, or that it cannot be read.
fn stopped(error: PcapError, records: u64) -> Result<String> {
    let next = records + 1;
    match error {
        PcapError::IoError(e) if e.kind() == ErrorKind::UnexpectedEof => {
            Ok(format!("the file ends inside record {next}: truncated, or the length of that record is damaged"))
        }
        PcapError::IoError(e) => Err(e.into()),
        other => Ok(format!("record {next} is damaged ({other}), nothing behind it was read")),
    }
}

fn read_pcap(input: Input, each: &mut impl FnMut(&Frame<'_>)) -> Result<Capture> {
    let mut reader = PcapReader::new(input).map_err(bad_header)?;
    let header = reader.header();
    // The upper bits may tell the length of a frame check sequence.
    let link = LinkLayer::new(DataLink::from(u32::from(header.datalink) & 0xffff))?;
    let nanos_per_tick = match header.ts_resolution {
        TsResolution::MicroSecond => 1_000,
        TsResolution::NanoSecond => 1,
    };
    let mut capture = Capture { interfaces: vec!["0".to_owned()], incomplete: None };
    let mut records = 0;
    // Raw records: the checked ones refuse every frame that is longer than the snap length.
    while let Some(record) = reader.next_raw_packet() {
        let record = match record {
            Ok(record) => record,
            Err(error) => {
                capture.incomplete = Some(stopped(error, records)?);
                break;
            }
        };
        records += 1;
        let fraction = u64::from(record.ts_frac) * nanos_per_tick;
        each(&Frame {
            number: records,
            interface: 0,
            link,
            time: Nanos(u64::from(record.ts_sec) * Nanos::SECOND.0 + fraction),
            bytes: &record.data,
            wire_len: record.data.len().max(record.orig_len as usize),
        });
    }
    Ok(capture)
}

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const OBSOLETE_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;

/// An interface of the current section.
struct Interface {
    link: DataLink,
    snaplen: u32,
    /// Ticks per second of its clock.
    ticks: u64,
}

fn read_pcapng(input: Input, each: &mut impl FnMut(&Frame<'_>)) -> Result<Capture> {
    let mut reader = PcapNgReader::new(input).map_err(bad_header)?;
    let mut endianness = reader.section().endianness;
    let mut capture = Capture::default();
    // Numbers of interfaces start anew with every section; ours go on.
    let mut section: Vec<Interface> = Vec::new();
    let (mut blocks, mut frames) = (1, 0);
    loop {
        let block = match reader.next_raw_block() {
            None => break,
            Some(Ok(block)) => block,
            Some(Err(error)) => {
                capture.incomplete = Some(stopped(error, blocks)?);
                break;
            }
        };
        blocks += 1;
        match block.type_ {
            SECTION_HEADER => {
                section.clear();
                endianness = reader.section().endianness;
            }
            INTERFACE_DESCRIPTION => {
                let Some(description) = reader.interfaces().last() else { continue };
                let mut name = None;
                let mut ticks = 1_000_000;
                for option in &description.options {
                    match option {
                        InterfaceDescriptionOption::IfName(n) => name = Some(n.trim_end_matches('\0').to_owned()),
                        InterfaceDescriptionOption::IfTsResol(r) => ticks = ticks_per_second(*r),
                        _ => {}
                    }
                }
                section.push(Interface { link: description.linktype, snaplen: description.snaplen, ticks });
                let number = capture.interfaces.len();
                capture.interfaces.push(name.filter(|n| !n.is_empty()).unwrap_or_else(|| number.to_string()));
            }
            kind @ (ENHANCED_PACKET | SIMPLE_PACKET | OBSOLETE_PACKET) => {
                let first_of_section = capture.interfaces.len() - section.len();
                let snap = section.first().map_or(0, |i| i.snaplen);
                let Some(packet) = packet_block(kind, &block.body, endianness, snap) else {
                    capture.incomplete = Some(format!("block {blocks} is damaged, nothing behind it was read"));
                    break;
                };
                let Some(interface) = section.get(packet.interface as usize) else {
                    capture.incomplete = Some(format!(
                        "block {blocks} names interface {}, which the file does not describe; nothing behind it was read",
                        packet.interface
                    ));
                    break;
                };
                let number = first_of_section + packet.interface as usize;
                let link = LinkLayer::new(interface.link)
                    .with_context(|| format!("interface {}", capture.interfaces[number]))?;
                frames += 1;
                each(&Frame {
                    number: frames,
                    interface: number as u32,
                    link,
                    time: time_of(packet.ticks, interface.ticks),
                    bytes: packet.bytes,
                    wire_len: packet.bytes.len().max(packet.wire_len as usize),
                });
            }
            _ => {}
        }
    }
    Ok(capture)
}

/// The `if_tsresol` option: a negative power of ten, or of two with the top bit set.
fn ticks_per_second(resolution: u8) -> u64 {
    let exponent = u32::from(resolution & 0x7f);
    let base: u64 = if resolution & 0x80 == 0 { 10 } else { 2 };
    base.checked_pow(exponent).unwrap_or(u64::MAX)
}

fn time_of(ticks: u64, per_second: u64) -> Nanos {
    let per_second = u128::from(per_second.max(1));
    let nanos = u128::from(ticks) * u128::from(Nanos::SECOND.0) / per_second;
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// A packet of a pcapng block.
struct BlockPacket<'a> {
    interface: u32,
    ticks: u64,
    wire_len: u32,
    bytes: &'a [u8],
}

/// Reads a packet block's body; `None` where it contradicts itself. Options, which may hold anything, are not looked at.
fn packet_block(kind: u32, body: &[u8], endianness: Endianness, snaplen: u32) -> Option<BlockPacket<'_>> {
    let number = |offset: usize| {
        let bytes: [u8; 4] = *body.get(offset..)?.first_chunk()?;
        Some(match endianness {
            Endianness::Big => u32::from_be_bytes(bytes),
            Endianness::Little => u32::from_le_bytes(bytes),
        })
    };
    if kind == SIMPLE_PACKET {
        // It belongs to the first interface and has no time; its data ends where snap length or padding say.
        let wire_len = number(0)?;
        let snaplen = if snaplen == 0 { u32::MAX } else { snaplen };
        let kept = wire_len.min(snaplen) as usize;
        let data = body.get(4..)?;
        return Some(BlockPacket { interface: 0, ticks: 0, wire_len, bytes: data.get(..kept).unwrap_or(data) });
    }
    let interface = match (kind, endianness) {
        (ENHANCED_PACKET, _) => number(0)?,
        // The obsolete block: 16 bits of interface, 16 bits of drops.
        (_, Endianness::Big) => number(0)? >> 16,
        (_, Endianness::Little) => number(0)? & 0xffff,
    };
    let kept = number(12)? as usize;
    Some(BlockPacket {
        interface,
        ticks: u64::from(number(4)?) << 32 | u64::from(number(8)?),
        wire_len: number(16)?,
        bytes: body.get(20..)?.get(..kept)?,
    })
}
