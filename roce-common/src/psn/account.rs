//! What the tracker concluded from one packet, in 64 bits: small enough to be the return value of a BPF function and a
//! field of an event, and enough for the [`Explainer`](super::Explainer) to tell what happened.

use core::fmt;

use super::{Outcome, WINDOW};

/// Widths: an outcome, a count (of PSNs in a window: 0 … 1,024), a flag.
const COUNT_BITS: u32 = 11;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const OUTCOME_MASK: u64 = 7;
/// The PSNs skipped before the packet, or the holes it filled.
const COUNT: u32 = 3;
const EXPIRED: u32 = COUNT + COUNT_BITS;
const RUN_PACKETS: u32 = EXPIRED + COUNT_BITS;
const RUN_FILLED: u32 = RUN_PACKETS + COUNT_BITS;
const RUN_SKIPPED: u32 = RUN_FILLED + COUNT_BITS;
const FLAGS: u32 = RUN_SKIPPED + COUNT_BITS;
/// A run of several packets that ended: it held a duplicate.
const ENDED_DUPLICATE: u64 = 1 << FLAGS;
/// Likewise: a NAK had asked for it.
const ENDED_ASKED_FOR: u64 = 2 << FLAGS;
/// A run starts with this packet.
const STARTED: u64 = 4 << FLAGS;
/// That run ends with this packet too.
const OWN_ENDED: u64 = 8 << FLAGS;
/// Likewise, and a NAK had asked for it.
const OWN_ASKED_FOR: u64 = 16 << FLAGS;
/// The path MTU became known or changed.
const PMTU: u64 = 32 << FLAGS;

const _: () = assert!(FLAGS + 6 == 64 && WINDOW as u64 <= COUNT_MASK);

/// What one packet was to the tracker, and what it brought to an end. The default says nothing.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Account(u64);

/// A run: packets behind `next`, each at or ahead of where the one before ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its packets, at most [`WINDOW`].
    pub packets: u32,
    /// Holes it filled.
    pub filled: u32,
    /// PSNs it skipped, its missing tail included.
    pub skipped: u32,
    /// It held a packet all of which had passed before.
    pub duplicate: bool,
    /// A sequence NAK had named a hole it filled, or an RNR NAK its start.
    pub asked_for: bool,
}

impl Run {
    /// Whether it was a retransmission; else it was late packets.
    #[inline(always)]
    pub const fn is_retransmission(&self) -> bool {
        self.duplicate || self.asked_for
    }
}

impl Account {
    /// The account in 64 bits, for an event or across a function call of the BPF side.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// An account from [`Account::bits`]. Any number is one, since what comes out of a ring buffer is not trusted.
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub(super) const fn of(outcome: Outcome) -> Self {
        let (code, count) = match outcome {
            Outcome::NotTracked => (0, 0),
            Outcome::InOrder => (1, 0),
            Outcome::First => (2, 0),
            Outcome::Gap(n) => (3, n),
            Outcome::Filled(n) => (4, n),
            Outcome::Duplicate => (5, 0),
            Outcome::Far => (6, 0),
            Outcome::Discontinuity => (7, 0),
        };
        Self(code | (count as u64 & COUNT_MASK) << COUNT)
    }

    #[inline(always)]
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Holes that fell out of the window; two windows full of them, the most there can be, count as one short of it.
    #[inline(always)]
    pub(super) const fn expiring(holes: u32) -> Self {
        let most = COUNT_MASK as u32;
        Self((if holes < most { holes } else { most } as u64) << EXPIRED)
    }

    #[inline(always)]
    pub(super) const fn ending(packets: u32, filled: u32, skipped: u32, duplicate: u32, asked_for: u32) -> Self {
        Self(
            (packets as u64 & COUNT_MASK) << RUN_PACKETS
                | (filled as u64 & COUNT_MASK) << RUN_FILLED
                | (skipped as u64 & COUNT_MASK) << RUN_SKIPPED
                | (duplicate as u64) << FLAGS
                | (asked_for as u64) << (FLAGS + 1),
        )
    }

    /// A run that starts with this packet.
    #[inline(always)]
    pub(super) const fn starting() -> Self {
        Self(STARTED)
    }

    /// `ended`, the account of the end of a run, when it is the packet's own.
    #[inline(always)]
    pub(super) const fn own(ended: Self) -> Self {
        Self(OWN_ENDED | (ended.0 & ENDED_ASKED_FOR) << 3)
    }

    #[inline(always)]
    pub(super) const fn learning_pmtu() -> Self {
        Self(PMTU)
    }

    /// What the packet was.
    #[inline(always)]
    pub const fn outcome(self) -> Outcome {
        let count = self.field(COUNT);
        match self.0 & OUTCOME_MASK {
            1 => Outcome::InOrder,
            2 => Outcome::First,
            3 => Outcome::Gap(count),
            4 => Outcome::Filled(count),
            5 => Outcome::Duplicate,
            6 => Outcome::Far,
            7 => Outcome::Discontinuity,
            _ => Outcome::NotTracked,
        }
    }

    /// 1 for a packet that passed for the first time, as far as is known, else 0: everything but duplicates and what waits
    /// far away. Not a comparison, since this runs in the kernel for every packet.
    #[inline(always)]
    pub const fn is_new(self) -> u64 {
        const REPEATS: u64 = 1 << 5 | 1 << 6;
        !REPEATS >> (self.0 & OUTCOME_MASK) & 1
    }

    /// Whether the packet was the next one, and nothing else is to be said.
    #[inline(always)]
    pub const fn is_plain(self) -> bool {
        self.0 == 1
    }

    /// Holes that fell out of the window with this packet: lost for good, as far as this tap knows.
    #[inline(always)]
    pub const fn expired(self) -> u32 {
        self.field(EXPIRED)
    }

    /// The run that this packet ended, having belonged to it or not; but see [`Account::own_run`].
    #[inline(always)]
    pub const fn ended(self) -> Option<Run> {
        let packets = self.field(RUN_PACKETS);
        if packets == 0 {
            return None;
        }
        Some(Run {
            packets,
            filled: self.field(RUN_FILLED),
            skipped: self.field(RUN_SKIPPED),
            duplicate: self.0 & ENDED_DUPLICATE != 0,
            asked_for: self.0 & ENDED_ASKED_FOR != 0,
        })
    }

    /// Whether a run starts with this packet.
    #[inline(always)]
    pub const fn run_started(self) -> bool {
        self.0 & STARTED != 0
    }

    /// The run of this packet alone, where it started and ended one.
    #[inline(always)]
    pub const fn own_run(self) -> Option<Run> {
        if self.0 & OWN_ENDED == 0 {
            return None;
        }
        let filled = if let Outcome::Filled(n) = self.outcome() { n } else { 0 };
        Some(Run { packets: 1, filled, skipped: 0, duplicate: filled == 0, asked_for: self.0 & OWN_ASKED_FOR != 0 })
    }

    /// Whether the path MTU became known or changed with this packet.
    #[inline(always)]
    pub const fn pmtu_learned(self) -> bool {
        self.0 & PMTU != 0
    }

    /// Whether it tells of more than a packet in its place: a gap, a run's start or end, holes given up, a discontinuity.
    #[inline(always)]
    pub const fn is_notable(self) -> bool {
        const RUN_AND_FLAGS: u64 = !0 << EXPIRED & !PMTU;
        self.0 & RUN_AND_FLAGS != 0 || matches!(self.0 & OUTCOME_MASK, 3 | 7)
    }

    #[inline(always)]
    const fn field(self, at: u32) -> u32 {
        (self.0 >> at & COUNT_MASK) as u32
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account")
            .field("outcome", &self.outcome())
            .field("expired", &self.expired())
            .field("ended", &self.ended())
            .field("run_started", &self.run_started())
            .field("own_run", &self.own_run())
            .field("pmtu_learned", &self.pmtu_learned())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        let run = Run { packets: 1_024, filled: 1_000, skipped: 24, duplicate: true, asked_for: true };
        let a = Account::of(Outcome::Gap(1_024))
            .and(Account::expiring(2_048))
            .and(Account::ending(run.packets, run.filled, run.skipped, 1, 1))
            .and(Account::learning_pmtu());
        assert_eq!((a.outcome(), a.expired(), a.ended()), (Outcome::Gap(1_024), 2_047, Some(run)));
        assert!(!a.run_started() && a.own_run().is_none() && a.pmtu_learned() && a.is_notable());

        let a = Account::of(Outcome::Filled(3))
            .and(Account::starting())
            .and(Account::own(Account::ending(1, 3, 0, 0, 1)))
            .and(Account::ending(2, 0, 1, 1, 0));
        let own = Run { packets: 1, filled: 3, skipped: 0, duplicate: false, asked_for: true };
        let before = Run { packets: 2, filled: 0, skipped: 1, duplicate: true, asked_for: false };
        assert_eq!((a.own_run(), a.ended(), a.run_started()), (Some(own), Some(before), true));
    }

    #[test]
    fn packets_in_their_place_are_not_notable() {
        use Outcome as O;
        for outcome in [O::NotTracked, O::InOrder, O::First, O::Filled(9), O::Duplicate, O::Far] {
            let a = Account::of(outcome).and(Account::learning_pmtu());
            assert_eq!(a.outcome(), outcome);
            assert_eq!(a.is_new() == 0, matches!(outcome, O::Duplicate | O::Far), "{outcome:?}");
            assert!(!a.is_notable(), "{outcome:?}");
            assert_eq!(Account::of(outcome).is_plain(), outcome == O::InOrder);
            assert!(!a.is_plain());
        }
        for a in [Account::of(O::Gap(1)), Account::of(O::Discontinuity), Account::expiring(1), Account::starting()] {
            assert!(a.is_notable(), "{a:?}");
        }
    }
}
