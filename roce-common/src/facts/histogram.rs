//! A histogram of times with buckets that grow with the value: eight to each doubling, from 1 µs to half a minute.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::units::Nanos;

/// log2 of the buckets in each doubling.
const SUB_BITS: u32 = 3;
const SUB: usize = 1 << SUB_BITS;
/// Everything below 2^10 ns, about a microsecond, is one bucket: a capture's clock is hardly better.
const LEAST_BITS: u32 = 10;
/// Everything from 2^35 ns, 34 s, is one bucket: longer than the ACK timeouts in use.
const MOST_BITS: u32 = 35;
const BUCKETS: usize = (MOST_BITS - LEAST_BITS) as usize * SUB + 2;

/// Times, counted in buckets. Quantiles are right to within a sixteenth of their value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Histogram {
    counts: [u32; BUCKETS],
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0 }
    }
}

impl Histogram {
    /// Counts a time. A bucket that is full stays so.
    #[inline(always)]
    pub fn add(&mut self, time: Nanos) {
        // Hidden from the compiler, which knows the bound from the logarithm and the BPF verifier does not.
        if let Some(bucket) = self.counts.get_mut(core::hint::black_box(bucket_of(time.0))) {
            *bucket = bucket.saturating_add(1);
        }
        self.total += 1;
    }

    /// Times counted.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// The time that `per_mille` thousandths of all times do not exceed: the middle of its bucket. `None` without times.
    pub fn quantile(&self, per_mille: u64) -> Option<Nanos> {
        if self.total == 0 {
            return None;
        }
        let rank = (self.total * per_mille).div_ceil(1_000).max(1);
        let mut below = 0;
        for (number, &count) in self.counts.iter().enumerate() {
            below += u64::from(count);
            if below >= rank {
                return Some(middle_of(number));
            }
        }
        Some(middle_of(BUCKETS - 1))
    }
}

const fn bucket_of(nanos: u64) -> usize {
    if nanos < 1 << LEAST_BITS {
        return 0;
    }
    if nanos >= 1 << MOST_BITS {
        return BUCKETS - 1;
    }
    let bits = nanos.ilog2();
    let sub = (nanos >> (bits - SUB_BITS)) as usize & (SUB - 1);
    1 + (bits - LEAST_BITS) as usize * SUB + sub
}

const fn middle_of(bucket: usize) -> Nanos {
    if bucket == 0 {
        return Nanos(1 << (LEAST_BITS - 1));
    }
    if bucket >= BUCKETS - 1 {
        return Nanos(1 << MOST_BITS);
    }
    let bits = LEAST_BITS + ((bucket - 1) / SUB) as u32;
    let sub = ((bucket - 1) % SUB) as u64;
    let width = 1 << (bits - SUB_BITS);
    Nanos((1 << bits) + sub * width + width / 2)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn every_time_is_within_a_sixteenth_of_its_bucket() {
        let mut time = 1_024_u64;
        let mut last = 0;
        while time < 1 << MOST_BITS {
            let bucket = bucket_of(time);
            assert!(bucket == last || bucket == last + 1, "{time}");
            last = bucket;
            let middle = middle_of(bucket).0;
            assert!(middle.abs_diff(time) <= time / 16, "{time} stands for {middle}");
            time += 1 + time / 100;
        }
        for outlier in [0, 1, 1_023, 1 << MOST_BITS, u64::MAX] {
            assert!(bucket_of(outlier) < BUCKETS);
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times() {
        let mut state = 1_u64;
        let mut times: Vec<u64> = (0..10_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                2_000 + (state >> 40) * (state >> 60)
            })
            .collect();
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(500), None);
        times.iter().for_each(|t| histogram.add(Nanos(*t)));
        times.sort_unstable();
        for per_mille in [1, 10, 500, 900, 990, 1_000] {
            let exact = times[(times.len() * per_mille).div_ceil(1_000) - 1];
            let told = histogram.quantile(per_mille as u64).expect("times").0;
            assert!(told.abs_diff(exact) <= exact / 16, "{per_mille}: {told} for {exact}");
        }
    }
}
