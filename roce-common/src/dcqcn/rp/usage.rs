//! Whether a flow uses its rate: what was sent keeps it busy for as long as that takes.

use super::Rp;
use crate::{
    dcqcn::{
        ONE,
        fixed::{share, time_for},
    },
    units::Nanos,
};

impl Rp {
    /// Books what was sent since bytes were last told, up to `self.seen`. Returns [`Self::counts_until`].
    pub(super) fn account(&mut self, sent: Option<u64>) -> Option<Nanos> {
        match sent {
            None => self.busy_until = self.busy_until.max(self.seen),
            Some(0) => {}
            Some(bytes) => {
                let time = time_for(self.average_rate(self.seen), bytes);
                let until = self.busy_until.max(self.told).0.saturating_add(time.0);
                // What a shaper has taken in may keep the flow busy for long, but no longer than idling is remembered.
                let most = self.seen.0.saturating_add(self.params.idle_restart.0.max(self.timer_period()));
                self.busy_until = Nanos(until.min(most));
            }
        }
        self.told = self.seen;
        self.changed_at = self.seen;
        self.rate_before = self.current;
        if sent.is_none() { None } else { self.counts_until() }
    }

    /// RC on average since bytes were last told, where cuts have changed it in between.
    pub(super) fn average_rate(&self, now: Nanos) -> u64 {
        let (before, all) = (self.changed_at.since(self.told).0, now.since(self.told).0);
        self.current + share(self.rate_before.saturating_sub(self.current), before, all)
    }

    /// Until when timer periods raise the rate; `None` where they always do.
    pub(super) fn counts_until(&self) -> Option<Nanos> {
        if self.params.usage == 0 {
            return None;
        }
        let idle_part = u64::from(ONE - self.params.usage.min(ONE));
        let (whole, rest) = (self.timer_period() >> 16, self.timer_period() & 0xffff);
        let slack = whole.saturating_mul(idle_part).saturating_add((rest * idle_part) >> 16);
        Some(Nanos(self.busy_until.0.saturating_add(slack)))
    }

    /// Idle for so long that its rate says nothing.
    pub(super) fn forgotten(&self, now: Nanos) -> bool {
        let most = self.params.idle_restart;
        self.params.usage > 0 && most.0 > 0 && now.since(self.busy_until) >= most
    }

    /// Starts a lasting limiter anew whose flow idled for so long.
    pub(super) fn forget(&mut self) {
        if self.lasting && self.forgotten(self.seen) {
            let busy_until = self.busy_until;
            *self = Self { busy_until, ..Self::start(self.params, self.seen) };
        }
    }
}
