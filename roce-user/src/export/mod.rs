//! The documented JSON of schema 1: the names and meanings shared by `roce inspect --json`, `roce flows --json` and
//! `roce run --json`. Counters mean the same live and offline, since the same tracker made them.

pub mod prometheus;
pub mod story;
pub mod utc;

use std::{collections::BTreeMap, net::IpAddr};

use roce_common::{
    abi::FlowKey,
    flow::{Flow, NakKind},
    units::Ecn,
};
use serde::Serialize;

use crate::{
    facts::{FactsReport, PathReport},
    findings::FindingReport,
};

/// Version of the JSON contract. Fields may be added under it; none changes its meaning.
pub const SCHEMA: u32 = 1;

/// Packets per ECN codepoint, CNPs excluded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct EcnCounts {
    /// Not ECN-capable.
    pub not_ect: u64,
    /// ECT(0).
    pub ect0: u64,
    /// ECT(1).
    pub ect1: u64,
    /// Congestion experienced.
    pub ce: u64,
}

impl EcnCounts {
    /// Counts one packet.
    pub fn count(&mut self, ecn: Ecn) {
        *match ecn {
            Ecn::NotEct => &mut self.not_ect,
            Ecn::Ect0 => &mut self.ect0,
            Ecn::Ect1 => &mut self.ect1,
            Ecn::Ce => &mut self.ce,
        } += 1;
    }

    /// From counts indexed by the codepoint, as [`Flow::ecn`] holds them.
    pub const fn from_codepoints(counts: [u64; 4]) -> Self {
        let [not_ect, ect1, ect0, ce] = counts;
        Self { not_ect, ect0, ect1, ce }
    }

    /// All packets.
    pub const fn total(&self) -> u64 {
        self.not_ect + self.ect0 + self.ect1 + self.ce
    }
}

/// NAKs by what they refuse.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct NakCounts {
    /// 0x60: the responder expected another PSN.
    pub psn_sequence: u64,
    /// 0x61.
    pub invalid_request: u64,
    /// 0x62.
    pub remote_access: u64,
    /// 0x63.
    pub remote_operational: u64,
    /// Any other syndrome.
    pub other: u64,
}

impl NakCounts {
    /// All NAKs.
    pub const fn total(&self) -> u64 {
        self.psn_sequence + self.invalid_request + self.remote_access + self.remote_operational + self.other
    }
}

/// What became of the PSNs of a flow, or of all flows of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Counters {
    /// PSNs skipped: `lost + reordered + open`.
    pub missing_psns: u64,
    /// Of those, brought by a retransmission or given up.
    pub lost: u64,
    /// PSNs that a retransmission skipped, that is, retransmissions lost.
    pub lost_again: u64,
    /// Of the missing, neither explained nor given up so far.
    pub open: u64,
    /// Of the missing, brought by a late packet.
    pub reordered: u64,
    /// Packets whose PSNs had all passed before.
    pub duplicates: u64,
    /// Packets of retransmissions; overlaps with `duplicates`.
    pub retransmitted: u64,
    /// Jumps beyond the window, confirmed by following packets.
    pub discontinuities: u64,
    /// Sequence NAKs of what had passed this tap.
    pub lost_after_tap: u64,
    /// READ requests that stepped back.
    pub reasked: u64,
    /// NAKs.
    pub nak: NakCounts,
    /// RNR NAKs.
    pub rnr_nak: u64,
}

impl Counters {
    /// The counters of a flow, as if it ended here: a run that is going on is judged by what it has shown.
    pub fn of(flow: &Flow) -> Self {
        let mut t = flow.tracker;
        t.finish();
        let nak = |kind: NakKind| u64::from(flow.nak[kind as usize]);
        Self {
            missing_psns: t.missing_psns,
            lost: t.lost,
            lost_again: t.lost_again,
            open: t.open(),
            reordered: t.reordered,
            duplicates: t.duplicates,
            retransmitted: t.retransmitted,
            discontinuities: u64::from(t.discontinuities),
            lost_after_tap: u64::from(t.lost_after_tap),
            reasked: u64::from(t.reasked),
            nak: NakCounts {
                psn_sequence: nak(NakKind::PsnSequence),
                invalid_request: nak(NakKind::InvalidRequest),
                remote_access: nak(NakKind::RemoteAccess),
                remote_operational: nak(NakKind::RemoteOperational),
                other: nak(NakKind::Other),
            },
            rnr_nak: u64::from(flow.rnr_nak),
        }
    }

    /// Adds another flow's counters. Never add flows of different taps and call the sum traffic: the same packet may
    /// have passed both.
    pub fn add(&mut self, other: &Self) {
        self.missing_psns += other.missing_psns;
        self.lost += other.lost;
        self.lost_again += other.lost_again;
        self.open += other.open;
        self.reordered += other.reordered;
        self.duplicates += other.duplicates;
        self.retransmitted += other.retransmitted;
        self.discontinuities += other.discontinuities;
        self.lost_after_tap += other.lost_after_tap;
        self.reasked += other.reasked;
        self.nak.psn_sequence += other.nak.psn_sequence;
        self.nak.invalid_request += other.nak.invalid_request;
        self.nak.remote_access += other.nak.remote_access;
        self.nak.remote_operational += other.nak.remote_operational;
        self.nak.other += other.nak.other;
        self.rnr_nak += other.rnr_nak;
    }
}

/// Packets per DSCP; the key is the number, or `other` where a live flow shows more than it counts one by one.
pub type DscpCounts = BTreeMap<String, u64>;

/// One flow at one tap.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FlowReport {
    /// Where it was observed.
    pub tap: String,
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Destination QPN.
    pub dest_qp: u32,
    /// `request` or `response`.
    pub space: &'static str,
    /// Transport service: `RC`, `UC`, `UD`, …
    pub service: &'static str,
    /// Packets.
    pub packets: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// PSN of the first packet.
    pub first_psn: u32,
    /// PSN of the serially highest packet.
    pub last_psn: u32,
    /// CNPs for the queue pair that sends this flow.
    pub cnp: u64,
    /// ECN codepoints.
    pub ecn: EcnCounts,
    /// DSCPs.
    pub dscp: DscpCounts,
    /// What became of its PSNs.
    #[serde(flatten)]
    pub counters: Counters,
    /// What else its packets tell.
    pub facts: FactsReport,
}

impl FlowReport {
    /// The report of a flow as it stands now.
    pub fn new(key: &FlowKey, flow: &Flow, tap: impl Into<String>) -> Self {
        Self {
            tap: tap.into(),
            src: key.src.into(),
            dst: key.dst.into(),
            dest_qp: key.dest_qp().get(),
            space: key.space().name(),
            service: flow.opcode().map_or("", |opcode| opcode.service().name()),
            packets: flow.packets,
            bytes: flow.bytes,
            first_psn: flow.first_psn,
            last_psn: flow.last_psn,
            cnp: flow.cnp,
            ecn: EcnCounts::from_codepoints(flow.ecn),
            dscp: flow
                .dscps()
                .map(|(dscp, count)| (dscp.map_or_else(|| "other".to_owned(), |d| d.get().to_string()), count))
                .collect(),
            counters: Counters::of(flow),
            facts: FactsReport::new(flow, None),
        }
    }
}

/// Validity of the invariant CRCs of RoCEv2 packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct IcrcCounts {
    /// Right.
    pub valid: u64,
    /// Wrong.
    pub invalid: u64,
    /// Not checked: the capture kept too few bytes, or the IPv4 header has options.
    pub unchecked: u64,
}

/// Frames that were taken out of tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct TunnelCounts {
    /// Out of VXLAN.
    pub vxlan: u64,
    /// Out of GENEVE.
    pub geneve: u64,
    /// ECN codepoints of the outer packets, whatever they carry.
    pub outer_ecn: EcnCounts,
}

/// What a capture file holds.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CaptureReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The file, as named by the caller.
    pub file: String,
    /// Frames read: `rocev2 + rocev1 + not_roce` and the malformed ones.
    pub frames: u64,
    /// Well-formed RoCEv2 packets, CNPs included.
    pub rocev2: u64,
    /// RoCEv1 frames.
    pub rocev1: u64,
    /// Everything else.
    pub not_roce: u64,
    /// Frames for the RoCEv2 port that are not usable, by reason; every reason is listed.
    pub malformed: BTreeMap<&'static str, u64>,
    /// CNPs.
    pub cnp: u64,
    /// ECN codepoints of all RoCEv2 packets except CNPs.
    pub ecn: EcnCounts,
    /// DSCPs likewise.
    pub dscp: DscpCounts,
    /// Invariant CRCs.
    pub icrc: IcrcCounts,
    /// Sums over the flows.
    #[serde(flatten)]
    pub counters: Counters,
    /// Packets of flows beyond the number that is kept.
    pub flows_refused: u64,
    /// Frames taken out of tunnels, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tunnels: Option<TunnelCounts>,
    /// Why the file was not read to its end, where it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
    /// What somebody should know, the gravest first.
    pub findings: Vec<FindingReport>,
    /// Connected queue pairs and source ports from host to host.
    pub paths: Vec<PathReport>,
    /// The flows in the order of their first packets.
    pub flows: Vec<FlowReport>,
}

impl CaptureReport {
    /// All malformed frames.
    pub fn malformed_total(&self) -> u64 {
        self.malformed.values().sum()
    }
}
