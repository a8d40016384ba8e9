//! What the endpoints send, read by others: tshark names the same fields, scapy computes the same ICRC. Each check runs
//! where its tool is, and says so where it is not.

use std::{
    collections::BTreeSet,
    fs::File,
    io::ErrorKind,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use pcap_file::pcap::{PcapPacket, PcapWriter};
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{self, Opcode, Packet, Verdict},
};
use roce_tests::endpoint::{Message, Op, Qp, QpConfig, Rnr, Traffic, ack_timeout, memory::converse};

/// ToS of the dialogue: DSCP 26, ECT(0).
const TOS: u8 = 0x6a;

fn pair(ipv6: bool) -> (Qp, Qp) {
    let address = |n: u8| -> Addr {
        let ip: IpAddr =
            if ipv6 { format!("fd00::{n}").parse().unwrap() } else { format!("10.0.0.{n}").parse().unwrap() };
        Addr::from(ip)
    };
    let messages = vec![
        Message::new(Op::Write, 1000),
        Message::new(Op::Write, 100),
        Message::new(Op::Send, 1001),
        Message::new(Op::Send, 3),
        Message::new(Op::Send, 0),
        Message::new(Op::Read, 1002),
        Message::new(Op::Read, 17),
    ];
    let a = QpConfig {
        local_qpn: Qpn::new(0x1234),
        remote_qpn: Qpn::new(0xab_cdef),
        local: address(1),
        remote: address(2),
        local_mac: [2, 0, 0, 0, 0, 1],
        next_hop_mac: [2, 0, 0, 0, 0, 2],
        pmtu: 256,
        tos: TOS,
        send_psn: Psn::new(0xff_fff0),
        recv_psn: Psn::new(5),
        timeout: ack_timeout(14),
        rnr: None,
        src_port: None,
        traffic: Traffic { messages, rounds: Some(4) },
    };
    let b = QpConfig {
        local_qpn: a.remote_qpn,
        remote_qpn: a.local_qpn,
        local: a.remote,
        remote: a.local,
        local_mac: a.next_hop_mac,
        next_hop_mac: a.local_mac,
        send_psn: a.recv_psn,
        recv_psn: a.send_psn,
        rnr: Some(Rnr { every: 5, code: 14 }),
        traffic: Traffic::none(),
        ..a.clone()
    };
    (Qp::new(a), Qp::new(b))
}

/// Every kind of packet the endpoints know, over both IP versions, in a file.
fn dialogue(dir: &Path) -> (PathBuf, Vec<(Packet, Vec<u8>)>) {
    let mut packets = Vec::new();
    for ipv6 in [false, true] {
        let (mut a, mut b) = pair(ipv6);
        let mut n = 0;
        let done = converse(&mut a, &mut b, 10_000, |_, frame, packet| {
            packets.push((*packet, frame.to_vec()));
            n += 1;
            n % 23 != 0
        });
        assert!(done);
    }
    let opcodes: BTreeSet<u8> = packets.iter().map(|(p, _)| p.bth.opcode.get()).collect();
    let every = [0, 1, 2, 4, 6, 7, 8, 0xa, 0xc, 0xd, 0xe, 0xf, 0x10, 0x11];
    assert_eq!(opcodes, every.into(), "the dialogue has every opcode");
    let syndromes: BTreeSet<u8> = packets.iter().filter_map(|(p, _)| p.aeth.map(|a| a.raw_syndrome)).collect();
    assert_eq!(syndromes, [0x1f, 0x2e, 0x60].into(), "and ACK, RNR NAK and sequence NAK");
    let path = dir.join("endpoints.pcap");
    let mut writer = PcapWriter::new(File::create(&path).unwrap()).unwrap();
    for (i, (_, frame)) in packets.iter().enumerate() {
        let at = Duration::from_micros(i as u64);
        writer.write_packet(&PcapPacket::new(at, frame.len() as u32, frame)).unwrap();
    }
    (path, packets)
}

/// Runs a tool; `None`, with the reason printed, where it is missing.
fn tool(command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(output) => Some(output),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            eprintln!("skipped: {} is not installed", command.get_program().display());
            None
        }
        Err(e) => panic!("{command:?}: {e}"),
    }
}

#[test]
fn tshark_reads_the_same_fields() {
    let dir = tempfile::tempdir().unwrap();
    let (path, packets) = dialogue(dir.path());
    let fields = [
        "infiniband.bth.opcode",
        "infiniband.bth.destqp",
        "infiniband.bth.psn",
        "infiniband.bth.a",
        "infiniband.bth.padcnt",
        "infiniband.aeth.syndrome",
        "infiniband.aeth.msn",
        "ip.dsfield.dscp",
        "ip.dsfield.ecn",
        "ip.ttl",
        "ip.flags.df",
        "ipv6.tclass.dscp",
        "ipv6.tclass.ecn",
        "ipv6.hlim",
        "udp.srcport",
        "udp.checksum",
        "ip.checksum.status",
    ];
    let mut command = Command::new("tshark");
    command.args(["-o", "ip.check_checksum:TRUE", "-T", "fields", "-E", "separator=;", "-r"]).arg(&path);
    for field in fields {
        command.args(["-e", field]);
    }
    let Some(output) = tool(&mut command) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), packets.len());
    for (line, (p, _)) in text.lines().zip(&packets) {
        let seen: Vec<Option<u32>> = line.split(';').map(number).collect();
        let v4 = p.src.as_v4().is_some();
        let ip = |value: u32, wanted: bool| wanted.then_some(value);
        let want = [
            Some(u32::from(p.bth.opcode.get())),
            Some(p.bth.dest_qp.get()),
            Some(p.bth.psn.get()),
            Some(u32::from(p.bth.ack_req)),
            Some(u32::from(p.bth.pad)),
            p.aeth.map(|a| u32::from(a.raw_syndrome)),
            p.aeth.map(|a| a.msn),
            ip(26, v4),
            ip(2, v4),
            ip(64, v4),
            ip(1, v4),
            ip(26, !v4),
            ip(2, !v4),
            ip(64, !v4),
            Some(u32::from(wire::source_port(Qpn::new(0x1234), Qpn::new(0xab_cdef)))),
            Some(0),
            ip(1, v4),
        ];
        assert_eq!(seen, want, "{p:?}\n{line}");
    }
    println!("tshark agrees on {} packets", packets.len());
}

/// A field as tshark prints it: decimal, hexadecimal, or a flag.
fn number(text: &str) -> Option<u32> {
    match text {
        "" => None,
        "True" => Some(1),
        "False" => Some(0),
        hex if hex.starts_with("0x") => u32::from_str_radix(&hex[2..], 16).ok(),
        decimal => decimal.parse().ok(),
    }
}

/// Reads every frame, takes its ICRC away, lets scapy build it again, and compares all bytes.
const SCAPY: &str = r#"
import sys
from scapy.utils import rdpcap
from scapy.layers.l2 import Ether
from scapy.layers.inet import UDP
import scapy.layers.inet6
from scapy.contrib.roce import BTH, AETH
n = 0
for frame in rdpcap(sys.argv[1]):
    raw = bytes(frame)
    p = Ether(raw)
    b = p[BTH]
    wire = raw[-4:]
    b.icrc = None
    again = bytes(p)
    if again != raw:
        sys.exit("frame %d: %s became %s" % (n + 1, raw.hex(), again.hex()))
    aeth = "%d" % b[AETH].syndrome if AETH in b else "-"
    print(b.opcode, b.dqpn, b.psn, b.ackreq, aeth, wire.hex())
    n += 1
"#;

#[test]
fn scapy_computes_the_same_icrc() {
    let dir = tempfile::tempdir().unwrap();
    let (path, packets) = dialogue(dir.path());
    let Some(probe) = tool(Command::new("python3").args(["-c", "import scapy.contrib.roce"])) else { return };
    if !probe.status.success() {
        eprintln!("skipped: python3 has no scapy with scapy.contrib.roce");
        return;
    }
    let Some(output) = tool(Command::new("python3").args(["-c", SCAPY]).arg(&path)) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), packets.len());
    for (line, (p, frame)) in text.lines().zip(&packets) {
        let icrc: String = frame[frame.len() - 4..].iter().map(|b| format!("{b:02x}")).collect();
        // scapy shows the AETH where it binds one to the opcode: acknowledgements.
        let aeth = match p.aeth {
            Some(a) if p.bth.opcode == Opcode::ACKNOWLEDGE => a.raw_syndrome.to_string(),
            _ => "-".to_owned(),
        };
        let mut seen: Vec<&str> = line.split(' ').collect();
        if p.bth.opcode != Opcode::ACKNOWLEDGE {
            seen[4] = "-";
        }
        let b = &p.bth;
        let want = format!("{} {} {} {} {aeth} {icrc}", b.opcode.get(), b.dest_qp, b.psn, u8::from(b.ack_req));
        assert_eq!(seen.join(" "), want, "{p:?}");
    }
    println!("scapy agrees on {} packets", packets.len());
}

#[test]
fn frames_parse_back_to_what_was_asked() {
    let dir = tempfile::tempdir().unwrap();
    let (_, packets) = dialogue(dir.path());
    for (p, frame) in &packets {
        assert_eq!(wire::parse(&frame[..]), Verdict::Roce(*p));
        assert_eq!((p.bth.pkey, p.bth.mig_req, p.bth.becn, p.bth.fecn, p.tos), (0xffff, false, false, false, TOS));
    }
}
