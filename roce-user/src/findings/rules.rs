//! Rules that judge whole flows, paths and hosts by their numbers. They need no packets, so they serve captures at their
//! end and a running attachment at any time.

use std::collections::{BTreeMap, BTreeSet};

use roce_common::{
    abi::{Counter, Counters as TapCounters, FlowKey, Space, Tap},
    flow::{Flow, NakKind},
    units::{Addr, Dscp, Nanos},
    wire::{Malformed, Service},
};

use super::{Code, Evidence, Findings, Subject};
use crate::export::Counters;

/// A flow is judged by its markings from this many packets on: below, a connection's first packets or a single probe would
/// be called a misconfigured sender.
pub const MARKING_LEAST: u64 = 16;
/// Packets, all CE, that a flow needs to be called marked at its source. A queue above its upper threshold marks every
/// packet too, but RED over 64 packets in a row does so only in a standing queue, which is worth the same look.
pub const CE_AT_SOURCE_LEAST: u64 = 64;
/// CE packets without any CNP that a flow needs to be called unanswered. The receiver answers the first one at once; the
/// rest allows for a capture that ends just then, and for intervals between CNPs, which only matter after the first.
pub const CE_WITHOUT_CNP_LEAST: u64 = 8;
/// Queue pairs between two hosts that all use one UDP source port. Two or three may collide by chance in a hash of 14
/// bits, four in a row do so once in 4·10^12.
pub const ONE_PORT_QPS_LEAST: usize = 4;
/// A silence of this length with unanswered requests is a stall. A loaded software sender comes back to a queue pair within
/// 20 ms, as seen on rxe; the ACK timeout that perftest sets (14) is 67 ms.
pub const STALL: Nanos = Nanos::from_millis(50);

/// What the rules look at: a flow with its key.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Which flow.
    pub key: &'a FlowKey,
    /// Its numbers.
    pub flow: &'a Flow,
    /// The flow that answers this one, or is answered by it, where the pairing is certain.
    pub partner: Option<&'a Flow>,
    /// Its first packet, where that is remembered.
    pub first: Option<Evidence>,
    /// Its first CE packet, likewise.
    pub ce: Option<Evidence>,
}

/// Judges all flows of a tap set, at the end or at any time; pass each flow once.
pub fn judge<'a>(findings: &mut Findings, flows: impl Iterator<Item = View<'a>> + Clone) {
    // By interface: live, what comes back passes the other direction.
    let talking: BTreeSet<(u32, Addr, Addr)> =
        flows.clone().map(|v| (v.key.tap.ifindex(), v.key.src, v.key.dst)).collect();
    for view in flows.clone() {
        let answers_pass = talking.contains(&(view.key.tap.ifindex(), view.key.dst, view.key.src));
        markings(findings, &view, answers_pass);
        refusals(findings, &view);
    }
    ports(findings, flows.clone());
    hosts(findings, flows);
}

/// What a datagram for the port that is no RoCEv2 packet is a case of; `None` where the capture cut it.
pub const fn malformed(reason: Malformed) -> Option<Code> {
    match reason {
        Malformed::TruncatedCapture => None,
        // There is no other version: these bytes are no BTH.
        Malformed::BadVersion => Some(Code::NotRoceOn4791),
        Malformed::UnknownOpcode
        | Malformed::TruncatedHeader
        | Malformed::BadLength
        | Malformed::PadBeyondPayload
        | Malformed::ReadTooLong
        | Malformed::UdpFragment => Some(Code::MalformedOn4791),
    }
}

/// Judges what the taps of an interface counted without looking at flows.
pub fn judge_counters(findings: &mut Findings, taps: &[TapCounters]) {
    let sum = |counter: Counter| taps.iter().map(|counters| counters[counter as usize]).sum();
    for reason in Malformed::ALL {
        if let Some(code) = malformed(reason) {
            findings.add(code, Subject::Capture, sum(Counter::of_malformed(reason)));
        }
    }
    findings.add(Code::Rocev1, Subject::Capture, sum(Counter::Rocev1));
    findings.add(Code::BadIcrc, Subject::Capture, sum(Counter::CnpBadIcrc));
}

/// ECN, DSCP and segment size of one flow.
fn markings(findings: &mut Findings, view: &View<'_>, answers_pass: bool) {
    let View { key, flow, partner, .. } = *view;
    if !is_data(key, flow) {
        return;
    }
    let mut found = |code: Code, evidence: Option<Evidence>| {
        findings.add(code, *key, 1);
        if let Some(evidence) = evidence {
            findings.show(code, *key, evidence);
        }
    };
    let [not_ect, _, _, ce] = flow.ecn;
    if flow.packets >= MARKING_LEAST {
        if not_ect == flow.packets {
            found(Code::NotEct, view.first);
        }
        if sole_dscp(flow) == Dscp::new(0) {
            found(Code::DscpUnmarked, view.first);
        }
    }
    if flow.dscps().count() > 1 {
        found(Code::DscpMixedInFlow, view.first);
    }
    if ce == flow.packets && ce >= CE_AT_SOURCE_LEAST {
        found(Code::CeAtSource, view.ce);
    }
    if ce >= CE_WITHOUT_CNP_LEAST && flow.cnp == 0 && answers_pass {
        found(Code::CeWithoutCnp, view.ce);
    }
    if flow.cnp > 0 && ce == 0 {
        found(Code::CnpWithoutCe, view.first);
    }
    let (Space::Request, Some(partner)) = (key.space(), partner) else { return };
    if let (Some(asked), Some(answered)) = (sole_dscp(flow), sole_dscp(partner))
        && asked != answered
    {
        found(Code::DscpAsymmetric, view.first);
    }
    let (requests, responses) = (flow.tracker.pmtu, partner.tracker.pmtu);
    if requests != 0 && responses != 0 && requests != responses {
        found(Code::MtuSegmentMismatch, view.first);
    }
}

/// What a responder refused in one flow, and what the tracker alone tells.
fn refusals(findings: &mut Findings, view: &View<'_>) {
    let nak = |kind: NakKind| u64::from(view.flow.nak[kind as usize]);
    let fatal = nak(NakKind::InvalidRequest) + nak(NakKind::RemoteAccess) + nak(NakKind::RemoteOperational);
    findings.add(Code::NakFatal, *view.key, fatal + nak(NakKind::Other));
    findings.add(Code::RnrNotLoss, *view.key, u64::from(view.flow.rnr_nak));
    findings.add(Code::Reordering, *view.key, Counters::of(view.flow).reordered);
}

/// Whether FIRST and MIDDLE packets may be this long.
pub const fn is_path_mtu(payload: u16) -> bool {
    payload.is_power_of_two() && payload >= 256 && payload <= 4_096
}

/// The request flows of connected queue pairs, by tap, source and destination.
pub fn paths<'a>(flows: impl Iterator<Item = View<'a>>) -> BTreeMap<(Tap, Addr, Addr), Vec<View<'a>>> {
    let mut paths: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for view in flows {
        if view.key.space() == Space::Request && is_connected(view.flow) {
            paths.entry((view.key.tap, view.key.src, view.key.dst)).or_default().push(view);
        }
    }
    paths
}

/// Source ports of the queue pairs between two hosts.
fn ports<'a>(findings: &mut Findings, flows: impl Iterator<Item = View<'a>>) {
    for ((tap, src, dst), views) in paths(flows) {
        if views.len() >= ONE_PORT_QPS_LEAST && views.iter().all(|v| v.flow.src_port == views[0].flow.src_port) {
            let path = Subject::Path(tap, src, dst);
            findings.add(Code::OnePortManyQps, path, 1);
            for first in views.iter().take(ONE_PORT_QPS_LEAST).filter_map(|v| v.first) {
                findings.show(Code::OnePortManyQps, path, first);
            }
        }
    }
}

/// DSCPs of the data that one host sends.
fn hosts<'a>(findings: &mut Findings, flows: impl Iterator<Item = View<'a>>) {
    let mut hosts: BTreeMap<(Tap, Addr), BTreeMap<Dscp, Option<Evidence>>> = BTreeMap::new();
    for View { key, flow, first, .. } in flows {
        if is_data(key, flow)
            && let Some(dscp) = sole_dscp(flow)
        {
            hosts.entry((key.tap, key.src)).or_default().entry(dscp).or_insert(first);
        }
    }
    for ((tap, host), dscps) in hosts {
        if dscps.len() > 1 {
            let host = Subject::Host(tap, host);
            findings.add(Code::DscpMixedOnHost, host, 1);
            for first in dscps.into_values().flatten() {
                findings.show(Code::DscpMixedOnHost, host, first);
            }
        }
    }
}

/// The only DSCP of a flow.
fn sole_dscp(flow: &Flow) -> Option<Dscp> {
    let mut dscps = flow.dscps();
    match (dscps.next(), dscps.next()) {
        (Some((dscp, _)), None) => dscp,
        _ => None,
    }
}

/// Whether the flow carries an application's data: payload, and not to the management queue pairs. ACKs have their own
/// class on some networks, and a few ACKs say little about a sender.
fn is_data(key: &FlowKey, flow: &Flow) -> bool {
    key.dest_qp().get() > 1 && flow.bytes > 0
}

/// Whether the flow belongs to a connected queue pair.
fn is_connected(flow: &Flow) -> bool {
    flow.opcode().is_some_and(|o| matches!(o.service(), Service::Rc | Service::Uc | Service::Xrc))
}
