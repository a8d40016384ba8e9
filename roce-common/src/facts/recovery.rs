//! How long it takes to notice and to repair.

use super::Spread;
use crate::{
    psn::{Cause, Episode},
    wire::rnr_timer,
};

/// Times of a flow's episodes, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovery {
    /// From a gap at this tap to the NAK that named it.
    pub gap_to_nak: Spread,
    /// From a sequence NAK to the first packet of the repeat.
    pub nak_to_refill: Spread,
    /// From a gap to the first packet of the repeat that filled it.
    pub gap_to_refill: Spread,
    /// The least wait that an RNR NAK asked for.
    pub rnr_timer: Spread,
    /// From an RNR NAK to the repeat of what it refused.
    pub rnr_wait: Spread,
}

impl Recovery {
    /// Takes a finished episode of the flow.
    pub fn episode(&mut self, episode: &Episode) {
        let evidence = &episode.evidence;
        let refill = evidence.refill;
        if let (Cause::RnrRepeat, Some(rnr)) = (episode.cause, evidence.rnr) {
            self.rnr_timer.add(rnr_timer(rnr.timer).0);
            if let Some(refill) = refill {
                self.rnr_wait.add(refill.since(rnr.seen.at).0);
            }
            return;
        }
        // A NAK before the gap is about an earlier one of the same repeat.
        if let (Some(gap), Some(nak)) = (evidence.gap, evidence.nak)
            && nak.seen.at.0 >= gap.at.0
        {
            self.gap_to_nak.add(nak.seen.at.since(gap.at).0);
        }
        if let (Some(nak), Some(refill)) = (evidence.nak, refill) {
            self.nak_to_refill.add(refill.since(nak.seen.at).0);
        }
        if let (Some(gap), Some(refill)) = (evidence.gap, refill) {
            self.gap_to_refill.add(refill.since(gap.at).0);
        }
    }
}
