//! Where the READ requests of a flow started.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Account, Outcome, Psn, ring::equal};

/// READ requests that are remembered.
const READS: usize = 16;

/// What is known of a PSN that a READ request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub enum ReadPlace {
    /// No READ of those remembered started before it.
    #[default]
    Unknown = 0,
    /// A READ started there.
    Start = 1,
    /// Only earlier ones did: it is inside one.
    Inside = 2,
}

impl ReadPlace {
    /// The place with this number; anything else is not known.
    #[inline(always)]
    pub const fn from_number(n: u32) -> Self {
        match n {
            1 => Self::Start,
            2 => Self::Inside,
            _ => Self::Unknown,
        }
    }
}

/// The starts of the newest READs of a flow that were asked for the first time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Reads {
    starts: [u32; READS],
    /// How many there were.
    count: u32,
    reserved: u32,
}

impl Reads {
    /// Takes a READ request and what the tracker said of it.
    #[inline(always)]
    pub fn packet(&mut self, psn: Psn, account: Account) {
        if matches!(account.outcome(), Outcome::InOrder | Outcome::First) {
            self.starts[self.count as usize % READS] = psn.get();
            self.count = self.count.wrapping_add(1);
        }
    }

    /// What is known of `psn`. Without branches: the verifier would follow both ways of each.
    #[inline(always)]
    pub fn place(&self, psn: Psn) -> ReadPlace {
        let (mut here, mut before) = (0, 0);
        let mut i = 0;
        while i < READS {
            let known = ((i as u64).wrapping_sub(u64::from(self.count)) >> 63) as u32;
            let behind = psn.get().wrapping_sub(self.starts[i]) & 0xff_ffff;
            here |= known & equal(behind, 0);
            before |= known & (behind >> 23 ^ 1);
            i += 1;
        }
        ReadPlace::from_number(if here != 0 { 1 } else { before << 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_told_from_what_is_inside() {
        let mut reads = Reads::default();
        let place = |reads: &Reads, psns: [u32; 4]| psns.map(|psn| reads.place(Psn::new(psn)));
        use ReadPlace::{Inside, Start, Unknown};
        assert_eq!(place(&reads, [0, 1, 0x80_0000, 0xff_ffff]), [Unknown; 4]);
        let account = |outcome| Account::of(outcome);
        for psn in [0xff_fff0, 0, 40] {
            reads.packet(Psn::new(psn), account(Outcome::InOrder));
        }
        reads.packet(Psn::new(44), account(Outcome::Duplicate));
        assert_eq!(place(&reads, [0xff_ffef, 0xff_fff0, 0xff_fff1, 0]), [Unknown, Start, Inside, Start]);
        assert_eq!(place(&reads, [39, 40, 44, 50]), [Inside, Start, Inside, Inside]);
        // Those are forgotten first that were remembered first.
        for psn in 100..115 {
            reads.packet(Psn::new(psn), account(Outcome::First));
        }
        assert_eq!(place(&reads, [0, 40, 50, 114]), [Unknown, Start, Inside, Start]);
    }
}
