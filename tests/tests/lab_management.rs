//! Connection management on the wire: what two hosts agree on, what nobody answers and what is refused is told the same live
//! and from a file, and the path MTU reaches the tracker. Needs root.

use std::{thread, time::Duration};

use roce_common::{
    abi::PairKey,
    units::{Addr, Qpn},
    wire::Opcode,
};
use roce_tests::{
    capture::Capture,
    endpoint::{Clock, Connection, Host, Message, Op, Traffic, ack_timeout, connect, loss},
    forge::Forger,
    lab::Pair,
    management::{Management, Terms},
    needs_root,
    oracle::tshark_management,
    rig::{self, eventually},
    run::AgentRole,
};
use serde_json::{Value, json};

const TERMS: Terms = Terms {
    ids: [0x0102_0304, 0xa0b0_c0d0],
    qpns: [0x11, 0x2a],
    psns: [0x00_a5c3, 0xff_ff40],
    rnr_retries: [3, 6],
    pmtu: 512,
    ack_timeout: 15,
    retries: 5,
};

/// A flow of a report.
fn flow<'a>(report: &'a Value, qp: u32, space: &str) -> &'a Value {
    let mut flows = report["flows"].as_array().unwrap().iter();
    flows.find(|f| f["dest_qp"] == qp && f["space"] == space).unwrap_or_else(|| panic!("{qp} {space}: {report}"))
}

fn finding<'a>(report: &'a Value, code: &str) -> Option<&'a Value> {
    report["findings"].as_array().unwrap().iter().find(|f| f["code"] == code)
}

/// How often a code was found, the sentences of its evidence, and between whom.
fn found(report: &Value, code: &str) -> Value {
    let Some(f) = finding(report, code) else { return Value::Null };
    let evidence: Vec<_> = f["evidence"].as_array().unwrap().iter().map(|e| &e["what"]).collect();
    json!([f["count"], evidence, f["flows"][0]["src"], f["flows"][0]["dst"]])
}

#[test]
fn a_managed_dialogue_is_told_the_same_live_and_from_a_file() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let (a, b) = (&pair.a, &pair.b);
    let mut agent = rig::agent(&b.port, AgentRole::Observe, &[]).unwrap();
    let capture = Capture::start(&b.port).unwrap();
    let management = Management::new(a, b, TERMS).unwrap();
    management.connect().unwrap();
    let maps = rig::maps(&b.port).unwrap();
    let [from, to] = [a, b].map(|h| Addr::from(h.address(false)));
    let ways = [PairKey::new(from, to, Qpn::new(TERMS.qpns[1])), PairKey::new(to, from, Qpn::new(TERMS.qpns[0]))];
    assert!(eventually(Duration::from_secs(3), || ways.iter().all(|way| maps.path_mtu(*way) == Some(512))));

    let clock = Clock::start();
    let (mut ha, mut hb) = (
        Host::start_lossy(&a.port, clock, Box::new(loss(0.02, 7))).unwrap(),
        Host::start_lossy(&b.port, clock, Box::new(loss(0.02, 8))).unwrap(),
    );
    let connection = Connection {
        qpn_a: TERMS.qpns[0],
        qpn_b: TERMS.qpns[1],
        psn_a: TERMS.psns[0],
        psn_b: TERMS.psns[1],
        pmtu: TERMS.pmtu,
        timeout: ack_timeout(TERMS.ack_timeout.into()),
        traffic_a: Traffic::times(Message::new(Op::Read, 20_000), 60),
        traffic_b: Traffic::times(Message::new(Op::Write, 9_000), 40),
        ..Connection::default()
    };
    let (qa, qb) = connect((&mut ha, a), (&mut hb, b), &connection).unwrap();
    assert!([&qa, &qb].iter().all(|qp| qp.wait_done(Duration::from_secs(20))), "{:?} {:?}", qa.stats(), qb.stats());
    // The agent looks once a second.
    thread::sleep(Duration::from_millis(2_200));
    management.disconnect().unwrap();
    assert!(eventually(Duration::from_secs(3), || ways.iter().all(|way| maps.path_mtu(*way).is_none())));
    let live = rig::report(&b.port, &["flows", "--json"]);
    assert!(agent.stop().unwrap().success(), "{}", agent.stderr());

    let dir = tempfile::tempdir().unwrap();
    let seen = capture.finish().unwrap();
    let offline = rig::inspected(&b.port, &seen);
    for (side, other) in [(0, 1), (1, 0)] {
        // What the packets to the other side are sent with; its own receiver says how often after RNR NAKs.
        let want = json!({
            "sender_qp": TERMS.qpns[side],
            "starting_psn": TERMS.psns[side],
            "path_mtu": TERMS.pmtu,
            "ack_timeout_ns": 4_096u64 << TERMS.ack_timeout,
            "retries": TERMS.retries,
            "rnr_retries": TERMS.rnr_retries[other],
        });
        for space in ["request", "response"] {
            let (live, offline) = [&live, &offline].map(|r| flow(r, TERMS.qpns[other], space)).into();
            assert_eq!((&live["facts"]["connection"], &offline["facts"]["connection"]), (&want, &want), "{space}");
            for counter in ["packets", "missing_psns", "lost", "lost_again", "duplicates", "retransmitted", "reasked"] {
                assert_eq!(live[counter], offline[counter], "{counter} of {side} {space}");
            }
            println!("{side} {space}: {} packets, {} again", live["packets"], live["retransmitted"]);
        }
        assert_eq!(flow(&live, TERMS.qpns[other], "request")["first_psn"], TERMS.psns[side]);
    }
    assert!(flow(&live, TERMS.qpns[1], "request")["reasked"].as_u64() > Some(0), "no READ was asked for again");
    for code in ["connect-unanswered", "connect-rejected"] {
        assert_eq!([found(&live, code), found(&offline, code)], [Value::Null, Value::Null]);
    }
    let Some(messages) = tshark_management(&seen, dir.path()).unwrap() else { return };
    let n = |value: u32| Some(value);
    let [qa, qb] = TERMS.qpns;
    let none = [None; 11];
    let with = |from: usize, values: &[Option<u32>]| {
        let mut row = none;
        row[from..from + values.len()].copy_from_slice(values);
        row.to_vec()
    };
    // 512 bytes have the code 2.
    let request = [n(qa), n(TERMS.psns[0]), n(2), n(TERMS.ack_timeout.into()), n(TERMS.retries.into()), n(3)];
    let reply = [n(qb), n(TERMS.psns[1]), n(6)];
    let empty = none.to_vec();
    assert_eq!(messages, [with(0, &request), with(6, &reply), empty.clone(), with(10, &[n(qb)]), empty]);
}

#[test]
fn a_path_mtu_that_no_packet_shows_gives_the_spans_of_reads() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let (a, b) = (&pair.a, &pair.b);
    let mut agent = rig::agent(&b.port, AgentRole::Observe, &[]).unwrap();
    let capture = Capture::start(&b.port).unwrap();
    Management::new(a, b, TERMS).unwrap().connect().unwrap();
    let maps = rig::maps(&b.port).unwrap();
    let [from, to] = [a, b].map(|h| Addr::from(h.address(false)));
    let way = PairKey::new(from, to, Qpn::new(TERMS.qpns[1]));
    assert!(eventually(Duration::from_secs(3), || maps.path_mtu(way) == Some(512)));
    // READs of 300 PSNs whose answers take another way. Three requests of one PSN are missing behind the first.
    let forger = Forger::new(a, b.address(false)).unwrap();
    let unmanaged = TERMS.qpns[1] + 1;
    for qp in [TERMS.qpns[1], unmanaged] {
        for psn in [100, 403, 703, 1_003] {
            forger.send(&forger.packet(Opcode::READ_REQUEST, qp, psn, 300 * 512, &[]));
        }
    }
    let flows_of = |report: &Value| {
        let of = |qp| flow(report, qp, "request");
        [of(TERMS.qpns[1]), of(unmanaged)].map(|f| (f["packets"].as_u64(), f["missing_psns"].as_u64()))
    };
    let mut live = Value::Null;
    let all = || {
        live = rig::report(&b.port, &["flows", "--json"]);
        live["flows"].as_array().unwrap().iter().filter(|f| f["packets"] == 4).count() == 2
    };
    assert!(eventually(Duration::from_secs(3), all));
    assert!(agent.stop().unwrap().success(), "{}", agent.stderr());
    let offline = rig::inspected(&b.port, &capture.finish().unwrap());
    // Nobody told of the other one: a READ of at least 38 PSNs of 4,096 bytes, until the place of a later one teaches more.
    assert_eq!(flows_of(&live), [(Some(4), Some(3)), (Some(4), Some(303 - 38))]);
    assert_eq!(flows_of(&offline), flows_of(&live));
}

#[test]
fn what_is_refused_and_what_nobody_answers_is_found_live_as_in_a_file() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let (a, b) = (&pair.a, &pair.b);
    let mut agent = rig::agent(&b.port, AgentRole::Observe, &[]).unwrap();
    let capture = Capture::start(&b.port).unwrap();
    let of = |number: u32| Terms { ids: [number, number + 0x100], qpns: [number, number + 0x100], ..TERMS };
    for number in [0x11, 0x12, 0x13] {
        let management = Management::new(a, b, of(number)).unwrap();
        management.request().unwrap();
        match number {
            // It is asked for once more, and nobody answers.
            0x11 => management.request().unwrap(),
            0x12 => management.reject(8).unwrap(),
            _ => {
                management.reply().unwrap();
                management.ready().unwrap();
            }
        }
    }
    let mut live = Value::Null;
    let both = || {
        thread::sleep(Duration::from_millis(400));
        live = rig::report(&b.port, &["flows", "--json"]);
        finding(&live, "connect-unanswered").is_some() && finding(&live, "connect-rejected").is_some()
    };
    assert!(eventually(Duration::from_secs(16), both), "{live}");
    assert!(agent.stop().unwrap().success(), "{}", agent.stderr());
    let dir = tempfile::tempdir().unwrap();
    let seen = capture.finish().unwrap();
    let offline = rig::inspected(&b.port, &seen);
    let [from, to] = [a, b].map(|h| h.address(false).to_string());
    for (code, what) in [
        ("connect-unanswered", "REQ without REP or REJ"),
        ("connect-rejected", "REJ: invalid service ID, nobody listens (8)"),
    ] {
        let want = json!([1, [what], from, to]);
        assert_eq!([found(&live, code), found(&offline, code)], [want.clone(), want], "{code}");
    }
    let Some(messages) = tshark_management(&seen, dir.path()).unwrap() else { return };
    let reasons: Vec<_> = messages.iter().filter_map(|m| m[9]).collect();
    assert_eq!((messages.len(), reasons), (7, vec![8]));
}
