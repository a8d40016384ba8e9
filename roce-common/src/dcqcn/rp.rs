//! Reaction point: CNPs, time and bytes in, a rate out.

mod increase;
mod usage;

use super::{
    ONE,
    fixed::{ALPHA_BITS, ALPHA_ONE, periods, power, scale},
    params::{AlphaUpdate, RpParams},
};
use crate::units::{Nanos, Rate};

/// An idle flow is looked at at least once in this many timer periods: how late it may be raised once it sends again.
const IDLE_LOOK: u64 = 64;

/// What a CNP did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reaction {
    /// The rate was cut.
    Cut,
    /// The last cut is less than the monitor period ago: nothing happened.
    HeldBack,
}

/// The rate limiter of one queue pair. It is `Copy`, needs no memory of its own and no tick: whoever holds it calls
/// [`Self::advance`] when [`Self::next_deadline`] has come, or later.
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
    /// A CNP came within this period of α.
    cnp_in_period: bool,
    /// It was there before the first CNP, and stays when it has recovered.
    lasting: bool,
    /// It began at the start rate, and no CNP came since.
    no_cnp_yet: bool,
    /// Until when its start lasts at least.
    start_until: Nanos,
    /// Up to where time has been accounted for.
    seen: Nanos,
    /// Until when what was sent keeps the flow busy at its rate.
    busy_until: Nanos,
    /// Up to where its bytes have been told; when a cut has changed the rate since, and the average rate until then.
    told: Nanos,
    changed_at: Nanos,
    rate_before: u64,
    alpha_at: Nanos,
    timer_at: Nanos,
    at_ceiling_since: Option<Nanos>,
}

impl Rp {
    /// The limiter of a flow that had none: its first CNP is about to be told. At the highest rate, α at its first value
    /// ("RC = line rate, α = 1", SIGCOMM'15 §3, RP algorithm).
    pub fn new(params: RpParams, now: Nanos) -> Self {
        let ceiling = params.ceiling().bytes_per_sec();
        let mut rp = Self {
            params,
            current: ceiling,
            target: ceiling,
            alpha: first_alpha(&params),
            timer_count: 0,
            byte_count: 0,
            bytes: 0,
            last_cut: None,
            cnp_in_period: false,
            lasting: false,
            no_cnp_yet: false,
            start_until: now,
            seen: now,
            busy_until: now,
            told: now,
            changed_at: now,
            rate_before: ceiling,
            alpha_at: now,
            timer_at: now,
            at_ceiling_since: Some(now),
        };
        rp.restart_timers(now);
        rp
    }

    /// The limiter of a flow from its first packet on: at `start_rate`, and until the first CNP, but for `start_periods` at
    /// least, every increase adds half to the target, behind a CNP at most `start_additive`. It is never [`Self::released`]: a flow that
    /// idled is held to the start rate again. Without a start rate it starts at the highest rate.
    pub fn start(params: RpParams, now: Nanos) -> Self {
        let mut rp = Self { lasting: true, ..Self::new(params, now) };
        let start = params.start_rate.bytes_per_sec();
        if start > 0 && start < rp.ceiling() {
            rp.current = start.clamp(rp.floor(), rp.ceiling());
            rp.target = rp.current;
            rp.no_cnp_yet = true;
            let least = rp.timer_period().saturating_mul(u64::from(params.start_periods));
            rp.start_until = Nanos(now.0.saturating_add(least));
            rp.at_ceiling_since = if rp.at_ceiling() { Some(now) } else { None };
        }
        rp
    }

    /// A CNP arrived at `now`: RT ← RC, RC ← RC·(1 − α/2), α ← (1 − g)·α + g, counters and timers start anew (SIGCOMM'15
    /// equation 1). At most once per monitor period. What was sent before it is told by [`Self::advance`].
    pub fn on_cnp(&mut self, now: Nanos) -> Reaction {
        let now = now.max(self.seen);
        self.decay_alpha(now);
        if self.last_cut.is_some_and(|cut| now.since(cut) < self.params.monitor) {
            self.cnp_in_period = true;
            return Reaction::HeldBack;
        }
        let from = self.seen;
        self.seen = now;
        self.raise(from, self.counts_until(), 0);
        self.forget();
        self.rate_before = self.average_rate(now);
        self.changed_at = now;
        if self.recovered(now) {
            // As if the limiter had been released and made anew.
            self.last_cut = None;
            self.alpha = first_alpha(&self.params);
        }
        let first = self.last_cut.is_none();
        if first || self.clamps() {
            self.target = self.current;
        }
        let first_rate = self.params.first_cnp_rate.bytes_per_sec();
        if first && first_rate > 0 {
            self.current = self.current.min(first_rate).max(self.floor());
            self.target = self.current;
        } else {
            self.current = self.cut().max(self.floor());
            self.target = self.target.max(self.current);
        }
        match self.params.alpha_update {
            AlphaUpdate::AtCnp => self.raise_alpha(),
            // The first CNP starts α; it does not raise it.
            AlphaUpdate::EveryPeriod => self.cnp_in_period = !first,
        }
        self.timer_count = 0;
        self.byte_count = 0;
        self.bytes = 0;
        self.no_cnp_yet = false;
        self.last_cut = Some(now);
        self.at_ceiling_since = None;
        if first || self.params.alpha_update == AlphaUpdate::AtCnp {
            self.restart_timers(now);
        } else {
            self.timer_at = Nanos(now.0.saturating_add(self.timer_period()));
        }
        Reaction::Cut
    }

    /// Brings the state to `now`. `sent` is the number of bytes sent since the last call, where somebody counts them.
    /// Any number of periods may have passed: the work does not grow with it.
    ///
    /// Where the parameters ask for `usage`, a timer period raises the rate only if the flow was busy for that share of
    /// it: bytes keep a flow busy for as long as they take at its rate. A flow whose bytes nobody counts is taken for
    /// busy.
    pub fn advance(&mut self, now: Nanos, sent: Option<u64>) {
        let from = self.seen;
        self.seen = from.max(now);
        self.decay_alpha(now);

        let raised_until = self.account(sent);
        self.raise(from, raised_until, sent.unwrap_or(0));
        self.forget();
    }

    /// Brings α to `now`: (1 − g)·α for every period without a CNP (equation 2).
    fn decay_alpha(&mut self, now: Nanos) {
        // α stands still until the first CNP.
        if self.last_cut.is_none() {
            return;
        }
        let period = self.alpha_period();
        let mut elapsed = periods(&mut self.alpha_at, now, period);
        if elapsed == 0 {
            return;
        }
        if self.params.alpha_update == AlphaUpdate::EveryPeriod && self.cnp_in_period {
            self.raise_alpha();
            elapsed -= 1;
        }
        self.cnp_in_period = false;
        self.alpha = scale(self.alpha, power(self.keep(ALPHA_ONE), elapsed));
    }

    /// α ← (1 − g)·α + g.
    fn raise_alpha(&mut self) {
        let weight = u64::from(self.params.g.min(ONE)) << (ALPHA_BITS - 16);
        self.alpha = (self.keep(self.alpha) + weight).min(ALPHA_ONE);
    }

    /// RC·(1 − α·2^10 / 2^gd), but not below what a cut must leave.
    fn cut(&self) -> u64 {
        // RC up to 2^40 and α in 2^-22: their product fits.
        let share = (self.current * (self.alpha >> (ALPHA_BITS - 22))) >> (12 + self.params.gd.clamp(8, 16));
        let kept = self.current * u64::from(self.params.least_kept_percent.min(100));
        self.current.saturating_sub(share).max(kept / 100)
    }

    /// Whether a cut sets the target.
    fn clamps(&self) -> bool {
        self.params.clamp_target
            || self.byte_count > 0
            || (self.params.clamp_target_after_timer && self.timer_count > 0)
    }

    fn restart_timers(&mut self, now: Nanos) {
        self.alpha_at = Nanos(now.0.saturating_add(self.alpha_period()));
        self.timer_at = Nanos(now.0.saturating_add(self.timer_period()));
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

    /// The queue pair needs no limiter any more: it is back at the highest rate for one timer period, or it idled until
    /// its rate says nothing. Never for a limiter made by [`Self::start`].
    pub fn released(&self, now: Nanos) -> bool {
        !self.lasting && (self.recovered(now) || self.forgotten(now))
    }

    /// When [`Self::advance`] next has something to do. Nothing is lost when it comes later: it accounts for every period
    /// in between, and a caller that steers many queue pairs may bundle them. α needs no deadline, it is brought up to date
    /// when it is used; nor does the byte counter, whose bytes are told when the timer's time has come.
    ///
    /// A flow that idles is looked at less and less often, down to once in 64 periods, since only bytes can raise
    /// it; a caller that learns that it sends again need not wait for the deadline.
    pub fn next_deadline(&self) -> Nanos {
        let after = |at: Nanos, time: u64| Nanos(at.0.saturating_add(time));
        let longest = self.timer_period().saturating_mul(IDLE_LOOK);
        let forgets = match self.params.idle_restart.0 {
            0 => Nanos(u64::MAX),
            _ if self.params.usage == 0 => Nanos(u64::MAX),
            // Once it has, only bytes matter.
            time if self.forgotten(self.seen) => after(self.seen, time.max(self.timer_period()).min(longest)),
            time => after(self.busy_until, time),
        };
        match self.at_ceiling_since {
            Some(_) if self.lasting => forgets,
            Some(since) => after(since, self.timer_period()),
            None if self.params.usage == 0 => self.timer_at,
            None => {
                let idle = self.seen.since(self.busy_until).0.min(longest);
                after(self.seen, idle).max(self.timer_at).min(forgets.max(self.timer_at))
            }
        }
    }

    /// At the highest rate for one timer period.
    fn recovered(&self, now: Nanos) -> bool {
        self.at_ceiling_since.is_some_and(|since| now.since(since).0 >= self.timer_period())
    }

    fn at_ceiling(&self) -> bool {
        self.current >= self.ceiling()
    }

    fn ceiling(&self) -> u64 {
        self.params.ceiling().bytes_per_sec()
    }

    fn floor(&self) -> u64 {
        self.params.min_rate.bytes_per_sec().clamp(1, self.ceiling().max(1))
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

/// α at the first CNP, in 2^-30.
fn first_alpha(params: &RpParams) -> u64 {
    u64::from(params.initial_alpha.min(ONE)) << (ALPHA_BITS - 16)
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
