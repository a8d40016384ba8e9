//! From counters to the summary: JSON (schema 1) and the table for people.

use roce_common::units::Nanos;
use roce_user::sim::engine::jain;
use serde::Serialize;

use super::{
    agents::AgentReports,
    options::Options,
    traffic::{Flow, Outcome},
};
use crate::{
    endpoint::{HostStats, QpStats},
    lab::QueueSummary,
    units::format_rate,
};

/// From this part of the CPUs' time on that a hypervisor took, the figures are as much its own: the main job with 0.4 % and less
/// carried 94 to 96 % of the payload capacity, with 1.9 % and more 87 to 90 %.
pub const DISTURBED: f64 = 0.005;

/// One flow of one pass.
#[derive(Clone, Debug, Serialize)]
pub struct FlowReport {
    /// Sender's address.
    pub src: String,
    /// Receiver's address.
    pub dst: String,
    /// Queue pair at the receiver.
    pub dest_qp: u32,
    /// Payload accepted for the first time in the second half, bits per second.
    pub rate_bps: u64,
}

/// What the endpoints themselves counted, beside what the dataplane saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EndpointReport {
    /// Request packets sent again.
    pub retransmitted: u64,
    /// Sequence NAKs received.
    pub naks: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Packets the responders had already.
    pub duplicates: u64,
    /// Sends the kernel refused.
    pub transmit_failures: u64,
    /// Packets with a wrong ICRC.
    pub icrc_errors: u64,
    /// Frames the endpoints' own receive buffers lost.
    pub receive_overruns: u64,
    /// CNPs that reached an endpoint instead of being consumed.
    pub cnps: u64,
    /// Queue pairs that ended in an error.
    pub failed: u64,
}

/// One pass. Numbers that only agents can give are `None` where there were none.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// Payload accepted for the first time, whole run.
    pub goodput_bps: u64,
    /// Frames the senders sent, headers counted, whole run.
    pub offered_bps: u64,
    /// Packets the bottleneck's queue dropped.
    pub switch_drops: u64,
    /// The same in the second half.
    pub switch_drops_second_half: u64,
    /// At the receiver's ingress tap: PSNs skipped.
    pub missing_psns: Option<u64>,
    /// At the receiver's ingress tap: of them lost.
    pub lost: Option<u64>,
    /// At the receiver's ingress tap: retransmissions lost.
    pub lost_again: Option<u64>,
    /// At the senders' egress taps (without agents: counted by the senders).
    pub retransmitted: u64,
    /// Packets the congestion point marked.
    pub ce: Option<u64>,
    /// CNPs the notification point sent.
    pub cnp: Option<u64>,
    /// CNPs a reaction point acted on.
    pub rp_handled: Option<u64>,
    /// CNPs no reaction point acted on.
    pub rp_ignored: Option<u64>,
    /// CE packets whose sender's QPN was not known.
    pub np_unpaired: Option<u64>,
    /// Jain's index of goodput per QP, second half.
    pub jain: f64,
    /// Mean queue of samples a millisecond apart, bytes, second half.
    pub queue_bytes_mean: u64,
    /// Median queue, bytes, second half.
    pub queue_bytes_p50: u64,
    /// 99th percentile of the queue, bytes, second half.
    pub queue_bytes_p99: u64,
    /// Goodput of the second half.
    pub goodput_second_half_bps: u64,
    /// The part of this machine's CPU time that its hypervisor gave to others, 0 to 1; 0 too where it does not tell.
    pub cpu_stolen: f64,
    /// The flows.
    pub flows: Vec<FlowReport>,
    /// What the endpoints counted.
    pub endpoint: EndpointReport,
}

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Version of this contract.
    pub schema: u32,
    /// Link rate in bits per second, headers counted.
    pub bottleneck_bps: u64,
    /// What of it can be payload.
    pub payload_capacity_bps: u64,
    /// First pass.
    pub without: Side,
    /// Second pass; absent when the endpoints ran alone.
    pub with: Option<Side>,
}

fn per_second(bytes: u64, time: Nanos) -> u64 {
    (bytes as f64 * 8e9 / time.0.max(1) as f64) as u64
}

pub(super) fn side(
    options: &Options,
    flows: &[Flow],
    outcome: &Outcome,
    hosts: &[HostStats],
    (whole, second): (QueueSummary, QueueSummary),
    agents: Option<&AgentReports>,
) -> Side {
    let time = outcome.end.since(outcome.begin);
    let second_half = outcome.end.since(outcome.half);
    let late: Vec<u64> = outcome.receivers.iter().map(|s| s.accepted.sum(outcome.half, outcome.end)).collect();
    let total = |f: fn(&QpStats) -> u64| -> u64 { outcome.senders.iter().map(f).sum() };
    let endpoint = EndpointReport {
        retransmitted: total(|s| s.retransmitted),
        naks: total(|s| s.naks),
        timeouts: total(|s| s.timeouts),
        duplicates: outcome.receivers.iter().map(|s| s.duplicates).sum(),
        transmit_failures: total(|s| s.transmit_failures),
        icrc_errors: hosts.iter().map(|h| h.icrc_errors).sum(),
        receive_overruns: hosts.iter().map(|h| h.receive_overruns).sum(),
        cnps: hosts.iter().map(|h| h.cnps).sum(),
        failed: outcome.senders.iter().chain(&outcome.receivers).filter(|s| s.fatal.is_some()).count() as u64,
    };
    let flow_reports = flows
        .iter()
        .zip(&late)
        .map(|(flow, bytes)| {
            let cfg = flow.sender.config();
            let (src, dst, dest_qp) = (cfg.local.to_string(), cfg.remote.to_string(), cfg.remote_qpn.get());
            FlowReport { src, dst, dest_qp, rate_bps: per_second(*bytes, second_half) }
        })
        .collect();
    Side {
        goodput_bps: per_second(outcome.receivers.iter().map(|s| s.accepted_bytes).sum(), time),
        offered_bps: per_second(total(|s| s.sent_bytes), time),
        switch_drops: u64::from(whole.drops),
        switch_drops_second_half: u64::from(second.drops),
        missing_psns: agents.map(|a| a.receiver_ingress("missing_psns")),
        lost: agents.map(|a| a.receiver_ingress("lost")),
        lost_again: agents.map(|a| a.receiver_ingress("lost_again")),
        retransmitted: agents.map_or(endpoint.retransmitted, |a| a.senders_egress("retransmitted")),
        ce: agents.map(|a| a.switch_counter("ce_marked")),
        cnp: agents.map(|a| a.host_counter("np_cnp_sent")),
        rp_handled: agents.map(|a| a.control("rp_handled")),
        rp_ignored: agents.map(|a| a.control("rp_ignored")),
        np_unpaired: agents.map(|a| a.host_counter("np_unpaired")),
        jain: jain(late.iter().map(|b| *b as f64)),
        queue_bytes_mean: u64::from(second.mean),
        queue_bytes_p50: u64::from(second.p50),
        queue_bytes_p99: u64::from(second.p99),
        goodput_second_half_bps: per_second(late.iter().sum(), second_half),
        cpu_stolen: outcome.stolen,
        flows: flow_reports,
        endpoint,
    }
    .checked(options)
}

impl Side {
    /// Says on stderr what makes the numbers doubtful.
    fn checked(self, options: &Options) -> Self {
        if self.endpoint.receive_overruns > 0 {
            eprintln!(
                "warning: this machine was too slow: {} frames lost in receive buffers",
                self.endpoint.receive_overruns
            );
        }
        if self.endpoint.transmit_failures > 0 {
            eprintln!(
                "warning: the kernel refused {} sends; on rxe each one ends a QP",
                self.endpoint.transmit_failures
            );
        }
        if self.cpu_stolen >= DISTURBED {
            eprintln!(
                "warning: a hypervisor took {:.1} % of this machine's CPU time, in pieces that a short queue does not outlast",
                100.0 * self.cpu_stolen
            );
        }
        if self.goodput_bps == 0 {
            eprintln!("warning: nothing arrived at {}", format_rate(options.link as f64));
        }
        self
    }
}

/// One row of the table.
type Row = (&'static str, fn(&Side) -> String);

fn optional(value: Option<u64>) -> String {
    value.map_or_else(|| "–".into(), |v| v.to_string())
}

const ROWS: [Row; 22] = [
    ("offered (with headers)", |s| format_rate(s.offered_bps as f64)),
    ("goodput (payload)", |s| format_rate(s.goodput_bps as f64)),
    ("goodput, second half", |s| format_rate(s.goodput_second_half_bps as f64)),
    ("switch drops", |s| s.switch_drops.to_string()),
    ("switch drops, second half", |s| s.switch_drops_second_half.to_string()),
    ("PSN gaps at the receiver", |s| optional(s.missing_psns)),
    ("  of them lost", |s| optional(s.lost)),
    ("  retransmissions lost", |s| optional(s.lost_again)),
    ("retransmitted packets", |s| s.retransmitted.to_string()),
    ("sequence NAKs", |s| s.endpoint.naks.to_string()),
    ("ACK timeouts", |s| s.endpoint.timeouts.to_string()),
    ("CE marks", |s| optional(s.ce)),
    ("CNPs sent", |s| optional(s.cnp)),
    ("CNPs acted on", |s| optional(s.rp_handled)),
    ("CNPs ignored", |s| optional(s.rp_ignored)),
    ("CE without known sender", |s| optional(s.np_unpaired)),
    ("Jain index, second half", |s| format!("{:.4}", s.jain)),
    ("queue mean, second half", |s| format!("{} B", s.queue_bytes_mean)),
    ("queue p50, second half", |s| format!("{} B", s.queue_bytes_p50)),
    ("queue p99, second half", |s| format!("{} B", s.queue_bytes_p99)),
    ("CNPs that reached endpoints", |s| s.endpoint.cnps.to_string()),
    ("CPU time stolen", |s| format!("{:.2} %", 100.0 * s.cpu_stolen)),
];

impl Summary {
    /// The side-by-side table.
    pub fn table(&self) -> String {
        let mut out = format!(
            "bottleneck {} with headers; it can carry {} of payload\n\n{:<30}{:>16}{:>16}\n",
            format_rate(self.bottleneck_bps as f64),
            format_rate(self.payload_capacity_bps as f64),
            "",
            "without",
            if self.with.is_some() { "with the loop" } else { "" }
        );
        for (name, value) in ROWS {
            let with = self.with.as_ref().map(value).unwrap_or_default();
            out.push_str(&format!("{name:<30}{:>16}{with:>16}\n", value(&self.without)));
        }
        let share = |s: &Side| format!("{:.1} %", 100.0 * s.goodput_bps as f64 / self.payload_capacity_bps as f64);
        out.push_str(&format!(
            "{:<30}{:>16}{:>16}\n\n",
            "goodput of what fits",
            share(&self.without),
            self.with.as_ref().map(share).unwrap_or_default()
        ));
        for (i, flow) in self.without.flows.iter().enumerate() {
            let name = format!("{} → QP {}", flow.src, flow.dest_qp);
            let with = self.with.as_ref().and_then(|w| w.flows.get(i));
            out.push_str(&format!(
                "{name:<30}{:>16}{:>16}\n",
                format_rate(flow.rate_bps as f64),
                with.map(|f| format_rate(f.rate_bps as f64)).unwrap_or_default()
            ));
        }
        out
    }
}
