//! Fixed-point arithmetic of the reaction point, 64 bits wide.

use crate::units::{Nanos, Rate};

/// Fraction bits of α inside the state machine: 14 more than it shows, so that thousands of small steps do not drift.
pub(super) const ALPHA_BITS: u32 = 30;
pub(super) const ALPHA_ONE: u64 = 1 << ALPHA_BITS;

/// How many periods end at or before `now`; moves `at`, the end of the next, behind them.
pub(super) fn periods(at: &mut Nanos, now: Nanos, period: u64) -> u64 {
    if now < *at {
        return 0;
    }
    let n = now.since(*at).0 / period + 1;
    at.0 = at.0.saturating_add(n.saturating_mul(period));
    n
}

/// `a · b` of two numbers in 2^-30, at most 1.
pub(super) const fn scale(a: u64, b: u64) -> u64 {
    (a * b) >> ALPHA_BITS
}

/// `base^n` in 2^-30 by repeated squaring; stops when nothing is left.
pub(super) fn power(mut base: u64, mut n: u64) -> u64 {
    let mut result = ALPHA_ONE;
    while n > 0 && result > 0 {
        if n & 1 == 1 {
            result = scale(result, base);
        }
        base = scale(base, base);
        n >>= 1;
    }
    result
}

/// `time · part / whole` for `part` up to `whole`, to 20 bits of the quotient.
pub(super) fn share(time: u64, part: u64, whole: u64) -> u64 {
    if part >= whole {
        return time;
    }
    let shift = (u64::BITS - whole.leading_zeros()).saturating_sub(44);
    let quotient = ((part >> shift) << 20) / (whole >> shift).max(1);
    if time < 1 << 43 { (time * quotient) >> 20 } else { (time >> 20) * quotient }
}

pub(super) fn saturating_count(count: u32, n: u64) -> u32 {
    count.saturating_add(u32::try_from(n).unwrap_or(u32::MAX))
}

/// The time `bytes` take at `rate`: as [`Rate::time_for`], also for more bytes than that takes.
pub(super) fn time_for(rate: u64, bytes: u64) -> Nanos {
    let shift = (u64::BITS - bytes.leading_zeros()).saturating_sub(34);
    Rate::from_bytes_per_sec(rate >> shift).time_for(bytes >> shift)
}
