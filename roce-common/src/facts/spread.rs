//! Least, mean and greatest of a quantity.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What is kept of many values of one quantity. The default holds none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Spread {
    count: u64,
    sum: u64,
    min: u64,
    max: u64,
}

impl Spread {
    /// Adds a value. Sums saturate.
    #[inline(always)]
    pub const fn add(&mut self, value: u64) {
        if self.count == 0 || value < self.min {
            self.min = value;
        }
        if value > self.max {
            self.max = value;
        }
        self.count += 1;
        self.sum = self.sum.saturating_add(value);
    }

    /// How many values there were.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Their sum.
    pub const fn sum(&self) -> u64 {
        self.sum
    }

    /// The least; 0 where there is none.
    pub const fn min(&self) -> u64 {
        self.min
    }

    /// The greatest; 0 where there is none.
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// The mean, rounded down; 0 where there is none.
    pub const fn mean(&self) -> u64 {
        match self.sum.checked_div(self.count) {
            Some(mean) => mean,
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_mean_and_greatest() {
        let mut s = Spread::default();
        assert_eq!((s.count(), s.min(), s.mean(), s.max()), (0, 0, 0, 0));
        for value in [7, 3, 11] {
            s.add(value);
        }
        assert_eq!((s.count(), s.sum(), s.min(), s.mean(), s.max()), (3, 21, 3, 7, 11));
        s.add(u64::MAX);
        assert_eq!((s.sum(), s.max()), (u64::MAX, u64::MAX));
    }
}
