//! Live is offline: one lossy dialogue through an agent's taps and into a capture file, and both tell the same of it.
//! Needs root.

use std::{collections::BTreeMap, thread, time::Duration};

use roce_common::{
    abi::PairKey,
    units::{Addr, Qpn},
};
use roce_tests::{
    capture::Capture,
    endpoint::{Clock, Connection, Host, Message, Op, Traffic, ack_timeout, connect},
    lab::{Bottleneck, Port, Star, run_roce, shape},
    needs_root, rig,
    run::AgentRole,
};
use serde_json::Value;

/// What schema 1 says of a flow that depends on the order of packets alone.
const COUNTERS: [&str; 19] = [
    "service",
    "packets",
    "bytes",
    "first_psn",
    "last_psn",
    "ecn",
    "dscp",
    "missing_psns",
    "lost",
    "lost_again",
    "open",
    "reordered",
    "duplicates",
    "retransmitted",
    "discontinuities",
    "lost_after_tap",
    "reasked",
    "nak",
    "rnr_nak",
];
/// What the kernel measures of a flow by the inspector's code.
const FACTS: [&str; 9] = [
    "opcodes",
    "messages",
    "message_sizes",
    "ce_share",
    "src_port",
    "src_port_changes",
    "retransmitted_bytes",
    "psns_per_ack",
    "credits",
];
/// Findings of episodes and counters that need nothing but the events that an agent hears. It does not hear of answers and
/// of READs that go well, so whether READ answers were lost behind this tap, say, only a file tells.
const FINDINGS: [&str; 4] = ["loss-before-tap", "reordering", "rnr-not-loss", "uc-loss"];

fn json_lines(port: &Port, args: &[&str]) -> Vec<Value> {
    let output = run_roce(&port.ns, args).unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// Flows by who sends to whom, with what is compared.
fn flows(report: &Value) -> BTreeMap<String, BTreeMap<&'static str, Value>> {
    let of = |f: &Value| {
        let name = format!("{} > {} QP {} {}", f["src"], f["dst"], f["dest_qp"], f["space"]);
        let counters = COUNTERS.iter().map(|c| (*c, f[*c].clone()));
        (name, counters.chain(FACTS.iter().map(|fact| (*fact, f["facts"][*fact].clone()))).collect())
    };
    report["flows"].as_array().unwrap().iter().map(of).collect()
}

fn found(report: &Value) -> BTreeMap<String, u64> {
    let all = report["findings"].as_array().unwrap().iter();
    all.map(|f| (f["code"].as_str().unwrap().to_owned(), f["count"].as_u64().unwrap())).collect()
}

fn comparable(report: &Value) -> BTreeMap<String, u64> {
    let mut found = found(report);
    found.retain(|code, _| FINDINGS.contains(&code.as_str()));
    found
}

fn sum(report: &Value, counter: &str) -> u64 {
    report["flows"].as_array().unwrap().iter().filter_map(|f| f[counter].as_u64()).sum()
}

#[test]
fn a_lossy_dialogue_is_told_the_same_live_and_from_a_file() {
    needs_root!();
    for ingress in ["xdp", "tc"] {
        let star = Star::new(1, 1500, None).unwrap();
        let (sender, receiver) = (&star.senders[0], &star.receiver);
        let mut agent = rig::agent(&receiver.port, AgentRole::Observe, &["--ingress", ingress]).unwrap();
        let capture = Capture::start(&receiver.port).unwrap();
        let clock = Clock::start();
        let (mut hs, mut hr) = (Host::start(&sender.port, clock).unwrap(), Host::start(&receiver.port, clock).unwrap());
        let connection = Connection {
            timeout: ack_timeout(12),
            traffic_a: Traffic::endless(Message::new(Op::Write, 40_000)),
            traffic_b: Traffic::endless(Message::new(Op::Read, 20_000)),
            ..Connection::default()
        };
        let (qs, qr) = connect((&mut hs, sender), (&mut hr, receiver), &connection).unwrap();
        // A NAK is understood once the pair is known; in a file it is always known.
        let maps = rig::maps(&receiver.port).unwrap();
        let [from, to] = [sender, receiver].map(|h| Addr::from(h.address(false)));
        rig::wait_paired(&maps, PairKey::new(from, to, Qpn::new(connection.qpn_b))).unwrap();
        rig::wait_paired(&maps, PairKey::new(to, from, Qpn::new(connection.qpn_a))).unwrap();
        shape(&star.receiver_port, Bottleneck { bits_per_sec: 60_000_000, queue: 12 }).unwrap();
        thread::sleep(Duration::from_millis(1_500));
        // What is going on comes to its end.
        star.switch().tc(&["qdisc del dev to-r root"]).unwrap();
        thread::sleep(Duration::from_millis(700));
        qs.kill();
        qr.kill();
        // The agent looks once a second.
        thread::sleep(Duration::from_millis(2_200));
        let live = rig::report(&receiver.port, &["flows", "--json"]);
        let findings = run_roce(&receiver.port.ns, &["flows", "--findings"]).unwrap();
        let text = String::from_utf8(findings.stdout).unwrap();
        assert!(findings.status.code() == Some(1) && text.contains("loss-before-tap (r): "), "{text}");
        let episodes = json_lines(&receiver.port, &["events", "--json", "--kind", "episode"]);
        assert!(episodes.iter().any(|e| e["cause"].is_string() && e["location"] == "before_tap"), "{episodes:?}");
        assert!(agent.stop().unwrap().success(), "{}", agent.stderr());
        let summary = agent.summary().unwrap();
        for lost in ["events_lost", "events_limited", "untracked", "flows_refused"] {
            let n = rig::counter(&summary, "ingress", lost) + rig::counter(&summary, "egress", lost);
            assert_eq!(n, 0, "{ingress}: {lost}");
        }
        assert_eq!(rig::control(&summary, "events_not_shown"), 0);

        let offline = rig::inspected(&receiver.port, &capture.finish().unwrap());

        for (report, what) in [(&live, "live"), (&offline, "offline")] {
            println!(
                "{ingress} {what}: packets {}, missing {}, lost {}, again {}, reasked {}; {:?}",
                sum(report, "packets"),
                sum(report, "missing_psns"),
                sum(report, "lost"),
                sum(report, "lost_again"),
                sum(report, "reasked"),
                found(report)
            );
        }
        assert!(sum(&offline, "lost") > 20 && sum(&offline, "reasked") > 0, "{ingress}: hardly anything was lost");
        let (live_flows, offline_flows) = (flows(&live), flows(&offline));
        assert_eq!(live_flows.len(), 4);
        assert_eq!(live_flows, offline_flows, "{ingress}");
        assert_eq!(comparable(&live), comparable(&offline), "{ingress}");
        assert!(found(&live).get("read-reasked").is_some_and(|n| *n > 0), "{ingress}");
        // Round trips: some of them are timed live, one at a time.
        let rtt = |report: &Value| -> BTreeMap<String, (u64, u64, u64)> {
            let requests = report["flows"].as_array().unwrap().iter().filter(|f| f["space"] == "request");
            let of = |f: &Value| {
                let n = |name: &str| f["facts"]["rtt_ns"][name].as_u64().unwrap_or(0);
                (f["dest_qp"].to_string(), (n("count"), n("min"), n("max")))
            };
            requests.map(of).collect()
        };
        let (some, all) = (rtt(&live), rtt(&offline));
        println!("{ingress} round trips: {some:?} of {all:?}");
        for (qp, (count, min, max)) in some {
            let (_, least, most) = all[&qp];
            // The two clocks stand apart by what the capture's socket takes.
            assert!(count > 0 && min + 1_000_000 > least && max < most + 5_000_000, "{ingress}: QP {qp}");
        }
        // Causes, places and how long repair took, too.
        let told = |f: &&Value| f["episodes"].as_array().is_some_and(|e| !e.is_empty() && e[0]["location"].is_string());
        let told: Vec<_> = live["flows"].as_array().unwrap().iter().filter(told).collect();
        assert!(
            told.len() >= 2 && told.iter().any(|f| f["facts"]["recovery_ns"]["gap_to_refill"].is_object()),
            "{live}"
        );
    }
}
