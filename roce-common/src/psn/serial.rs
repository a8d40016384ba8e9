//! 24-bit serial arithmetic.

use core::fmt;

/// A packet sequence number, 24 bits, compared serially: of two PSNs less than 2^23 apart the later is the greater.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    #[inline(always)]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number, below 2^24.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// `self + n` modulo 2^24.
    #[inline(always)]
    pub const fn add(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// `self − n` modulo 2^24.
    #[inline(always)]
    pub const fn sub(self, n: u32) -> Self {
        Self::new(self.0.wrapping_sub(n))
    }

    /// `self − other` as a 24-bit signed number in −2^23 … 2^23 − 1.
    #[inline(always)]
    pub const fn diff(self, other: Self) -> i32 {
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::Psn;

    #[test]
    fn serial_difference_matches_the_reference_table() {
        for (a, b, want) in [
            (0x000000, 0xffffff, 1),
            (0xffffff, 0x000000, -1),
            (0x7fffff, 0x000000, 8_388_607),
            (0x800000, 0x000000, -8_388_608),
            (0x000010, 0xfffff0, 32),
        ] {
            assert_eq!(Psn::new(a).diff(Psn::new(b)), want, "{a:#x} - {b:#x}");
        }
    }

    #[test]
    fn addition_wraps_at_24_bits() {
        assert_eq!(Psn::new(0xff_ffff).add(1), Psn::new(0));
        assert_eq!(Psn::new(0).sub(1), Psn::new(0xff_ffff));
        assert_eq!(Psn::new(0x1ff_ffff).get(), 0xff_ffff);
    }
}
