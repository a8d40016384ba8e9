//! Reaction point: CNPs, time and bytes in, a rate out.

use super::{ONE, params::RpParams};
use crate::units::{Nanos, Rate};

/// Fraction bits of α inside the state machine: 14 more than it shows, so that thousands of small steps do not drift.
const ALPHA_BITS: u32 = 30;
const ALPHA_ONE: u64 = 1 << ALPHA_BITS;

/// Most single increases one [`Rp::advance`] works through. Reached only with steps below a 4,000th of the line rate
/// whose timer and byte increases interleave; what is beyond it counts as stages but no longer raises the rate.
const MAX_STEPS: u32 = 4_096;

/// What a CNP did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reaction {
    /// The rate was cut.
    Cut,
    /// The last cut is less than the monitor period ago: nothing happened.
    HeldBack,
}

/// The rate limiter of one queue pair. It exists from the first CNP until it is [`Rp::released`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rp {
    params: RpParams,
    /// RC, bytes per second.
    current: u64,
    /// RT, bytes per second.
    target: u64,
    /// α, in 2^-30.
    alpha: u64,
    /// T and BC, the numbers of increases since the last cut.
    timer_count: u32,
    byte_count: u32,
    /// Bytes sent since the last byte-counter increase.
    bytes: u64,
    last_cut: Option<Nanos>,
    /// Up to where time has been accounted for.
    seen: Nanos,
    alpha_at: Nanos,
    timer_at: Nanos,
    at_line_since: Option<Nanos>,
}

impl Rp {
    /// A reaction point at line rate with α = 1 ("RC = line rate, α = 1", SIGCOMM'15 §3, RP algorithm).
    pub const fn new(params: RpParams, now: Nanos) -> Self {
        let line = params.line.bytes_per_sec();
        Self {
            params,
            current: line,
            target: line,
            alpha: ALPHA_ONE,
            timer_count: 0,
            byte_count: 0,
            bytes: 0,
            last_cut: None,
            seen: now,
            alpha_at: Nanos(now.0.saturating_add(params.alpha_timer.0)),
            timer_at: Nanos(now.0.saturating_add(params.timer.0)),
            at_line_since: Some(now),
        }
    }

    /// A CNP arrived at `now`: RT ← RC, RC ← RC·(1 − α/2), α ← (1 − g)·α + g, counters and timers start anew (SIGCOMM'15
    /// equation 1). At most once per monitor period.
    pub fn on_cnp(&mut self, now: Nanos) -> Reaction {
        self.advance(now, 0);
        if self.last_cut.is_some_and(|cut| now.since(cut) < self.params.monitor) {
            return Reaction::HeldBack;
        }
        self.target = self.current;
        // RC < 2^40 and α in 1/65536: the product stays below 2^57.
        let cut = (self.current * (self.alpha >> (ALPHA_BITS - 16))) >> 17;
        self.current = (self.current - cut).max(self.floor());
        self.target = self.target.max(self.current);
        self.alpha = self.keep(self.alpha) + (u64::from(self.params.g.min(ONE)) << (ALPHA_BITS - 16));
        self.alpha = self.alpha.min(ALPHA_ONE);
        self.timer_count = 0;
        self.byte_count = 0;
        self.bytes = 0;
        let now = now.max(self.seen);
        self.last_cut = Some(now);
        self.alpha_at = Nanos(now.0.saturating_add(self.alpha_period()));
        self.timer_at = Nanos(now.0.saturating_add(self.timer_period()));
        self.at_line_since = None;
        Reaction::Cut
    }

    /// Brings the state to `now`, `bytes_sent` bytes after the last call. Any number of periods may have passed: the
    /// work does not grow with it.
    pub fn advance(&mut self, now: Nanos, bytes_sent: u64) {
        let from = self.seen;
        self.seen = from.max(now);

        // α ← (1 − g)·α for every K without a CNP (equation 2).
        let (alpha_period, timer_period) = (self.alpha_period(), self.timer_period());
        let decays = periods(&mut self.alpha_at, now, alpha_period);
        if decays > 0 {
            self.alpha = scale(self.alpha, power(self.keep(ALPHA_ONE), decays));
        }

        // Increases: one per T, one per B bytes. The bytes are taken as spread evenly over the time.
        let first_timer = self.timer_at;
        let mut timers = periods(&mut self.timer_at, now, timer_period);
        let period = self.params.byte_period.max(1);
        let (elapsed, carried) = (now.since(from).0, self.bytes);
        self.bytes = self.bytes.saturating_add(bytes_sent);
        let mut by_bytes = self.bytes / period;
        self.bytes %= period;
        let spacing = share(elapsed, period, bytes_sent);
        let mut next_timer = first_timer;
        let mut next_bytes = Nanos(from.0.saturating_add(share(elapsed, period - carried, bytes_sent)));

        let mut steps = 0;
        while (timers > 0 || by_bytes > 0) && !self.at_line() && steps < MAX_STEPS {
            steps += 1;
            let jumped = self.jump(timers, by_bytes);
            if jumped > 0 {
                if timers > 0 {
                    timers -= jumped;
                    next_timer.0 = next_timer.0.saturating_add(jumped.saturating_mul(timer_period));
                } else {
                    by_bytes -= jumped;
                    next_bytes.0 = next_bytes.0.saturating_add(jumped.saturating_mul(spacing));
                }
                continue;
            }
            let at;
            if timers > 0 && (by_bytes == 0 || next_timer <= next_bytes) {
                at = next_timer;
                timers -= 1;
                next_timer.0 = next_timer.0.saturating_add(timer_period);
                self.timer_count = self.timer_count.saturating_add(1);
            } else {
                at = next_bytes;
                by_bytes -= 1;
                next_bytes.0 = next_bytes.0.saturating_add(spacing);
                self.byte_count = self.byte_count.saturating_add(1);
            }
            self.increase();
            if self.at_line() {
                self.at_line_since = Some(at);
            }
        }
        self.timer_count = saturating_count(self.timer_count, timers);
        self.byte_count = saturating_count(self.byte_count, by_bytes);
    }

    /// One increase (SIGCOMM'15 equations 3 and 4, and figure 7): fast recovery, additive or hyper increase by the
    /// counters, then RC ← (RT + RC)/2.
    fn increase(&mut self) {
        let (low, high) = (self.timer_count.min(self.byte_count), self.timer_count.max(self.byte_count));
        let f = self.params.fast_recovery;
        if high >= f {
            let step = if low > f {
                self.params.hyper.bytes_per_sec().saturating_mul(u64::from(low - f))
            } else {
                self.params.additive.bytes_per_sec()
            };
            self.target = self.target.saturating_add(step).min(self.line());
        }
        // Rounded up, so that RC reaches RT and does not stay one below.
        self.current = (self.target + self.current).div_ceil(2);
    }

    /// Takes all additive steps that can be taken at once, when only one kind of increase is left and its sibling keeps
    /// the stage additive; returns how many. With D = RT − RC a step makes D' = (D + A)/2, so after k steps
    /// D = A + (D₀ − A)/2^k.
    fn jump(&mut self, timers: u64, by_bytes: u64) -> u64 {
        let f = self.params.fast_recovery;
        let (left, count, other) = if by_bytes == 0 {
            (timers, &mut self.timer_count, self.byte_count)
        } else if timers == 0 {
            (by_bytes, &mut self.byte_count, self.timer_count)
        } else {
            return 0;
        };
        let additive = self.params.additive.bytes_per_sec().max(1);
        if other > f || (*count).saturating_add(1).max(other) < f {
            return 0;
        }
        let room = self.params.line.bytes_per_sec().saturating_sub(self.target) / additive;
        let k = left.min(room);
        if k < 2 {
            return 0;
        }
        *count = saturating_count(*count, k);
        let shift = u32::try_from(k).unwrap_or(u32::MAX);
        let halved = |v: u64| v.checked_shr(shift).unwrap_or(0);
        let gap = self.target.saturating_sub(self.current);
        let gap = if gap >= additive { additive + halved(gap - additive) } else { additive - halved(additive - gap) };
        self.target += k * additive;
        self.current = self.target.saturating_sub(gap);
        k
    }

    /// RC.
    pub const fn rate(&self) -> Rate {
        Rate::from_bytes_per_sec(self.current)
    }

    /// RT.
    pub const fn target(&self) -> Rate {
        Rate::from_bytes_per_sec(self.target)
    }

    /// α, in 1/65536.
    pub const fn alpha(&self) -> u32 {
        (self.alpha >> (ALPHA_BITS - 16)) as u32
    }

    /// Back at line rate for one timer period: the queue pair needs no limiter.
    pub fn released(&self, now: Nanos) -> bool {
        self.at_line_since.is_some_and(|since| now.since(since).0 >= self.timer_period())
    }

    /// When the rate next rises by itself, or the limiter is released. α needs no deadline: it is brought up to date
    /// when it is used.
    pub fn next_deadline(&self) -> Nanos {
        match self.at_line_since {
            Some(since) => Nanos(since.0.saturating_add(self.timer_period())),
            None => self.timer_at,
        }
    }

    fn at_line(&self) -> bool {
        self.current >= self.line()
    }

    fn line(&self) -> u64 {
        self.params.line.bytes_per_sec()
    }

    fn floor(&self) -> u64 {
        self.params.min_rate.bytes_per_sec().clamp(1, self.line().max(1))
    }

    fn timer_period(&self) -> u64 {
        self.params.timer.0.max(1)
    }

    fn alpha_period(&self) -> u64 {
        self.params.alpha_timer.0.max(1)
    }

    /// `(1 − g) · alpha`.
    fn keep(&self, alpha: u64) -> u64 {
        (alpha * u64::from(ONE - self.params.g.min(ONE))) >> 16
    }
}

/// How many periods end at or before `now`; moves `at`, the end of the next, behind them.
fn periods(at: &mut Nanos, now: Nanos, period: u64) -> u64 {
    if now < *at {
        return 0;
    }
    let n = now.since(*at).0 / period + 1;
    at.0 = at.0.saturating_add(n.saturating_mul(period));
    n
}

/// `a · b` of two numbers in 2^-30, at most 1.
const fn scale(a: u64, b: u64) -> u64 {
    (a * b) >> ALPHA_BITS
}

/// `base^n` in 2^-30 by repeated squaring; stops when nothing is left.
fn power(mut base: u64, mut n: u64) -> u64 {
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
fn share(time: u64, part: u64, whole: u64) -> u64 {
    if part >= whole {
        return time;
    }
    let shift = (u64::BITS - whole.leading_zeros()).saturating_sub(44);
    let quotient = ((part >> shift) << 20) / (whole >> shift).max(1);
    if time < 1 << 43 { (time * quotient) >> 20 } else { (time >> 20) * quotient }
}

fn saturating_count(count: u32, n: u64) -> u32 {
    count.saturating_add(u32::try_from(n).unwrap_or(u32::MAX))
}

#[cfg(test)]
#[path = "rp_tests.rs"]
mod tests;
