//! Facts of a flow: what is kept with the flow everywhere, and beside it what only a reader of every packet and its time can
//! afford.

pub mod detail;
mod report;

use roce_common::{
    facts::{Probes, Recovery, RoundTrips as Times, SILENCE, Spread, is_timed},
    psn::{Account, Episode, Outcome, Psn},
    units::Nanos,
    wire::{Kind, Packet, Service},
};

pub use report::{
    ConnectionReport, CreditReport, FactsReport, MessageReport, PathReport, RecoveryReport, RttReport, SpreadReport,
};

/// Round trips of a flow: what is under way, and what was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct RoundTrips {
    probes: Probes,
    times: Times,
}

/// Facts of one flow in the making.
#[derive(Clone, Debug, Default)]
pub struct FlowFacts {
    packets: u64,
    recovery: Option<Box<Recovery>>,
    silences: Spread,
    round_trips: Option<Box<RoundTrips>>,
    /// One past the highest PSN sent.
    next: Option<Psn>,
    /// The highest PSN answered.
    answered: Option<Psn>,
    /// When the flow or its answers last passed.
    heard: Nanos,
    /// An RNR NAK tells the sender to be silent.
    told_to_wait: bool,
    cnp_sent: u64,
}

impl FlowFacts {
    /// Takes the next packet of the flow: what the tracker said of it, and the PSN behind everything that the flow has
    /// used so far. The silence of at least [`SILENCE`] that it ended, if
    /// something was unanswered.
    #[inline]
    pub fn packet(&mut self, p: &Packet, account: Account, next: Psn, now: Nanos) -> Option<Nanos> {
        let (opcode, outcome) = (p.bth.opcode, account.outcome());
        self.packets += 1;
        if opcode.kind() == Kind::Response || !matches!(opcode.service(), Service::Rc | Service::Xrc) {
            return None;
        }
        let stall = self.heard_again(now);
        self.next = Some(next);
        self.told_to_wait = false;
        match outcome {
            Outcome::First | Outcome::InOrder | Outcome::Gap(_) => {
                if is_timed(p, account) {
                    self.round_trips.get_or_insert_default().probes.sent(p.bth.psn, now);
                }
            }
            Outcome::Filled(_) | Outcome::Duplicate => {
                if let Some(round_trips) = &mut self.round_trips {
                    round_trips.probes.repeated(p.bth.psn);
                }
            }
            Outcome::Discontinuity => {
                self.answered = None;
                if let Some(round_trips) = &mut self.round_trips {
                    round_trips.probes.clear();
                }
            }
            Outcome::NotTracked | Outcome::Far => {}
        }
        stall
    }

    /// A response to this flow: `p` answers its PSN, or refuses it. Returns the silence that it ended, as above.
    #[inline]
    pub fn response(&mut self, p: &Packet, refused: bool, now: Nanos) -> Option<Nanos> {
        let psn = if refused { p.bth.psn.sub(1) } else { p.bth.psn };
        let stall = self.heard_again(now);
        self.told_to_wait = refused;
        if self.answered.is_none_or(|answered| psn.diff(answered) > 0) {
            self.answered = Some(psn);
        }
        if let Some(round_trips) = &mut self.round_trips
            && let Some(time) = round_trips.probes.answered(psn, now)
            && !refused
        {
            round_trips.times.add(time);
        }
        stall
    }

    /// A finished episode of the flow.
    pub fn episode(&mut self, episode: &Episode) {
        self.recovery.get_or_insert_default().episode(episode);
    }

    /// Packets of the flow.
    pub const fn packets(&self) -> u64 {
        self.packets
    }

    /// The end; `cnp_sent` is how many CNPs the flow's source sent to the queue pair that the flow goes to.
    pub const fn finish(&mut self, cnp_sent: u64) {
        self.cnp_sent = cnp_sent;
    }

    /// Something of the flow passed: was it silent for long, with a request unanswered?
    #[inline]
    fn heard_again(&mut self, now: Nanos) -> Option<Nanos> {
        let silence = now.since(self.heard);
        self.heard = now;
        let unanswered = match (self.next, self.answered) {
            // What the first answer seen does not cover had been sent before it, as far as is known.
            (Some(next), Some(answered)) => next.diff(answered) > 1,
            _ => false,
        };
        if silence.0 < SILENCE.0 || !unanswered || self.told_to_wait {
            return None;
        }
        self.silences.add(silence.0);
        Some(silence)
    }
}
