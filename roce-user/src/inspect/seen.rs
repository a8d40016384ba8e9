//! What the analysis says of each frame, at the moment in which it passes. `--packets`, plots and findings are made of it.

use roce_common::{
    abi::Tap,
    psn::{Account, Outcome, Psn},
    wire::{Malformed, Packet},
};

use super::attribution::FlowIndex;

/// What a frame was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    /// A well-formed RoCEv2 packet.
    Packet(SeenPacket),
    /// A RoCEv1 frame.
    RoceV1,
    /// Something else.
    NotRoce,
    /// For the RoCEv2 port and not usable.
    Malformed(Malformed),
}

/// A well-formed RoCEv2 packet and what the analysis made of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SeenPacket {
    /// Number of its frame.
    pub(super) number: u64,
    /// The packet.
    pub(super) packet: Packet,
    /// Where it was seen.
    pub(super) tap: Tap,
    /// Whether its ICRC is right; `None` where it cannot be told.
    pub(super) icrc_valid: Option<bool>,
    /// Its flow: an index into the report's flows. `None` for a CNP, which names no flow, and where there is no room for
    /// another flow.
    pub(super) flow: Option<FlowIndex>,
    /// What the flow's tracker made of it. Whether a run is a retransmission or late is known when it ends.
    pub(super) outcome: Outcome,
    /// The same with all that it brought to an end.
    pub(super) account: Account,
    /// One past the highest PSN that the flow has used.
    pub(super) next: Psn,
    /// For a response: the flow that it answers, where that is certain.
    pub(super) answers: Option<FlowIndex>,
    /// For a sequence NAK or RNR NAK: the flow whose packet it refuses, where that is certain.
    pub(super) refused: Option<FlowIndex>,
}
