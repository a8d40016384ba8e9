//! What an agent has made of events so far, as it tells other processes and they show it.

use roce_common::{
    abi::FlowKey,
    facts::{Recovery, Spread},
    psn::Tally,
};
use serde::Serialize;

use crate::{
    facts::{ConnectionReport, RecoveryReport, SpreadReport},
    findings::FindingReport,
};

/// Everything, of one interface.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StoryReport {
    /// Flows that had episodes.
    pub flows: Vec<FlowStory>,
    /// What episodes mean.
    pub findings: Vec<FindingReport>,
}

/// Episodes of one cause at one place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct EpisodeCount {
    /// Why, by the names of [`roce_common::psn::Cause`].
    pub cause: &'static str,
    /// Where, by the names of [`roce_common::psn::Location`].
    pub location: &'static str,
    /// How many.
    pub count: u32,
}

/// Of one flow.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FlowStory {
    /// Tap.
    pub tap: String,
    /// Source address.
    pub src: std::net::IpAddr,
    /// Destination address.
    pub dst: std::net::IpAddr,
    /// Destination QPN.
    pub dest_qp: u32,
    /// `request` or `response`.
    pub space: &'static str,
    /// Its episodes.
    pub episodes: Vec<EpisodeCount>,
    /// Noticing and repairing.
    pub recovery_ns: RecoveryReport,
    /// What its connection was made with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<ConnectionReport>,
    /// Silences while something was unanswered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silences_ns: Option<SpreadReport>,
}

impl FlowStory {
    /// The story of the flow `key`.
    pub fn new(key: &FlowKey, (tally, recovery, silences): (&Tally, &Recovery, &Spread), tap: String) -> Self {
        Self {
            tap,
            src: key.src.into(),
            dst: key.dst.into(),
            dest_qp: key.dest_qp().get(),
            space: key.space().name(),
            episodes: tally
                .iter()
                .map(|(cause, location, count)| EpisodeCount { cause: cause.name(), location: location.name(), count })
                .collect(),
            recovery_ns: RecoveryReport::of(recovery),
            connection: None,
            silences_ns: SpreadReport::of(silences),
        }
    }
}
