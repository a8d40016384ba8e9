//! What the analysis collects for facts and findings while frames pass. It sees each frame when the analysis is done
//! with it.

mod copies;
mod memory;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, btree_map::Entry};

use roce_common::{
    abi::{FlowKey, Space, Tap},
    flow::{Flow, refusal},
    psn::{Episode, Outcome, Psn, Run},
    units::{Addr, Dscp, Ecn, Qpn},
    wire::{Kind, Packet, Syndrome},
};

use super::{
    attribution::FlowIndex,
    capture::Frame,
    seen::{Seen, SeenPacket},
};
use crate::{
    facts::{FlowFacts, PathReport},
    findings::{Code, Evidence, Findings, Subject, episodes, rules},
};
use copies::Copies;
use memory::{FlowMemory, Mark};

/// A flow counts as captured twice from this many copies on, if they are also a quarter of its packets: where a capture
/// sees every packet twice they are half. Fewer may be the network's doing.
const COPIES_LEAST: u64 = 16;

/// Queue pairs whose CNPs are remembered until it is known whether anybody sends them.
const MOST_NOTIFIED: usize = 4_096;

/// The collector and what it must remember of a capture.
#[derive(Default)]
pub(super) struct Watch {
    findings: Findings,
    flows: Vec<FlowMemory>,
    copies: Copies,
    cnps: BTreeMap<(Tap, Addr, Addr, Qpn), Cnps>,
}

/// CNPs for one queue pair.
struct Cnps {
    first: Packet,
    mark: Mark,
    count: u64,
}

impl Watch {
    /// Takes the next frame, what it was, and the episodes of its flow that it ended.
    #[inline]
    pub(super) fn frame(&mut self, frame: &Frame<'_>, seen: &Seen, ended: &[Episode]) {
        match seen {
            Seen::Packet(packet) => self.packet(frame, packet, ended),
            Seen::NotRoce => {}
            Seen::RoceV1 => self.capture_note(Code::Rocev1, frame, "RoCEv1"),
            Seen::Malformed(reason) => {
                let code = rules::malformed(*reason).unwrap_or(Code::TruncatedCapture);
                self.capture_note(code, frame, reason.name());
            }
        }
    }

    fn packet(&mut self, frame: &Frame<'_>, seen: &SeenPacket, ended: &[Episode]) {
        let psn = seen.packet.bth.psn;
        if seen.icrc_valid == Some(false) {
            self.findings.note(Code::BadIcrc, key_of(seen), evidence(frame, Some(psn), "wrong ICRC"));
        }
        let Some(flow) = seen.flow else {
            if seen.packet.bth.opcode.kind() == Kind::Cnp {
                self.cnp(frame, seen);
            }
            return;
        };
        if flow >= self.flows.len() {
            self.flows.resize_with(flow + 1, FlowMemory::default);
        }
        let mark = Mark { frame: frame.number, time: frame.time, psn };
        let memory = &mut self.flows[flow];
        memory.first.get_or_insert(mark);
        if matches!(seen.account.outcome(), Outcome::First | Outcome::InOrder) {
            memory.port = seen.packet.src_port;
        }
        if seen.packet.ecn() == Ecn::Ce {
            memory.ce.get_or_insert(mark);
        }
        if self.copies.pass(frame, &seen.packet, flow, &mut memory.identification) {
            memory.copies += 1;
            if is_captured_twice(memory.copies, memory.facts.packets() + 1) {
                self.findings.show(Code::DuplicateCapture, key_of(seen), mark.evidence("copy"));
            }
        }
        let silence = memory.facts.packet(&seen.packet, seen.account, seen.next, frame.time);
        if silence >= Some(rules::STALL) {
            self.findings.note(Code::Stall, key_of(seen), mark.evidence("end of the silence"));
        }
        self.segment(seen, flow, mark);
        if seen.account.is_notable() {
            self.notable(seen, flow, mark);
        }
        for episode in ended {
            self.episode(key_of(seen), flow, episode);
        }
        if seen.packet.bth.opcode.kind() == Kind::Response {
            self.response(seen, flow, seen.answers, mark);
        }
    }

    /// FIRST and MIDDLE packets are as long as the path MTU, which does not change while a connection lives.
    fn segment(&mut self, seen: &SeenPacket, flow: FlowIndex, mark: Mark) {
        let (opcode, payload) = (seen.packet.bth.opcode, seen.packet.payload_len);
        let memory = &mut self.flows[flow];
        if seen.account.outcome() == Outcome::Discontinuity {
            memory.segment = 0;
        }
        if !opcode.fills_pmtu() {
            return;
        }
        let known = memory.segment;
        let wrong = !rules::is_path_mtu(payload) || known != 0 && payload != known;
        memory.segment = payload;
        if wrong {
            self.findings.note(Code::MtuSegmentMismatch, key_of(seen), mark.evidence("segment of another length"));
        }
    }

    /// Remembers frames that an episode may tell of later.
    fn notable(&mut self, seen: &SeenPacket, flow: FlowIndex, mark: Mark) {
        let memory = &mut self.flows[flow];
        match seen.account.outcome() {
            Outcome::Gap(skipped) => memory.gap = Some(Mark { psn: mark.psn.sub(skipped), ..mark }),
            Outcome::Discontinuity => {
                let new_port = memory.port != seen.packet.src_port;
                memory.port = seen.packet.src_port;
                let code = if new_port { Code::QpnReuse } else { Code::PsnDiscontinuity };
                self.findings.note(code, key_of(seen), mark.evidence("goes on at another PSN"));
                return;
            }
            _ => {}
        }
        if seen.account.run_started() {
            memory.run = Some(mark);
        }
        let late = |run: Option<Run>| run.is_some_and(|run| !run.is_retransmission());
        if (late(seen.account.own_run()) || late(seen.account.ended()))
            && let Some(run) = memory.run
        {
            self.findings.show(Code::Reordering, key_of(seen), run.evidence("came late"));
        }
    }

    /// A response, and the flow that it surely answers.
    fn response(&mut self, seen: &SeenPacket, flow: FlowIndex, answers: Option<FlowIndex>, mark: Mark) {
        let refused = refusal(&seen.packet);
        match refused {
            None | Some(Syndrome::PsnSequence) => {}
            Some(Syndrome::RnrNak(_)) => {
                self.findings.show(Code::RnrNotLoss, key_of(seen), mark.evidence("RNR NAK"));
            }
            Some(_) => {
                self.findings.show(Code::NakFatal, key_of(seen), mark.evidence("NAK"));
            }
        }
        if let Some(memory) = seen.refused.and_then(|flow| self.flows.get_mut(flow)) {
            memory.nak = Some(mark);
        }
        let Some(memory) = answers.and_then(|flow| self.flows.get_mut(flow)) else { return };
        memory.partner = Some(flow);
        if memory.facts.response(&seen.packet, refused.is_some(), mark.time) >= Some(rules::STALL) {
            self.findings.note(Code::Stall, key_of(seen), mark.evidence("end of the silence"));
        }
    }

    /// A finished episode of a flow.
    pub(super) fn episode(&mut self, key: FlowKey, flow: FlowIndex, episode: &Episode) {
        let Some(memory) = self.flows.get_mut(flow) else { return };
        memory.facts.episode(episode);
        if is_captured_twice(memory.copies, memory.facts.packets()) {
            return;
        }
        episodes::note(&mut self.findings, key, episode, memory.frames_of(episode));
    }

    fn cnp(&mut self, frame: &Frame<'_>, seen: &SeenPacket) {
        let path = Subject::Path(seen.tap, seen.packet.src, seen.packet.dst);
        if !seen.packet.bth.becn {
            self.findings.note(Code::CnpBecnMissing, path, evidence(frame, None, "CNP without BECN"));
        }
        if seen.packet.dscp() != Dscp::CNP {
            self.findings.note(Code::CnpDscpUnexpected, path, evidence(frame, None, "CNP in another DSCP"));
        }
        let p = &seen.packet;
        let room = self.cnps.len() < MOST_NOTIFIED;
        match self.cnps.entry((seen.tap, p.src, p.dst, p.bth.dest_qp)) {
            Entry::Occupied(mut known) => known.get_mut().count += 1,
            Entry::Vacant(new) if room => {
                let mark = Mark { frame: frame.number, time: frame.time, psn: p.bth.psn };
                new.insert(Cnps { first: *p, mark, count: 1 });
            }
            Entry::Vacant(_) => {}
        }
    }

    fn capture_note(&mut self, code: Code, frame: &Frame<'_>, what: &'static str) {
        self.findings.note(code, Subject::Capture, evidence(frame, None, what));
    }

    /// The end of a flow.
    pub(super) fn finish(&mut self, key: FlowKey, flow: FlowIndex) {
        let Some(memory) = self.flows.get_mut(flow) else { return };
        let cnps = self.cnps.get(&(key.tap, key.src, key.dst, key.dest_qp()));
        memory.facts.finish(cnps.map_or(0, |cnps| cnps.count));
        if is_captured_twice(memory.copies, memory.facts.packets()) {
            self.findings.add(Code::DuplicateCapture, key, memory.copies);
            for code in episodes::CODES {
                self.findings.retract(*code, key);
            }
        }
    }

    /// The collector, for what is found at the end.
    pub(super) const fn findings(&mut self) -> &mut Findings {
        &mut self.findings
    }

    /// The facts of a flow.
    pub(super) fn facts(&self, flow: FlowIndex) -> Option<&FlowFacts> {
        self.flows.get(flow).map(|memory| &memory.facts)
    }

    /// Judges all flows at the end; they stand in the order of their numbers. `notified` finds the flow that a CNP slows
    /// down.
    pub(super) fn judge(&mut self, all: &[(&FlowKey, &Flow)], notified: impl Fn(Tap, &Packet) -> Option<FlowIndex>) {
        for ((tap, src, dst, _), cnps) in &self.cnps {
            if notified(*tap, &cnps.first).is_none() {
                let path = Subject::Path(*tap, *src, *dst);
                self.findings.add(Code::CnpUnmatched, path, cnps.count);
                self.findings.show(Code::CnpUnmatched, path, cnps.mark.evidence("first CNP for this queue pair"));
            }
        }
        let Self { flows, findings, .. } = self;
        rules::judge(findings, views(flows, all));
    }

    /// The paths of all flows.
    pub(super) fn paths(&self, all: &[(&FlowKey, &Flow)], tap_name: impl Fn(Tap) -> String) -> Vec<PathReport> {
        PathReport::all(views(&self.flows, all), tap_name)
    }
}

/// All flows, in the order of their numbers, as rules look at them.
fn views<'a>(
    memories: &'a [FlowMemory],
    all: &'a [(&'a FlowKey, &'a Flow)],
) -> impl Iterator<Item = rules::View<'a>> + Clone {
    all.iter().enumerate().map(move |(number, &(key, flow))| {
        let memory = memories.get(number);
        let mark = |mark: Option<Mark>, what| mark.map(|mark| mark.evidence(what));
        rules::View {
            key,
            flow,
            partner: memory.and_then(|m| m.partner).map(|partner| all[partner].1),
            first: mark(memory.and_then(|m| m.first), "first packet"),
            ce: mark(memory.and_then(|m| m.ce), "first CE packet"),
        }
    })
}

fn is_captured_twice(copies: u64, packets: u64) -> bool {
    copies >= COPIES_LEAST && copies * 4 >= packets
}

fn evidence(frame: &Frame<'_>, psn: Option<Psn>, what: &'static str) -> Evidence {
    Evidence { frame: Some(frame.number), time: frame.time, psn, what }
}

/// The key of the packet's flow, whether or not there was room for it.
fn key_of(seen: &SeenPacket) -> FlowKey {
    let p = &seen.packet;
    let space = if p.bth.opcode.kind() == Kind::Response { Space::Response } else { Space::Request };
    FlowKey::new(seen.tap, p.src, p.dst, p.bth.dest_qp, space)
}
