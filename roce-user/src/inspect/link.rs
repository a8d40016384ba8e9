//! Link types of captures.

use std::fmt;

use roce_common::wire::{Bytes, Link, Tunnel, Verdict, parse_link, tunnel};

const ETHERNET: u32 = 1;
const LINUX_SLL: u32 = 113;
const LINUX_SLL2: u32 = 276;
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

/// Link types that people bring, by number, and what to do about them.
const KNOWN: [(u32, &str, &str); 14] = [
    (0, "NULL", "capture on the interface that carries the traffic, not on a BSD loopback"),
    (9, "PPP", "capture on the Ethernet side"),
    (105, "IEEE802_11", "capture on the wired side of the access point"),
    (108, "LOOP", "capture on the interface that carries the traffic, not on a BSD loopback"),
    (119, "PRISM_HEADER", "capture on the wired side of the access point"),
    (127, "IEEE802_11_RADIOTAP", "capture on the wired side of the access point"),
    (147, "USER0", "it is for private use; export its packets as Ethernet"),
    (189, "USB_LINUX", "capture on a network interface"),
    (192, "PPI", "capture on the wired side of the access point"),
    (197, "ERF", "export it as Ethernet, for instance with dagconvert -T erf:pcap"),
    (220, "USB_LINUX_MMAPPED", "capture on a network interface"),
    (247, "INFINIBAND", "it holds native InfiniBand packets, which have no IP header; RoCEv2 is captured on Ethernet"),
    (249, "USBPCAP", "capture on a network interface"),
    (253, "NETLINK", "capture on a network interface"),
];

/// A link type that is not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Unsupported(u32);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, advice) = KNOWN
            .iter()
            .find(|known| known.0 == self.0)
            .map_or(("unknown", "export it as Ethernet"), |&(_, name, advice)| (name, advice));
        write!(
            f,
            "link type {} ({name}) is not supported; Ethernet, raw IP and Linux cooked v1 and v2 are: {advice}",
            self.0
        )
    }
}

/// What the frames of a capture start with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkLayer {
    Ethernet,
    Ip,
    Cooked,
    CookedV2,
    /// What a tunnel says of the frame in it.
    Inner(Link),
}

impl LinkLayer {
    /// The link layer with this number, or an error that names the link type, what is understood and what to do.
    pub(super) fn new(link: u32) -> Result<Self, Unsupported> {
        Ok(match link {
            ETHERNET => Self::Ethernet,
            LINUX_SLL => Self::Cooked,
            LINUX_SLL2 => Self::CookedV2,
            other if RAW_IP.contains(&other) => Self::Ip,
            other => return Err(Unsupported(other)),
        })
    }

    /// Parses a frame: the bytes kept and its length on the wire.
    pub(super) fn parse(self, frame: &(&[u8], usize)) -> Verdict {
        match self.link(frame) {
            Some(link) => parse_link(frame, link),
            None => Verdict::NotRoce,
        }
    }

    /// The tunnel that a frame is a packet of.
    pub(super) fn tunnel(self, frame: &(&[u8], usize)) -> Option<Tunnel> {
        tunnel(frame, self.link(frame)?)
    }

    /// The number that captures write for it.
    pub(super) const fn number(self) -> u16 {
        match self {
            Self::Ethernet | Self::Inner(_) => ETHERNET as u16,
            Self::Ip => RAW_IP[0] as u16,
            Self::Cooked => LINUX_SLL as u16,
            Self::CookedV2 => LINUX_SLL2 as u16,
        }
    }

    /// What the parser is told; `None` where the frame is too short to know.
    fn link(self, frame: &(&[u8], usize)) -> Option<Link> {
        match self {
            Self::Ethernet => Some(Link::Ethernet),
            Self::Ip => Some(Link::Ip),
            Self::Cooked => cooked(frame, SLL_PROTOCOL, SLL_LEN),
            Self::CookedV2 => cooked(frame, SLL2_PROTOCOL, SLL2_LEN),
            Self::Inner(link) => Some(link),
        }
    }
}

/// A cooked header of `offset` bytes with the protocol at `protocol`, and up to two VLAN tags behind it.
fn cooked(frame: &(&[u8], usize), protocol: usize, mut offset: usize) -> Option<Link> {
    let number = |at: usize| Bytes::get::<2>(frame, at).map(u16::from_be_bytes);
    let mut ethertype = number(protocol)?;
    for _ in 0..2 {
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ {
            break;
        }
        ethertype = number(offset + 2)?;
        offset += 4;
    }
    Some(Link::Other { ethertype, offset })
}
