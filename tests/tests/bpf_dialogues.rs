//! The BPF side of the tracker against what is known without it: random dialogues, and the captures offline.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    time::Instant,
};

use aya::programs::{TestRun as _, TestRunOptions, Xdp};
use roce_common::{
    abi::{Counter, Direction, FlowKey, PairKey, Role, Tap},
    flow::Flow,
    pairing::{Evidence, RequestFlow, Response, SLACK, sole_match},
    units::Addr,
    wire::{self, Kind as PacketKind, Malformed, Packet, Service, Verdict},
};
use roce_tests::{
    dialogue::{End, Kind, Truth, Wire, dialogue},
    progtest::{Programs, config},
    replay,
};
use roce_user::{export::Counters, facts::FactsReport, inspect};
use serde_json::Value;

/// Interface index of the configuration.
const IFINDEX: u32 = 1;

fn programs() -> Programs {
    let mut p = Programs::load().expect("programs");
    let mut cfg = config(Role::Observe);
    // The events of a million packets have no reader here.
    cfg.events_per_tick = 0;
    p.maps.set_config(cfg).expect("configuration");
    p
}

fn pass(program: &Xdp, frame: &[u8]) {
    program
        .test_run(TestRunOptions { data_in: Some(frame), repeat: 1, ..TestRunOptions::new() })
        .expect("BPF_PROG_TEST_RUN");
}

fn flows(p: &Programs) -> HashMap<FlowKey, Flow> {
    p.maps.flows().into_iter().collect()
}

#[test]
fn the_programs_find_the_truth_in_a_million_packets() {
    let mut p = programs();
    let tap = Tap::new(IFINDEX, Direction::Ingress);
    let (mut packets, mut frame) = (0, Vec::new());
    let mut expected = Vec::new();
    let start = Instant::now();
    for (number, seed) in (1_000..1_030u64).enumerate() {
        for (k, kind) in Kind::ALL.into_iter().enumerate() {
            let d = dialogue(kind, seed, 6_000);
            let wire = Wire::numbered((number * Kind::ALL.len() + k) as u32);
            for from in [End::Requester, End::Responder] {
                let (key, sender) = wire.pair(from);
                p.maps.add_pair(key, sender.get()).expect("a pair");
            }
            let program = p.object.xdp("roce_xdp").expect("the program");
            for passed in &d.packets {
                wire.frame(passed, &mut frame).expect("a frame");
                pass(program, &frame);
            }
            packets += d.packets.len();
            expected.push((wire, kind, seed, d.requests, d.answers));
        }
    }
    println!("{packets} packets in {:.1} s", start.elapsed().as_secs_f64());
    assert!(packets > 1_000_000, "{packets}");
    let flows = flows(&p);
    let found = |wire: &Wire, from| flows.get(&wire.key(tap, from)).map_or_else(Truth::default, Truth::of);
    for (wire, kind, seed, requests, answers) in expected {
        assert_eq!(found(&wire, End::Requester), requests, "requests of {kind:?}, seed {seed}");
        assert_eq!(found(&wire, End::Responder), answers, "answers of {kind:?}, seed {seed}");
    }
}

/// What the controller would have paired: the rules of `pairing` over the whole capture.
fn pairs(packets: &[Packet]) -> Vec<(PairKey, u32)> {
    let of = |p: &Packet| PairKey::new(p.src, p.dst, p.bth.dest_qp);
    let connected = |p: &&Packet| p.bth.opcode.service() == Service::Rc && p.bth.dest_qp.get() > 1;
    let mut requests: BTreeMap<PairKey, RequestFlow> = BTreeMap::new();
    let mut evidence: BTreeMap<PairKey, Evidence<PairKey>> = BTreeMap::new();
    for p in packets.iter().filter(connected) {
        let (psn, src_port) = (p.bth.psn, p.src_port);
        if p.bth.opcode.kind() == PacketKind::Request {
            let fresh = RequestFlow {
                src: p.src,
                dst: p.dst,
                dest_qp: p.bth.dest_qp,
                src_port,
                first: psn,
                highest: psn,
                open_ended: false,
            };
            requests.entry(of(p)).or_insert(fresh).extend(psn, None, src_port);
        }
    }
    for p in packets.iter().filter(connected) {
        if p.bth.opcode.kind() == PacketKind::Response {
            let answer =
                Response { src: p.src, dst: p.dst, dest_qp: p.bth.dest_qp, src_port: p.src_port, psn: p.bth.psn };
            let outcome = sole_match(requests.iter().map(|(&k, &f)| (k, f)), &answer, SLACK);
            evidence.entry(of(p)).or_default().add(outcome, p.bth.psn);
        }
    }
    evidence.into_iter().filter_map(|(key, e)| Some((key, e.candidate()?.dest_qp().get()))).collect()
}

/// What the kernel keeps of a flow is what the inspector says of it, who knows more.
fn facts_are_equal(live: &FactsReport, offline: &FactsReport, name: &str) {
    let [live, offline] = [live, offline].map(|facts| serde_json::to_value(facts).expect("JSON"));
    let Value::Object(live) = live else { panic!("{live}") };
    assert!(live.len() >= 8, "{live:?}");
    for (fact, value) in live {
        assert_eq!(value, offline[&fact], "{name}: {fact}");
    }
}

#[test]
fn the_captures_count_the_same_live_and_offline() {
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures");
    let (mut p, mut compared) = (programs(), 0);
    for entry in captures.read_dir().expect("tests/captures") {
        let file = entry.expect("an entry").path();
        if file.extension().is_none_or(|e| e != "pcap") {
            continue;
        }
        let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
        let report = inspect::report(&file).expect("a report");
        let frames = replay::read(&file).expect("frames");
        let packets: Vec<Packet> = frames
            .iter()
            .filter_map(|f| match wire::parse(&f.bytes[..]) {
                Verdict::Roce(packet) => Some(packet),
                _ => None,
            })
            .collect();
        for (key, sender) in pairs(&packets) {
            p.maps.add_pair(key, sender).expect("a pair");
        }
        let before = p.maps.counters(Direction::Ingress).expect("counters");
        let program = p.object.xdp("roce_xdp").expect("the program");
        for frame in &frames {
            pass(program, &frame.bytes);
        }
        let after = p.maps.counters(Direction::Ingress).expect("counters");
        let grown = |c: Counter| after[c as usize] - before[c as usize];
        let seen = [
            Counter::Rocev2,
            Counter::Rocev1,
            Counter::NotRoce,
            Counter::Cnp,
            Counter::NotEct,
            Counter::Ect1,
            Counter::Ect0,
            Counter::Ce,
        ];
        let ecn = &report.ecn;
        let want = [report.rocev2, report.rocev1, report.not_roce, report.cnp, ecn.not_ect, ecn.ect1, ecn.ect0, ecn.ce];
        assert_eq!(seen.map(grown), want, "{name}: {seen:?}");
        let malformed: BTreeMap<_, _> =
            Malformed::ALL.into_iter().map(|r| (r.name(), grown(Counter::of_malformed(r)))).collect();
        assert_eq!(malformed, report.malformed, "{name}");
        let mut live: Vec<_> = flows(&p).into_iter().collect();
        assert_eq!(live.len(), report.flows.len(), "{name}");
        for (key, _) in p.maps.pairs() {
            p.maps.remove_pair(key).expect("a pair removed");
        }
        for (key, flow) in live.drain(..) {
            p.maps.remove_flow(&key).expect("a flow removed");
            let offline = report
                .flows
                .iter()
                .find(|f| {
                    (Addr::from(f.src), Addr::from(f.dst), f.dest_qp, f.space)
                        == (key.src, key.dst, key.dest_qp().get(), key.space().name())
                })
                .expect("the same flow");
            let live = Counters::of(&flow);
            assert_eq!(live, offline.counters, "{name} {key:?}");
            assert_eq!(
                (flow.packets, flow.bytes, flow.first_psn, flow.last_psn),
                (offline.packets, offline.bytes, offline.first_psn, offline.last_psn),
                "{name} {key:?}"
            );
            facts_are_equal(&FactsReport::new(&flow, None), &offline.facts, &name);
            compared += 1;
        }
    }
    assert!(compared > 60, "{compared} flows");
}
