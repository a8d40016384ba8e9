//! `roce inspect` on the captures of `tests/captures`, against answers that do not come from this program.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use pcap_file::pcap::PcapReader;
use roce_common::{
    psn::Psn,
    units::Ecn,
    wire::{Verdict, parse},
};
use roce_user::{
    export::{CaptureReport, FlowReport},
    facts::PathReport,
    findings::Code,
    inspect,
};
use serde_json::Value;

fn captures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures")
}

/// Names without extension of the files with this extension.
fn names(extension: &str) -> BTreeSet<String> {
    fs::read_dir(captures())
        .expect("tests/captures")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .map(|path| path.file_stem().expect("name").to_string_lossy().into_owned())
        .collect()
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} of {value}"))
}

/// Where `got` lacks or contradicts what `want` says; objects are compared by the fields of `want`.
fn differences(path: &str, want: &Value, got: &Value, out: &mut Vec<String>) {
    match (want, got) {
        (Value::Object(fields), Value::Object(_)) => {
            for (name, value) in fields {
                differences(&format!("{path}.{name}"), value, &got[name], out);
            }
        }
        _ if want == got => {}
        _ => out.push(format!("{path}: want {want}, got {got}")),
    }
}

fn identity(flow: &Value) -> (String, u64, u64, u64, u64) {
    (
        flow["space"].as_str().expect("space").to_owned(),
        number(flow, "dest_qp"),
        number(flow, "packets"),
        number(flow, "first_psn"),
        number(flow, "last_psn"),
    )
}

fn by_identity(report: &Value) -> Vec<Value> {
    let mut flows = report["flows"].as_array().expect("flows").clone();
    flows.sort_by_key(identity);
    flows
}

fn sum(counts: &Value) -> u64 {
    counts.as_object().expect("object").values().filter_map(Value::as_u64).sum()
}

#[test]
fn every_capture_gives_its_golden_answer() {
    let goldens = names("json");
    assert_eq!(goldens, names("pcap"), "a golden answer for every capture");
    assert!(goldens.len() >= 30);
    let mut wrong = Vec::new();
    for name in &goldens {
        let mut golden: Value =
            serde_json::from_slice(&fs::read(captures().join(format!("{name}.json"))).expect("golden")).expect("JSON");
        let report = inspect::report(&captures().join(format!("{name}.pcap"))).expect("report");
        let report = serde_json::to_value(report).expect("JSON");
        // Reasons the answer does not name must be zero.
        if sum(&golden["malformed"]) != sum(&report["malformed"]) {
            wrong.push(format!("{name}: malformed want {}, got {}", golden["malformed"], report["malformed"]));
        }
        let codes: BTreeSet<_> = report["findings"]
            .as_array()
            .expect("findings")
            .iter()
            .map(|f| f["code"].as_str().expect("code"))
            .collect();
        let story: BTreeSet<_> =
            golden["findings"].as_array().expect("codes").iter().map(|c| c.as_str().expect("code")).collect();
        if codes != story {
            wrong.push(format!("{name}: findings want {story:?}, got {codes:?}"));
        }
        let (want, got) = (by_identity(&golden), by_identity(&report));
        for rest in ["file", "flows", "findings"] {
            golden.as_object_mut().expect("object").remove(rest);
        }
        differences(name, &golden, &report, &mut wrong);
        let identities = |flows: &[Value]| flows.iter().map(identity).collect::<Vec<_>>();
        if identities(&want) != identities(&got) {
            wrong.push(format!("{name}: flows want {:?}, got {:?}", identities(&want), identities(&got)));
            continue;
        }
        for (want, got) in want.iter().zip(&got) {
            differences(&format!("{name} {:?}", identity(want)), want, got, &mut wrong);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_numbers_of_every_report_add_up() {
    const SUMMED: [&str; 11] = [
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
        "rnr_nak",
    ];
    for name in names("pcap") {
        let report = inspect::report(&captures().join(format!("{name}.pcap"))).expect("report");
        let r = serde_json::to_value(report).expect("JSON");
        let n = |field| number(&r, field);
        assert_eq!(n("schema"), 1);
        assert_eq!(n("frames"), n("rocev2") + n("rocev1") + n("not_roce") + sum(&r["malformed"]), "{name}");
        assert_eq!(sum(&r["ecn"]) + n("cnp"), n("rocev2"), "{name}");
        assert_eq!(sum(&r["dscp"]) + n("cnp"), n("rocev2"), "{name}");
        assert_eq!(n("missing_psns"), n("lost") + n("reordered") + n("open"), "{name}");
        let flows = r["flows"].as_array().expect("flows");
        for field in SUMMED {
            let total: u64 = flows.iter().map(|f| number(f, field)).sum();
            assert_eq!(n(field), total, "{name}: {field}");
        }
        assert_eq!(flows.iter().map(|f| number(f, "packets")).sum::<u64>() + n("cnp"), n("rocev2"), "{name}");
        for flow in flows {
            assert_eq!(sum(&flow["ecn"]), number(flow, "packets"), "{name}");
            assert_eq!(sum(&flow["dscp"]), number(flow, "packets"), "{name}");
            for field in ["tap", "src", "dst", "service"] {
                assert!(flow[field].as_str().is_some_and(|s| !s.is_empty()), "{name}: {field}");
            }
        }
    }
}

/// The drops are known: what is in the file before the switch and not in the one behind it.
#[test]
fn losses_are_the_frames_the_switch_dropped() {
    for (kind, drops) in [("write", 30), ("send", 23), ("read", 11)] {
        let report =
            |side: &str| inspect::report(&captures().join(format!("rxe-{kind}-loss1-{side}.pcap"))).expect("report");
        let (pre, post) = (report("pre"), report("post"));
        assert_eq!(pre.frames - post.frames, drops);
        assert_eq!(post.counters.lost + post.counters.lost_again, drops, "{kind}");
        assert_eq!((pre.counters.missing_psns, pre.counters.lost_again), (0, 0), "{kind}");
        assert_eq!(pre.counters.lost_after_tap, pre.counters.nak.psn_sequence, "{kind}");
        let found = |report: &CaptureReport, code: Code| {
            report.findings.iter().find(|f| f.code == code.name()).map_or(0, |f| f.count)
        };
        assert_eq!((found(&post, Code::LossBeforeTap), found(&post, Code::LossAfterTap)), (drops, 0), "{kind}");
        assert_eq!(found(&pre, Code::LossBeforeTap), 0, "{kind}");
        // Where there are no NAKs, the requester asks again.
        let asked = pre.counters.nak.psn_sequence + pre.counters.reasked;
        assert_eq!(found(&pre, Code::LossAfterTap), asked, "{kind}");
    }
}

/// The frames that findings name are what is said of them.
#[test]
fn evidence_names_the_right_frames() {
    let mut checked = 0;
    for name in names("pcap") {
        let path = captures().join(format!("{name}.pcap"));
        let mut reader = PcapReader::new(fs::File::open(&path).expect("capture")).expect("header");
        let mut frames = Vec::new();
        while let Some(frame) = reader.next_packet() {
            frames.push(frame.expect("frame").data.into_owned());
        }
        let packet = |number: u64| match parse(&frames[number as usize - 1][..]) {
            Verdict::Roce(packet) => packet,
            other => panic!("{name}: frame {number} is {other:?}"),
        };
        for evidence in inspect::report(&path).expect("report").findings.iter().flat_map(|f| &f.evidence) {
            let (number, psn) = (evidence.frame.expect("a number"), evidence.psn.map(Psn::new));
            let syndrome = |number| packet(number).aeth.map(|a| a.raw_syndrome);
            let passed = |psn| (1..number).any(|n| packet(n).bth.psn == psn && packet(n).dst == packet(number).dst);
            let right = match evidence.what {
                "NAK" => syndrome(number).is_some_and(|s| (0x60..=0x63).contains(&s)),
                "RNR NAK" => syndrome(number).is_some_and(|s| s & 0xe0 == 0x20),
                "repeat starts" => Some(packet(number).bth.psn) == psn,
                "gap" => psn.is_some_and(|psn| packet(number).bth.psn.diff(psn) > 0 && !passed(psn)),
                "first CE packet" => packet(number).ecn() == Ecn::Ce,
                _ => true,
            };
            assert!(right, "{name}: {evidence:?}");
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn paths_count_queue_pairs_and_source_ports() {
    let paths = |name: &str| inspect::report(&captures().join(name)).expect("report").paths;
    let of = |path: &PathReport| (path.src.to_string(), path.qps, path.src_ports);
    // By tshark: QPs 18 … 21 from ports 49476, 49513, 49552 and 49593.
    let four: Vec<_> = paths("rxe-write-4qp.pcap").iter().map(of).collect();
    assert_eq!(four, [("10.9.0.1".to_owned(), 4, 4)]);
    // Both sides ask; the management queue pair is not connected.
    let both: Vec<_> = paths("rxe-cm-rping.pcap").iter().map(of).collect();
    assert_eq!(both, [("10.9.0.1".to_owned(), 1, 1), ("10.9.0.2".to_owned(), 1, 1)]);
    assert!(paths("rxe-send-ud.pcap").is_empty());
}

#[test]
fn a_cnp_goes_to_the_flow_of_the_qp_it_names() {
    let report = inspect::report(&captures().join("fact-enizaksoy-ce-cnp.pcap")).expect("report");
    let with: Vec<_> = report.flows.iter().filter(|f| f.cnp > 0).collect();
    assert_eq!(with.len(), 1);
    assert_eq!((with[0].dest_qp, with[0].space, with[0].cnp), (0xd1d, "request", 1));
    // The answers to that queue pair come from where the CNP came from.
    let sent = |f: &FlowReport| f.facts.cnp_sent.unwrap_or(0);
    let by: Vec<_> = report.flows.iter().filter(|f| sent(f) > 0).map(|f| (f.dest_qp, f.space, sent(f))).collect();
    assert_eq!(by, [(0xd1e, "response", 1)]);
    // Nobody knows the flow: the capture has no data of that QP.
    let report = inspect::report(&captures().join("rxe-cnp.pcap")).expect("report");
    assert_eq!((report.cnp, report.flows.iter().map(|f| f.cnp).sum::<u64>()), (4, 0));
}
