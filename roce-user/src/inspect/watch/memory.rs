//! What is remembered of one flow to name the packets that show a finding.

use roce_common::{
    psn::{Episode, Psn},
    units::Nanos,
};

use crate::{facts::FlowFacts, findings::Evidence, inspect::attribution::FlowIndex};

use super::copies::Identification;

/// A frame that may become evidence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mark {
    pub(super) frame: u64,
    pub(super) time: Nanos,
    pub(super) psn: Psn,
}

impl Mark {
    pub(super) const fn evidence(self, what: &'static str) -> Evidence {
        Evidence { frame: Some(self.frame), time: self.time, psn: Some(self.psn), what }
    }
}

/// The facts of a flow and the newest frames of each kind that episodes tell of.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowMemory {
    pub(super) facts: FlowFacts,
    /// The flow that answers it.
    pub(super) partner: Option<FlowIndex>,
    /// Its first packet.
    pub(super) first: Option<Mark>,
    /// Its first CE packet.
    pub(super) ce: Option<Mark>,
    /// The newest packet behind a gap; its PSN is the first one skipped.
    pub(super) gap: Option<Mark>,
    /// The newest sequence NAK or RNR NAK for it.
    pub(super) nak: Option<Mark>,
    /// The newest packet that started a run.
    pub(super) run: Option<Mark>,
    /// The payload of its FIRST and MIDDLE packets.
    pub(super) segment: u16,
    /// Its IP identifications.
    pub(super) identification: Identification,
    /// Packets captured twice.
    pub(super) copies: u64,
    /// The source port of its newest packet in order.
    pub(super) port: u16,
}

impl FlowMemory {
    /// The frames that show an episode, as far as they are still remembered.
    pub(super) fn frames_of(&self, episode: &Episode) -> impl Iterator<Item = Evidence> + Clone + use<> {
        let e = &episode.evidence;
        let of = |mark: Option<Mark>, at: Option<Nanos>, what| {
            mark.filter(|mark| Some(mark.time) == at).map(|mark| mark.evidence(what))
        };
        let nak = e.nak.map(|nak| (nak.seen.at, "NAK")).or(e.rnr.map(|rnr| (rnr.seen.at, "RNR NAK")));
        [
            of(self.gap, e.gap.map(|gap| gap.at), "gap"),
            nak.and_then(|(at, what)| of(self.nak, Some(at), what)),
            of(self.run, e.refill, "repeat starts"),
        ]
        .into_iter()
        .flatten()
    }
}
