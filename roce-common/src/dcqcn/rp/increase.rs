//! How the rate rises: the stages, and many steps of one at once.

use super::Rp;
use crate::{
    dcqcn::{
        fixed::{periods, saturating_count, share},
        params::Boundary,
    },
    units::Nanos,
};

/// The part of the target that every increase of a start adds to it. Doubling overshoots: while a rate doubles within one
/// timer, a fast link's short queue overflows before the first CNP can be heard.
const START_GROWTH: u64 = 2;

/// Most single increases one [`Rp::advance`] works through. Reached only with steps below a 4,000th of the line rate
/// whose timer and byte increases interleave; what is beyond it counts as stages but no longer raises the rate.
const MAX_STEPS: u32 = 4_096;

impl Rp {
    /// All increases from `from` to `self.seen`: one per T, as long as timer periods count, and one per B of the
    /// `bytes_sent`.
    pub(super) fn raise(&mut self, from: Nanos, counts_until: Option<Nanos>, bytes_sent: u64) {
        let timer_period = self.timer_period();
        let mut next_timer = self.timer_at;
        let elapsed_periods = periods(&mut self.timer_at, self.seen, timer_period);
        let mut timers = match counts_until {
            Some(until) => elapsed_periods.min(periods(&mut { next_timer }, until, timer_period)),
            None => elapsed_periods,
        };

        // The bytes are taken as spread evenly over the time.
        let period = self.params.byte_period;
        let (elapsed, carried) = (self.seen.since(from).0, self.bytes);
        let mut by_bytes = 0;
        if let Some(n) = self.bytes.saturating_add(bytes_sent).checked_div(period) {
            by_bytes = n;
            self.bytes = self.bytes.saturating_add(bytes_sent) % period;
        }
        let spacing = share(elapsed, period, bytes_sent);
        let first_bytes = share(elapsed, period.saturating_sub(carried), bytes_sent);
        let mut next_bytes = Nanos(from.0.saturating_add(first_bytes));

        let mut steps = 0;
        while (timers > 0 || by_bytes > 0) && !self.at_ceiling() && steps < MAX_STEPS {
            steps += 1;
            let next = if timers > 0 { next_timer } else { next_bytes };
            let jumped = if self.starts(next) { 0 } else { self.jump(timers, by_bytes) };
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
            self.increase(at);
            if self.at_ceiling() {
                self.at_ceiling_since = Some(at);
            }
        }
        self.timer_count = saturating_count(self.timer_count, timers);
        self.byte_count = saturating_count(self.byte_count, by_bytes);
    }

    /// One increase (SIGCOMM'15 equations 3 and 4, and figure 7): fast recovery, additive or hyper increase by the
    /// counters, then RC ← (RT + RC)/2. In a start the target grows by half instead.
    fn increase(&mut self, at: Nanos) {
        let step = if self.starts(at) { self.start_step() } else { self.step() };
        self.target = self.target.saturating_add(step).min(self.ceiling());
        // Rounded up, so that RC reaches RT and does not stay one below.
        self.current = (self.target + self.current).div_ceil(2);
    }

    /// Whether an increase at `at` belongs to the flow's start.
    fn starts(&self, at: Nanos) -> bool {
        self.no_cnp_yet || at < self.start_until
    }

    /// What the target gains in a start.
    fn start_step(&self) -> u64 {
        let half = self.target / START_GROWTH;
        match self.params.start_additive.bytes_per_sec() {
            most if most > 0 && !self.no_cnp_yet => half.clamp(1, most),
            _ => half.max(1),
        }
    }

    /// What the target gains at this stage.
    fn step(&self) -> u64 {
        let f = self.last_recovery();
        let (low, high) = if self.params.byte_period == 0 {
            (self.timer_count.min(f.saturating_add(1)), self.timer_count)
        } else {
            (self.timer_count.min(self.byte_count), self.timer_count.max(self.byte_count))
        };
        if low > f {
            self.params.hyper.bytes_per_sec().saturating_mul(u64::from(low - f))
        } else if high >= f {
            self.params.additive.bytes_per_sec()
        } else {
            0
        }
    }

    /// Takes all steps of one size that can be taken at once, when only one kind of increase is left and its sibling keeps
    /// the step; returns how many. With D = RT − RC and the step A one increase makes D' = (D + A)/2, so after k of them
    /// D = A + (D₀ − A)/2^k.
    fn jump(&mut self, timers: u64, by_bytes: u64) -> u64 {
        let f = self.last_recovery();
        let alone = self.params.byte_period == 0;
        let (left, count, other) = if by_bytes == 0 {
            (timers, self.timer_count, self.byte_count)
        } else if timers == 0 {
            (by_bytes, self.byte_count, self.timer_count)
        } else {
            return 0;
        };
        let next = count.saturating_add(1);
        let (additive, hyper) = (self.params.additive.bytes_per_sec(), self.params.hyper.bytes_per_sec());
        let step = match (alone, other > f) {
            (true, _) if next > f => hyper,
            (false, false) if next.max(other) >= f => additive,
            (false, true) if next >= other => hyper.saturating_mul(u64::from(other - f)),
            _ => return 0,
        };
        let step = step.max(1);
        let k = left.min(self.ceiling().saturating_sub(self.target) / step);
        if k < 2 {
            return 0;
        }
        if by_bytes == 0 {
            self.timer_count = saturating_count(count, k);
        } else {
            self.byte_count = saturating_count(count, k);
        }
        let shift = u32::try_from(k).unwrap_or(u32::MAX);
        let halved = |v: u64| v.checked_shr(shift).unwrap_or(0);
        let gap = self.target.saturating_sub(self.current);
        let gap = if gap >= step { step + halved(gap - step) } else { step - halved(step - gap) };
        self.target += k * step;
        self.current = self.target.saturating_sub(gap);
        k
    }

    /// The stage that a count must reach for additive increase.
    fn last_recovery(&self) -> u32 {
        match self.params.boundary {
            Boundary::Below => self.params.fast_recovery,
            Boundary::UpTo => self.params.fast_recovery.saturating_add(1),
        }
    }
}
