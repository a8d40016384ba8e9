//! What the events of the BPF programs amount to: episodes with cause and place, by the explainer that the inspector
//! uses too, and what they mean. Knows neither sockets nor maps.
//!
//! Live there is a little less to go by than in a capture: how far a flow is answered is known where a run starts, and
//! silences are measured by a clock that goes in steps.

use std::collections::{HashMap, HashSet, hash_map::Entry};

use roce_common::{
    abi::{Answered, Direction, Event, EventKind, FlowKey, MadEvent, PairKey, Space, Tap},
    facts::{Recovery, Spread},
    flow::Flow,
    psn::{Account, Episode, Explainer, Fate, Outcome, Passing, Psn, ReadPlace, Tally},
    units::{Nanos, Qpn},
    wire::{Aeth, Kind, Opcode, Syndrome, cm},
};

use super::path_mtus::{PathMtu, PathMtus};
use crate::{
    connections::{Connections, Mark, Terms},
    export::story::{FlowStory, StoryReport},
    findings::{Code, Evidence, Findings, episodes, rules},
};

/// Most flows with a story, each about 1 kB. Flows to which nothing happens have none.
const MOST_FLOWS: usize = 16_384;

/// What happened to one flow.
#[derive(Default)]
struct Told {
    explainer: Explainer,
    tally: Tally,
    recovery: Recovery,
    /// Silences while something was unanswered, in nanoseconds.
    silences: Spread,
    /// The PSN that the newest NAK refused, which is not answered.
    refused: Option<Psn>,
    /// What its connection was made with.
    terms: Option<Terms>,
}

impl Told {
    /// Of a flow whose connection has these terms, if they are known.
    fn of(terms: Option<Terms>, key: &FlowKey) -> Self {
        let mut told = Self { terms, ..Self::default() };
        if let (Some(terms), Space::Request) = (terms, key.space()) {
            told.explainer.set_ack_timeout(terms.ack_timeout);
        }
        told
    }
}

/// A connection's messages pass both directions of an interface, so connections are kept by interface alone.
const fn interface(tap: Tap) -> Tap {
    Tap::new(tap.ifindex(), Direction::Ingress)
}

fn key_of_interface(key: &FlowKey) -> FlowKey {
    key.at(interface(key.tap))
}

/// See the module.
#[derive(Default)]
pub(super) struct Story {
    flows: HashMap<FlowKey, Told>,
    findings: Findings,
    connections: Connections,
    path_mtus: PathMtus,
    /// UDP source ports of flows, as of their newest event.
    ports: HashMap<FlowKey, u16>,
}

impl Story {
    /// Takes a message of connection management; returns what the maps are to be told.
    pub(super) fn management(&mut self, message: &MadEvent) -> Vec<PathMtu> {
        let event = &message.event;
        let Some(mad) = cm::read(&message.mad[..], 0) else { return Vec::new() };
        let mark = Mark { frame: None, time: Nanos(event.time_ns) };
        let path = (interface(event.tap), event.src, event.dst);
        if let cm::Message::Disconnect(qpn) = mad.message {
            let ended = self.connections.ending(path, qpn).into_iter().flatten();
            return ended.filter_map(|(_, src, dst, qpn)| self.path_mtus.forget(PairKey::new(src, dst, qpn))).collect();
        }
        let Some(made) = self.connections.message(path, &mad, mark, &mut self.findings) else { return Vec::new() };
        // Flows of these queue pairs may be there already: numbers are used again.
        for key in made.request_flows() {
            for tap in [key.tap, key.tap.opposite()] {
                let key = key.at(tap);
                let terms = self.connections.terms(&key_of_interface(&key));
                if let (Some(told), Some(terms)) = (self.flows.get_mut(&key), terms) {
                    told.explainer.set_ack_timeout(terms.ack_timeout);
                }
            }
        }
        let mut changes = Vec::new();
        for (key, (_, src, dst, qpn)) in made.request_flows().iter().zip(made.directions) {
            if let Some(terms) = self.connections.terms(key).filter(|terms| terms.pmtu != 0) {
                changes.extend(self.path_mtus.learn(PairKey::new(src, dst, qpn), terms.pmtu));
            }
        }
        changes
    }

    /// Takes an event; `tell` hears the episodes that it ends.
    pub(super) fn event(&mut self, event: &Event, mut tell: impl FnMut(FlowKey, Episode)) {
        let (Some(kind), Some(opcode)) = (EventKind::from_number(event.kind), Opcode::new(event.opcode)) else {
            return;
        };
        if matches!(kind, EventKind::Cnp | EventKind::CnpSent | EventKind::CnpUnpaired | EventKind::Management) {
            return;
        }
        let space = if opcode.kind() == Kind::Response { Space::Response } else { Space::Request };
        let key = FlowKey::new(event.tap, event.src, event.dst, Qpn::new(event.dest_qp), space);
        let (psn, at) = (Psn::new(event.psn), Nanos(event.time_ns));
        if kind == EventKind::Silence {
            self.silence(event, key, Nanos::from_micros(event.value.into()));
            return;
        }
        let account = Account::from_bits(event.account);
        let new_port = self.is_new_port(key, event.src_port);
        if account.is_notable() {
            if account.outcome() == Outcome::Discontinuity {
                let code = if new_port { Code::QpnReuse } else { Code::PsnDiscontinuity };
                let evidence = Evidence { frame: None, time: at, psn: Some(psn), what: "goes on at another PSN" };
                self.findings.note(code, key, evidence);
            }
            let silence = match kind {
                EventKind::RunStarted => Nanos::from_micros(event.value.into()),
                _ => Nanos(0),
            };
            let answered = match (kind, space) {
                (EventKind::RunStarted, Space::Request) => Answered::from_bits(event.fate),
                _ => None,
            };
            let read = answered.map_or(ReadPlace::Unknown, Answered::place);
            let passing = Passing { psn, opcode, read, silence, at };
            self.with(
                key,
                |told, tell| {
                    if let Some(answered) = answered {
                        let highest = answered.highest();
                        let refused = told.refused == Some(highest);
                        let last = if refused { highest.sub(1) } else { highest };
                        let ago = u64::from(event.refused_qp) * 1_000;
                        told.explainer.answer(last, Nanos(at.0.saturating_sub(ago)));
                        if opcode.is_read_request() {
                            told.explainer.answer_fate(psn, read, answered.fate(), at);
                        }
                    }
                    told.explainer.packet(account, &passing, tell);
                },
                &mut tell,
            );
        }
        if let (EventKind::Gap, Space::Response, Outcome::Gap(skipped)) = (kind, space, account.outcome())
            && event.refused_qp != 0
        {
            let asked = self.requests_of(&key, event);
            self.with(asked, |told, _| told.explainer.answer_gap(psn.sub(skipped), at), &mut tell);
        }
        if matches!(kind, EventKind::Nak | EventKind::RnrNak) && event.refused_qp != 0 {
            let refused = self.requests_of(&key, event);
            let syndrome = Aeth { raw_syndrome: event.value as u8, msn: 0 }.syndrome();
            let fate = Fate::from_number(event.fate).unwrap_or(Fate::Unknown);
            self.with(
                refused,
                |told, _| {
                    told.refused = Some(psn);
                    match syndrome {
                        Syndrome::PsnSequence => told.explainer.sequence_nak(psn, fate, at),
                        Syndrome::RnrNak(timer) => told.explainer.rnr_nak(psn, timer, at),
                        _ => {}
                    }
                },
                &mut tell,
            );
        }
    }

    /// Whether packets of the flow came from another source port before.
    fn is_new_port(&mut self, key: FlowKey, port: u16) -> bool {
        let room = self.ports.len() < MOST_FLOWS;
        match self.ports.entry(key) {
            Entry::Occupied(mut known) => known.insert(port) != port,
            Entry::Vacant(new) if room => {
                new.insert(port);
                false
            }
            Entry::Vacant(_) => false,
        }
    }

    /// A packet of the flow `key` ended a silence of the requests that it belongs to or answers.
    fn silence(&mut self, event: &Event, key: FlowKey, silence: Nanos) {
        let requests = if key.space() == Space::Request { key } else { self.requests_of(&key, event) };
        self.with(requests, |told, _| told.silences.add(silence.0), &mut |_, _| {});
        if silence >= rules::STALL {
            let (time, psn) = (Nanos(event.time_ns), Some(Psn::new(event.psn)));
            self.findings.note(Code::Stall, key, Evidence { frame: None, time, psn, what: "end of the silence" });
        }
    }

    /// The requests that an event of the responses `key` names as those that they answer or refuse.
    fn requests_of(&self, key: &FlowKey, event: &Event) -> FlowKey {
        let [across, here] = key.back(Qpn::new(event.refused_qp), Space::Request);
        if !self.flows.contains_key(&across) && self.flows.contains_key(&here) { here } else { across }
    }

    /// Lets the flow of `key` hear something, where it has or finds a place.
    fn with(
        &mut self,
        key: FlowKey,
        hear: impl FnOnce(&mut Told, &mut dyn FnMut(Episode)),
        tell: &mut impl FnMut(FlowKey, Episode),
    ) {
        if self.flows.len() >= MOST_FLOWS && !self.flows.contains_key(&key) {
            return;
        }
        let connections = &self.connections;
        let told = self.flows.entry(key).or_insert_with(|| Told::of(connections.terms(&key_of_interface(&key)), &key));
        let mut ended = Vec::new();
        hear(told, &mut |episode| ended.push(episode));
        for episode in ended {
            told.tally.add(&episode);
            told.recovery.episode(&episode);
            episodes::note(&mut self.findings, key, &episode, evidence(&episode));
            tell(key, episode);
        }
    }

    /// Time has passed: connections that nobody answered, and what unreliable connections lost is given up.
    pub(super) fn tick(&mut self, now: Nanos, mut tell: impl FnMut(FlowKey, Episode)) {
        self.connections.give_up(now, &mut self.findings);
        let keys: Vec<FlowKey> = self.flows.keys().copied().collect();
        for key in keys {
            self.with(key, |told, tell| told.explainer.tick(now, tell), &mut tell);
        }
    }

    /// Forgets the flows that are no longer there. What was found stays found.
    pub(super) fn keep_only(&mut self, live: &[(FlowKey, Flow)]) {
        let known = |key: &&FlowKey| self.flows.contains_key(*key) || self.ports.contains_key(*key);
        let known: HashSet<FlowKey> = live.iter().map(|(key, _)| key).filter(known).copied().collect();
        self.flows.retain(|key, _| known.contains(key));
        self.ports.retain(|key, _| known.contains(key));
        // What connections were made with is told of every flow of theirs.
        for (key, _) in live {
            if self.flows.len() < MOST_FLOWS
                && !self.flows.contains_key(key)
                && let Some(terms) = self.connections.terms(&key_of_interface(key))
            {
                self.flows.insert(*key, Told::of(Some(terms), key));
            }
        }
    }

    /// What happened so far, for other processes.
    pub(super) fn report(&self, tap_name: impl Fn(Tap) -> String) -> StoryReport {
        let flows = self
            .flows
            .iter()
            .filter(|(_, told)| told.tally != Tally::default() || told.silences.count() != 0 || told.terms.is_some());
        StoryReport {
            flows: flows
                .map(|(key, told)| {
                    let mut story =
                        FlowStory::new(key, (&told.tally, &told.recovery, &told.silences), tap_name(key.tap));
                    story.connection = told.terms.as_ref().map(Terms::report);
                    story
                })
                .collect(),
            findings: self.findings.report(tap_name),
        }
    }
}

/// The packets that an episode knows of.
fn evidence(episode: &Episode) -> impl Iterator<Item = Evidence> + Clone {
    let e = &episode.evidence;
    let shown = |psn: Psn, time: Nanos, what| Evidence { frame: None, time, psn: Some(psn), what };
    [
        e.gap.map(|gap| shown(gap.psn, gap.at, "never came, or came again later")),
        e.nak.map(|nak| shown(nak.seen.psn, nak.seen.at, "NAK")),
        e.rnr.map(|rnr| shown(rnr.seen.psn, rnr.seen.at, "RNR NAK")),
        e.refill.map(|at| shown(episode.first, at, "the repeat begins")),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use roce_common::{
        psn::{Cause, Location, Observed, Tracker},
        units::Addr,
        wire::cm::MAD_BYTES,
    };

    use super::*;

    const OUT: Tap = Tap::new(3, Direction::Egress);
    const A: Addr = Addr::v4([10, 0, 0, 1]);
    const B: Addr = Addr::v4([10, 0, 0, 2]);

    fn event(kind: EventKind, opcode: u8, psn: u32) -> Event {
        Event {
            time_ns: 0,
            kind: kind as u32,
            tap: OUT,
            src: A,
            dst: B,
            dest_qp: 17,
            psn,
            value: 0,
            src_port: 50_000,
            opcode,
            tos: 0,
            account: 0,
            fate: 0,
            refused_qp: 0,
        }
    }

    /// Feeds WRITE MIDDLEs of these PSNs through a tracker, as the BPF side does, and their notable accounts to a story.
    struct Dialogue {
        story: Story,
        tracker: Tracker,
        time: u64,
        told: Vec<(FlowKey, Episode)>,
        /// What the kernel finds when a run starts: see `Event::fate`.
        answered: u32,
    }

    impl Dialogue {
        fn new() -> Self {
            Self { story: Story::default(), tracker: Tracker::default(), time: 0, told: Vec::new(), answered: 0 }
        }

        fn hear(&mut self, event: Event) {
            let told = &mut self.told;
            self.story.event(&event, |key, episode| told.push((key, episode)));
        }

        fn send(&mut self, psns: impl IntoIterator<Item = u32>, silence_us: u32) {
            let mut silence = silence_us;
            for psn in psns {
                self.time += 1_000 + u64::from(silence) * 1_000;
                let opcode = Opcode::new(0x07).expect("WRITE MIDDLE");
                let account = self.tracker.observe(&Observed::new(opcode, Psn::new(psn), 1_024, 0));
                let kind = if account.run_started() { EventKind::RunStarted } else { EventKind::Sample };
                let plain = event(kind, opcode.get(), psn);
                let (account, value, fate) = (account.bits(), silence, self.answered);
                self.hear(Event { time_ns: self.time, account, value, fate, refused_qp: silence, ..plain });
                silence = 1;
            }
        }

        fn nak(&mut self, psn: u32) {
            let fate = self.tracker.note_sequence_nak(Psn::new(psn)) as u32;
            let plain = event(EventKind::Nak, 0x11, psn);
            let (tap, time_ns) = (OUT.opposite(), self.time);
            self.hear(Event { tap, src: B, dst: A, dest_qp: 99, value: 0x60, fate, refused_qp: 17, time_ns, ..plain });
        }
    }

    #[test]
    fn a_nak_from_the_other_direction_explains_the_repeat() {
        let mut d = Dialogue::new();
        d.send(0..20, 1);
        d.nak(15);
        d.send(15..30, 1);
        assert_eq!(d.told.len(), 1, "{:?}", d.told);
        let (key, episode) = d.told[0];
        assert_eq!((key.tap, key.dest_qp(), key.space()), (OUT, Qpn::new(17), Space::Request));
        assert_eq!((episode.cause, episode.location, episode.packets), (Cause::GoBackN, Location::AfterTap, 5));
        let report = d.story.report(|tap| format!("x/{}", tap.ifindex()));
        assert_eq!(report.flows.len(), 1);
        assert_eq!(report.flows[0].episodes[0].cause, "go_back_n");
        assert!(report.findings.iter().any(|f| f.code == "loss-after-tap"), "{:?}", report.findings);
    }

    #[test]
    fn silence_before_a_repeat_is_a_timeout_and_gone_flows_are_forgotten() {
        let mut d = Dialogue::new();
        d.send(0..20, 1);
        d.send(10..30, 67_000);
        let [(key, episode)] = d.told[..] else { panic!("{:?}", d.told) };
        assert_eq!((episode.cause, episode.packets, episode.lost), (Cause::Timeout, 10, 0));
        d.story.keep_only(&[(key, Flow::default())]);
        assert_eq!(d.story.report(|_| String::new()).flows.len(), 1);
        d.story.keep_only(&[]);
        let report = d.story.report(|_| String::new());
        assert!(report.flows.is_empty() && report.findings.iter().any(|f| f.code == "timeout-retransmit"));
    }

    #[test]
    fn a_far_place_is_another_connection_where_the_port_is_another() {
        for (port, code) in [(50_000, "psn-discontinuity"), (50_001, "qpn-reuse")] {
            let mut d = Dialogue::new();
            // An undisturbed flow tells of itself once.
            d.hear(event(EventKind::FirstSight, 0x07, 0));
            let opcode = Opcode::new(0x07).expect("WRITE MIDDLE");
            let mut pass = |psn| d.tracker.observe(&Observed::new(opcode, Psn::new(psn), 1_024, 0));
            pass(0);
            let account = [500_000, 500_001, 500_002].map(&mut pass)[2].bits();
            d.hear(Event { account, src_port: port, ..event(EventKind::Discontinuity, 0x07, 500_002) });
            let found = d.story.report(|_| String::new()).findings;
            assert_eq!(found.iter().map(|f| f.code).collect::<Vec<_>>(), [code]);
        }
    }

    #[test]
    fn a_timeout_after_an_answer_that_passed_is_needless() {
        for (answered, code) in
            [(Some(19), "spurious-retransmit"), (Some(9), "timeout-retransmit"), (None, "timeout-retransmit")]
        {
            let mut d = Dialogue::new();
            d.send(0..20, 1);
            let told = |psn| Answered::new(Psn::new(psn), Fate::Unknown, ReadPlace::Unknown).bits();
            d.answered = answered.map_or(0, told);
            d.send(10..30, 67_000);
            let found = d.story.report(|_| String::new()).findings;
            assert!(found.iter().any(|f| f.code == code), "{answered:?}: {found:?}");
        }
    }

    /// A message of connection management: attribute, the two numbers of the connection, and bytes of its body.
    fn management(from: Addr, attribute: u8, ids: (u8, u8), body: &[(usize, u8)]) -> MadEvent {
        let mut mad = [0; MAD_BYTES];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[17] = attribute;
        (mad[27], mad[31]) = ids;
        for (at, byte) in body {
            mad[24 + at] = *byte;
        }
        let (tap, dst) = if from == A { (OUT, B) } else { (OUT.opposite(), A) };
        let plain = event(EventKind::Management, 0x64, 0);
        MadEvent { event: Event { tap, src: from, dst, dest_qp: 1, ..plain }, mad }
    }

    #[test]
    fn connections_are_followed_over_both_directions_of_an_interface() {
        let mut story = Story::default();
        // QP 99, PSN 5, PMTU 1024, timeout 2^14; answered by QP 17. Another one nobody answers.
        let request = [(34, 99), (46, 5), (50, 0x30), (95, 14 << 3), (43, 0x18), (47, 6)];
        assert_eq!(story.management(&management(A, 0x10, (1, 0), &request)), []);
        let reply = management(B, 0x13, (2, 1), &[(14, 17), (22, 9), (27, 0x60)]);
        let ways = [PairKey::new(A, B, Qpn::new(17)), PairKey::new(B, A, Qpn::new(99))];
        assert_eq!(story.management(&reply), ways.map(|key| PathMtu { key, bytes: Some(1_024) }));
        assert_eq!(story.management(&reply), [], "it came again");
        story.management(&management(A, 0x10, (3, 0), &request));
        let there = FlowKey::new(OUT, A, B, Qpn::new(17), Space::Request);
        let back = FlowKey::new(OUT.opposite(), B, A, Qpn::new(99), Space::Request);
        story.keep_only(&[(there, Flow::default()), (back, Flow::default())]);
        story.tick(Nanos(11 * Nanos::SECOND.0), |_, _| {});
        let report = story.report(|_| String::new());
        let of = |qp| report.flows.iter().find(|f| f.dest_qp == qp).and_then(|f| f.connection.clone()).expect("terms");
        let (one, other) = (of(17), of(99));
        assert_eq!((one.sender_qp, one.starting_psn, one.path_mtu, one.rnr_retries), (99, 5, Some(1_024), 3));
        assert_eq!((other.sender_qp, other.starting_psn, other.ack_timeout_ns), (17, 9, Some(4_096 << 14)));
        assert!(
            report.findings.iter().any(|f| f.code == "connect-unanswered" && f.count == 1),
            "{:?}",
            report.findings
        );
        // The explainer knows the timeout: 10 ms of silence are none, 67 ms are.
        assert_eq!(story.flows[&there].explainer.ack_timeout().map(|t| t.exponent), Some(14));
        // The one who was asked ends it.
        let end = management(B, 0x15, (2, 1), &[(10, 99)]);
        assert_eq!(story.management(&end), [ways[1], ways[0]].map(|key| PathMtu { key, bytes: None }));
    }

    #[test]
    fn silences_are_summed_up_for_the_requests_and_long_ones_are_stalls() {
        let mut story = Story::default();
        let silence = |ms: u32, opcode, refused_qp| {
            let plain = event(EventKind::Silence, opcode, 7);
            Event { value: ms * 1_000, refused_qp, ..plain }
        };
        story.event(&silence(12, 0x07, 0), |_, _| {});
        // A response ends one of the requests that it answers.
        let answer = Event { tap: OUT.opposite(), src: B, dst: A, dest_qp: 99, ..silence(60, 0x11, 17) };
        story.event(&answer, |_, _| {});
        let report = story.report(|_| String::new());
        let [flow] = &report.flows[..] else { panic!("{report:?}") };
        let silences = flow.silences_ns.expect("silences");
        assert_eq!((flow.dest_qp, silences.count, silences.max), (17, 2, 60_000_000));
        assert!(report.findings.iter().any(|f| f.code == "stall" && f.count == 1), "{:?}", report.findings);
    }

    #[test]
    fn a_flood_of_disturbed_flows_is_bounded() {
        let mut story = Story::default();
        let mut tracker = Tracker::default();
        let opcode = Opcode::new(0x07).expect("WRITE MIDDLE");
        let mut observe = |psn| tracker.observe(&Observed::new(opcode, Psn::new(psn), 1_024, 0));
        observe(0);
        let gap = observe(9).bits();
        for qp in 0..2 * MOST_FLOWS as u32 {
            let plain = event(EventKind::Gap, opcode.get(), 9);
            story.event(&Event { dest_qp: qp, account: gap, ..plain }, |_, _| {});
        }
        assert_eq!(story.flows.len(), MOST_FLOWS);
    }
}
