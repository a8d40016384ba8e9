//! What the BPF programs tell user space through the ring buffers.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Tap;
use crate::{
    psn::{Fate, Psn, ReadPlace},
    units::Addr,
    wire::cm::MAD_BYTES,
};

/// What an [`Event`] reports; the number stands in [`Event::kind`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum EventKind {
    /// A CNP for a local address; `value` is its IP ToS byte, `dest_qp` the local QPN. CNP ring only.
    Cnp = 1,
    /// The first packet of a flow at its tap.
    FirstSight = 2,
    /// One packet in N, or a packet of a flow that is not paired yet.
    Sample = 3,
    /// `value` PSNs before `psn` were skipped; of responses, `refused_qp` says whose answers these are.
    Gap = 4,
    /// A NAK; `value` is its syndrome byte, `fate` and `refused_qp` say what it refuses.
    Nak = 5,
    /// An RNR NAK; likewise.
    RnrNak = 6,
    /// The flow continues at a PSN far from where it was.
    Discontinuity = 7,
    /// The NP sent a CNP: `src` is the local address, `dst` the peer, `dest_qp` the peer's QPN, `value` the local QPN.
    CnpSent = 8,
    /// A packet behind those that had passed starts a run; no packet of the flow had come for `value` µs.
    RunStarted = 9,
    /// A run ended; it had `value` packets.
    RunEnded = 10,
    /// `value` PSNs that were skipped are too far behind to be repeated now.
    Expired = 11,
    /// The egress program limited a queue pair at the start rate: `dst` and `dest_qp` name the limiter, `value` is its HTB
    /// class, 0 with the EDT pacer.
    Started = 12,
    /// With a request unanswered, nothing of a connection had passed for `value` µs before this packet. Of a response,
    /// `refused_qp` is the destination QPN of the flow that it answers, from `dst` to `src`.
    Silence = 13,
    /// A message of connection management; its record is a [`MadEvent`].
    Management = 14,
    /// A CNP for a local address that no known queue pair is meant by; `value` is its IP ToS byte. Of the CNPs that name one
    /// queue pair the first, second, fourth and so on.
    CnpUnpaired = 15,
}

impl EventKind {
    /// The kind with this number.
    pub const fn from_number(n: u32) -> Option<Self> {
        Some(match n {
            1 => Self::Cnp,
            2 => Self::FirstSight,
            3 => Self::Sample,
            4 => Self::Gap,
            5 => Self::Nak,
            6 => Self::RnrNak,
            7 => Self::Discontinuity,
            8 => Self::CnpSent,
            9 => Self::RunStarted,
            10 => Self::RunEnded,
            11 => Self::Expired,
            12 => Self::Started,
            13 => Self::Silence,
            14 => Self::Management,
            15 => Self::CnpUnpaired,
            _ => return None,
        })
    }

    /// The name used in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cnp => "cnp",
            Self::FirstSight => "first_sight",
            Self::Sample => "sample",
            Self::Gap => "gap",
            Self::Nak => "nak",
            Self::RnrNak => "rnr_nak",
            Self::Discontinuity => "discontinuity",
            Self::CnpSent => "cnp_sent",
            Self::RunStarted => "run_started",
            Self::RunEnded => "run_ended",
            Self::Expired => "expired",
            Self::Started => "started",
            Self::Silence => "silence",
            Self::Management => "management",
            Self::CnpUnpaired => "cnp_unpaired",
        }
    }
}

/// One record of a ring buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Event {
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Number of an [`EventKind`].
    pub kind: u32,
    /// Where.
    pub tap: Tap,
    /// Source address of the packet.
    pub src: Addr,
    /// Destination address of the packet.
    pub dst: Addr,
    /// Destination QPN of the packet.
    pub dest_qp: u32,
    /// PSN of the packet.
    pub psn: u32,
    /// See [`EventKind`].
    pub value: u32,
    /// UDP source port of the packet.
    pub src_port: u16,
    /// BTH opcode byte of the packet; tells request from response.
    pub opcode: u8,
    /// ToS or traffic class of the packet.
    pub tos: u8,
    /// What the tracker concluded from the packet: the bits of a [`crate::psn::Account`]. An event is of the kind that
    /// comes first in: first sight, discontinuity, gap, run started, run ended, expired; the account has the rest.
    pub account: u64,
    /// Of a sequence NAK: number of the [`Fate`] of its PSN. Where a run of requests starts: the bits of an [`Answered`], 0
    /// where the responses are not known. 0 otherwise.
    pub fate: u32,
    /// Of a NAK or RNR NAK: destination QPN of the request flow it refuses, from `dst` to `src`; 0 where not known. Of a gap in
    /// responses: that of the flow they answer. Where a run of requests starts: µs since the newest response.
    pub refused_qp: u32,
}

/// A record of a ring buffer that holds a message of connection management, or what may be one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MadEvent {
    /// Which packet: of the kind [`EventKind::Management`].
    pub event: Event,
    /// The first bytes of the MAD.
    pub mad: [u8; MAD_BYTES],
}

const _: () = assert!(size_of::<MadEvent>() == 200);

/// What the responses to a request flow had told when a run of it starts, in 32 bits; none of them is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answered(u32);

/// 24 bits of a PSN, 2 each of a fate and a place.
const FATE: u32 = 24;
const PLACE: u32 = 26;
const KNOWN: u32 = 1 << 31;

impl Answered {
    /// The highest PSN that they, NAKs included, had named. Where the run starts with a READ: what had become of the answer to
    /// its PSN, and what was known of that PSN as the start of a READ.
    #[inline(always)]
    pub const fn new(highest: Psn, fate: Fate, place: ReadPlace) -> Self {
        Self(KNOWN | highest.get() | (fate as u32) << FATE | (place as u32) << PLACE)
    }

    /// As it stands in [`Event::fate`].
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// From [`Event::fate`]; `None` where the responses are not known.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & KNOWN == 0 { None } else { Some(Self(bits)) }
    }

    /// The highest PSN named.
    pub const fn highest(self) -> Psn {
        Psn::new(self.0 & 0xff_ffff)
    }

    /// What had become of the answer to the PSN that a READ asks for again.
    pub const fn fate(self) -> Fate {
        match Fate::from_number(self.0 >> FATE & 3) {
            Some(fate) => fate,
            None => Fate::Unknown,
        }
    }

    /// What was known of that PSN.
    pub const fn place(self) -> ReadPlace {
        ReadPlace::from_number(self.0 >> PLACE & 3)
    }
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Event>() == 80);
    assert!(offset_of!(Event, src) == 16 && offset_of!(Event, dest_qp) == 48 && offset_of!(Event, src_port) == 60);
    assert!(offset_of!(Event, account) == 64);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_into_the_bits_comes_out() {
        for psn in [0, 7, 0xff_ffff] {
            for fate in [Fate::Unknown, Fate::Told, Fate::Passed, Fate::Skipped] {
                for place in [ReadPlace::Unknown, ReadPlace::Start, ReadPlace::Inside] {
                    let answered =
                        Answered::from_bits(Answered::new(Psn::new(psn), fate, place).bits()).expect("known");
                    assert_eq!((answered.highest().get(), answered.fate(), answered.place()), (psn, fate, place));
                }
            }
        }
        assert_eq!(Answered::from_bits(0), None);
    }
}
