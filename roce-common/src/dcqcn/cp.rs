//! Congestion point: a virtual queue and RED on its depth.

use super::ONE;

/// What [`take`] found and left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// When the packet's turn comes: `max(now, next)`, at most the horizon away. The departure time of an EDT pacer; minus
    /// `now`, the time the packets before it take: the depth of a virtual queue.
    pub start_ns: u64,
    /// The new value of the shared cell.
    pub next_ns: u64,
}

/// The one primitive of pacing and of the virtual queue: `next = max(now, next) + cost`, never more than `horizon_ns`
/// ahead of `now`. A pure function of the cell's old value, to be retried in a compare-and-swap loop.
#[inline(always)]
pub const fn take(next_ns: u64, now_ns: u64, cost_ns: u64, horizon_ns: u64) -> Slot {
    let far = now_ns.saturating_add(horizon_ns);
    let start_ns = if next_ns < now_ns {
        now_ns
    } else if next_ns > far {
        far
    } else {
        next_ns
    };
    let next_ns = start_ns.saturating_add(cost_ns);
    Slot { start_ns, next_ns: if next_ns > far { far } else { next_ns } }
}

/// A virtual queue that drains at `bytes_per_sec` and holds `limit_bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    /// Drain rate; 0 never drains and never fills: its depth is always 0.
    pub bytes_per_sec: u64,
    /// Most bytes it holds; what comes on top vanishes, as in the real queue it stands for.
    pub limit_bytes: u32,
}

/// A packet's arrival at a [`Queue`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Bytes the packet found before it.
    pub depth_bytes: u64,
    /// The new value of the shared cell: when the queue will be empty.
    pub empty_at_ns: u64,
}

/// What a packet takes of a [`Queue`]: two arguments of [`take`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// How long the queue needs for it.
    pub cost_ns: u64,
    /// How long it needs for all that it holds.
    pub horizon_ns: u64,
}

impl Queue {
    const SECOND: u64 = 1_000_000_000;

    /// What a packet of `bytes` takes of it.
    #[inline(always)]
    pub const fn place(&self, bytes: u32) -> Place {
        if self.bytes_per_sec == 0 {
            return Place { cost_ns: 0, horizon_ns: 0 };
        }
        // u32 · 10^9 stays below 2^62, so neither product nor the way back from time to bytes overflows.
        Place {
            cost_ns: bytes as u64 * Self::SECOND / self.bytes_per_sec,
            horizon_ns: self.limit_bytes as u64 * Self::SECOND / self.bytes_per_sec,
        }
    }

    /// Bytes in front of a packet that waits for `wait_ns`, at most the horizon.
    #[inline(always)]
    pub const fn depth_bytes(&self, wait_ns: u64) -> u64 {
        wait_ns * self.bytes_per_sec / Self::SECOND
    }

    /// A packet of `bytes` arrives at `now_ns`; `empty_at_ns` is the cell's old value.
    #[inline(always)]
    pub const fn arrive(&self, empty_at_ns: u64, now_ns: u64, bytes: u32) -> Arrival {
        let Place { cost_ns, horizon_ns } = self.place(bytes);
        let slot = take(empty_at_ns, now_ns, cost_ns, horizon_ns);
        Arrival { depth_bytes: self.depth_bytes(slot.start_ns - now_ns), empty_at_ns: slot.next_ns }
    }
}

/// How likely a packet that finds `depth_bytes` is marked, in 1/65536: never up to `kmin`, with a probability that grows to
/// `pmax` at `kmax`, always above (SIGCOMM'15 §3, CP algorithm: RED on the instantaneous queue).
#[inline(always)]
pub const fn probability(depth_bytes: u64, kmin: u32, kmax: u32, pmax: u32) -> u32 {
    (threshold(depth_bytes, kmin, kmax, pmax) >> 16) as u32
}

/// Whether a packet that finds `depth_bytes` is marked, with its [`probability`]. `random` is uniform.
#[inline(always)]
pub const fn mark(depth_bytes: u64, kmin: u32, kmax: u32, pmax: u32, random: u32) -> bool {
    (random as u64) < threshold(depth_bytes, kmin, kmax, pmax)
}

/// The probability in 2^-32.
#[inline(always)]
const fn threshold(depth_bytes: u64, kmin: u32, kmax: u32, pmax: u32) -> u64 {
    if depth_bytes <= kmin as u64 {
        return 0;
    }
    if depth_bytes > kmax as u64 {
        return 1 << 32;
    }
    // Here kmin < depth <= kmax. The test keeps the compiler from adding a panic for a division by zero, which BPF has no
    // use for; pmax <= 2^16 and depth < 2^32 keep the product below 2^64.
    let range = kmax.wrapping_sub(kmin) as u64;
    if range == 0 {
        return 1 << 32;
    }
    let pmax = if pmax > ONE { ONE } else { pmax } as u64;
    (pmax << 16) * (depth_bytes - kmin as u64) / range
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_idle_cell_starts_now_and_a_busy_one_queues() {
        assert_eq!(take(0, 1_000, 10, u64::MAX), Slot { start_ns: 1_000, next_ns: 1_010 });
        assert_eq!(take(1_010, 1_000, 10, u64::MAX), Slot { start_ns: 1_010, next_ns: 1_020 });
        assert_eq!(take(5_000, 1_000, 10, 100), Slot { start_ns: 1_100, next_ns: 1_100 });
        assert_eq!(take(u64::MAX, 1_000, 10, u64::MAX).next_ns, u64::MAX);
    }

    #[test]
    fn a_burst_fills_the_virtual_queue_to_its_limit() {
        let q = Queue { bytes_per_sec: 12_500_000, limit_bytes: 64 * 1_000 };
        let mut cell = 0;
        for i in 0..200u64 {
            let a = q.arrive(cell, 1_000_000, 1_000);
            assert_eq!(a.depth_bytes, (i * 1_000).min(64_000));
            cell = a.empty_at_ns;
        }
        // 64,000 bytes drain in 5.12 ms.
        assert_eq!(q.arrive(cell, 1_000_000 + 2_560_000, 1_000).depth_bytes, 32_000);
        assert_eq!(q.arrive(cell, 1_000_000 + 5_120_000, 1_000).depth_bytes, 0);
        assert_eq!(Queue { bytes_per_sec: 0, limit_bytes: 1 }.arrive(7, 9, 1_000).depth_bytes, 0);
    }

    #[test]
    fn marking_follows_the_red_curve() {
        let (kmin, kmax, pmax) = (4_000, 32_000, ONE / 5);
        assert!(!mark(4_000, kmin, kmax, pmax, 0));
        assert!(mark(4_001, kmin, kmax, pmax, 0));
        assert!(mark(32_001, kmin, kmax, pmax, u32::MAX));
        let mut state = 1u32;
        for depth in [8_000u64, 16_000, 24_000, 32_000] {
            let n = 200_000u32;
            let marked = (0..n)
                .filter(|_| {
                    state ^= state << 13;
                    state ^= state >> 17;
                    state ^= state << 5;
                    mark(depth, kmin, kmax, pmax, state)
                })
                .count();
            let want = 0.2 * (depth - 4_000) as f64 / 28_000.0;
            assert!((marked as f64 / f64::from(n) - want).abs() < 0.005, "depth {depth}: {marked}");
        }
        // A step: kmin = kmax, as DCTCP.
        assert!(!mark(5_000, 5_000, 5_000, ONE, 0));
        assert!(mark(5_001, 5_000, 5_000, ONE, u32::MAX));
        // kmin above kmax is a step at kmin, not a division by zero.
        assert!(!mark(5_000, 6_000, 5_000, ONE, 0));
    }

    #[test]
    fn the_probability_is_that_of_the_mark() {
        let p = |depth| probability(depth, 4_000, 32_000, ONE / 5);
        assert_eq!((p(0), p(4_000), p(32_001), p(u64::MAX)), (0, 0, ONE, ONE));
        assert_eq!(p(32_000), ONE / 5);
        assert_eq!(p(18_000), ONE / 10);
        assert_eq!((probability(5_000, 5_000, 5_000, ONE), probability(5_001, 5_000, 5_000, ONE)), (0, ONE));
    }

    #[test]
    fn a_queue_that_idled_is_empty_and_a_clock_that_jumped_fills_it_at_most_once() {
        let q = Queue { bytes_per_sec: 12_500_000, limit_bytes: 64_000 };
        let hour = 3_600_000_000_000u64;
        // Idle for an hour: the first packet finds nothing, and the hour is not made up for.
        let first = q.arrive(1_000, hour, 1_000);
        assert_eq!((first.depth_bytes, first.empty_at_ns), (0, hour + 80_000));
        // The cell lies an hour ahead: the queue counts as full, no more, and drains as a full one does.
        let jumped = q.arrive(2 * hour, hour, 1_000);
        assert_eq!((jumped.depth_bytes, jumped.empty_at_ns), (64_000, hour + 5_120_000));
        assert_eq!(q.arrive(jumped.empty_at_ns, hour + 5_120_000, 1_000).depth_bytes, 0);
    }

    proptest! {
        #[test]
        fn nothing_overflows(
            cell: u64, now: u64, bytes: u32, rate: u64, limit: u32,
            kmin: u32, kmax: u32, pmax: u32, random: u32
        ) {
            let a = Queue { bytes_per_sec: rate, limit_bytes: limit }.arrive(cell, now, bytes);
            prop_assert!(a.depth_bytes <= u64::from(limit));
            mark(a.depth_bytes, kmin, kmax, pmax, random);
        }
    }
}
