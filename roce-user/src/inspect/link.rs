//! Link types of captures.

use anyhow::{Result, bail};
use pcap_file::DataLink;
use roce_common::wire::{Bytes, Link, Verdict, parse_link};

const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;
/// Linux cooked capture v1: packet type, device type, address length, address, then the protocol in the last two bytes.
const SLL_LEN: usize = 16;
const SLL_PROTOCOL: usize = 14;
/// Linux cooked capture v2: the protocol comes first.
const SLL2_LEN: usize = 20;
const SLL2_PROTOCOL: usize = 0;
/// Raw IP: the number, two that some systems write for it, and IPv4 and IPv6 alone.
const RAW_IP: [u32; 5] = [101, 12, 14, 228, 229];

/// What the frames of a capture start with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkLayer {
    Ethernet,
    Ip,
    Cooked,
    CookedV2,
}

impl LinkLayer {
    /// The link layer, or an error that names the link type and what is understood.
    pub(super) fn new(link: DataLink) -> Result<Self> {
        Ok(match link {
            DataLink::ETHERNET => Self::Ethernet,
            DataLink::LINUX_SLL => Self::Cooked,
            DataLink::LINUX_SLL2 => Self::CookedV2,
            other if RAW_IP.contains(&u32::from(other)) => Self::Ip,
            other => bail!(
                "link type {} ({other:?}) is not supported; Ethernet, raw IP and Linux cooked v1 and v2 are",
                u32::from(other)
            ),
        })
    }

    /// Parses a frame: the bytes kept and its length on the wire.
    pub(super) fn parse(self, frame: &(&[u8], usize)) -> Verdict {
        match self {
            Self::Ethernet => parse_link(frame, Link::Ethernet),
            Self::Ip => parse_link(frame, Link::Ip),
            Self::Cooked => cooked(frame, SLL_PROTOCOL, SLL_LEN),
            Self::CookedV2 => cooked(frame, SLL2_PROTOCOL, SLL2_LEN),
        }
    }
}

/// A cooked header of `offset` bytes with the protocol at `protocol`, and up to two VLAN tags behind it.
fn cooked(frame: &(&[u8], usize), protocol: usize, mut offset: usize) -> Verdict {
    let number = |at: usize| Bytes::get::<2>(frame, at).map(u16::from_be_bytes);
    let Some(mut ethertype) = number(protocol) else { return Verdict::NotRoce };
    for _ in 0..2 {
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ {
            break;
        }
        let Some(inner) = number(offset + 2) else { return Verdict::NotRoce };
        ethertype = inner;
        offset += 4;
    }
    parse_link(frame, Link::Other { ethertype, offset })
}
