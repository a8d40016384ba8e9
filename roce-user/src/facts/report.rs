//! Facts in JSON: the object `facts` of a flow. What does not apply to a flow is left out.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use roce_common::{
    abi::Tap,
    facts::{Class, Recovery, RoundTrips, Spread},
    flow::Flow,
    units::Ecn,
};
use serde::{Deserialize, Serialize};

use super::FlowFacts;
use crate::findings::rules::{self, View};

/// Least, mean and greatest of a quantity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SpreadReport {
    /// Values.
    pub count: u64,
    /// The least.
    pub min: u64,
    /// Their mean, rounded down.
    pub mean: u64,
    /// The greatest.
    pub max: u64,
}

impl SpreadReport {
    /// `None` where there are no values.
    pub fn of(spread: &Spread) -> Option<Self> {
        (spread.count() > 0).then(|| Self {
            count: spread.count(),
            min: spread.min(),
            mean: spread.mean(),
            max: spread.max(),
        })
    }
}

/// Sizes of messages.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MessageReport {
    /// Sizes in bytes of the messages whose size is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<SpreadReport>,
    /// Messages by size; the key is the least size of a bucket that reaches to its double.
    pub by_size: BTreeMap<String, u32>,
}

/// Credits in AETHs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CreditReport {
    /// Receive buffers granted, where an AETH says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granted: Option<SpreadReport>,
    /// AETHs that say nothing about credits.
    pub without: u64,
}

/// Passive round trips in nanoseconds: from a request that must be answered to the response that carries its PSN, at this
/// tap, repeated requests and those that a later answer covers left out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RttReport {
    /// All samples.
    #[serde(flatten)]
    pub spread: SpreadReport,
    /// Median, within a sixteenth.
    pub p50: u64,
    /// 99th percentile, within a sixteenth.
    pub p99: u64,
}

/// Times in nanoseconds of noticing and repairing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// From a gap at this tap to the NAK that named it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_to_nak: Option<SpreadReport>,
    /// From a sequence NAK to the first packet of the repeat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nak_to_refill: Option<SpreadReport>,
    /// From a gap to the first packet of the repeat that filled it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_to_refill: Option<SpreadReport>,
    /// The least wait that RNR NAKs asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnr_timer: Option<SpreadReport>,
    /// From an RNR NAK to the repeat of what it refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnr_wait: Option<SpreadReport>,
}

impl RecoveryReport {
    /// Of a flow's.
    pub fn of(recovery: &Recovery) -> Self {
        Self {
            gap_to_nak: SpreadReport::of(&recovery.gap_to_nak),
            nak_to_refill: SpreadReport::of(&recovery.nak_to_refill),
            gap_to_refill: SpreadReport::of(&recovery.gap_to_refill),
            rnr_timer: SpreadReport::of(&recovery.rnr_timer),
            rnr_wait: SpreadReport::of(&recovery.rnr_wait),
        }
    }
}

/// The connected queue pairs that one host addresses at another, and how their packets are spread.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PathReport {
    /// Where it was observed.
    pub tap: String,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Queue pairs at the destination.
    pub qps: u64,
    /// Different UDP source ports of their requests: what ECMP can tell apart.
    pub src_ports: u64,
}

impl PathReport {
    /// The paths of all flows.
    pub fn all<'a>(flows: impl Iterator<Item = View<'a>>, tap_name: impl Fn(Tap) -> String) -> Vec<Self> {
        rules::paths(flows)
            .into_iter()
            .map(|((tap, src, dst), views)| {
                let ports: BTreeSet<u16> = views.iter().map(|v| v.flow.src_port).collect();
                let (qps, src_ports) = (views.len() as u64, ports.len() as u64);
                Self { tap: tap_name(tap), src: src.into(), dst: dst.into(), qps, src_ports }
            })
            .collect()
    }
}

impl RttReport {
    /// Of measured times; `None` where there are none.
    pub fn of(RoundTrips { spread, times }: &RoundTrips) -> Option<Self> {
        Some(Self { spread: SpreadReport::of(spread)?, p50: times.quantile(500)?.0, p99: times.quantile(990)?.0 })
    }
}

/// What the connection of a flow was made with, as its management (CM) told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// The queue pair that sends the flow.
    pub sender_qp: u32,
    /// PSN of its first request.
    pub starting_psn: u32,
    /// Path MTU in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// ACK timeout in nanoseconds; absent where it waits for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack_timeout_ns: Option<u64>,
    /// How often it may repeat a packet; 7 is without end in soft-RoCE.
    pub retries: u8,
    /// How often after RNR NAKs; 7 is without end.
    pub rnr_retries: u8,
}

/// Facts of one flow. Those that may be missing are measured beside the flow: by the reader of a capture, or by an agent.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FactsReport {
    /// Packets by what they do.
    pub opcodes: BTreeMap<&'static str, u64>,
    /// Messages that ended here, repeats not counted again; in the response space READs and atomics answered.
    pub messages: u64,
    /// Sizes of the messages whose size is known.
    pub message_sizes: MessageReport,
    /// Share of packets that are CE.
    pub ce_share: f64,
    /// UDP source port of the newest packet.
    pub src_port: u16,
    /// How often the source port changed.
    pub src_port_changes: u32,
    /// Path MTU in bytes, once a packet has shown it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// What its connection was made with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<ConnectionReport>,
    /// CNPs that its source sent to the queue pair it goes to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cnp_sent: Option<u64>,
    /// Payload bytes of retransmissions.
    pub retransmitted_bytes: u64,
    /// Their share of all payload bytes.
    pub retransmitted_share: f64,
    /// PSNs covered by each ACK.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psns_per_ack: Option<SpreadReport>,
    /// Credits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credits: Option<CreditReport>,
    /// Round trips.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_ns: Option<RttReport>,
    /// Noticing and repairing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery_ns: Option<RecoveryReport>,
    /// Silences of at least 10 ms with unanswered requests, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silences_ns: Option<SpreadReport>,
}

fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

impl FactsReport {
    /// The facts of `flow`, as if it ended here, and what was measured beside it.
    pub fn new(flow: &Flow, facts: Option<&FlowFacts>) -> Self {
        let mut ended = *flow;
        ended.finish();
        let measured = &ended.measured;
        let (messages, acks) = (&measured.messages, &measured.acks);
        let round_trips = facts.and_then(|facts| facts.round_trips.as_deref());
        let recovery = facts.map(|facts| facts.recovery.as_deref().copied().unwrap_or_default());
        Self {
            opcodes: Class::ALL
                .into_iter()
                .map(|class| (class.name(), flow.mix.of(class)))
                .filter(|&(_, packets)| packets > 0)
                .collect(),
            messages: flow.mix.messages,
            message_sizes: MessageReport {
                bytes: SpreadReport::of(messages.sizes()),
                by_size: messages.by_size().map(|(size, count)| (size.to_string(), count)).collect(),
            },
            ce_share: share(flow.ecn[Ecn::Ce as usize], flow.packets),
            src_port: flow.src_port,
            src_port_changes: flow.src_port_changes,
            path_mtu: (flow.tracker.pmtu != 0).then_some(flow.tracker.pmtu),
            connection: None,
            cnp_sent: facts.map(|facts| facts.cnp_sent),
            retransmitted_bytes: measured.repeats.bytes,
            retransmitted_share: share(measured.repeats.bytes, flow.bytes),
            psns_per_ack: SpreadReport::of(&acks.coalesced),
            credits: (acks.credits.count() + acks.without_credits > 0)
                .then(|| CreditReport { granted: SpreadReport::of(&acks.credits), without: acks.without_credits }),
            rtt_ns: round_trips.and_then(|r| RttReport::of(&r.times)),
            recovery_ns: recovery.map(|recovery| RecoveryReport::of(&recovery)),
            silences_ns: facts.and_then(|facts| SpreadReport::of(&facts.silences)),
        }
    }
}
