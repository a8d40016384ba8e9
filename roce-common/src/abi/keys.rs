//! Map keys and the small map values.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::units::{Addr, Qpn};

/// Which way a packet passes an interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum Direction {
    /// Received by the host.
    Ingress = 0,
    /// Sent by the host.
    Egress = 1,
}

/// Where a packet was observed: an interface and a direction, or, offline, an interface of a capture.
/// The same packet passing two taps is two observations.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Tap(u32);

impl Tap {
    /// The tap of interface `ifindex` (below 2^31) in `direction`.
    #[inline(always)]
    pub const fn new(ifindex: u32, direction: Direction) -> Self {
        Self(ifindex << 1 | direction as u32)
    }

    /// The tap as a number.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The tap of this [`Tap::number`].
    #[inline(always)]
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// The interface index, or the number of the capture interface.
    #[inline(always)]
    pub const fn ifindex(self) -> u32 {
        self.0 >> 1
    }

    /// The direction; [`Direction::Ingress`] offline.
    #[inline(always)]
    pub const fn direction(self) -> Direction {
        if self.0 & 1 == 0 { Direction::Ingress } else { Direction::Egress }
    }

    /// The same interface's other direction.
    #[inline(always)]
    pub const fn opposite(self) -> Self {
        Self(self.0 ^ 1)
    }
}

/// One of the two independent PSN spaces of a (source, destination, destination QPN).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
pub enum Space {
    /// Requests, numbered by the source's send queue.
    Request = 0,
    /// Responses, echoing PSNs of the destination's send queue.
    Response = 1,
}

impl Space {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Response => "response",
        }
    }
}

/// Key of the flow map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FlowKey {
    /// Where the flow was observed.
    pub tap: Tap,
    /// Space in the first byte, destination QPN big-endian in the other three.
    space_and_qpn: [u8; 4],
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
}

impl FlowKey {
    /// The key of a flow.
    #[inline(always)]
    pub const fn new(tap: Tap, src: Addr, dst: Addr, dest_qp: Qpn, space: Space) -> Self {
        let [_, a, b, c] = dest_qp.get().to_be_bytes();
        Self { tap, space_and_qpn: [space as u32 as u8, a, b, c], src, dst }
    }

    /// Destination QPN.
    #[inline(always)]
    pub const fn dest_qp(&self) -> Qpn {
        Qpn::new(u32::from_be_bytes(self.space_and_qpn))
    }

    /// PSN space.
    #[inline(always)]
    pub const fn space(&self) -> Space {
        if self.space_and_qpn[0] == 0 { Space::Request } else { Space::Response }
    }

    /// The flow of a space that goes back to the queue pair `sender`, which sends this one. It passes the interface's other
    /// direction, or the same one on a mirror port: of the two keys, the first that exists is it.
    #[inline(always)]
    pub const fn back(&self, sender: Qpn, space: Space) -> [Self; 2] {
        let across = Self::new(self.tap.opposite(), self.dst, self.src, sender, space);
        [across, across.at(self.tap)]
    }

    /// The same flow at another tap.
    #[inline(always)]
    pub const fn at(self, tap: Tap) -> Self {
        Self { tap, ..self }
    }
}

/// Key of PAIRS: packets from `src` to `dst` with this destination QPN. Its value names the queue pair that sends them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PairKey {
    /// Source address.
    pub src: Addr,
    /// Destination address.
    pub dst: Addr,
    qpn: [u8; 4],
}

impl PairKey {
    /// The key of packets from `src` to `dst` for `dest_qp`.
    #[inline(always)]
    pub const fn new(src: Addr, dst: Addr, dest_qp: Qpn) -> Self {
        Self { src, dst, qpn: dest_qp.get().to_be_bytes() }
    }

    /// The destination QPN.
    #[inline(always)]
    pub const fn dest_qp(&self) -> Qpn {
        Qpn::new(u32::from_be_bytes(self.qpn))
    }
}

/// Key of RATES and PACE: packets to `peer` for its queue pair `qpn`, that is, all packets of one local queue pair.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PeerQp {
    /// The peer's address.
    pub peer: Addr,
    qpn: [u8; 4],
}

impl PeerQp {
    /// The key of `qpn` of `peer`.
    #[inline(always)]
    pub const fn new(peer: Addr, qpn: Qpn) -> Self {
        Self { peer, qpn: qpn.get().to_be_bytes() }
    }

    /// The QPN.
    #[inline(always)]
    pub const fn qpn(&self) -> Qpn {
        Qpn::new(u32::from_be_bytes(self.qpn))
    }
}

/// Value of PAIRS. Created by user space; the counters and times are kept by the BPF programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PairValue {
    /// Time of the last CNP sent to the queue pair that sends these packets, CLOCK_MONOTONIC; 0 = never.
    pub last_cnp_ns: u64,
    /// CNPs among these packets: survives a full ring buffer.
    pub cnp_rx: u64,
    /// The QPN of the queue pair that sends these packets.
    pub sender_qpn: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Value of CNPS: CNPs of a tap from a source to a destination that name one queue pair there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CnpCount {
    /// How many there were.
    pub packets: u64,
    /// Of these, in another DSCP than [`crate::units::Dscp::CNP`].
    pub in_other_dscp: u64,
    /// Of these, without BECN.
    pub without_becn: u64,
    /// When the newest passed, by the coarse clock.
    pub last_seen_ns: u64,
}

/// Value of RATES: how fast a queue pair may send. Written by user space; the
/// egress program only adds entries at the start rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RateValue {
    /// Bytes per second, frame bytes; never 0.
    pub bytes_per_sec: u64,
    /// When the kernel received the CNP that led to this rate, CLOCK_MONOTONIC; 0 where none did.
    pub cause_ns: u64,
    /// HTB class (major:minor), 0 with the EDT pacer.
    pub classid: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Value of PACE: the limiter of a queue pair. Created with its rate, kept by the egress program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PaceCell {
    /// Departure time of the next packet, CLOCK_MONOTONIC.
    pub next_ns: u64,
    /// Frame bytes sent since the limiter exists, retransmissions included: the RP's byte counter.
    pub bytes: u64,
    /// Packets likewise.
    pub packets: u64,
    /// [`RateValue::cause_ns`] of the newest CNP whose rate a packet has met.
    pub cause_ns: u64,
    /// How long after that CNP the first packet met its rate, in nanoseconds.
    pub reaction_ns: u64,
}

/// Entry of CP_CLASSES: how packets of some DSCPs are marked. Entry 0 is not used: the port's own values are those of
/// [`super::Config`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CpClass {
    /// Rate of the class's own virtual queue, bytes per second; 0 = it shares the port's.
    pub bytes_per_sec: u64,
    /// Its own virtual queue holds no more than this, bytes.
    pub limit_bytes: u32,
    /// Marking starts above this depth, bytes.
    pub kmin_bytes: u32,
    /// Marking is certain above this depth, bytes.
    pub kmax_bytes: u32,
    /// Marking probability at `kmax_bytes`, in 1/65536.
    pub pmax: u32,
}

/// Entry of CP_STATS: what a class saw, per CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CpStats {
    /// Packets, RoCE or not.
    pub packets: u64,
    /// Frame bytes.
    pub bytes: u64,
    /// Packets made CE.
    pub marked: u64,
    /// Sum of the depths that packets found, bytes.
    pub depth_sum: u64,
    /// The second (of 2^30 ns) that `peak_bytes` is of.
    pub second: u64,
    /// The greatest depth in it.
    pub peak_bytes: u64,
}

/// The virtual queue of a congestion point: one cell per class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VirtualQueue {
    /// When the queue will be empty, CLOCK_MONOTONIC.
    pub empty_at_ns: u64,
}

/// The CNP that tc ingress asks the egress program to make of a clone: one slot per CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CnpJob {
    /// 1 from just before the redirect until the clone is taken.
    pub active: u32,
    /// QPN the CNP is for: the queue pair that sent the congested data.
    pub dest_qp: u32,
    /// QPN of the local queue pair that received it.
    pub local_qp: u32,
    /// UDP source port of the CNP.
    pub src_port: u32,
    /// PSN of the congested packet: the clone must carry it.
    pub psn: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How many telemetry events a CPU may still emit in the current tick.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct EventBudget {
    /// Number of the tick (1/16 second) the budget is for.
    pub tick: u64,
    /// Events emitted in it.
    pub used: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<FlowKey>() == 40 && align_of::<FlowKey>() == 4);
    assert!(offset_of!(FlowKey, src) == 8 && offset_of!(FlowKey, dst) == 24);
    assert!(size_of::<PeerQp>() == 20 && size_of::<PairKey>() == 36);
    assert!(size_of::<CnpJob>() == 24 && size_of::<EventBudget>() == 16);
    assert!(
        size_of::<PairValue>() == 24 && offset_of!(PairValue, cnp_rx) == 8 && offset_of!(PairValue, sender_qpn) == 16
    );
    assert!(size_of::<RateValue>() == 24 && offset_of!(RateValue, classid) == 16);
    assert!(size_of::<PaceCell>() == 40);
    assert!(size_of::<VirtualQueue>() == 8);
    assert!(size_of::<CpClass>() == 24 && size_of::<CpStats>() == 48);
};
