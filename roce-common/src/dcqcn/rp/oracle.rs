//! The reaction point in floating point, one event at a time: what the state machine must agree with.

use std::vec::Vec;

use super::Rp;
use crate::{
    dcqcn::{
        fixed::share,
        params::{AlphaUpdate, Boundary, RpParams},
    },
    units::Nanos,
};

/// The same equations in floating point, one event at a time. Times are exact; how long bytes keep a flow busy is
/// reckoned at the rate under test, so that both see the same periods.
pub(super) struct Oracle {
    p: RpParams,
    pub(super) rc: f64,
    pub(super) rt: f64,
    pub(super) alpha: f64,
    t: u64,
    bc: u64,
    bytes: u64,
    last_cut: Option<u64>,
    cnp_in_period: bool,
    no_cnp_yet: bool,
    start_until: u64,
    lasting: bool,
    seen: u64,
    busy_until: u64,
    told: u64,
    alpha_at: u64,
    timer_at: u64,
    at_ceiling_since: Option<u64>,
}

impl Oracle {
    pub(super) fn new(p: RpParams, now: u64) -> Self {
        let most = p.ceiling().bytes_per_sec() as f64;
        Self {
            p,
            rc: most,
            rt: most,
            alpha: f64::from(p.initial_alpha) / 65_536.0,
            t: 0,
            bc: 0,
            bytes: 0,
            last_cut: None,
            cnp_in_period: false,
            no_cnp_yet: false,
            start_until: now,
            lasting: false,
            seen: now,
            busy_until: now,
            told: now,
            alpha_at: now + p.alpha_timer.0,
            timer_at: now + p.timer.0,
            at_ceiling_since: Some(now),
        }
    }

    pub(super) fn start(p: RpParams, now: u64) -> Self {
        let start = p.start_rate.bytes_per_sec() as f64;
        if start == 0.0 || start >= p.ceiling().bytes_per_sec() as f64 {
            return Self { lasting: true, ..Self::new(p, now) };
        }
        Self {
            rc: start,
            rt: start,
            no_cnp_yet: true,
            start_until: now + u64::from(p.start_periods) * p.timer.0,
            lasting: true,
            at_ceiling_since: None,
            ..Self::new(p, now)
        }
    }

    fn g(&self) -> f64 {
        f64::from(self.p.g) / 65_536.0
    }

    fn most(&self) -> f64 {
        self.p.ceiling().bytes_per_sec() as f64
    }

    /// `under_test`: the integer state machine before this call; whether it counts as recovered hangs on the last byte per
    /// second, which rounding decides.
    pub(super) fn on_cnp(&mut self, now: u64, mut under_test: Rp) {
        self.decay(now);
        if self.last_cut.is_some_and(|c| now - c < self.p.monitor.0) {
            self.cnp_in_period = true;
            return;
        }
        // What was sent is not told yet: only what was booked before keeps the flow busy.
        let from = self.seen;
        self.seen = now;
        self.raise(from, 0, true);
        under_test.seen = Nanos(now);
        under_test.raise(Nanos(from), under_test.counts_until(), 0);
        under_test.forget();
        if under_test.recovered(Nanos(now)) {
            assert!(self.rc >= self.most() * 0.999);
            self.last_cut = None;
            self.alpha = f64::from(self.p.initial_alpha) / 65_536.0;
        }
        let first = self.last_cut.is_none();
        let raised = self.bc > 0 || (self.p.clamp_target_after_timer && self.t > 0);
        if first || self.p.clamp_target || raised {
            self.rt = self.rc;
        }
        let least = self.p.min_rate.bytes_per_sec() as f64;
        if first && self.p.first_cnp_rate.bytes_per_sec() > 0 {
            self.rc = self.rc.min(self.p.first_cnp_rate.bytes_per_sec() as f64).max(least);
            self.rt = self.rc;
        } else {
            let cut = self.alpha * 1_024.0 / f64::from(1u32 << self.p.gd);
            let kept = f64::from(self.p.least_kept_percent) / 100.0;
            self.rc = (self.rc * (1.0 - cut).max(kept)).max(least);
            self.rt = self.rt.max(self.rc);
        }
        let by_period = self.p.alpha_update == AlphaUpdate::EveryPeriod;
        if by_period {
            self.cnp_in_period = !first;
        } else {
            self.alpha = (1.0 - self.g()) * self.alpha + self.g();
        }
        (self.t, self.bc, self.bytes) = (0, 0, 0);
        self.no_cnp_yet = false;
        self.at_ceiling_since = None;
        self.last_cut = Some(now);
        if first || !by_period {
            self.alpha_at = now + self.p.alpha_timer.0;
        }
        self.timer_at = now + self.p.timer.0;
    }

    /// `rate`: the average rate under test since bytes were last told.
    pub(super) fn advance(&mut self, now: u64, sent: Option<u64>, rate: u64) {
        let from = self.seen;
        self.seen = now;
        self.decay(now);
        let bytes = sent.unwrap_or(0);
        if sent.is_none() {
            self.busy_until = self.busy_until.max(now);
        }
        if bytes > 0 {
            let time = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
            let until = u128::from(self.busy_until.max(self.told)) + time;
            let most = now + self.p.idle_restart.0.max(self.p.timer.0);
            self.busy_until = u64::try_from(until).unwrap().min(most);
        }
        self.told = now;
        self.raise(from, bytes, sent.is_some());
    }

    fn decay(&mut self, now: u64) {
        if self.last_cut.is_none() || self.alpha_at > now {
            return;
        }
        let periods = (now - self.alpha_at) / self.p.alpha_timer.0 + 1;
        self.alpha_at += periods * self.p.alpha_timer.0;
        if self.p.alpha_update == AlphaUpdate::EveryPeriod && self.cnp_in_period {
            self.alpha += self.g() / (1.0 - self.g());
        }
        self.cnp_in_period = false;
        self.alpha *= (1.0 - self.g()).powf(periods as f64);
    }

    /// Every increase from `from` to `self.seen`, in order; `told`: what was sent is known.
    fn raise(&mut self, from: u64, bytes: u64, told: bool) {
        let (now, gated) = (self.seen, self.p.usage > 0);
        let idle_part = u128::from(65_536 - self.p.usage);
        let busy = self.busy_until + ((u128::from(self.p.timer.0) * idle_part) >> 16) as u64;
        let mut events: Vec<(u64, bool)> = Vec::new();
        if let Some(n) = (self.bytes + bytes).checked_div(self.p.byte_period) {
            self.bytes += bytes;
            let carried = self.bytes - bytes;
            self.bytes %= self.p.byte_period;
            let time = |i| {
                from + share(now - from, self.p.byte_period - carried, bytes)
                    + i * share(now - from, self.p.byte_period, bytes)
            };
            events.extend((0..n).map(|i| (time(i), true)));
        }
        while self.timer_at <= now {
            if !gated || !told || self.timer_at <= busy {
                events.push((self.timer_at, false));
            }
            self.timer_at += self.p.timer.0;
        }
        events.sort_unstable();
        for (at, by_bytes) in events {
            if by_bytes {
                self.bc += 1;
            } else {
                self.t += 1;
            }
            if self.at_ceiling_since.is_none() {
                self.increase(at);
                if self.rc > self.most() - 1.0 {
                    self.at_ceiling_since = Some(at);
                }
            }
        }
        let idle = self.p.idle_restart.0;
        if gated && self.lasting && idle > 0 && now.saturating_sub(self.busy_until) >= idle {
            *self = Self { busy_until: self.busy_until, ..Self::start(self.p, now) };
        }
    }

    fn increase(&mut self, at: u64) {
        let f = u64::from(self.p.fast_recovery) + u64::from(self.p.boundary == Boundary::UpTo);
        let (low, high) = (self.t.min(self.bc), self.t.max(self.bc));
        let (additive, hyper) = (self.p.additive.bytes_per_sec() as f64, self.p.hyper.bytes_per_sec() as f64);
        let step = if self.p.byte_period == 0 {
            match self.t.cmp(&f) {
                std::cmp::Ordering::Less => 0.0,
                std::cmp::Ordering::Equal => additive,
                std::cmp::Ordering::Greater => hyper,
            }
        } else if low > f {
            (low - f) as f64 * hyper
        } else if high >= f {
            additive
        } else {
            0.0
        };
        let most = match self.p.start_additive.bytes_per_sec() {
            most if most > 0 && !self.no_cnp_yet => most as f64,
            _ => f64::INFINITY,
        };
        let starts = self.no_cnp_yet || at < self.start_until;
        self.rt += if starts { (self.rt / 2.0).min(most) } else { step };
        self.rt = self.rt.min(self.most());
        self.rc = (self.rt + self.rc) / 2.0;
    }
}
