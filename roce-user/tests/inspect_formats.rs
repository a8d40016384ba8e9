//! The container must not matter: one capture rewritten in every format and link type gives one answer. Files that are
//! damaged, of another kind or too short say so.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use flate2::{Compression, write::GzEncoder};
use pcap_file::pcap::PcapReader;
use roce_user::{
    export::CaptureReport,
    inspect::{self, InspectArgs},
};
use tempfile::TempDir;

fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures").join(name)
}

/// A frame: seconds, nanoseconds, bytes.
type Frame = (u32, u32, Vec<u8>);

fn frames(name: &str) -> Vec<Frame> {
    let mut reader = PcapReader::new(fs::File::open(capture(name)).expect("capture")).expect("header");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.expect("packet");
        frames.push((packet.timestamp.as_secs() as u32, packet.timestamp.subsec_nanos(), packet.data.into_owned()));
    }
    frames
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Order {
    Little,
    Big,
}

impl Order {
    fn u16(self, n: u16) -> [u8; 2] {
        if self == Self::Little { n.to_le_bytes() } else { n.to_be_bytes() }
    }

    fn u32(self, n: u32) -> [u8; 4] {
        if self == Self::Little { n.to_le_bytes() } else { n.to_be_bytes() }
    }
}

/// A pcap file; `snap` bytes of every frame are kept.
fn pcap(order: Order, nanos: bool, link: u32, snap: usize, frames: &[Frame]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(order.u32(if nanos { 0xa1b2_3c4d } else { 0xa1b2_c3d4 }));
    out.extend(order.u16(2));
    out.extend(order.u16(4));
    out.extend([0; 8]);
    out.extend(order.u32(snap as u32));
    out.extend(order.u32(link));
    for (seconds, fraction, bytes) in frames {
        let kept = bytes.len().min(snap);
        out.extend(order.u32(*seconds));
        out.extend(order.u32(if nanos { *fraction } else { fraction / 1_000 }));
        out.extend(order.u32(kept as u32));
        out.extend(order.u32(bytes.len() as u32));
        out.extend(&bytes[..kept]);
    }
    out
}

fn block(order: Order, kind: u32, body: &[u8]) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let len = order.u32(padded as u32 + 12);
    let mut out = Vec::new();
    out.extend(order.u32(kind));
    out.extend(len);
    out.extend(body);
    out.resize(8 + padded, 0);
    out.extend(len);
    out
}

fn section(order: Order) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(order.u32(0x1a2b_3c4d));
    body.extend(order.u16(1));
    body.extend(order.u16(0));
    body.extend([0xff; 8]);
    block(order, 0x0a0d_0d0a, &body)
}

fn interface(order: Order, link: u16, name: &str) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(order.u16(link));
    body.extend([0; 6]);
    body.extend(order.u16(2));
    body.extend(order.u16(name.len() as u16));
    body.extend(name.as_bytes());
    body.resize(body.len().next_multiple_of(4), 0);
    // if_tsresol: nanoseconds.
    body.extend(order.u16(9));
    body.extend(order.u16(1));
    body.extend([9, 0, 0, 0]);
    body.extend([0; 4]);
    block(order, 1, &body)
}

fn enhanced(order: Order, interface: u32, (seconds, nanos, bytes): &Frame) -> Vec<u8> {
    let ticks = u64::from(*seconds) * 1_000_000_000 + u64::from(*nanos);
    let mut body = Vec::new();
    for n in [interface, (ticks >> 32) as u32, ticks as u32, bytes.len() as u32, bytes.len() as u32] {
        body.extend(order.u32(n));
    }
    body.extend(bytes);
    body.resize(body.len().next_multiple_of(4), 0);
    // A comment that is not UTF-8 must not stop the reading.
    body.extend(order.u16(1));
    body.extend(order.u16(3));
    body.extend([0xff, 0xfe, 0xfd, 0]);
    body.extend([0; 4]);
    block(order, 6, &body)
}

fn pcapng(order: Order, link: u16, frames: &[Frame]) -> Vec<u8> {
    let mut out = section(order);
    out.extend(interface(order, link, "mirror0"));
    for frame in frames {
        out.extend(enhanced(order, 0, frame));
    }
    out
}

fn write(dir: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join("rewritten.cap");
    fs::write(&path, bytes).expect("write");
    path
}

fn report(dir: &TempDir, bytes: &[u8]) -> CaptureReport {
    inspect::report(&write(dir, bytes)).expect("report")
}

fn error(path: &Path) -> String {
    format!("{:#}", inspect::report(path).expect_err("an error"))
}

/// The report without the names of the file and of its interface.
fn anonymous(mut report: CaptureReport) -> CaptureReport {
    report.file.clear();
    for flow in &mut report.flows {
        flow.tap.clear();
    }
    for path in &mut report.paths {
        path.tap.clear();
    }
    for finding in &mut report.findings {
        let subjects = finding.flows.iter_mut().chain(finding.evidence.iter_mut().map(|e| &mut e.at));
        subjects.for_each(|s| s.tap = None);
    }
    report
}

/// Puts `header` and the two-byte protocol `at` in it in place of the Ethernet header.
fn cooked(frames: &[Frame], header: usize, at: usize, vlan: bool) -> Vec<Frame> {
    frames
        .iter()
        .map(|(seconds, nanos, bytes)| {
            let mut new = vec![0; header];
            if vlan {
                new[at..at + 2].copy_from_slice(&[0x81, 0x00]);
                new.extend([0x60, 0x05]);
                new.extend(&bytes[12..14]);
            } else {
                new[at..at + 2].copy_from_slice(&bytes[12..14]);
            }
            new.extend(&bytes[14..]);
            (*seconds, *nanos, new)
        })
        .collect()
}

#[test]
fn every_container_and_link_type_gives_the_same_answer() {
    let dir = tempfile::tempdir().expect("directory");
    for name in ["rxe-write-loss1-post.pcap", "rxe-write-rc-ipv6.pcap", "fact-enizaksoy-ce-cnp.pcap"] {
        let frames = frames(name);
        let want = anonymous(inspect::report(&capture(name)).expect("report"));
        let raw: Vec<Frame> = frames.iter().map(|(s, n, b)| (*s, *n, b[14..].to_vec())).collect();
        let sll = cooked(&frames, 16, 14, false);
        let sll2 = cooked(&frames, 20, 0, false);
        let sll_vlan = cooked(&frames, 16, 14, true);
        let sll2_vlan = cooked(&frames, 20, 0, true);
        for order in [Order::Little, Order::Big] {
            for (link, frames) in
                [(1, &frames), (101, &raw), (12, &raw), (113, &sll), (276, &sll2), (113, &sll_vlan), (276, &sll2_vlan)]
            {
                for nanos in [false, true] {
                    let got = report(&dir, &pcap(order, nanos, link, 65_535, frames));
                    assert_eq!(anonymous(got), want, "{name}: pcap {order:?} ns {nanos} link {link}");
                }
                let got = report(&dir, &pcapng(order, link as u16, frames));
                assert!(got.flows.iter().all(|f| f.tap == "mirror0"));
                assert_eq!(anonymous(got), want, "{name}: pcapng {order:?} link {link}");
            }
        }
        // A frame check sequence announced in the upper bits of the link type.
        let got = report(&dir, &pcap(Order::Little, false, 1 | 0x2400_0000, 65_535, &frames));
        assert_eq!(anonymous(got), want, "{name}: with FCS length");
    }
}

#[test]
fn interfaces_are_taps_of_their_own_through_sections_of_either_order() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("fact-psn-wrap.pcap");
    let mut file = section(Order::Little);
    file.extend(interface(Order::Little, 1, "port1"));
    file.extend(interface(Order::Little, 1, "port2"));
    for frame in &frames {
        file.extend(enhanced(Order::Little, 0, frame));
        file.extend(enhanced(Order::Little, 1, frame));
    }
    file.extend(section(Order::Big));
    file.extend(interface(Order::Big, 1, ""));
    for frame in &frames {
        file.extend(enhanced(Order::Big, 0, frame));
    }
    let report = report(&dir, &file);
    assert_eq!(report.rocev2, 36);
    let taps: Vec<_> = report.flows.iter().map(|f| (f.tap.as_str(), f.space, f.packets)).collect();
    assert_eq!(
        taps,
        [
            ("port1", "request", 6),
            ("port2", "request", 6),
            ("port1", "response", 6),
            ("port2", "response", 6),
            ("2", "request", 6),
            ("2", "response", 6)
        ]
    );
    assert_eq!(
        (report.counters.missing_psns, report.counters.duplicates),
        (0, 0),
        "taps do not see each other's packets"
    );
}

#[test]
fn simple_packet_blocks_belong_to_the_first_interface() {
    let dir = tempfile::tempdir().expect("directory");
    let mut file = section(Order::Little);
    file.extend(interface(Order::Little, 1, "eth7"));
    for (_, _, bytes) in frames("fact-psn-wrap.pcap") {
        let mut body = Order::Little.u32(bytes.len() as u32).to_vec();
        body.extend(bytes);
        file.extend(block(Order::Little, 3, &body));
    }
    let report = report(&dir, &file);
    assert_eq!((report.rocev2, report.icrc.valid), (12, 12));
    assert_eq!(report.flows[0].tap, "eth7");
}

#[test]
fn frames_cut_by_the_snap_length_are_read_as_far_as_headers_go() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("rxe-write-loss1-post.pcap");
    let want = anonymous(inspect::report(&capture("rxe-write-loss1-post.pcap")).expect("report"));
    // Enough for every header: 14 + 20 + 8 + 12 + 16.
    let mut got = anonymous(report(&dir, &pcap(Order::Little, false, 1, 70, &frames)));
    assert!(got.icrc.unchecked > 2_000);
    got.icrc = want.icrc;
    assert_eq!(got, want);
    // Too little for the BTH: counted, and no flow.
    for snap in [30, 42, 53] {
        let got = report(&dir, &pcap(Order::Little, false, 1, snap, &frames));
        assert_eq!(got.malformed["truncated_capture"], got.frames, "{snap}");
        assert_eq!((got.rocev2, got.flows.len()), (0, 0));
    }
}

#[test]
fn a_truncated_last_record_is_reported_and_the_rest_is_read() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("fact-psn-wrap.pcap");
    for bytes in [pcap(Order::Little, false, 1, 65_535, &frames), pcapng(Order::Big, 1, &frames)] {
        let got = report(&dir, &bytes[..bytes.len() - 5]);
        assert_eq!(got.rocev2, 11);
        let reason = got.incomplete.expect("a reason");
        assert!(reason.contains("truncated") && reason.contains("packet 12"), "{reason}");
    }
    // A length that cannot be: the same.
    let mut bytes = pcap(Order::Little, false, 1, 65_535, &frames[..3]);
    let at = bytes.len() - frames[2].2.len() - 8;
    bytes[at..at + 4].copy_from_slice(&[0xff; 4]);
    let got = report(&dir, &bytes);
    assert_eq!((got.rocev2, got.incomplete.is_some()), (2, true));
    // A block that contradicts itself.
    let mut bytes = pcapng(Order::Little, 1, &frames[..3]);
    let len = bytes.len();
    bytes[len - 1] ^= 1;
    let got = report(&dir, &bytes);
    assert_eq!(got.rocev2, 2);
    assert!(got.incomplete.expect("a reason").contains("damaged"));
    // An interface that nobody described.
    let mut bytes = section(Order::Little);
    bytes.extend(enhanced(Order::Little, 0, &frames[0]));
    assert!(report(&dir, &bytes).incomplete.expect("a reason").contains("interface 0"));
}

#[test]
fn what_cannot_be_read_is_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("fact-psn-wrap.pcap");
    let good = pcap(Order::Little, false, 1, 65_535, &frames);
    for (bytes, says) in [
        (&b""[..], "empty"),
        (b"ab", "not a capture"),
        (b"this is a text file, not a capture\n", "not a capture"),
        (b"\x1f\x8b\x08\x00rest", "gzip"),
        (b"\x28\xb5\x2f\xfdrest", "zstd -d"),
        (b"\xa1\xb2\xcd\x34rest", "modified"),
        (b"\x34\xcd\xb2\xa1rest", "modified"),
        (&good[..4], "truncated"),
        (&good[..23], "truncated"),
        (&pcapng(Order::Little, 1, &frames)[..20], "truncated"),
        (b"\x0a\x0d\x0d\x0a\x1c\x00\x00\x00garbagegarbage______", "header"),
    ] {
        let path = write(&dir, bytes);
        let error = error(&path);
        assert!(error.contains(says) && error.contains("rewritten.cap"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let missing = dir.path().join("missing.pcap");
    assert!(error(&missing).contains("missing.pcap"));
    assert!(error(dir.path()).contains(&dir.path().display().to_string()));
}

#[test]
fn other_link_types_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("fact-psn-wrap.pcap");
    for (link, name) in [(105, "IEEE802_11"), (0, "NULL"), (247, "INFINIBAND"), (65_000, "65000")] {
        let path = write(&dir, &pcap(Order::Little, false, link, 65_535, &frames));
        let error_pcap = error(&path);
        let path = write(&dir, &pcapng(Order::Big, link as u16, &frames));
        let error_pcapng = error(&path);
        for error in [error_pcap, error_pcapng] {
            assert!(error.contains(name) && error.contains("rewritten.cap"), "{error}");
        }
    }
    // An interface without packets may be of any type.
    let mut file = section(Order::Little);
    file.extend(interface(Order::Little, 105, "wlan0"));
    file.extend(interface(Order::Little, 1, "eth0"));
    for frame in &frames {
        file.extend(enhanced(Order::Little, 1, frame));
    }
    assert_eq!(report(&dir, &file).rocev2, 12);
}

#[test]
fn several_files_give_one_json_line_each_and_a_bad_one_does_not_hide_the_others() {
    let dir = tempfile::tempdir().expect("directory");
    let bad = write(&dir, b"nothing");
    let files = [capture("fact-psn-wrap.pcap"), bad, capture("fact-rnr-nak-retry.pcap")];
    let args = InspectArgs { json: true, ..InspectArgs::of(files) };
    let mut out = Vec::new();
    let error = inspect::run(&args, &mut out).expect_err("the bad file");
    assert!(format!("{error:#}").contains("rewritten.cap"));
    let lines: Vec<serde_json::Value> = out
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!((&lines[0]["frames"], &lines[1]["rnr_nak"]), (&12.into(), &1.into()));
}

#[test]
fn the_table_names_what_was_found() {
    let table = |name: &str| {
        let mut out = Vec::new();
        inspect::run(&InspectArgs::of([capture(name)]), &mut out).expect("report");
        String::from_utf8(out).expect("UTF-8")
    };
    let text = table("rxe-send-loss1-post.pcap");
    for part in ["2520 RoCEv2", "15 missing = 15 lost + 0 reordered + 0 open; 8 lost again", "14 sequence", "MISSING"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("CNP  "), "columns of zeros are left out: {text}");
    assert!(table("fact-port4791-not-roce.pcap").contains("unknown_opcode 1"));
}

#[test]
fn gzip_gives_the_same_answer_and_its_damage_is_told() {
    let dir = tempfile::tempdir().expect("directory");
    let name = "rxe-write-loss1-post.pcap";
    let want = anonymous(inspect::report(&capture(name)).expect("report"));
    let bytes = fs::read(capture(name)).expect("capture");
    let gzip = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).expect("gzip");
        encoder.finish().expect("gzip")
    };
    assert_eq!(anonymous(report(&dir, &gzip(&bytes))), want);
    // Two members, as `cat a.gz b.gz` makes them, cut inside a packet.
    let mut two = gzip(&bytes[..1_000]);
    two.extend(gzip(&bytes[1_000..]));
    assert_eq!(anonymous(report(&dir, &two)), want);
    let cut = report(&dir, &two[..two.len() / 2]);
    assert!(cut.frames > 100 && cut.frames < want.frames);
    let reason = cut.incomplete.expect("a reason");
    assert!(reason.contains("gzip stream is truncated") && reason.contains(&format!("packet {}", cut.frames + 1)));
    // A wrong checksum: all packets, and a word.
    let mut wrong = gzip(&bytes);
    let at = wrong.len() - 8;
    wrong[at] ^= 1;
    let wrong = report(&dir, &wrong);
    assert_eq!(wrong.frames, want.frames);
    assert!(wrong.incomplete.expect("a reason").contains("gzip stream is damaged"));
}

#[test]
fn a_second_section_goes_on_where_interfaces_have_the_same_name() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("rxe-write-loss1-post.pcap");
    let want = anonymous(inspect::report(&capture("rxe-write-loss1-post.pcap")).expect("report"));
    let mut file = pcapng(Order::Little, 1, &frames[..1_000]);
    // Blocks that nobody needs, one of them longer than what is kept in memory.
    file.extend(block(Order::Little, 5, &[1; 32]));
    file.extend(block(Order::Little, 0x0bad, &vec![7; 5 << 20]));
    file.extend(pcapng(Order::Big, 1, &frames[1_000..]));
    assert_eq!(anonymous(report(&dir, &file)), want);
}

#[test]
fn the_obsolete_packet_block_is_read_in_either_order() {
    let dir = tempfile::tempdir().expect("directory");
    for order in [Order::Little, Order::Big] {
        let mut file = section(order);
        file.extend(interface(order, 105, "wlan0"));
        file.extend(interface(order, 1, "eth0"));
        for (_, _, bytes) in frames("fact-psn-wrap.pcap") {
            let mut body = order.u16(1).to_vec();
            body.extend(order.u16(0xffff));
            body.extend([0; 8]);
            body.extend(order.u32(bytes.len() as u32));
            body.extend(order.u32(bytes.len() as u32));
            body.extend(bytes);
            file.extend(block(order, 2, &body));
        }
        let report = report(&dir, &file);
        assert_eq!((report.rocev2, report.flows[0].tap.as_str()), (12, "eth0"));
    }
}

#[test]
fn what_has_another_link_type_is_left_out_by_name() {
    let dir = tempfile::tempdir().expect("directory");
    let frames = frames("fact-psn-wrap.pcap");
    let mut file = section(Order::Little);
    file.extend(interface(Order::Little, 1, "eth0"));
    file.extend(interface(Order::Little, 197, "dag0"));
    for (i, frame) in frames.iter().enumerate() {
        file.extend(enhanced(Order::Little, u32::from(i == 4), frame));
    }
    let report = report(&dir, &file);
    assert_eq!((report.rocev2, report.frames), (11, 11));
    let reason = report.incomplete.expect("a reason");
    for part in ["dag0", "197 (ERF)", "1 of its packets", "packet 5"] {
        assert!(reason.contains(part), "{reason}");
    }
}

/// editcap rewrites a capture as pcapng the way Wireshark does; where it is missing, this says so.
#[test]
fn a_pcapng_of_wireshark_is_read() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("editcap.pcapng");
    let source = capture("rxe-read-loss1-post.pcap");
    match Command::new("editcap").args(["-F", "pcapng"]).arg(&source).arg(&path).status() {
        Ok(status) if status.success() => {
            let want = anonymous(inspect::report(&source).expect("report"));
            assert_eq!(anonymous(inspect::report(&path).expect("report")), want);
        }
        Ok(status) => panic!("editcap failed: {status}"),
        Err(error) => println!("SKIP reading what editcap writes: it cannot be run ({error})"),
    }
}
