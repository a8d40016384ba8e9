//! Counters of a tap, per CPU, one slot each. `frames` is not counted: it is the sum of what a frame can be.

use crate::{units::Ecn, wire::Malformed};

/// The counters of one direction of an interface on one CPU; the map has one entry per [`super::Direction`].
pub type Counters = [u64; Counter::COUNT];

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// What the BPF programs count, per direction; the discriminant is the slot.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u32)]
        pub enum Counter { $($(#[$doc])* $variant,)* }

        impl Counter {
            /// Every counter in the order of its slot.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in JSON and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

counters! {
    /// Well-formed RoCEv2 packets, CNPs included.
    Rocev2 = "rocev2",
    /// RoCEv1 frames.
    Rocev1 = "rocev1",
    /// Everything that is not RoCE.
    NotRoce = "not_roce",
    /// Malformed: too short for its headers.
    TruncatedHeader = "truncated_header",
    /// Malformed: headers not readable here.
    TruncatedCapture = "truncated_capture",
    /// Malformed: contradicting lengths.
    BadLength = "bad_length",
    /// Malformed: transport version.
    BadVersion = "bad_version",
    /// Malformed: opcode that does not exist.
    UnknownOpcode = "unknown_opcode",
    /// Malformed: pad beyond payload.
    PadBeyondPayload = "pad_beyond_payload",
    /// Malformed: READ above 2^31 bytes.
    ReadTooLong = "read_too_long",
    /// Malformed: fragment.
    UdpFragment = "udp_fragment",
    /// Malformed packets dropped before they reach rxe.
    GuardDropped = "guard_dropped",
    /// CNPs seen.
    Cnp = "cnp",
    /// CNPs for a local address handed to the controller and consumed.
    CnpConsumed = "cnp_consumed",
    /// CNPs without BECN.
    CnpWithoutBecn = "cnp_without_becn",
    /// CNPs that did not fit the ring buffer (their QP's own counter still has them).
    CnpRingFull = "cnp_ring_full",
    /// CNPs for a QP that is not paired with their source.
    CnpUnpaired = "cnp_unpaired",
    /// Telemetry events that did not fit the ring buffer.
    EventsLost = "events_lost",
    /// Telemetry events held back by the rate limit.
    EventsLimited = "events_limited",
    /// Packets of flows for which the map had no room.
    FlowsRefused = "flows_refused",
    /// Packets whose flow was locked by another CPU.
    Untracked = "untracked",
    /// Not-ECT packets (CNPs excluded, like the three below).
    NotEct = "not_ect",
    /// ECT(1) packets.
    Ect1 = "ect1",
    /// ECT(0) packets.
    Ect0 = "ect0",
    /// CE packets.
    Ce = "ce",
    /// CE packets with payload for a local address: what the NP answers.
    NpCe = "np_ce",
    /// CNPs sent by the NP.
    NpCnpSent = "np_cnp_sent",
    /// CE packets inside the CNP interval.
    NpHeldBack = "np_held_back",
    /// CE packets whose sender's QPN is not known: no CNP.
    NpUnpaired = "np_unpaired",
    /// CE packets while the egress program was not ready: no CNP.
    NpNotReady = "np_not_ready",
    /// CNPs that could not be built or sent.
    NpFailed = "np_failed",
    /// Packets whose DSCP or ECN the marker set.
    Marked = "marked",
    /// Packets the marker could not rewrite.
    MarkFailed = "mark_failed",
    /// ECT packets the congestion point made CE.
    CeMarked = "ce_marked",
    /// Packets above the marking threshold that were not ECT.
    CeNotEct = "ce_not_ect",
    /// Packets that could not join the contended virtual queue within the retry bound.
    VqContended = "vq_contended",
    /// Packets given a departure time or a class.
    Paced = "paced",
    /// Packets of limited QPs let through because the controller's heartbeat is old.
    PacingFailsafe = "pacing_failsafe",
    /// Packets whose limiter was contended beyond the retry bound and left unpaced.
    PaceContended = "pace_contended",
    /// Queue pairs limited at the start rate by their first data packet.
    StartLimited = "start_limited",
    /// Data packets of queue pairs that could not be: no HTB class was at hand, or the map had no room.
    StartUnlimited = "start_unlimited",
    /// Packets of transit flows (role host, address not local).
    Transit = "transit",
    /// Packets that a capture asked for and that did not fit its ring buffer.
    CaptureLost = "capture_lost",
    /// CNPs for a paired QP whose ICRC is wrong: consumed like the others, and nobody is slowed.
    CnpBadIcrc = "cnp_bad_icrc",
    /// RoCEv2 packets of this host that were dropped while its root qdisc was replaced.
    SwapDropped = "swap_dropped",
}

impl Counter {
    /// Number of counters.
    pub const COUNT: usize = Self::ALL.len();

    /// The counter of a malformed packet.
    #[inline(always)]
    pub const fn of_malformed(reason: Malformed) -> Self {
        match reason {
            Malformed::TruncatedHeader => Self::TruncatedHeader,
            Malformed::TruncatedCapture => Self::TruncatedCapture,
            Malformed::BadLength => Self::BadLength,
            Malformed::BadVersion => Self::BadVersion,
            Malformed::UnknownOpcode => Self::UnknownOpcode,
            Malformed::PadBeyondPayload => Self::PadBeyondPayload,
            Malformed::ReadTooLong => Self::ReadTooLong,
            Malformed::UdpFragment => Self::UdpFragment,
        }
    }

    /// The counter of an ECN codepoint.
    #[inline(always)]
    pub const fn of_ecn(ecn: Ecn) -> Self {
        match ecn {
            Ecn::NotEct => Self::NotEct,
            Ecn::Ect1 => Self::Ect1,
            Ecn::Ect0 => Self::Ect0,
            Ecn::Ce => Self::Ce,
        }
    }
}
