//! What goes into a pair table and what comes out.

use roce_common::{
    abi::Direction,
    psn::Psn,
    units::{Addr, Nanos, Qpn},
    wire::Opcode,
};

/// A local queue pair: device and number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LocalQp {
    /// Interface index.
    pub ifindex: u32,
    /// QPN.
    pub qpn: Qpn,
}

/// Two connected queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair {
    /// The local one.
    pub local: LocalQp,
    /// Its address.
    pub local_addr: Addr,
    /// The peer's address.
    pub peer: Addr,
    /// The peer's QPN.
    pub remote: Qpn,
    /// The source-port rule named it.
    pub supported: bool,
}

/// What became of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It is sure now.
    Added(Pair),
    /// It is contradicted, or idle for too long.
    Removed(Pair),
}

/// One packet seen at a tap of `ifindex`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Observation {
    /// Interface index.
    pub ifindex: u32,
    /// Received or sent.
    pub direction: Direction,
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// Destination QPN.
    pub dest_qp: Qpn,
    /// PSN.
    pub psn: Psn,
    /// Opcode.
    pub opcode: Opcode,
    /// UDP source port.
    pub src_port: u16,
    /// The first packet of its flow, seen from its beginning.
    pub first_sight: bool,
    /// The flow jumped here from somewhere else.
    pub restart: bool,
}

/// What the kernel's flow table knows of a request flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowSeen {
    /// Interface index.
    pub ifindex: u32,
    /// Received or sent.
    pub direction: Direction,
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    /// Destination QPN.
    pub dest_qp: Qpn,
    /// PSN of its first packet.
    pub first: Psn,
    /// The serially highest PSN: one before the one that is expected next.
    pub highest: Psn,
}

/// Bounds of a [`PairTable`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most flows and response streams.
    pub entries: usize,
    /// Most flows, and most response streams, of one direction between two hosts.
    pub entries_per_hosts: usize,
    /// Most pairs.
    pub pairs: usize,
    /// Entries idle for this long are forgotten, and pairs with them.
    pub idle: Nanos,
    /// Added to [`SLACK`]: how many packets of a flow may pass between two samples.
    pub sample_every: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 262_144,
            entries_per_hosts: 4_096,
            pairs: roce_common::abi::MAX_PAIRS as usize / 2,
            idle: Nanos(120 * Nanos::SECOND.0),
            sample_every: 64,
        }
    }
}
