//! What a peer refused of a flow, told to it without its lock.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Fate, Psn};

const PSN_MASK: u64 = 0xff_ffff;
/// There is a sequence NAK; its PSN is below.
const NAK: u64 = 1 << 24;
const RNR_PSN: u32 = 25;
/// There is an RNR NAK; its PSN is below.
const RNR: u64 = 1 << 49;
/// Counts of NAKs for PSNs that had passed.
const LOST: u32 = 50;
const LOST_MASK: u64 = (1 << (64 - LOST)) - 1;

/// The NAKs that named PSNs of a flow since its newest packet, in 64 bits: the newest of each kind, as a
/// [`Tracker`](super::Tracker) remembers them, and how many were for PSNs that had passed. Nobody waits for the flow's lock to
/// tell it of them, and no packet of the flow for whoever tells; it [hears](super::Tracker::hear) of them with its next packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Refusals(u64);

impl Refusals {
    /// The refusals in 64 bits; 0 is none.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Refusals from [`Refusals::bits`].
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// These, and a sequence NAK for `psn`, of which [`Tracker::nak_fate`](super::Tracker::nak_fate) said `fate`. One that is
    /// known already is none.
    #[inline(always)]
    pub const fn and_nak(self, psn: Psn, fate: Fate) -> Self {
        if matches!(fate, Fate::Told) {
            return self;
        }
        let lost = self.lost_after_tap() as u64 + matches!(fate, Fate::Passed) as u64;
        let others = self.0 & (RNR | PSN_MASK << RNR_PSN);
        Self(others | NAK | psn.get() as u64 | (lost & LOST_MASK) << LOST)
    }

    /// These, and an RNR NAK for `psn`.
    #[inline(always)]
    pub const fn and_rnr(self, psn: Psn) -> Self {
        Self(self.0 & !(PSN_MASK << RNR_PSN) | RNR | (psn.get() as u64) << RNR_PSN)
    }

    /// The PSN of the newest sequence NAK.
    #[inline(always)]
    pub(super) const fn nak(self) -> Option<Psn> {
        if self.0 & NAK == 0 { None } else { Some(Psn::new((self.0 & PSN_MASK) as u32)) }
    }

    /// The PSN of the newest RNR NAK.
    #[inline(always)]
    pub(super) const fn rnr(self) -> Option<Psn> {
        if self.0 & RNR == 0 { None } else { Some(Psn::new((self.0 >> RNR_PSN & PSN_MASK) as u32)) }
    }

    /// Sequence NAKs for PSNs that had passed.
    #[inline(always)]
    pub(super) const fn lost_after_tap(self) -> u32 {
        (self.0 >> LOST) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_each_kind_is_kept_and_every_loss_counted() {
        let psn = Psn::new;
        let all = Refusals::default()
            .and_nak(psn(0xff_ffff), Fate::Passed)
            .and_rnr(psn(0xff_fffe))
            .and_nak(psn(5), Fate::Passed)
            .and_nak(psn(6), Fate::Told)
            .and_nak(psn(7), Fate::Skipped)
            .and_rnr(psn(9));
        assert_eq!((all.nak(), all.rnr(), all.lost_after_tap()), (Some(psn(7)), Some(psn(9)), 2));
        assert_eq!(Refusals::from_bits(all.bits()), all);
        let none = Refusals::default();
        assert_eq!((none.nak(), none.rnr(), none.lost_after_tap(), none.bits()), (None, None, 0, 0));
        let one = none.and_nak(psn(0), Fate::Skipped);
        assert_eq!((one.nak(), one.rnr(), one.lost_after_tap()), (Some(psn(0)), None, 0));
    }
}
