//! What is measured while it runs.

use super::{network::PS_PER_NS, scenario::Scenario};

/// Points of every curve over time.
pub(super) const BINS: usize = 200;
/// Most steps of the histogram of a queue's depth, of a packet each.
const STEPS: u64 = 1 << 17;

/// The depth of one queue, weighed by time.
#[derive(Debug)]
pub(super) struct QueueStats {
    depth: u64,
    since: u64,
    warmup: u64,
    bin_ps: u64,
    bin_end: u64,
    bin: usize,
    packet: u64,
    /// Time by packets waiting; grows with the queue.
    histogram: Vec<u64>,
    integral: f64,
    square: f64,
    peak: u64,
    /// Mean times duration, and peak, of each bin.
    curve: Vec<(f64, u64)>,
}

/// The distribution of a queue's depth, in bytes.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Depth {
    /// Mean over time.
    pub mean: f64,
    /// Standard deviation over time.
    pub std: f64,
    /// Half of the time it was at most this.
    pub p50: u64,
    /// 99 % of the time it was at most this.
    pub p99: u64,
    /// The most.
    pub peak: u64,
}

impl QueueStats {
    pub(super) fn new(s: &Scenario) -> Self {
        let bin_ps = bin_ps(s);
        Self {
            depth: 0,
            since: 0,
            warmup: s.warmup.0 * PS_PER_NS,
            bin_ps,
            bin_end: bin_ps,
            bin: 0,
            packet: u64::from(s.packet),
            histogram: Vec::new(),
            integral: 0.0,
            square: 0.0,
            peak: 0,
            curve: vec![(0.0, 0); BINS],
        }
    }

    /// The queue has been as it is until `now`, and is `depth` from now on.
    #[inline]
    pub(super) fn change(&mut self, now: u64, depth: u64) {
        while now >= self.bin_end && self.bin + 1 < BINS {
            self.account(self.bin_end);
            self.bin += 1;
            self.bin_end += self.bin_ps;
        }
        self.account(now);
        self.depth = depth;
        if now >= self.warmup {
            self.peak = self.peak.max(depth);
        }
        let curve = &mut self.curve[self.bin];
        curve.1 = curve.1.max(depth);
    }

    #[inline]
    fn account(&mut self, now: u64) {
        let depth = self.depth as f64;
        let curve = &mut self.curve[self.bin];
        curve.0 += depth * (now - self.since) as f64;
        curve.1 = curve.1.max(self.depth);
        let from = self.since.max(self.warmup);
        if now > from {
            let span = now - from;
            self.integral += depth * span as f64;
            self.square += depth * depth * span as f64;
            let step = (self.depth / self.packet).min(STEPS) as usize;
            if step >= self.histogram.len() {
                self.histogram.resize(step + 1, 0);
            }
            self.histogram[step] += span;
        }
        self.since = now;
    }

    /// The distribution from the end of the warm-up until `end`.
    pub(super) fn depth(&self) -> Depth {
        let total: u64 = self.histogram.iter().sum();
        if total == 0 {
            return Depth::default();
        }
        let percentile = |share: f64| {
            let (mut seen, want) = (0, share * total as f64);
            let step = self.histogram.iter().position(|&n| {
                seen += n;
                seen as f64 >= want
            });
            step.unwrap_or(0) as u64 * self.packet
        };
        let mean = self.integral / total as f64;
        let std = (self.square / total as f64 - mean * mean).max(0.0).sqrt();
        Depth { mean, std, p50: percentile(0.5), p99: percentile(0.99), peak: self.peak }
    }

    /// Mean and peak of each bin.
    pub(super) fn curve(&self) -> Vec<(f64, u64)> {
        self.curve.iter().map(|&(area, peak)| (area / self.bin_ps as f64, peak)).collect()
    }
}

/// The length of a bin of the curves.
pub(super) const fn bin_ps(s: &Scenario) -> u64 {
    (s.time.0 * PS_PER_NS).div_ceil(BINS as u64)
}

/// Jain's fairness index of what flows got: 1 when all got the same, 1/n when one got all; 1 where nobody got anything.
pub fn jain(shares: impl Iterator<Item = f64>) -> f64 {
    let (mut n, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for x in shares {
        n += 1.0;
        sum += x;
        squares += x * x;
    }
    if squares > 0.0 { sum * sum / (n * squares) } else { 1.0 }
}

/// The value that `share` of the sorted `values` do not exceed.
pub fn percentile(values: &[u64], share: f64) -> u64 {
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied().unwrap_or(0)
}
