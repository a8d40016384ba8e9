//! The inspector's counting: every frame through the parser, every RoCEv2 packet through its flow's tracker.

use std::collections::BTreeMap;

use foldhash::{HashMap, HashMapExt as _};
use roce_common::{
    abi::{Direction, FlowKey, MAX_FLOWS, Space, Tap},
    flow::{Flow, refusal},
    psn::{Account, Episode, Explainer, Outcome, Passing, Psn, ReadPlace, Tally},
    units::{Nanos, Qpn},
    wire::{Kind, Malformed, Packet, Syndrome, Verdict, cm, icrc},
};

use super::{
    attribution::{Attribution, FlowIndex},
    capture::{Capture, Frame},
    filter::{FlowPattern, Flows},
    seen::{Seen, SeenPacket},
    watch::Watch,
};
use crate::{
    connections::{Connections, Mark, Terms},
    export::{CaptureReport, Counters, DscpCounts, EcnCounts, FlowReport, IcrcCounts, SCHEMA},
    facts::FactsReport,
    findings::{Code, Subject},
};

#[cfg(test)]
mod episode_tests;

/// A flow and what the file's reader can afford beyond what the kernel keeps.
struct Entry {
    key: FlowKey,
    flow: Flow,
    /// Packets by DSCP, once there are more of them than the flow itself counts.
    dscps: Option<Box<[u64; 64]>>,
    /// From the second packet on: floods of flows of one packet have nothing to explain.
    explainer: Option<Box<Explainer>>,
    /// Its episodes by cause and place.
    tally: Tally,
}

/// Episodes kept one by one, each about 300 bytes; all of them are in the tallies.
const MOST_EPISODES: usize = 100_000;

/// Counts of a capture in the making.
pub(super) struct Analysis {
    most_flows: usize,
    no_icrc: bool,
    frames: u64,
    rocev2: u64,
    rocev1: u64,
    not_roce: u64,
    malformed: [u64; Malformed::ALL.len()],
    cnp: u64,
    ecn: EcnCounts,
    dscp: [u64; 64],
    icrc: IcrcCounts,
    flows_refused: u64,
    index: HashMap<FlowKey, FlowIndex>,
    entries: Vec<Entry>,
    /// The episodes, in the order of their ends; the first [`MOST_EPISODES`].
    episodes: Vec<(FlowIndex, Episode)>,
    /// Those that the newest frame ended.
    ended: Vec<Episode>,
    attribution: Attribution,
    watch: Watch,
    connections: Connections,
    first_time: Option<Nanos>,
    last_time: Nanos,
    /// Whose findings are asked for.
    asked: Vec<FlowPattern>,
}

impl Default for Analysis {
    fn default() -> Self {
        Self::new(MAX_FLOWS as usize)
    }
}

impl Analysis {
    /// Nothing counted; packets of flows beyond `most_flows` will only be counted at the top.
    pub(super) fn new(most_flows: usize) -> Self {
        Self {
            most_flows,
            no_icrc: false,
            frames: 0,
            rocev2: 0,
            rocev1: 0,
            not_roce: 0,
            malformed: [0; Malformed::ALL.len()],
            cnp: 0,
            ecn: EcnCounts::default(),
            dscp: [0; 64],
            icrc: IcrcCounts::default(),
            flows_refused: 0,
            index: HashMap::new(),
            entries: Vec::new(),
            episodes: Vec::new(),
            ended: Vec::new(),
            attribution: Attribution::new(most_flows),
            watch: Watch::default(),
            connections: Connections::default(),
            first_time: None,
            last_time: Nanos(0),
            asked: Vec::new(),
        }
    }

    /// From here on ICRCs are not checked.
    pub(super) fn leave_icrcs(&mut self) {
        self.no_icrc = true;
    }

    /// At the end, only what is found of these flows is told.
    pub(super) fn ask_for(&mut self, flows: &[FlowPattern]) {
        flows.clone_into(&mut self.asked);
    }

    /// Takes the next frame, and says what it was.
    pub(super) fn frame(&mut self, frame: &Frame<'_>) -> Seen {
        let seen = self.count(frame);
        self.watch.frame(frame, &seen, &self.ended);
        self.ended.clear();
        seen
    }

    fn count(&mut self, frame: &Frame<'_>) -> Seen {
        self.frames += 1;
        self.first_time.get_or_insert(frame.time);
        self.last_time = frame.time;
        match frame.link.parse(&(frame.bytes, frame.wire_len)) {
            Verdict::Roce(mut packet) => {
                self.rocev2 += 1;
                if let Some(tunnel) = &frame.tunnel {
                    packet.tos = tunnel.tos_behind(packet.tos);
                }
                let icrc_valid = if self.no_icrc { None } else { icrc::is_valid_by(frame.bytes, &packet, crc32) };
                match icrc_valid {
                    Some(true) => self.icrc.valid += 1,
                    Some(false) => self.icrc.invalid += 1,
                    None => self.icrc.unchecked += 1,
                }
                let tap = Tap::new(frame.interface, Direction::Ingress);
                let mut seen = SeenPacket {
                    number: frame.number,
                    packet,
                    tap,
                    icrc_valid,
                    flow: None,
                    outcome: Outcome::NotTracked,
                    account: Account::default(),
                    next: Psn::default(),
                    answers: None,
                    refused: None,
                };
                self.packet(&mut seen, frame.time);
                if seen.packet.bth.dest_qp == Qpn::GSI {
                    self.manage(frame, tap, &seen.packet);
                }
                Seen::Packet(seen)
            }
            Verdict::RoceV1 => {
                self.rocev1 += 1;
                Seen::RoceV1
            }
            Verdict::NotRoce => {
                self.not_roce += 1;
                Seen::NotRoce
            }
            Verdict::Malformed(reason) => {
                self.malformed[reason as usize] += 1;
                Seen::Malformed(reason)
            }
        }
    }

    /// Counts a packet and completes what is said of it.
    fn packet(&mut self, seen: &mut SeenPacket, now: Nanos) {
        let (tap, packet) = (seen.tap, &seen.packet);
        let space = match packet.bth.opcode.kind() {
            Kind::Cnp => {
                self.cnp += 1;
                self.attribution.cnp(tap, packet);
                return;
            }
            Kind::Request => Space::Request,
            Kind::Response => Space::Response,
        };
        self.ecn.count(packet.ecn());
        self.dscp[usize::from(packet.dscp().get())] += 1;
        let key = FlowKey::new(tap, packet.src, packet.dst, packet.bth.dest_qp, space);
        let Some(number) = self.entry(key) else {
            self.flows_refused += 1;
            return;
        };
        seen.flow = Some(number);
        if packet.bth.opcode.is_read_request() {
            self.note_answer_fate(number, &key, packet, now);
        }
        let (entry, episodes, ended) = (&mut self.entries[number], &mut self.episodes, &mut self.ended);
        seen.account = entry.observe(packet, now, |episode| {
            keep(episodes, number, episode);
            ended.push(episode);
        });
        seen.outcome = seen.account.outcome();
        seen.next = entry.flow.tracker.next();
        match space {
            Space::Request => self.attribution.request(number, &key, packet, &self.entries[number].flow.tracker),
            Space::Response => {
                seen.answers = self.attribution.response(tap, packet);
                seen.refused = self.response(seen, now);
            }
        }
        if seen.outcome == Outcome::First {
            self.use_terms(number, &key);
        }
    }

    /// What the management of a flow's connection told of it.
    fn use_terms(&mut self, number: FlowIndex, key: &FlowKey) {
        let Some(terms) = self.connections.terms(key) else { return };
        let entry = &mut self.entries[number];
        entry.flow.tracker.teach_pmtu(terms.pmtu);
        if key.space() == Space::Request {
            entry.explainer().set_ack_timeout(terms.ack_timeout);
            self.attribution.told(number, key, terms.sender);
        }
    }

    /// A packet for QP1 may make a connection; its flows may have begun before, on queue pairs that are used again.
    fn manage(&mut self, frame: &Frame<'_>, tap: Tap, packet: &Packet) {
        let Some(mad) = cm::parse(&(frame.bytes, frame.wire_len), packet) else { return };
        let mark = Mark { frame: Some(frame.number), time: frame.time };
        let path = (tap, packet.src, packet.dst);
        let Some(made) = self.connections.message(path, &mad, mark, self.watch.findings()) else { return };
        for key in made.request_flows().into_iter().chain(made.answer_flows()) {
            if let Some(&number) = self.index.get(&key) {
                self.use_terms(number, &key);
            }
        }
    }

    /// Before a READ that asks again is counted: what had become of the answer it asks for.
    fn note_answer_fate(&mut self, number: FlowIndex, key: &FlowKey, packet: &Packet, now: Nanos) {
        let psn = packet.bth.psn;
        if !self.entries[number].flow.tracker.in_window(psn) {
            return;
        }
        let Some(requester) = self.attribution.sender_of(number) else { return };
        let answers = FlowKey::new(key.tap, key.dst, key.src, requester, Space::Response);
        let Some(&answers) = self.index.get(&answers) else { return };
        let fate = self.entries[answers].flow.tracker.fate(psn);
        let place = self.entries[number].flow.measured.reads.place(psn);
        self.entries[number].explainer().answer_fate(psn, place, fate, now);
    }

    /// Tells the flow that a response answers what the response says of it. Returns the flow whose packet it refuses.
    fn response(&mut self, seen: &SeenPacket, now: Nanos) -> Option<FlowIndex> {
        let (tap, packet) = (seen.tap, &seen.packet);
        let psn = packet.bth.psn;
        if let Some(flow) = seen.answers {
            if packet.bth.opcode.fills_pmtu() {
                self.entries[flow].flow.tracker.teach_pmtu(packet.payload_len.into());
            }
            let explainer = self.entries[flow].explainer();
            if let Outcome::Gap(skipped) = seen.outcome {
                explainer.answer_gap(psn.sub(skipped), now);
            }
            if refusal(packet).is_none() {
                explainer.answer(psn, now);
            }
        }
        let syndrome = refusal(packet)?;
        if !matches!(syndrome, Syndrome::PsnSequence | Syndrome::RnrNak(_)) {
            return None;
        }
        let entries = &self.entries;
        let in_window = |flow: FlowIndex, psn: Psn| entries[flow].flow.tracker.in_window(psn);
        let flow = self.attribution.refused(tap, packet, in_window)?;
        let entry = &mut self.entries[flow];
        if let Syndrome::RnrNak(timer) = syndrome {
            if entry.flow.tracker.note_rnr_nak(psn) {
                entry.explainer().rnr_nak(psn, timer, now);
            }
        } else {
            let fate = entry.flow.tracker.note_sequence_nak(psn);
            entry.explainer().sequence_nak(psn, fate, now);
        }
        Some(flow)
    }

    /// The number of the flow, new or known; `None` where there is no room for another.
    fn entry(&mut self, key: FlowKey) -> Option<FlowIndex> {
        if let Some(&number) = self.index.get(&key) {
            return Some(number);
        }
        let number = self.entries.len();
        if number >= self.most_flows {
            return None;
        }
        self.index.insert(key, number);
        self.entries.push(Entry::new(key));
        Some(number)
    }

    /// Frames taken so far.
    pub(super) const fn frames(&self) -> u64 {
        self.frames
    }

    /// The flow that the CNP `packet` tells to slow down, by what is known now.
    pub(super) fn notified(&self, tap: Tap, packet: &Packet) -> Option<FlowIndex> {
        self.attribution.notified(tap, packet, &self.index)
    }

    /// Time from the first to the last frame.
    pub(super) fn duration(&self) -> Nanos {
        self.last_time.since(self.first_time.unwrap_or(self.last_time))
    }

    /// Nothing more will come: what was going on ends.
    fn end_episodes(&mut self) {
        let (at, episodes, watch) = (self.last_time, &mut self.episodes, &mut self.watch);
        for (number, entry) in self.entries.iter_mut().enumerate() {
            let key = entry.key;
            entry.finish(at, |episode| {
                keep(episodes, number, episode);
                watch.episode(key, number, &episode);
            });
            watch.finish(key, number);
        }
    }

    /// The end of the capture: its flows, and their episodes in the order of their ends.
    pub(super) fn flows(mut self) -> Vec<(FlowKey, Flow, Vec<Episode>)> {
        self.end_episodes();
        let mut flows: Vec<_> = self.entries.into_iter().map(|entry| (entry.key, entry.flow, Vec::new())).collect();
        for (number, episode) in self.episodes {
            flows[number].2.push(episode);
        }
        flows
    }

    /// The end of the capture.
    pub(super) fn finish(mut self, file: String, capture: &Capture) -> CaptureReport {
        for (flow, cnps) in self.attribution.cnps_by_flow(&self.index) {
            self.entries[flow].flow.cnp += cnps;
        }
        self.end_episodes();
        self.judge(capture);
        let tap_name = |tap: Tap| capture.tap_name(tap).to_owned();
        let all: Vec<_> = self.entries.iter().map(|entry| (&entry.key, &entry.flow)).collect();
        let paths = self.watch.paths(&all, tap_name);
        let mut counters = Counters::default();
        let flows: Vec<_> = self
            .entries
            .iter()
            .enumerate()
            .map(|(number, entry)| {
                let mut report = entry.report(tap_name(entry.key.tap));
                report.facts = FactsReport::new(&entry.flow, self.watch.facts(number));
                report.facts.connection = self.connections.terms(&entry.key).as_ref().map(Terms::report);
                counters.add(&report.counters);
                report
            })
            .collect();
        CaptureReport {
            schema: SCHEMA,
            file,
            frames: self.frames,
            rocev2: self.rocev2,
            rocev1: self.rocev1,
            not_roce: self.not_roce,
            malformed: Malformed::ALL
                .into_iter()
                .map(|r| (r.name(), self.malformed[r as usize]))
                .collect::<BTreeMap<_, _>>(),
            cnp: self.cnp,
            ecn: self.ecn,
            dscp: by_number(&self.dscp),
            icrc: self.icrc,
            counters,
            flows_refused: self.flows_refused,
            tunnels: None,
            incomplete: capture.incomplete.clone(),
            findings: self.watch.findings().report(tap_name),
            paths,
            flows,
        }
    }

    /// Judges what can only be judged at the end.
    fn judge(&mut self, capture: &Capture) {
        let flows: Vec<_> = self.entries.iter().map(|entry| (&entry.key, &entry.flow)).collect();
        let (attribution, index) = (&self.attribution, &self.index);
        self.watch.judge(&flows, |tap, cnp| attribution.notified(tap, cnp, index));
        let findings = self.watch.findings();
        self.connections.finish(findings);
        if capture.incomplete.is_some() {
            findings.add(Code::TruncatedCapture, Subject::Capture, 1);
        }
        let asked = Flows(&self.asked);
        if !asked.all() {
            findings.keep_only(|subject| asked.subject(subject, |tap| capture.tap_name(tap)));
        }
    }
}

impl Entry {
    fn new(key: FlowKey) -> Self {
        Self { key, flow: Flow::default(), dscps: None, explainer: None, tally: Tally::default() }
    }

    fn explainer(&mut self) -> &mut Explainer {
        self.explainer.get_or_insert_default()
    }

    fn observe(&mut self, packet: &Packet, now: Nanos, mut tell: impl FnMut(Episode)) -> Account {
        let (others, before) = (self.flow.dscp_others, self.flow.last_seen_ns);
        let account = self.flow.observe(packet, now);
        if self.flow.dscp_others != others {
            self.dscps.get_or_insert_with(|| Box::new([0; 64]))[usize::from(packet.dscp().get())] += 1;
        }
        if self.flow.packets < 2 {
            return account;
        }
        let (psn, opcode, silence) = (packet.bth.psn, packet.bth.opcode, now.since(Nanos(before)));
        // A READ that begins a repeat is not remembered as one that was asked for the first time.
        let starts = account.run_started() && opcode.is_read_request();
        let read = if starts { self.flow.measured.reads.place(psn) } else { ReadPlace::Unknown };
        let (tally, explainer) = (&mut self.tally, self.explainer.get_or_insert_default());
        explainer.packet(account, &Passing { psn, opcode, read, silence, at: now }, |episode| {
            tally.add(&episode);
            tell(episode);
        });
        account
    }

    /// The end of the capture.
    fn finish(&mut self, now: Nanos, mut tell: impl FnMut(Episode)) {
        let account = self.flow.finish();
        if let Some(explainer) = &mut self.explainer {
            explainer.finish(account, now, |episode| {
                self.tally.add(&episode);
                tell(episode);
            });
        }
    }

    fn report(&self, tap: String) -> FlowReport {
        let mut report = FlowReport::new(&self.key, &self.flow, tap);
        if let Some(dscps) = &self.dscps {
            report.dscp.remove("other");
            report.dscp.extend(by_number(dscps));
        }
        report
    }
}

/// Keeps an episode, while there is room.
fn keep(episodes: &mut Vec<(FlowIndex, Episode)>, flow: FlowIndex, episode: Episode) {
    if episodes.len() < MOST_EPISODES {
        episodes.push((flow, episode));
    }
}

/// CRC-32 by the instructions that the CPU has for it.
fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

fn by_number(counts: &[u64; 64]) -> DscpCounts {
    counts.iter().enumerate().filter(|&(_, &n)| n != 0).map(|(dscp, &n)| (dscp.to_string(), n)).collect()
}
