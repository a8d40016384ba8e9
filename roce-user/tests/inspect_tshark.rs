//! tshark as an oracle for the parser: opcode, QPN, PSN, ECN, DSCP, syndrome and READ length of every packet of every
//! capture; and for what `roce inspect --packets` prints of them. Where tshark is missing the tests say so and check
//! nothing. Where tshark is known to misread, a test of its own says how.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, Opcode, Packet, Reth, Verdict, emit, parse},
};
use roce_user::inspect::{self, InspectArgs};
use serde_json::Value;

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
    read_by_tshark(capture, true)
}

/// What tshark reads, `told` what the port carries or not.
fn read_by_tshark(capture: &Path, told: bool) -> BTreeMap<usize, Fields> {
    let mut command = Command::new("tshark");
    // Name resolution off.
    command.args(["-n", "-T", "fields"]);
    if told {
        // No protocol but this one on the port, whatever the source port is.
        command.args(["-d", "udp.port==4791,infiniband"]);
    }
    command.arg("-r").arg(capture);
    for field in ASKED {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().filter_map(Fields::theirs).collect()
}

/// Whether tshark can be run; says so where it cannot.
fn is_here() -> bool {
    match Command::new("tshark").arg("--version").output() {
        Ok(_) => true,
        Err(error) => {
            println!("SKIP comparing with tshark: it cannot be run ({error})");
            false
        }
    }
}

/// The captures of the project.
fn captures() -> impl Iterator<Item = PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    let entries = fs::read_dir(directory).expect("tests/captures");
    entries.map(|entry| entry.expect("entry").path()).filter(|path| path.extension().is_some_and(|e| e == "pcap"))
}

#[test]
fn tshark_reads_the_same_fields() {
    if !is_here() {
        return;
    }
    let (mut compared, mut files) = (0, 0);
    for path in captures() {
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

/// The lines of `--packets` have what tshark reads: opcode, QPN, PSN, syndrome, ECN, DSCP.
#[test]
fn lines_of_packets_say_what_tshark_says() {
    if !is_here() {
        return;
    }
    let mut compared = 0;
    for path in captures() {
        let theirs = theirs(&path);
        let mut out = Vec::new();
        let args = InspectArgs { json: true, packets: true, ..InspectArgs::of([&path]) };
        inspect::run(&args, &mut out).expect("report");
        for line in out.split(|&b| b == b'\n').filter(|l| !l.is_empty()) {
            let line: Value = serde_json::from_slice(line).expect("JSON");
            let number = |name: &str| line[name].as_u64().map(|n| n as u32);
            let (Some(packet), Some(opcode)) = (number("packet"), number("opcode")) else { continue };
            let ecn = match line["ecn"].as_str() {
                Some("not_ect") => 0,
                Some("ect1") => 1,
                Some("ect0") => 2,
                Some("ce") => 3,
                other => panic!("{other:?}"),
            };
            let theirs = &theirs[&(packet as usize)];
            let ours = (opcode, number("dest_qp"), number("psn"), number("syndrome"), ecn, number("dscp"));
            let want = (
                theirs.opcode,
                Some(theirs.dest_qp),
                Some(theirs.psn),
                theirs.syndrome,
                theirs.tos & 3,
                Some(theirs.tos >> 2),
            );
            assert_eq!(ours, want, "packet {packet} of {}", path.display());
            compared += 1;
        }
    }
    assert!(compared > 20_000);
}

/// What tshark is known to misread: it may agree one day, and until then the way in which it does not is the known one.
#[test]
fn where_tshark_misreads_the_way_is_known() {
    if !is_here() {
        return;
    }
    let reth = Some(Reth { va: 0, rkey: 7, dma_len: 4_096 });
    let ordinary =
        (Opcode::ACKNOWLEDGE, emit::Ext { aeth: Some(Aeth { raw_syndrome: 0x1f, msn: 3 }), ..emit::Ext::default() }, 0);
    // Name, source port, packet, and what tshark 4.0 leaves out of it when it is not told what the port carries.
    let cases = [
        ("an ordinary packet", 49_441, ordinary, ""),
        ("a source port of 69, which tshark takes for TFTP", 69, ordinary, "opcode"),
        (
            "a FLUSH, whose headers tshark does not know",
            49_441,
            (Opcode::new(0x1c).expect("FLUSH"), emit::Ext { immediate: Some(0x11), reth, ..emit::Ext::default() }, 0),
            "dma_len icrc",
        ),
        (
            "an ATOMIC_WRITE, whose headers tshark does not know",
            49_441,
            (Opcode::new(0x1d).expect("ATOMIC_WRITE"), emit::Ext { reth, ..emit::Ext::default() }, 8),
            "dma_len icrc",
        ),
    ];
    let dir = tempfile::tempdir().expect("directory");
    for (name, src_port, (opcode, ext, payload), left_out) in cases {
        let path = emit::Path {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src: Addr::v4([10, 0, 0, 1]),
            dst: Addr::v4([10, 0, 0, 2]),
            tos: 0x6a,
            ttl: 64,
            ip_id: 1,
            src_port,
        };
        let mut frame = [0; 256];
        let bth = Bth::new(opcode, Qpn::new(0x1234), Psn::new(0xab_cdef));
        let Ok(len) = emit::frame(&path, &bth, &ext, &[9; 8][..payload], &mut frame) else {
            panic!("{name} cannot be built");
        };
        let Verdict::Roce(packet) = parse(&frame[..len]) else { panic!("{name} is not read") };
        let file = dir.path().join("one.pcap");
        let mut writer = PcapWriter::new(fs::File::create(&file).expect("file")).expect("header");
        let record = PcapPacket::new(Duration::from_secs(1), len as u32, &frame[..len]);
        writer.write_packet(&record).expect("write");
        drop(writer);
        let ours = Fields::ours(&packet, &frame[..len]);
        assert_eq!((ours.opcode, ours.dest_qp, ours.psn), (opcode.get().into(), 0x1234, 0xab_cdef));
        let told = read_by_tshark(&file, false).remove(&1);
        match told {
            Some(theirs) if theirs == ours => {}
            None if left_out.contains("opcode") => println!("tshark misreads {name}: it reads no packet"),
            Some(theirs) if !left_out.is_empty() => {
                println!("tshark misreads {name}: {theirs:?}");
                // The BTH is read, what follows is not.
                let bth = (theirs.opcode, theirs.dest_qp, theirs.psn, theirs.tos);
                assert_eq!(bth, (ours.opcode, ours.dest_qp, ours.psn, ours.tos), "{name}");
                assert!(
                    theirs.dma_len.is_none_or(|n| Some(n) == ours.dma_len) || left_out.contains("dma_len"),
                    "{name}"
                );
            }
            other => panic!("{name}: {other:?}, and {ours:?} here"),
        }
    }
}

/// The answers beside the captures of guests are what tshark counts.
#[test]
fn golden_answers_are_what_tshark_counts() {
    if !is_here() {
        return;
    }
    let mut seen = 0;
    for path in captures() {
        let name = path.file_stem().expect("name").to_string_lossy().into_owned();
        if !name.starts_with("vm-") {
            continue;
        }
        let golden: Value =
            serde_json::from_slice(&fs::read(path.with_extension("json")).expect("golden")).expect("JSON");
        let packets: Vec<Fields> = theirs(&path).into_values().collect();
        let (cnps, others): (Vec<_>, Vec<_>) = packets.iter().partition(|p| p.opcode == 0x81);
        let count = |wanted: &dyn Fn(&Fields) -> bool| others.iter().filter(|p| wanted(p)).count() as u64;
        assert_eq!(golden["rocev2"], packets.len(), "{name}");
        assert_eq!(golden["cnp"], cnps.len(), "{name}");
        for (ecn, bits) in [("not_ect", 0), ("ect1", 1), ("ect0", 2), ("ce", 3)] {
            assert_eq!(golden["ecn"][ecn], count(&|p| p.tos & 3 == bits), "{name}: {ecn}");
        }
        assert_eq!(golden["nak"]["psn_sequence"], count(&|p| p.syndrome == Some(0x60)), "{name}");
        for flow in golden["flows"].as_array().expect("flows") {
            let response = flow["space"] == "response";
            let of_flow = |p: &Fields| {
                flow["dest_qp"] == p.dest_qp
                    && response == (p.opcode >> 5 == 0 && (0x0d..=0x12).contains(&(p.opcode & 0x1f)))
            };
            assert!(flow["packets"].as_u64() <= Some(count(&of_flow)), "{name}: {flow}");
            assert!(count(&|p| of_flow(p) && flow["first_psn"] == p.psn) > 0, "{name}: {flow}");
            assert!(count(&|p| of_flow(p) && flow["last_psn"] == p.psn) > 0, "{name}: {flow}");
        }
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} captures of guests");
}
