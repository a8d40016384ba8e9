//! tshark as an oracle for the parser: opcode, QPN, PSN, ECN, DSCP, syndrome and READ length of every packet of every
//! capture. Where tshark is missing the test says so and checks nothing.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use pcap_file::pcap::PcapReader;
use roce_common::wire::{Opcode, Packet, Verdict, parse};

/// What both read of a packet.
#[derive(PartialEq, Debug)]
struct Fields {
    opcode: u32,
    dest_qp: u32,
    psn: u32,
    tos: u32,
    src_port: u32,
    syndrome: Option<u32>,
    dma_len: Option<u32>,
    /// `None` for a CNP, whose opcode tshark 4.0 does not know: it reads the header and nothing behind it.
    icrc: Option<u32>,
}

impl Fields {
    fn ours(packet: &Packet, frame: &[u8]) -> Self {
        let at = packet.icrc_offset();
        Self {
            opcode: packet.bth.opcode.get().into(),
            dest_qp: packet.bth.dest_qp.get(),
            psn: packet.bth.psn.get(),
            tos: packet.tos.into(),
            src_port: packet.src_port.into(),
            syndrome: packet.aeth.map(|a| a.raw_syndrome.into()),
            dma_len: packet.reth.map(|r| r.dma_len),
            icrc: (packet.bth.opcode != Opcode::CNP)
                .then(|| u32::from_be_bytes(frame[at..at + 4].try_into().expect("four bytes"))),
        }
    }

    /// From a line of tshark: frame number, then the fields in the order they are asked for.
    fn theirs(line: &str) -> Option<(usize, Self)> {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |i: usize| {
            let text: &str = cells.get(i)?;
            match text.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16).ok(),
                None => text.parse().ok(),
            }
        };
        let fields = Self {
            opcode: cell(1)?,
            dest_qp: cell(2)?,
            psn: cell(3)?,
            tos: cell(4).or_else(|| cell(5))?,
            src_port: cell(6)?,
            syndrome: cell(7),
            dma_len: cell(8),
            icrc: cell(9),
        };
        Some((cell(0)? as usize, fields))
    }
}

const ASKED: [&str; 10] = [
    "frame.number",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "ip.dsfield",
    "ipv6.tclass",
    "udp.srcport",
    "infiniband.aeth.syndrome",
    "infiniband.reth.dmalen",
    "infiniband.invariant.crc",
];

fn theirs(capture: &Path) -> BTreeMap<usize, Fields> {
    let mut command = Command::new("tshark");
    // Name resolution off, and no protocol but this one on the port, whatever the source port is.
    command.args(["-n", "-d", "udp.port==4791,infiniband", "-T", "fields"]).arg("-r").arg(capture);
    for field in ASKED {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().filter_map(Fields::theirs).collect()
}

#[test]
fn tshark_reads_the_same_fields() {
    if let Err(error) = Command::new("tshark").arg("--version").output() {
        eprintln!("skipped: tshark cannot be run ({error})");
        return;
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    let (mut compared, mut files) = (0, 0);
    for entry in fs::read_dir(directory).expect("tests/captures") {
        let path = entry.expect("entry").path();
        if path.extension().is_none_or(|e| e != "pcap") {
            continue;
        }
        files += 1;
        let theirs = theirs(&path);
        let mut reader = PcapReader::new(fs::File::open(&path).expect("capture")).expect("header");
        let mut number = 0;
        while let Some(frame) = reader.next_packet() {
            number += 1;
            let frame = frame.expect("frame").data;
            let Verdict::Roce(packet) = parse(&frame[..]) else { continue };
            let ours = Fields::ours(&packet, &frame);
            assert_eq!(Some(&ours), theirs.get(&number), "frame {number} of {}", path.display());
            compared += 1;
        }
    }
    eprintln!("{compared} packets of {files} captures agree with tshark");
    assert!(files >= 30 && compared > 20_000);
}
