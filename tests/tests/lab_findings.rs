//! What can be found live: for every finding a dialogue that has it, forged onto a wire, and the agent's word against that of
//! the inspector, which gets the same packets in a file. Needs root.

use std::{collections::BTreeMap, thread, time::Duration};

use roce_common::{
    abi::PairKey,
    units::{Addr, Qpn},
    wire::Opcode,
};
use roce_tests::{
    capture::Capture,
    forge::{self, Forger},
    lab::Pair,
    needs_root,
    rig::{self, eventually},
    run::AgentRole,
};
use roce_user::dataplane::Maps;
use serde_json::Value;

/// DSCP 26, ECT(0), and with other codepoints.
const DATA: u8 = 0x6a;
const NOT_ECT: u8 = 0x68;
const CE: u8 = 0x6b;
/// DSCP 48, ECT(0).
const CNP: u8 = 0xc2;
/// A packet passes the wire in less than this.
const TRAVEL: Duration = Duration::from_millis(3);

/// Two queue pairs that are connected.
struct Dialogue {
    requester: Forger,
    responder: Forger,
    opcode: Opcode,
    payload: usize,
    /// Queue pairs of who asks and who answers.
    qps: [u32; 2],
    /// PSNs are counted from here: from their PSNs the inspector knows which answers belong to which requests.
    base: u32,
}

impl Dialogue {
    /// Number `n`: with a source port of its own.
    fn new(pair: &Pair, maps: &mut Maps, n: u32) -> Self {
        let (a, b) = (&pair.a, &pair.b);
        let [from, to] = [a, b].map(|h| Addr::from(h.address(false)));
        let qps = [0x100 + n, 0x200 + n];
        maps.add_pair(PairKey::new(from, to, Qpn::new(qps[1])), qps[0]).unwrap();
        maps.add_pair(PairKey::new(to, from, Qpn::new(qps[0])), qps[1]).unwrap();
        let forger = |from, to| {
            let mut forger = Forger::new(from, to).unwrap();
            (forger.path.tos, forger.path.src_port) = (DATA, 50_000 + n as u16);
            forger
        };
        let (requester, responder) = (forger(a, b.address(false)), forger(b, a.address(false)));
        Self { requester, responder, opcode: Opcode::WRITE_MIDDLE, payload: 256, qps, base: n * 700_000 }
    }

    fn send(&mut self, psns: impl IntoIterator<Item = u32>) {
        for psn in psns {
            // A sender gives every packet another identification.
            self.requester.path.ip_id = self.requester.path.ip_id.wrapping_add(1);
            self.requester.send(&self.requester.packet(
                self.opcode,
                self.qps[1],
                self.base + psn,
                0,
                &[7; 512][..self.payload],
            ));
        }
        thread::sleep(TRAVEL);
    }

    fn answer(&mut self, psn: u32, syndrome: u8) {
        self.responder.send(&self.responder.acknowledge(self.qps[0], self.base + psn, syndrome));
        thread::sleep(TRAVEL);
    }

    fn ack(&mut self, psn: u32) {
        self.answer(psn, 0x1f);
    }

    /// A CNP for who asks.
    fn cnp(&mut self, tos: u8, change: impl FnOnce(&mut Vec<u8>)) {
        let data = self.responder.path.tos;
        self.responder.path.tos = tos;
        self.responder.send(&forge::altered(&self.responder.cnp(self.qps[0]), change));
        self.responder.path.tos = data;
        thread::sleep(TRAVEL);
    }

    /// Packets that are acknowledged as they pass.
    fn undisturbed(&mut self, psns: std::ops::Range<u32>) {
        let last = psns.end - 1;
        for psn in psns.step_by(5) {
            self.send(psn..(psn + 5).min(last + 1));
            self.ack((psn + 4).min(last));
        }
    }
}

/// A dialogue and the findings that it has; all others that it has are those of its markings.
type Case = (&'static [&'static str], fn(&mut Dialogue));

const CASES: &[Case] = &[
    (&["loss-before-tap"], |d| {
        d.undisturbed(0..40);
        d.send((40..60).chain(61..64));
        d.answer(60, 0x60);
        d.send(60..70);
        d.ack(69);
    }),
    (&["loss-after-tap"], |d| {
        d.undisturbed(0..40);
        d.send(40..60);
        d.answer(55, 0x60);
        d.send(55..70);
        d.ack(69);
    }),
    (&["loss-unexplained"], |d| {
        d.undisturbed(0..40);
        d.send([40, 42]);
        for psn in (43..1_643).step_by(160) {
            d.send(psn..psn + 160);
            d.ack(psn + 159);
        }
    }),
    (&["uc-loss"], |d| {
        d.opcode = Opcode::new(0x27).unwrap();
        d.send((0..20).chain(21..30));
        thread::sleep(Duration::from_millis(30));
        d.send(30..40);
    }),
    (&["timeout-retransmit", "stall"], |d| {
        d.undisturbed(0..40);
        d.send(40..60);
        thread::sleep(Duration::from_millis(100));
        d.send(40..70);
        d.ack(69);
    }),
    (&["spurious-retransmit"], |d| {
        d.undisturbed(0..40);
        d.send((40..60).chain(52..70));
        d.ack(69);
    }),
    (&["rnr-not-loss"], |d| {
        d.undisturbed(0..40);
        d.send(40..48);
        d.answer(47, 0x2c);
        thread::sleep(Duration::from_millis(6));
        d.send(47..60);
        d.ack(59);
    }),
    (&["nak-fatal"], |d| {
        d.undisturbed(0..40);
        d.send(40..48);
        d.answer(47, 0x62);
    }),
    (&["reordering"], |d| {
        d.undisturbed(0..40);
        d.send([40, 41, 43, 42, 44, 45, 46, 47, 48, 49]);
        d.ack(49);
    }),
    (&["reordering-naked", "reordering"], |d| {
        d.undisturbed(0..40);
        d.send([40, 41, 43, 42, 44, 45]);
        d.answer(42, 0x60);
        d.send(42..60);
        d.ack(59);
    }),
    (&["psn-discontinuity"], |d| {
        d.undisturbed(0..40);
        d.undisturbed(300_000..300_020);
    }),
    (&["qpn-reuse"], |d| {
        d.undisturbed(0..40);
        d.requester.path.src_port += 500;
        d.undisturbed(300_000..300_020);
    }),
    (&["mtu-segment-mismatch"], |d| {
        d.undisturbed(0..40);
        let middle = Opcode::new(0x0e).unwrap();
        let response = d.responder.packet(middle, d.qps[0], d.base + 35, 0, &[7; 512]);
        d.responder.send(&response);
        thread::sleep(TRAVEL);
    }),
    (&["not-ect"], |d| {
        d.requester.path.tos = NOT_ECT;
        d.undisturbed(0..40);
    }),
    (&["dscp-unmarked", "dscp-mixed-on-host"], |d| {
        (d.requester.path.tos, d.responder.path.tos) = (2, 2);
        d.undisturbed(0..40);
    }),
    (&["dscp-mixed-in-flow"], |d| {
        d.undisturbed(0..40);
        d.requester.path.tos = 0x2a;
        d.undisturbed(40..50);
    }),
    (&["dscp-asymmetric"], |d| {
        d.responder.path.tos = 0x2a;
        d.undisturbed(0..40);
    }),
    (&["ce-at-source"], |d| {
        d.requester.path.tos = CE;
        d.undisturbed(0..80);
        d.cnp(CNP, |_| {});
    }),
    (&["ce-without-cnp"], |d| {
        d.undisturbed(0..40);
        d.requester.path.tos = CE;
        d.undisturbed(40..50);
    }),
    (&["cnp-without-ce"], |d| {
        d.undisturbed(0..40);
        d.cnp(CNP, |_| {});
    }),
    (&["cnp-becn-missing", "cnp-dscp-unexpected"], |d| {
        d.requester.path.tos = CE;
        d.undisturbed(0..40);
        d.cnp(DATA, |frame| frame[46] = 0);
        d.cnp(CNP, |_| {});
    }),
];

/// What does not appear in the file, or only there: single frames that are compared with others, and what is no RoCEv2 packet,
/// which the capture of this test leaves out.
const NOT_COMPARED: [&str; 3] = ["malformed-on-4791", "not-roce-on-4791", "rocev1-present"];

/// Findings with their counts and whom they are about, without the tap: a file has one for both directions.
fn findings(report: &Value) -> BTreeMap<String, (u64, Vec<String>)> {
    let who = |f: &Value| {
        let mut all: Vec<String> = f["flows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| format!("{} > {} {} {} {}", s["src"], s["dst"], s["dest_qp"], s["space"], s["count"]))
            .collect();
        all.sort();
        all
    };
    let all = report["findings"].as_array().unwrap().iter();
    all.map(|f| (f["code"].as_str().unwrap().to_owned(), (f["count"].as_u64().unwrap(), who(f)))).collect()
}

#[test]
fn every_finding_of_flows_is_told_the_same_live_and_from_a_file() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let mut agent = rig::agent(&pair.b.port, AgentRole::Observe, &[]).unwrap();
    let capture = Capture::start(&pair.b.port).unwrap();
    let mut maps = rig::maps(&pair.b.port).unwrap();
    let mut want: Vec<&str> =
        vec!["cnp-unmatched", "one-port-many-qps", "malformed-on-4791", "not-roce-on-4791", "rocev1-present"];
    for (n, (codes, tell)) in (0..).zip(CASES) {
        tell(&mut Dialogue::new(&pair, &mut maps, n));
        want.extend(*codes);
    }
    let stray = Forger::new(&pair.a, pair.b.address(false)).unwrap();
    for _ in 0..5 {
        stray.send(&stray.cnp(0x999));
    }
    // Four queue pairs of a host, which sends nothing else, with one port.
    let forger = Forger::new(&pair.a, pair.b.address(true)).unwrap();
    for psn in 0..4 {
        for qp in 0x300..0x304 {
            forger.send(&forger.write(qp, qp * 0x1000 + psn, &[7; 32]));
        }
    }
    let malformed = forge::malformed(&Forger::new(&pair.a, pair.b.address(false)).unwrap());
    let mut others: Vec<_> = malformed.values().cloned().collect();
    let mut rocev1 = others[0][..60].to_vec();
    rocev1[12..14].copy_from_slice(&[0x89, 0x15]);
    others.extend([rocev1.clone(), rocev1]);
    others.iter().for_each(|frame| forger.send(frame));

    want.sort_unstable();
    want.dedup();
    let mut live = Value::Null;
    let all = || {
        thread::sleep(Duration::from_millis(300));
        live = rig::report(&pair.b.port, &["flows", "--json"]);
        let found = findings(&live);
        want.iter().all(|code| found.contains_key(*code))
    };
    let complete = eventually(Duration::from_secs(6), all);
    assert!(agent.stop().unwrap().success(), "{}", agent.stderr());
    let offline = rig::inspected(&pair.b.port, &capture.finish().unwrap());
    let (mut live, offline) = (findings(&live), findings(&offline));
    assert!(complete, "want {want:?}, live {live:#?}, offline {offline:#?}");
    let counts = NOT_COMPARED.map(|code| live.remove(code).map(|(count, _)| count));
    assert_eq!(counts, [Some(malformed.len() as u64 - 1), Some(1), Some(2)]);
    assert_eq!(live, offline);
    println!("{} findings, live as from a file: {:?}", live.len(), live.keys());
}
