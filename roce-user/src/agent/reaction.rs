//! How long a CNP takes to become a rate.

use std::time::Duration;

/// Buckets per power of two: a percentile is right to an eighth of itself.
const PARTS: usize = 8;
/// Powers of two, from 1 ns to more than an hour.
const POWERS: usize = 43;

/// Times from the kernel's stamp of a CNP to the rate standing in the map that the next packet reads, counted in buckets of
/// an eighth of a power of two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reactions {
    counts: Vec<u64>,
    count: u64,
    max_ns: u64,
}

impl Default for Reactions {
    fn default() -> Self {
        Self { counts: vec![0; PARTS * POWERS], count: 0, max_ns: 0 }
    }
}

impl Reactions {
    /// Counts one.
    pub fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.count += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Those that came after `earlier`; the slowest is still that of all.
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = self.counts.iter().zip(&earlier.counts).map(|(now, then)| now.saturating_sub(*then)).collect();
        Self { counts, count: self.count.saturating_sub(earlier.count), max_ns: self.max_ns }
    }

    /// How many there were.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The slowest.
    pub const fn max(&self) -> Duration {
        Duration::from_nanos(self.max_ns)
    }

    /// The time that `share` (0 to 1) of them did not exceed, to the upper end of its bucket; zero where there were none.
    pub fn percentile(&self, share: f64) -> Duration {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (i, n) in self.counts.iter().enumerate() {
            below += n;
            if below >= rank {
                return Duration::from_nanos(upper_end(i).min(self.max_ns));
            }
        }
        Duration::ZERO
    }
}

/// Times below 8 ns have a bucket each; above, the three bits below the leading one choose among eight.
fn bucket(ns: u64) -> usize {
    let bits = (u64::BITS - ns.leading_zeros()) as usize;
    if bits <= 3 {
        return ns as usize;
    }
    let part = (ns >> (bits - 4)) as usize & (PARTS - 1);
    ((bits - 3) * PARTS + part).min(PARTS * POWERS - 1)
}

fn upper_end(bucket: usize) -> u64 {
    if bucket < PARTS {
        return bucket as u64;
    }
    let shift = bucket / PARTS - 1;
    ((PARTS + bucket % PARTS + 1) as u64) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_an_eighth() {
        let mut r = Reactions::default();
        assert_eq!((r.percentile(0.5), r.max()), (Duration::ZERO, Duration::ZERO));
        for us in 1..=1_000u64 {
            r.add(us * 1_000);
        }
        for (share, want) in [(0.5, 500e3), (0.99, 990e3), (1.0, 1e6)] {
            let got = r.percentile(share).as_nanos() as f64;
            assert!(got >= want && got <= want * 1.126, "{share}: {got}");
        }
        assert_eq!((r.count(), r.max()), (1_000, Duration::from_millis(1)));
        let before = r.clone();
        r.add(100);
        assert_eq!(
            (r.since(&before).count(), r.since(&before).percentile(0.5) <= Duration::from_nanos(113)),
            (1, true)
        );
    }

    #[test]
    fn every_time_has_a_bucket_that_holds_it() {
        for ns in (0..64).chain((6..64).flat_map(|b| [(1u64 << b) - 1, 1 << b, (1 << b) + 1])).chain([u64::MAX]) {
            let b = bucket(ns);
            assert!(b < PARTS * POWERS);
            if b < PARTS * POWERS - 1 {
                assert!(ns <= upper_end(b) && (b == 0 || ns >= upper_end(b - 1).min(ns)), "{ns} in {b}");
                assert!(b == 0 || bucket(ns.saturating_sub(ns / 8 + 1)) < b || ns < 8, "{ns} in {b}");
            }
        }
    }
}
