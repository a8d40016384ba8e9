//! Facts of flows against times and fields that tshark reads, put together here by other means: whole lists instead of
//! what is kept of a stream. Where tshark is missing the test says so and checks nothing.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    process::Command,
};

use roce_user::{export::FlowReport, facts::SpreadReport, inspect};

/// A packet as tshark reads it.
struct Packet {
    nanos: u64,
    src: String,
    dst: String,
    dest_qp: u32,
    opcode: u32,
    psn: u32,
    ack_req: bool,
    syndrome: Option<u32>,
    /// Bytes of the UDP datagram that are not its header.
    bytes: u64,
    pad: u64,
}

const ASKED: [&str; 11] = [
    "frame.time_epoch",
    "ip.src",
    "ip.dst",
    "ipv6.src",
    "ipv6.dst",
    "infiniband.bth.destqp",
    "infiniband.bth.opcode",
    "infiniband.bth.psn",
    "infiniband.bth.a",
    "infiniband.aeth.syndrome",
    "udp.length",
];

fn packet(line: &str) -> Option<Packet> {
    let cells: Vec<&str> = line.split('\t').collect();
    let number = |i: usize| match cells.get(i)?.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => cells[i].parse().ok(),
    };
    let (seconds, fraction) = cells.first()?.split_once('.')?;
    let address = |v4: usize, v6: usize| if cells[v4].is_empty() { cells[v6] } else { cells[v4] }.to_owned();
    Some(Packet {
        nanos: seconds.parse::<u64>().ok()? * 1_000_000_000 + format!("{fraction:0<9}").parse::<u64>().ok()?,
        src: address(1, 3),
        dst: address(2, 4),
        dest_qp: number(5)?,
        opcode: number(6)?,
        psn: number(7)?,
        ack_req: matches!(cells[8], "1" | "True"),
        syndrome: number(9),
        bytes: u64::from(number(10)?) - 8,
        pad: number(11)?.into(),
    })
}

impl Packet {
    const fn is_response(&self) -> bool {
        matches!(self.opcode, 0x0d..=0x12)
    }

    /// Payload: what is left behind BTH, the headers of the opcode (these captures hold RC only), pad and ICRC.
    fn payload(&self) -> u64 {
        let headers = match self.opcode {
            0x06 | 0x0a | 0x0c => 16,
            0x0b => 20,
            0x03 | 0x05 | 0x09 | 0x0d | 0x0f | 0x10 | 0x11 => 4,
            0x64 => 8,
            _ => 0,
        };
        self.bytes - 12 - headers - self.pad - 4
    }

    fn flow(&self) -> (String, String, u32, bool) {
        (self.src.clone(), self.dst.clone(), self.dest_qp, self.is_response())
    }
}

fn packets(capture: &Path) -> Vec<Packet> {
    let mut command = Command::new("tshark");
    command.args(["-n", "-d", "udp.port==4791,infiniband", "-T", "fields"]).arg("-r").arg(capture);
    for field in ASKED.iter().chain(&["infiniband.bth.padcnt"]) {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().filter_map(packet).collect()
}

/// Times from requests that must be answered, and passed once, to the first response with their PSN.
fn round_trips(requests: &[&Packet], responses: &[&Packet]) -> Vec<u64> {
    let mut times_sent: HashMap<u32, u32> = HashMap::new();
    for p in requests {
        *times_sent.entry(p.psn).or_default() += 1;
    }
    let mut answers: HashMap<u32, u64> = HashMap::new();
    for p in responses.iter().filter(|p| p.syndrome.is_none_or(|s| s < 0x20)) {
        answers.entry(p.psn).or_insert(p.nanos);
    }
    let mut times: Vec<u64> = requests
        .iter()
        .filter(|p| (p.ack_req || p.opcode == 0x0c) && times_sent[&p.psn] == 1)
        .filter_map(|p| Some(answers.get(&p.psn)? - p.nanos))
        .collect();
    times.sort_unstable();
    times
}

fn same_spread(got: SpreadReport, want: &[u64], what: &str) {
    let mean = want.iter().sum::<u64>() / want.len() as u64;
    let want = (want.len() as u64, want.iter().min().copied(), mean, want.iter().max().copied());
    assert_eq!((got.count, Some(got.min), got.mean, Some(got.max)), want, "{what}");
}

fn check(name: &str, flow: &FlowReport, mine: &[&Packet], reverse: &[&Packet]) {
    let what = format!("{name}: QP {} {}", flow.dest_qp, flow.space);
    assert_eq!(flow.bytes, mine.iter().map(|p| p.payload()).sum::<u64>(), "{what}");
    let count = |ops: &[u32]| mine.iter().filter(|p| ops.contains(&(p.opcode & 0x1f))).count() as u64;
    let classes: [(&str, &[u32]); 5] = [
        ("send", &[0, 1, 2, 3, 4, 5]),
        ("write", &[6, 7, 8, 9, 10, 11]),
        ("read", &[12]),
        ("read_response", &[13, 14, 15, 16]),
        ("acknowledge", &[17]),
    ];
    for (class, ops) in classes {
        assert_eq!(flow.facts.opcodes.get(class).copied().unwrap_or(0), count(ops), "{what} {class}");
    }
    if flow.space == "response" {
        let acks = mine.iter().filter(|p| p.opcode == 0x11 && p.syndrome.is_some_and(|s| s < 0x20));
        let mut psns: Vec<u32> = acks.map(|p| p.psn).collect();
        psns.dedup_by_key(|psn| *psn);
        // The PSNs of these captures do not wrap, and rxe's ACKs of repeats say the highest PSN again.
        let steps: Vec<u64> = psns.windows(2).filter(|w| w[1] > w[0]).map(|w| u64::from(w[1] - w[0])).collect();
        if let Some(spread) = flow.facts.psns_per_ack {
            same_spread(spread, &steps, &what);
        }
        return;
    }
    let times = round_trips(mine, reverse);
    let Some(rtt) = &flow.facts.rtt_ns else {
        assert!(times.is_empty() || flow.service != "RC", "{what}: no round trips");
        return;
    };
    same_spread(rtt.spread, &times, &what);
    for (told, per_mille) in [(rtt.p50, 500), (rtt.p99, 990)] {
        let exact = times[(times.len() * per_mille).div_ceil(1_000) - 1];
        assert!(told.abs_diff(exact) <= exact / 16, "{what}: {told} for {exact}");
    }
}

#[test]
fn facts_are_what_tshark_and_plain_lists_give() {
    if let Err(error) = Command::new("tshark").arg("--version").output() {
        println!("SKIP tshark cannot be run ({error})");
        return;
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    let captures = [
        "rxe-write-rc",
        "rxe-write-rc-ipv6",
        "rxe-write-mtu1024",
        "rxe-write-4qp",
        "rxe-send-rc",
        "rxe-read-rc",
        "rxe-write-loss1-pre",
        "rxe-send-loss1-pre",
    ];
    let mut round_trips = 0;
    for name in captures {
        let path = directory.join(format!("{name}.pcap"));
        let packets = packets(&path);
        let mut flows: BTreeMap<_, Vec<&Packet>> = BTreeMap::new();
        for p in &packets {
            flows.entry(p.flow()).or_default().push(p);
        }
        let report = inspect::report(&path).expect("report");
        assert_eq!(report.flows.len(), flows.len(), "{name}");
        for flow in &report.flows {
            let (src, dst) = (flow.src.to_string(), flow.dst.to_string());
            let mine = &flows[&(src.clone(), dst.clone(), flow.dest_qp, flow.space == "response")];
            // rxe gives both ends the same number here.
            let reverse = flows.get(&(dst, src, flow.dest_qp, flow.space != "response"));
            check(name, flow, mine, reverse.map_or(&[], |r| r));
            round_trips += flow.facts.rtt_ns.as_ref().map_or(0, |r| r.spread.count);
        }
    }
    println!("{round_trips} round trips agree with tshark's times");
    assert!(round_trips > 300);
}

#[test]
fn bytes_sent_again_are_those_of_repeated_psns() {
    // PMTU 256: every packet of these captures that carries data is full, and in the captures before the lossy switch
    // everything sent again had passed.
    for name in ["rxe-write-loss1-pre", "rxe-send-loss1-pre"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/captures/{name}.pcap"));
        let report = inspect::report(&path).expect("report");
        let again: u64 = report.flows.iter().map(|f| f.facts.retransmitted_bytes).sum();
        assert_eq!(again, report.counters.duplicates * 256, "{name}");
    }
}
