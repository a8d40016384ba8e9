//! What `roce inspect` prints, draws and writes, on captures whose story is known.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};
use roce_user::inspect::{self, InspectArgs};
use serde_json::Value;

fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures").join(name)
}

fn args(files: &[PathBuf]) -> InspectArgs {
    InspectArgs::of(files)
}

fn output(args: &InspectArgs) -> String {
    let mut out = Vec::new();
    inspect::run(args, &mut out).expect("report");
    String::from_utf8(out).expect("UTF-8")
}

fn json(args: InspectArgs) -> Vec<Value> {
    output(&InspectArgs { json: true, ..args }).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

/// The frames of a capture, changed, as a new file.
fn rewrite(from: &str, to: &Path, mut change: impl FnMut(usize, Vec<u8>) -> Option<Vec<u8>>) {
    let mut reader = PcapReader::new(fs::File::open(capture(from)).expect("capture")).expect("header");
    let mut writer = PcapWriter::new(fs::File::create(to).expect("file")).expect("header");
    let mut number = 0;
    while let Some(packet) = reader.next_packet() {
        let packet = packet.expect("packet");
        number += 1;
        if let Some(bytes) = change(number, packet.data.into_owned()) {
            let len = bytes.len() as u32;
            writer.write_packet(&PcapPacket::new_owned(packet.timestamp, len, bytes)).expect("write");
        }
    }
}

#[test]
fn a_line_per_packet_says_what_it_was() {
    let file = capture("fact-clos-gobackn-34-missing.pcap");
    let lines = json(InspectArgs { packets: true, ..args(std::slice::from_ref(&file)) });
    let (report, packets) = lines.split_last().expect("lines");
    assert_eq!(report["frames"], packets.len());
    let verdict = |psn: u64| -> Vec<&str> {
        let of = packets
            .iter()
            .filter(|p| p["psn"].as_u64().is_some_and(|n| n % 100 == psn) && p["operation"] != "ACKNOWLEDGE");
        of.map(|p| p["verdict"].as_str().expect("a verdict")).collect()
    };
    // … 33 35, NAK 34, then 34 35 36 37.
    assert_eq!(verdict(33), ["in order"]);
    assert_eq!(verdict(34), ["fills a gap"]);
    assert_eq!(verdict(35), ["gap: 1 PSN before it is missing", "duplicate"]);
    assert_eq!(verdict(36), ["in order"]);
    assert!(packets.iter().any(|p| p["verdict"] == "NAK: psn sequence" && p["syndrome"] == 0x60));
    // The same for people, one line each.
    let text = output(&InspectArgs { packets: true, ..args(&[file]) });
    let lines: Vec<_> = text.lines().take_while(|l| !l.is_empty()).collect();
    assert_eq!(lines.len(), packets.len());
    assert!(lines.iter().any(|l| l.ends_with(": fills a gap")), "{text}");
    // What is not RoCEv2 has a line too.
    let text = output(&InspectArgs { packets: true, ..args(&[capture("fact-port4791-not-roce.pcap")]) });
    assert_eq!(text.lines().take_while(|l| !l.is_empty()).filter(|l| l.contains(": malformed: ")).count(), 6, "{text}");
}

#[test]
fn patterns_choose_what_is_shown_and_not_what_is_counted() {
    let file = capture("rxe-write-4qp.pcap");
    let flows = vec!["qpn=19,space=request".parse().expect("a pattern")];
    let report = &json(InspectArgs { flows: flows.clone(), ..args(std::slice::from_ref(&file)) })[0];
    assert_eq!((report["rocev2"].as_u64(), report["flows"].as_array().map(Vec::len)), (Some(1360), Some(1)));
    assert_eq!(report["flows"][0]["packets"], 320);
    let lines = json(InspectArgs { flows, packets: true, ..args(&[file]) });
    assert_eq!(lines.len(), 321);
    // The NAKs that explain the requests travel in the other flow.
    let file = capture("rxe-write-loss1-pre.pcap");
    let flows = vec!["space=request".parse().expect("a pattern")];
    let report = &json(InspectArgs { flows, ..args(&[file]) })[0];
    assert_eq!((&report["lost_after_tap"], &report["nak"]["psn_sequence"]), (&15.into(), &0.into()));
}

#[test]
fn times_choose_what_is_read() {
    let whole = args(&[capture("rxe-write-rc.pcap")]);
    let times: Vec<u64> =
        json(InspectArgs { packets: true, ..whole.clone() }).iter().filter_map(|l| l["time_ns"].as_u64()).collect();
    let (start, middle) = (times[0], times[500]);
    let after = middle - start;
    let of = |from: Option<String>, to: Option<String>| {
        let parse = |t: Option<String>| t.map(|t| t.parse().expect("a time"));
        json(InspectArgs { from: parse(from), to: parse(to), ..whole.clone() })[0]["frames"].as_u64().expect("frames")
    };
    let before = times.iter().filter(|&&t| t < middle).count() as u64;
    let seconds = format!("{}.{:09}", middle / 1_000_000_000, middle % 1_000_000_000);
    assert_eq!(of(None, Some(format!("+{after}ns"))), before);
    assert_eq!(of(Some(format!("+{after}ns")), None), 1020 - before);
    assert_eq!(of(Some(seconds.clone()), None), 1020 - before);
    assert_eq!(of(Some(seconds.clone()), Some(seconds)), 0);
}

/// The drops are known: what is in the file before the switch and not in the one behind it.
#[test]
fn two_taps_tell_what_was_lost_between_them() {
    for (kind, drops, space) in [("write", 30, "request"), ("send", 23, "request"), ("read", 11, "response")] {
        let [pre, post] = ["pre", "post"].map(|side| capture(&format!("rxe-{kind}-loss1-{side}.pcap")));
        // The order in which they are given decides only where nothing else does.
        for files in [[pre.clone(), post.clone()], [post.clone(), pre.clone()]] {
            let between = InspectArgs { between: true, ..args(&files) };
            let report = json(between.clone()).remove(0);
            assert_eq!((&report["lost_between"], &report["told_between"]), (&drops.into(), &drops.into()), "{kind}");
            let flows = report["flows"].as_array().expect("flows");
            assert_eq!(flows.len(), 2, "{kind}");
            for flow in flows {
                let lost = if flow["space"] == space { drops } else { 0 };
                assert_eq!((&flow["lost_between"], &flow["same_span"]), (&lost.into(), &true.into()), "{kind}: {flow}");
                let e = &flow["episodes"];
                assert_eq!((&e["before_both"], &e["unknown"]), (&0.into(), &0.into()), "{kind}: {flow}");
                // Lost READ answers are asked for again: that is an episode of the requests too, of which none was lost.
                if lost > 0 {
                    assert!(e["between"].as_u64() > Some(0), "{kind}: {flow}");
                    assert_eq!(flow["first"], pre.display().to_string(), "{kind}");
                }
            }
            let text = output(&between);
            assert!(text.contains(&format!("lost between the two taps: {drops} packets; {drops} by")), "{text}");
        }
    }
    let wrong = InspectArgs { between: true, ..args(&[capture("rxe-write-rc.pcap")]) };
    let error = inspect::run(&wrong, &mut Vec::new()).expect_err("one file");
    assert!(error.to_string().contains("two files"), "{error}");
}

#[test]
fn findings_of_flows_that_were_not_asked_for_are_left_out() {
    let found = |pattern: &str| {
        let flows = vec![pattern.parse().expect("a pattern")];
        let report = json(InspectArgs { flows, ..args(&[capture("rxe-write-loss1-post.pcap")]) }).remove(0);
        let all = report["findings"].as_array().expect("findings").clone();
        all.iter().map(|f| f["code"].as_str().expect("code").to_owned()).collect::<Vec<_>>()
    };
    assert!(found("space=request").contains(&"loss-before-tap".to_owned()));
    assert!(!found("space=response").contains(&"loss-before-tap".to_owned()));
    assert_eq!(found("src=10.99.0.1"), Vec::<String>::new());
}

#[test]
fn joined_files_are_one_capture() {
    let dir = tempfile::tempdir().expect("directory");
    let name = "rxe-write-loss1-post.pcap";
    let parts = [dir.path().join("a"), dir.path().join("b"), dir.path().join("c")];
    for (i, part) in parts.iter().enumerate() {
        rewrite(name, part, |number, bytes| (number / 1_000 == i).then_some(bytes));
    }
    let want = &mut json(args(&[capture(name)]))[0];
    let [got] = &mut json(InspectArgs { join: true, ..args(&parts) })[..] else { panic!("one report") };
    assert_eq!(json(args(&parts)).len(), 3, "apart otherwise");
    for report in [&mut *want, &mut *got] {
        report.as_object_mut().expect("object").remove("file");
    }
    assert_eq!(got, want);
}

#[test]
fn rows_of_csv_have_the_cells_of_the_header() {
    let text =
        output(&InspectArgs { csv: true, ..args(&[capture("rxe-write-loss1-post.pcap"), capture("rxe-cnp.pcap")]) });
    let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split(',').collect()).collect();
    assert_eq!(rows.len(), 1 + 2 + 1, "one header");
    assert!(rows.iter().all(|r| r.len() == rows[0].len()));
    let column = |name| rows[0].iter().position(|c| *c == name).expect("a column");
    assert_eq!((rows[1][column("lost")], rows[1][column("retransmitted")]), ("17", "1101"));
    assert_eq!(rows[2][column("nak_psn_sequence")], "15");
}

/// `inner` in a tunnel: Ethernet, IPv4 with this ToS, UDP, the tunnel's header.
fn wrap(inner: &[u8], tos: u8, port: u16, header: &[u8]) -> Vec<u8> {
    let udp_len = (8 + header.len() + inner.len()) as u16;
    let mut out = vec![2; 12];
    out.extend([0x08, 0x00, 0x45, tos]);
    out.extend((20 + udp_len).to_be_bytes());
    out.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 172, 16, 0, 1, 172, 16, 0, 2, 0xc0, 0]);
    out.extend(port.to_be_bytes());
    out.extend(udp_len.to_be_bytes());
    out.extend([0, 0]);
    out.extend(header);
    out.extend(inner);
    out
}

#[test]
fn tunnels_are_looked_into_and_their_networks_told_apart() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("tunnel.pcap");
    let name = "rxe-write-ecn-pre.pcap";
    // Network 5 by VXLAN, the same traffic in network 6 by GENEVE with options; every tenth outer packet carries CE.
    rewrite(name, &path, |number, bytes| {
        Some(wrap(&bytes, if number % 10 == 0 { 3 } else { 2 }, 4789, &[8, 0, 0, 0, 0, 0, 5, 0]))
    });
    let both = dir.path().join("both.pcap");
    let mut all = fs::read(&path).expect("file");
    rewrite(name, &both, |_, bytes| Some(wrap(&bytes, 0, 6081, &[1, 0, 0x65, 0x58, 0, 0, 6, 0, 1, 1, 1, 1])));
    all.extend(&fs::read(&both).expect("file")[24..]);
    fs::write(&both, all).expect("write");
    let closed = &json(args(std::slice::from_ref(&both)))[0];
    assert_eq!((&closed["rocev2"], &closed["not_roce"]), (&0.into(), &2040.into()));
    assert!(closed.get("tunnels").is_none());
    let open = &json(InspectArgs { decap: true, ..args(&[both]) })[0];
    assert_eq!((&open["rocev2"], &open["icrc"]["valid"]), (&2040.into(), &2040.into()));
    assert_eq!((&open["tunnels"]["vxlan"], &open["tunnels"]["geneve"]), (&1020.into(), &1020.into()));
    assert_eq!(open["tunnels"]["outer_ecn"]["ce"], 102);
    // A receiver sees CE where the inner packet can carry it, and it can: ECT(0).
    assert_eq!((&open["ecn"]["ce"], &open["ecn"]["ect0"]), (&102.into(), &1938.into()));
    assert_eq!((&open["missing_psns"], &open["duplicates"]), (&0.into(), &0.into()));
    let taps: Vec<_> =
        open["flows"].as_array().expect("flows").iter().map(|f| f["tap"].as_str().expect("tap")).collect();
    assert_eq!(taps, ["0/vxlan 5", "0/vxlan 5", "0/geneve 6", "0/geneve 6"]);
}

#[test]
fn the_plot_shows_what_happened_by_kind() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("plot.svg");
    output(&InspectArgs {
        plot: Some(path.clone()),
        ..args(&[capture("rxe-write-loss1-post.pcap"), capture("fact-enizaksoy-ce-cnp.pcap")])
    });
    let svg = fs::read_to_string(&path).expect("the plot");
    for part in ["QP 27 request", "missing (17)", "sent again (1084)", "sequence NAK (15)", "CE (6)", "CNP (1)"] {
        assert!(svg.contains(part), "{part}");
    }
    // One panel for each flow with a story: acknowledgements alone have none.
    assert_eq!(svg.matches("class=\"title\"").count(), 2);
}

/// The packet with a wrong ICRC, what stands around it, and the comment; tshark reads it where it is installed.
#[test]
fn evidence_is_written_with_comments() {
    let dir = tempfile::tempdir().expect("directory");
    let (bad, out) = (dir.path().join("bad.pcap"), dir.path().join("evidence.pcapng"));
    rewrite("rxe-write-rc.pcap", &bad, |number, mut bytes| {
        if number == 500 {
            bytes[100] ^= 1;
        }
        Some(bytes)
    });
    let found = inspect::run(
        &InspectArgs { write_findings: Some(out.clone()), flows: Vec::new(), ..args(std::slice::from_ref(&bad)) },
        &mut Vec::new(),
    );
    assert!(found.expect("report"), "a wrong ICRC is a finding");
    let times = |file: &PathBuf| -> Vec<u64> {
        let lines = json(InspectArgs { packets: true, ..args(std::slice::from_ref(file)) });
        lines.iter().filter_map(|l| l["time_ns"].as_u64()).collect()
    };
    let (all, kept) = (times(&bad), times(&out));
    assert!(all[491..508].iter().all(|t| kept.contains(t)), "the packet and eight on either side");
    assert!(kept.len() < 100 && kept.is_sorted(), "and not everything");
    assert_eq!(inspect::report(&out).expect("the extract is a capture").icrc.invalid, 1);
    let text = String::from_utf8_lossy(&fs::read(&out).expect("file")).into_owned();
    assert!(text.contains("bad-icrc: ") && text.contains("packet 500 of "), "a comment");
    match Command::new("tshark")
        .args(["-n", "-T", "fields", "-e", "frame.number", "-e", "frame.comment", "-r"])
        .arg(&out)
        .output()
    {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let commented: Vec<_> = text.lines().filter(|l| l.contains("bad-icrc")).collect();
            assert_eq!(commented.len(), 1, "{text}");
            assert!(commented[0].contains("PSN ") && commented[0].contains("packet 500 of "), "{text}");
        }
        Err(error) => println!("SKIP reading the comments with tshark: it cannot be run ({error})"),
    }
}

fn roce(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roce"));
    command.arg("inspect").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn stdin_is_shown_as_it_comes_and_reported_at_its_end() {
    let bytes = fs::read(capture("fact-psn-wrap.pcap")).expect("capture");
    let mut child = roce(&["--packets", "-"]).spawn().expect("roce");
    let mut stdin = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    // Half of the file: its packets are shown while the writer goes on.
    stdin.write_all(&bytes[..bytes.len() / 2]).expect("write");
    let first = lines.next().expect("a line").expect("UTF-8");
    assert!(first.contains("first of its flow"), "{first}");
    stdin.write_all(&bytes[bytes.len() / 2..]).expect("write");
    drop(stdin);
    let rest: Vec<_> = lines.map(|l| l.expect("UTF-8")).collect();
    assert!(rest.iter().any(|l| l.contains("12 frames")), "{rest:?}");
    assert_eq!(child.wait().expect("end").code(), Some(0));
}

#[test]
fn ctrl_c_on_stdin_prints_the_report_so_far() {
    let bytes = fs::read(capture("fact-psn-wrap.pcap")).expect("capture");
    let mut child = roce(&["--json", "--packets", "-"]).spawn().expect("roce");
    let mut stdin = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    // In the middle of a packet.
    stdin.write_all(&bytes[..bytes.len() - 30]).expect("write");
    for _ in 0..11 {
        lines.next().expect("a line").expect("UTF-8");
    }
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("signal");
    let report: Value = serde_json::from_str(&lines.next().expect("the report").expect("UTF-8")).expect("JSON");
    assert_eq!((&report["file"], &report["frames"]), (&"-".into(), &11.into()));
    assert!(report.get("incomplete").is_none(), "{report}");
    // The writer is still there.
    assert_eq!(child.wait().expect("end").code(), Some(0));
    drop(stdin);
}

#[test]
fn exit_codes_tell_findings_from_failures() {
    let dir = tempfile::tempdir().expect("directory");
    let good = capture("fact-psn-wrap.pcap");
    let cut = dir.path().join("cut.pcap");
    let bytes = fs::read(&good).expect("capture");
    fs::write(&cut, &bytes[..bytes.len() - 5]).expect("write");
    let text = dir.path().join("text");
    fs::write(&text, "no capture\n").expect("write");
    for (file, code) in [(&good, 0), (&cut, 1), (&text, 2)] {
        let output = roce(&[file.to_str().expect("UTF-8")]).output().expect("roce");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert_eq!(stderr.lines().count(), usize::from(code > 0), "{stderr}");
    }
    for wrong in
        [&["--flow", "qp=1"][..], &["--from", "yesterday"], &["--csv", "--json"], &["--no-icrc", "--verify-icrc"]]
    {
        let output = roce(&[wrong, &["x.pcap"]].concat()).output().expect("roce");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{wrong:?}");
    }
}
