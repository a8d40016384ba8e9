//! One request on its way, and the times of those that came back: round trips where not all can be remembered.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Histogram, Spread};
use crate::{
    psn::{Account, Outcome, Psn},
    units::Nanos,
    wire::{Packet, Service},
};

/// Whether the time to the answer of a request is a round trip: it passes for the first time, and its sender asks for an
/// acknowledgement of it, or a responder must answer it for its own sake.
#[inline(always)]
pub fn is_timed(p: &Packet, account: Account) -> bool {
    let opcode = p.bth.opcode;
    matches!(opcode.service(), Service::Rc | Service::Xrc)
        && (p.bth.ack_req || opcode.is_read_request() || opcode.is_atomic_request())
        && matches!(account.outcome(), Outcome::First | Outcome::InOrder | Outcome::Gap(_))
}

/// Bits of a time that are kept: nine minutes of nanoseconds.
const TIME_BITS: u32 = 39;
const TIME: u64 = (1 << TIME_BITS) - 1;
/// There is a request.
const SET: u64 = 1 << 63;

/// A request that is being timed, or none, in 64 bits: the flow of its answers can be told of it without a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Probe(u64);

/// What a response means to a [`Probe`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Nothing: it is about what came before, or nothing is being timed.
    Earlier,
    /// It covers the request, and more or less than that: no sample.
    Covered,
    /// It is the answer.
    Exact,
}

impl Probe {
    /// The request `psn`, which passed `now`.
    #[inline(always)]
    pub const fn new(psn: Psn, now: Nanos) -> Self {
        Self(SET | (psn.get() as u64) << TIME_BITS | now.0 & TIME)
    }

    /// The probe in 64 bits; 0 is none.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// A probe from [`Probe::bits`].
    #[inline(always)]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// What a response with this PSN is to it; `refused`: it refuses the PSN, and answers what is before.
    #[inline(always)]
    pub const fn meets(self, psn: Psn, refused: bool) -> Answer {
        if self.0 == 0 {
            return Answer::Earlier;
        }
        let ahead = psn.diff(Psn::new((self.0 >> TIME_BITS) as u32 & 0xff_ffff)) - refused as i32;
        if ahead < 0 {
            Answer::Earlier
        } else if ahead > 0 || refused {
            Answer::Covered
        } else {
            Answer::Exact
        }
    }

    /// Time from the request to `now`.
    #[inline(always)]
    pub const fn age(self, now: Nanos) -> Nanos {
        Nanos(now.0.wrapping_sub(self.0) & TIME)
    }
}

/// Round trips of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RoundTrips {
    /// Least, mean and greatest.
    pub spread: Spread,
    /// How many of which length.
    pub times: Histogram,
}

impl RoundTrips {
    /// Adds one.
    #[inline(always)]
    pub fn add(&mut self, time: Nanos) {
        self.spread.add(time.0);
        self.times.add(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_to_the_very_psn_ends_it_with_a_time() {
        let probe = Probe::new(Psn::new(0xff_ffff), Nanos(TIME - 4));
        let meets = |psn, refused| probe.meets(Psn::new(psn), refused);
        assert_eq!([0xff_fffe, 0xff_ffff, 0, 9].map(|psn| meets(psn, false)), {
            use Answer::{Covered, Earlier, Exact};
            [Earlier, Exact, Covered, Covered]
        });
        // Its refusal is no answer; that of the next one is one to it too, but came for something else.
        assert_eq!((meets(0xff_ffff, true), meets(0, true)), (Answer::Earlier, Answer::Covered));
        assert_eq!(Probe::default().meets(Psn::new(0), false), Answer::Earlier);
        assert_eq!(Probe::from_bits(probe.bits()).age(Nanos(TIME + 11)), Nanos(15));
        assert_ne!(Probe::new(Psn::new(0), Nanos(0)), Probe::default());
    }
}
