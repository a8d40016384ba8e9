//! Random numbers that a seed determines on every machine.

/// xorshift64*, seeded through splitmix64 so that neighbouring seeds have nothing in common.
#[derive(Clone, Debug)]
pub(in crate::sim) struct Random(u64);

impl Random {
    pub(in crate::sim) const fn new(seed: u64) -> Self {
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((z ^ (z >> 31)) | 1)
    }

    #[inline]
    pub(in crate::sim) const fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    #[inline]
    pub(in crate::sim) const fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// Evenly distributed from 0 to `max`.
    #[inline]
    pub(in crate::sim) const fn up_to(&mut self, max: u64) -> u64 {
        if max == 0 { 0 } else { self.next_u64() % (max + 1) }
    }

    /// Evenly distributed in [0, 1).
    pub(in crate::sim) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Exponentially distributed with this mean.
    pub(in crate::sim) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}
