//! `roce run --capture`: the packets around what happens, in files that other programs read. Needs root.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use nix::mount::{MsFlags, mount, umount};
use pcap_file::pcapng::{
    Block, PcapNgReader,
    blocks::{
        enhanced_packet::EnhancedPacketOption, interface_description::InterfaceDescriptionOption,
        interface_statistics::InterfaceStatisticsOption, section_header::SectionHeaderOption,
    },
};
use roce_common::wire::{self, Opcode, Verdict, icrc};
use roce_tests::{
    endpoint::{Clock, Connection, Host, Message, Op, Traffic, ack_timeout, connect},
    forge::Forger,
    lab::{Pair, Port, run_roce},
    needs_root,
    rig::{self, eventually},
    run::{AgentProcess, AgentRole},
};
use serde_json::Value;
use tempfile::TempDir;

const QP: u32 = 0x21;
const PATIENCE: Duration = Duration::from_secs(8);

struct Packet {
    bytes: Vec<u8>,
    wire_len: u32,
    /// 1 in, 2 out.
    flags: u32,
    comments: Vec<String>,
}

impl Packet {
    fn psn(&self) -> u32 {
        match wire::parse(&self.bytes[..]) {
            Verdict::Roce(p) => p.bth.psn.get(),
            // Only the headers: the PSN stands where it stands.
            _ => u32::from_be_bytes([0, self.bytes[51], self.bytes[52], self.bytes[53]]),
        }
    }

    fn is_cnp(&self) -> bool {
        matches!(wire::parse(&self.bytes[..]), Verdict::Roce(p) if p.bth.opcode == Opcode::CNP)
    }
}

/// A file as another library reads it.
struct Recorded {
    about: Vec<String>,
    iface: String,
    packets: Vec<Packet>,
    received: u64,
    dropped: u64,
    end: Vec<String>,
}

fn read(path: &Path) -> Recorded {
    let mut reader = PcapNgReader::new(File::open(path).unwrap()).unwrap();
    let about = reader.section().options.iter().filter_map(|o| match o {
        SectionHeaderOption::Comment(c) => Some(c.to_string()),
        _ => None,
    });
    let mut out = Recorded {
        about: about.collect(),
        iface: String::new(),
        packets: Vec::new(),
        received: 0,
        dropped: u64::MAX,
        end: Vec::new(),
    };
    while let Some(block) = reader.next_block() {
        match block.unwrap() {
            Block::InterfaceDescription(i) => {
                for option in &i.options {
                    match option {
                        InterfaceDescriptionOption::IfName(n) => out.iface = n.to_string(),
                        InterfaceDescriptionOption::IfTsResol(r) => assert_eq!(*r, 9),
                        _ => {}
                    }
                }
            }
            Block::EnhancedPacket(p) => {
                let mut packet =
                    Packet { bytes: p.data.to_vec(), wire_len: p.original_len, flags: 0, comments: Vec::new() };
                for option in &p.options {
                    match option {
                        EnhancedPacketOption::Flags(f) => packet.flags = *f,
                        EnhancedPacketOption::Comment(c) => packet.comments.push(c.to_string()),
                        _ => {}
                    }
                }
                out.packets.push(packet);
            }
            Block::InterfaceStatistics(s) => {
                for option in &s.options {
                    match option {
                        InterfaceStatisticsOption::IsbIfRecv(n) => out.received = *n,
                        InterfaceStatisticsOption::IsbIfDrop(n) => out.dropped = *n,
                        InterfaceStatisticsOption::Comment(c) => out.end.push(c.to_string()),
                        _ => {}
                    }
                }
            }
            other => panic!("{other:?}"),
        }
    }
    out
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "pcapng"));
    files.sort();
    files
}

fn wait_for(dir: &Path, count: usize) -> Vec<PathBuf> {
    eventually(PATIENCE, || files(dir).len() >= count);
    let found = files(dir);
    assert_eq!(found.len(), count, "{found:?}");
    found
}

fn observer(port: &Port, dir: &Path, args: &[&str]) -> AgentProcess {
    let all: Vec<&str> = ["--capture", dir.to_str().unwrap()].iter().chain(args).copied().collect();
    rig::agent(port, AgentRole::Observe, &all).unwrap()
}

fn send(forger: &Forger, psns: impl IntoIterator<Item = u32>) {
    psns.into_iter().for_each(|psn| forger.send(&forger.write(QP, psn, &[0x5a; 200])));
}

/// Headers of a WRITE ONLY over IPv4.
const HEADERS: usize = 14 + 20 + 8 + 12 + 16;
const WIRE: u32 = HEADERS as u32 + 200 + 4;

#[test]
fn the_headers_around_a_gap_go_into_a_file() {
    needs_root!();
    for ingress in ["xdp", "xdp-generic", "tc"] {
        let (pair, dir) = (Pair::new(1500).unwrap(), TempDir::new().unwrap());
        let folder = dir.path().join("made/here");
        let args = ["--ingress", ingress, "--capture-before", "5", "--capture-after", "4"];
        let mut agent = observer(&pair.b.port, &folder, &args);
        let forger = Forger::new(&pair.a, pair.b.address(false)).unwrap();
        send(&forger, (0..10).chain(12..30));
        let found = wait_for(&folder, 1);
        let name = found[0].file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("roce-2") && name.ends_with("Z-b-gap.pcapng"), "{name}");
        let recorded = read(&found[0]);
        let psns: Vec<_> = recorded.packets.iter().map(Packet::psn).collect();
        assert_eq!(psns, [6, 7, 8, 9, 12, 13, 14, 15, 16], "{ingress}");
        assert_eq!(recorded.iface, "b");
        for packet in &recorded.packets {
            assert_eq!((packet.bytes.len(), packet.wire_len, packet.flags), (HEADERS, WIRE, 1), "{ingress}");
            let comments: Vec<_> = packet.comments.iter().map(String::as_str).collect();
            let right = match packet.psn() {
                12 => comments[0].starts_with("gap: 2 PSNs missing before PSN 12, 10.66.1.1 > "),
                _ => comments.is_empty(),
            };
            assert!(right, "{comments:?}");
        }
        assert!(recorded.about[0].contains("5 packets up to this, 4 behind it; the headers"), "{:?}", recorded.about);
        assert_eq!((recorded.received, recorded.dropped), (9, 0));
        assert_eq!(recorded.end, ["no packet was lost by the capture"]);

        let events = run_roce(&pair.b.port.ns, &["events", "--json", "--kind", "capture"]).unwrap();
        let event: Value = serde_json::from_slice(&events.stdout).unwrap();
        assert_eq!(event["file"], found[0].to_str().unwrap());
        tshark(&found[0]);
        // Our own inspector reads it back.
        let output = run_roce(&pair.b.port.ns, &["inspect", "--json", found[0].to_str().unwrap()]).unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((report["rocev2"].as_u64(), report["missing_psns"].as_u64()), (Some(9), Some(2)), "{report}");
        assert!(agent.stop().unwrap().success());
        assert_eq!((agent.stderr().as_str(), files(&folder).len()), ("", 1));
    }
}

/// tshark reads interface, direction, comments and both lengths.
fn tshark(path: &Path) {
    let fields =
        ["frame.interface_name", "frame.packet_flags_direction", "frame.len", "frame.cap_len", "frame.comment"];
    let args = fields.iter().flat_map(|f| ["-e", f]);
    let output = match Command::new("tshark").args(["-T", "fields", "-r"]).arg(path).args(args).output() {
        Ok(output) => output,
        Err(error) => {
            println!("SKIP tshark: {error}");
            return;
        }
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
    assert_eq!(lines.len(), 9, "{text}");
    for (i, line) in lines.iter().enumerate() {
        assert_eq!(line[0], "b");
        assert!(["0x00000001", "1"].contains(&line[1]), "{line:?}");
        assert_eq!((line[2], line[3]), (WIRE.to_string().as_str(), HEADERS.to_string().as_str()));
        assert_eq!(line[4].starts_with("gap: 2 PSNs"), i == 4, "{line:?}");
    }
}

#[test]
fn payload_is_taken_when_asked_for_and_an_answer_is_a_trigger() {
    needs_root!();
    let (pair, dir) = (Pair::new(1500).unwrap(), TempDir::new().unwrap());
    let args = ["--capture-snaplen", "1500", "--capture-after", "3", "--iface"];
    // Also the other way: what this host sends.
    let mut agent = observer(&pair.b.port, dir.path(), &args[..4]);
    let (there, back) =
        (Forger::new(&pair.a, pair.b.address(false)).unwrap(), Forger::new(&pair.b, pair.a.address(false)).unwrap());
    send(&there, 0..3);
    // What is sent on one side arrives on the other a little later; the NAK leaves at once.
    thread::sleep(Duration::from_millis(50));
    let nak = back.acknowledge(0x77, 3, 0x60);
    back.send(&nak);
    thread::sleep(Duration::from_millis(100));
    send(&there, 3..20);
    let found = wait_for(dir.path(), 1);
    let recorded = read(&found[0]);
    assert!(found[0].to_str().unwrap().ends_with("-b-nak.pcapng"));
    let whole: Vec<_> = recorded.packets.iter().map(|p| (p.bytes.len() as u32, p.flags)).collect();
    let data = (WIRE, 1);
    assert_eq!(whole, [data, data, data, (nak.len() as u32, 2), data, data, data]);
    assert_eq!(recorded.packets[3].bytes, nak);
    assert!(recorded.packets[3].comments[0].starts_with("NAK: syndrome 0x60 at PSN 3, 10.66.1.2 > "));
    assert_eq!(recorded.packets[0].bytes, there.write(QP, 0, &[0x5a; 200]));
    assert!(agent.stop().unwrap().success());
}

#[test]
fn the_folder_is_a_ring_and_the_end_writes_what_is_open() {
    needs_root!();
    let (pair, dir) = (Pair::new(1500).unwrap(), TempDir::new().unwrap());
    let stranger = dir.path().join("roce-notes.pcapng");
    fs::write(&stranger, "mine").unwrap();
    let args = ["--capture-files", "2", "--capture-before", "2", "--capture-after", "2"];
    let mut agent = observer(&pair.b.port, dir.path(), &args);
    let forger = Forger::new(&pair.a, pair.b.address(false)).unwrap();
    let mut firsts = Vec::new();
    for round in 0..3u32 {
        let base = 10 * round;
        send(&forger, [base, base + 2, base + 3, base + 4]);
        let want = (round as usize + 1).min(2) + 1;
        let newest = || files(dir.path()).into_iter().rev().find(|f| *f != stranger);
        assert!(eventually(PATIENCE, || newest().is_some_and(|f| !firsts.contains(&f))), "round {round}");
        firsts.push(newest().unwrap());
        assert_eq!(files(dir.path()).len(), want, "round {round}");
        thread::sleep(Duration::from_millis(1_100));
    }
    assert!(!firsts[0].exists() && firsts[1].exists() && stranger.exists());
    // Too few packets follow.
    send(&forger, [50]);
    thread::sleep(Duration::from_millis(200));
    assert!(agent.stop().unwrap().success());
    let last = read(files(dir.path()).iter().rfind(|f| **f != stranger).unwrap());
    assert_eq!(last.packets.iter().map(Packet::psn).collect::<Vec<_>>(), [24, 50]);
}

#[test]
fn a_directory_that_cannot_be_written_is_said_before_anything_is_attached() {
    needs_root!();
    let (pair, dir) = (Pair::new(1500).unwrap(), TempDir::new().unwrap());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let refused = |args: &[&str]| {
        let all: Vec<&str> = ["run", "--iface", "b", "--role", "observe"].iter().chain(args).copied().collect();
        let output = run_roce(&pair.b.port.ns, &all).unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = refused(&["--capture", file.to_str().unwrap()]);
    assert!(said.starts_with(&format!("roce: --capture: cannot create {}", file.display())), "{said}");
    let said = refused(&["--capture", "/proc/self"]);
    assert!(said.starts_with("roce: --capture: cannot write to /proc/self: choose another directory: "), "{said}");
    let said = refused(&["--capture", dir.path().to_str().unwrap(), "--capture-limit", "much"]);
    assert!(said.contains("--capture-limit: `much` is no number of bytes"), "{said}");
    assert!(refused(&["--capture-snaplen", "128"]).contains("--capture <DIR>"));
}

struct Mounted(TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        // The test has said all there is to say.
        let _ = umount(self.0.path());
    }
}

#[test]
fn a_full_disk_is_told_and_the_agent_goes_on() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let disk = Mounted(TempDir::new().unwrap());
    let dir = disk.0.path();
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some("size=16k")).unwrap();
    let mut agent = observer(&pair.b.port, dir, &["--capture-before", "200", "--capture-after", "200"]);
    let forger = Forger::new(&pair.a, pair.b.address(false)).unwrap();
    send(&forger, (0..300).chain(302..600));
    let events = || {
        let output = run_roce(&pair.b.port.ns, &["events", "--kind", "notice"]).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(eventually(PATIENCE, || events().contains("No space left on device")), "{}", events());
    assert!(events().contains(&format!("cannot write {}/roce-", dir.display())), "{}", events());
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "nothing half written stays");
    // It still counts.
    send(&forger, 600..700);
    let counted = || {
        let output = run_roce(&pair.b.port.ns, &["flows", "--json"]).unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["flows"][0]["packets"].as_u64()
    };
    assert!(eventually(PATIENCE, || counted() == Some(698)), "{:?}", counted());
    assert!(agent.stop().unwrap().success());
    assert!(agent.stderr().contains("No space left on device"), "{}", agent.stderr());
}

#[test]
fn cnps_are_recorded_as_they_left_and_before_they_are_consumed() {
    needs_root!();
    for ingress in ["xdp", "tc"] {
        let (pair, dirs) = (Pair::new(1500).unwrap(), [TempDir::new().unwrap(), TempDir::new().unwrap()]);
        let host = |port: &Port, dir: &TempDir| {
            let folder = dir.path().to_str().unwrap();
            let args = ["--capture", folder, "--ingress", ingress, "--guard", "on", "--pacer", "off"];
            rig::agent(port, AgentRole::Host, &args).unwrap()
        };
        let mut agents = [host(&pair.a.port, &dirs[0]), host(&pair.b.port, &dirs[1])];
        let clock = Clock::start();
        let (mut ha, mut hb) = (Host::start(&pair.a.port, clock).unwrap(), Host::start(&pair.b.port, clock).unwrap());
        let connection = Connection {
            tos: 3,
            timeout: ack_timeout(19),
            traffic_a: Traffic::endless(Message::new(Op::Write, 10_000)),
            ..Connection::default()
        };
        let (qa, _qb) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap();
        let storm =
            |dir: &TempDir| files(dir.path()).into_iter().find(|f| f.to_str().unwrap().ends_with("-cnp-storm.pcapng"));
        let stormy = eventually(PATIENCE, || dirs.iter().all(|d| storm(d).is_some()));
        qa.kill();
        agents.iter_mut().for_each(|a| assert!(a.stop().unwrap().success(), "{}", a.stderr()));
        assert!(stormy, "{ingress}: {:?} {:?}", files(dirs[0].path()), files(dirs[1].path()));
        assert_eq!(ha.stats().cnps, 0, "all were consumed");
        for (dir, way) in dirs.iter().zip([1, 2]) {
            let recorded = read(&storm(dir).unwrap());
            let mut ways = BTreeMap::<_, u32>::new();
            for cnp in recorded.packets.iter().filter(|p| p.is_cnp()) {
                *ways.entry(cnp.flags).or_default() += 1;
                assert_eq!(cnp.bytes.len() as u32, cnp.wire_len, "whole");
                let Verdict::Roce(packet) = wire::parse(&cnp.bytes[..]) else { unreachable!() };
                let right = icrc::expected(&cnp.bytes, &packet).unwrap();
                assert_eq!(cnp.bytes[packet.icrc_offset()..][..4], right, "as it left");
            }
            assert!(ways.len() == 1 && ways.get(&way).is_some_and(|n| *n >= 10), "{ingress}: {ways:?}");
            assert!(recorded.about[0].starts_with("CNP storm: 100 CNPs within 100 ms"), "{:?}", recorded.about);
        }
    }
}
