//! The RoCEv2 wire format: one parser, one set of builders, one ICRC.

mod aeth_codes;
mod bytes;
pub mod checksum;
pub mod cm;
pub mod emit;
mod headers;
pub mod icrc;
mod opcode;
mod parse;
mod tunnel;

pub use aeth_codes::{credits, rnr_timer};
pub use bytes::Bytes;
pub use headers::{Aeth, AtomicEth, Bth, Deth, Reth, Syndrome};
pub use opcode::{Kind, Opcode, Position, Service};
pub use parse::{
    IpVersion, Link, Malformed, Other, Packet, Verdict, destination, is_surely_not_roce, parse, parse_into, parse_link,
};
pub use tunnel::{Tunnel, TunnelKind, tunnel};

/// The UDP destination port that makes a datagram RoCEv2 (IANA).
pub const UDP_PORT: u16 = 4791;
/// EtherType of RoCEv1 (GRH directly over Ethernet).
pub const ETHERTYPE_ROCEV1: u16 = 0x8915;
/// Length of the base transport header.
pub const BTH_LEN: usize = 12;
/// Length of the invariant CRC at the end of every packet.
pub const ICRC_LEN: usize = 4;
/// UDP length of a CNP: UDP header, BTH, 16 reserved bytes, ICRC.
pub const CNP_UDP_LEN: usize = 40;

/// The UDP source port the Linux kernel derives from the two QPNs of a connection when no flow label is given
/// (`rdma_calc_flow_label` and `rdma_flow_label_to_udp_sport` in `include/rdma/ib_verbs.h`). rxe uses it from 6.1 on;
/// it is symmetric, so both directions of a connection carry the same port. Other senders follow other rules.
#[inline(always)]
pub const fn source_port(a: crate::units::Qpn, b: crate::units::Qpn) -> u16 {
    let mut v = a.get() as u64 * b.get() as u64;
    v ^= v >> 20;
    v ^= v >> 40;
    let label = (v & 0xf_ffff) as u32;
    ((label & 0x3fff) ^ ((label & 0xf_c000) >> 14)) as u16 | 0xc000
}

#[cfg(test)]
mod tests;
