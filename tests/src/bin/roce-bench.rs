//! Speed lives here and in no test.
//!
//! `roce-bench packet`: what each BPF program costs per packet, beside a program that does nothing and one that parses and
//! counts, in the same run. `inspect`, `reaction` and `scale`: see [`roce_tests::bench`].

use std::{env, fs, io::Write as _, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use roce_common::{
    abi::{FlowKey, MarkPolicy, Pacer, PairKey, PeerQp, RateValue, Role},
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, IpVersion, Opcode, emit},
};
use roce_tests::{
    bench::{inspect, reaction, scale},
    progtest::{Programs, config, monotonic_ns},
};
use serde::Serialize;
use serde_json::json;

const LOCAL: Addr = Addr::v4([10, 0, 0, 1]);
const PEER: Addr = Addr::v4([10, 0, 0, 2]);
const LOCAL_QPN: Qpn = Qpn::new(0x21);
const PEER_QPN: Qpn = Qpn::new(0x42);
/// QPN of the first flow of the programs that take turns over flows.
const FIRST_QPN: u32 = 0x1_0000;

#[derive(Parser)]
#[command(name = "roce-bench", about = "What the dataplane costs, and how quick it is")]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Nanoseconds per packet through BPF_PROG_TEST_RUN
    Packet {
        /// Rounds; the median is shown
        #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
        /// Repetitions per round
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
        repeat: u32,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// From a CNP to the rate of the next packet, and from a CE mark to its CNP, on real packets
    Reaction {
        /// CNPs, and CE marks, of each kind
        #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
        cnps: u32,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// `roce inspect` against tshark on generated captures
    Inspect {
        /// Size of the smaller capture in MB; the larger one has four times that
        #[arg(long, default_value_t = 1_100, value_parser = clap::value_parser!(u64).range(1..=20_000))]
        megabytes: u64,
        /// Runs of `roce inspect` per capture; the median counts
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
        /// The `roce` program
        #[arg(long, value_name = "FILE")]
        roce: PathBuf,
        /// Where captures are made, and removed: room for the larger one [default: the directory of temporary files]
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// CPU and memory of the controller with very many limited queue pairs
    Scale {
        /// Limited queue pairs
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..=120_000))]
        qps: u32,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().what {
        What::Packet { rounds, repeat, json } => packet(rounds, repeat, json),
        What::Reaction { cnps, json } => reaction::run(cnps).and_then(|r| show(json, &r, &r.table())),
        What::Inspect { megabytes, rounds, roce, dir, json } => {
            let dir = dir.unwrap_or_else(env::temp_dir);
            let options = inspect::Options { roce, dir, bytes: megabytes * 1_000_000, rounds };
            inspect::run(&options).and_then(|r| show(json, &r, &r.table()))
        }
        What::Scale { qps, json } => scale::run(qps).and_then(|r| show(json, &r, &r.table())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _nobody_listens = writeln!(std::io::stderr(), "roce-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// A report as one JSON object, with the machine, or as a table.
fn show(as_json: bool, report: &impl Serialize, table: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if as_json {
        let mut value = serde_json::to_value(report)?;
        value["host"] = json!(host());
        writeln!(out, "{value}")?;
    } else {
        writeln!(out, "{}\n\n{table}", host())?;
    }
    Ok(())
}

/// One measured case.
struct Case {
    name: &'static str,
    hook: Hook,
    program: &'static str,
    frame: Vec<u8>,
    /// Changes maps and configuration for this case.
    prepare: fn(&mut Programs) -> Result<()>,
    nanos: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Hook {
    Xdp,
    Tc,
}

fn packet(rounds: u32, repeat: u32, as_json: bool) -> Result<()> {
    let mut p = Programs::load_for_benchmark()?;
    p.maps.set_local(&[LOCAL])?;
    p.maps.add_pair(PairKey::new(PEER, LOCAL, LOCAL_QPN), PEER_QPN.get())?;
    let mut cases = cases();
    // Cases alternate within a round, so that a busy moment of the machine hits all of them.
    for round in 0..rounds {
        for case in &mut cases {
            (case.prepare)(&mut p)?;
            let run = match case.hook {
                Hook::Xdp => p.xdp(case.program, &case.frame, repeat)?,
                Hook::Tc => p.tc(case.program, &case.frame, 0, repeat)?,
            };
            case.nanos.push(run.nanos);
        }
        if !as_json {
            let _nobody_watches = write!(std::io::stderr(), "\rround {}/{rounds}", round + 1);
        }
    }
    let median = |c: &Case| {
        let mut n = c.nanos.clone();
        n.sort_unstable();
        n[n.len() / 2]
    };
    let of = |name: &str| cases.iter().find(|c| c.name == name).map(median).context("a baseline is missing");
    let base =
        [("xdp", of("xdp: empty")?, of("xdp: parse and count")?), ("tc", of("tc: empty")?, of("tc: parse and count")?)];
    let mut out = std::io::stdout().lock();
    let mut rows = Vec::new();
    for case in &cases {
        let (_, empty, count) = base[usize::from(case.hook == Hook::Tc)];
        let n = median(case);
        rows.push((case.name, n, ratio(n, empty)?, ratio(n, count)?));
    }
    let host = host();
    if as_json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(name, n, empty, count)| json!({"case": name, "ns": n, "per_empty": empty, "per_parse_and_count": count}))
            .collect();
        writeln!(out, "{}", json!({"schema": 1, "host": host, "rounds": rounds, "repeat": repeat, "cases": rows}))?;
        return Ok(());
    }
    writeln!(std::io::stderr())?;
    writeln!(out, "{host}; medians of {rounds} rounds of {repeat} packets, ns per packet")?;
    writeln!(out, "{:<44} {:>6} {:>9} {:>17}", "case", "ns", "/ empty", "/ parse and count")?;
    for (name, n, empty, count) in rows {
        writeln!(out, "{name:<44} {n:>6} {empty:>9.2} {count:>17.2}")?;
    }
    Ok(())
}

fn ratio(n: u64, of: u64) -> Result<f64> {
    if of == 0 {
        bail!("a baseline took no time: raise --repeat");
    }
    Ok((n as f64 / of as f64 * 100.0).round() / 100.0)
}

/// What the figures were measured on.
fn host() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu.lines().find_map(|l| l.strip_prefix("model name")).map_or("", |l| l.trim_start_matches([' ', '\t', ':']));
    format!("Linux {}, {model}", release.trim())
}

fn cases() -> Vec<Case> {
    let case = |name, hook, program, frame: &[u8], prepare| Case {
        name,
        hook,
        program,
        frame: frame.to_vec(),
        prepare,
        nanos: Vec::new(),
    };
    let tcp = tcp();
    let inbound = write(PEER, LOCAL, LOCAL_QPN);
    let outbound = write(LOCAL, PEER, PEER_QPN);
    let host: fn(&mut Programs) -> Result<()> = |p| settle(p, Role::Host, 1, |_| {});
    vec![
        case("xdp: empty", Hook::Xdp, "baseline_empty", &inbound, host),
        case("xdp: parse and count", Hook::Xdp, "baseline_count", &inbound, host),
        case("xdp: TCP", Hook::Xdp, "roce_xdp", &tcp, host),
        case("xdp: WRITE, next of 1 flow", Hook::Xdp, "bench_xdp", &turns(PEER, LOCAL, 1), host),
        case("xdp: WRITE, 1,000 flows in turn", Hook::Xdp, "bench_xdp", &turns(PEER, LOCAL, 1_000), |p| {
            settle(p, Role::Host, 1_000, |_| {})
        }),
        case("xdp: WRITE, 100,000 flows in turn", Hook::Xdp, "bench_xdp", &turns(PEER, LOCAL, 100_000), |p| {
            settle(p, Role::Host, 100_000, |_| {})
        }),
        case("xdp: WRITE, the same again (retransmission)", Hook::Xdp, "roce_xdp", &inbound, host),
        case("xdp: ACK", Hook::Xdp, "roce_xdp", &ack(), host),
        case("xdp: CNP for a paired QP, consumed", Hook::Xdp, "roce_xdp", &cnp(), host),
        case("tc: empty", Hook::Tc, "baseline_tc_empty", &outbound, host),
        case("tc: parse and count", Hook::Tc, "baseline_tc_count", &outbound, host),
        case("tc ingress: TCP, XDP counts", Hook::Tc, "roce_tc_ingress", &tcp, host),
        case("tc ingress: WRITE, XDP counts", Hook::Tc, "roce_tc_ingress", &inbound, host),
        case("tc egress: TCP", Hook::Tc, "roce_tc_egress", &tcp, host),
        case("tc egress: WRITE, observed", Hook::Tc, "bench_tc_egress", &turns(LOCAL, PEER, 1), |p| {
            settle(p, Role::Observe, 1, |_| {})
        }),
        case("tc egress: WRITE, marked", Hook::Tc, "bench_tc_egress", &turns(LOCAL, PEER, 1), host),
        case("tc egress: WRITE, paced by EDT, not marked", Hook::Tc, "bench_tc_egress", &turns(LOCAL, PEER, 1), |p| {
            settle(p, Role::Host, 1, |cfg| {
                cfg.pacer = Pacer::Edt as u32;
                cfg.dscp_policy = MarkPolicy::Keep as u32;
                cfg.ecn_policy = MarkPolicy::Keep as u32;
            })?;
            p.maps.beat(monotonic_ns())?;
            let fast = RateValue { bytes_per_sec: 12_500_000_000, ..RateValue::default() };
            p.maps.set_rate(PeerQp::new(PEER, Qpn::new(FIRST_QPN)), fast)
        }),
        case("tc egress: WRITE, virtual queue, not marked", Hook::Tc, "bench_tc_egress", &turns(LOCAL, PEER, 1), |p| {
            settle(p, Role::Cp, 1, |cfg| cfg.vq_bytes_per_sec = 125_000_000_000)
        }),
        case("HTB filter: WRITE of a limited QP", Hook::Tc, "roce_htb", &outbound, |p| {
            settle(p, Role::Host, 1, |cfg| cfg.pacer = Pacer::Htb as u32)?;
            p.maps.beat(monotonic_ns())?;
            let limited = RateValue { bytes_per_sec: 1_000_000, classid: 0x726f_0001, ..RateValue::default() };
            p.maps.set_rate(PeerQp::new(PEER, PEER_QPN), limited)
        }),
    ]
}

/// The configuration of a case, and that many flows in the map.
fn settle(p: &mut Programs, role: Role, flows: u32, change: fn(&mut roce_common::abi::Config)) -> Result<()> {
    let mut cfg = config(role);
    cfg.sample_every = 0;
    change(&mut cfg);
    p.maps.set_config(cfg)?;
    for (key, _) in p.maps.rates() {
        p.maps.clear_rate(key)?;
    }
    let have: Vec<FlowKey> = p.maps.flows().into_iter().map(|(k, _)| k).collect();
    let (least, most) = (flows as usize / 2, flows as usize + 16);
    if have.len() > most {
        for key in &have {
            p.maps.remove_flow(key)?;
        }
    }
    if have.len() < least || have.len() > most {
        for n in 0..flows {
            p.xdp("roce_xdp", &write(PEER, LOCAL, Qpn::new(FIRST_QPN + n)), 1)?;
        }
    }
    Ok(())
}

fn path(src: Addr, dst: Addr) -> emit::Path {
    emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src,
        dst,
        tos: 0,
        ttl: 64,
        ip_id: 7,
        src_port: 0xc123,
    }
}

fn build(path: &emit::Path, bth: &Bth, ext: &emit::Ext, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 2_048];
    let n = emit::frame(path, bth, ext, payload, &mut out).expect("the frames of the benchmark are well-formed");
    out.truncate(n);
    out
}

fn write(src: Addr, dst: Addr, qpn: Qpn) -> Vec<u8> {
    build(&path(src, dst), &Bth::new(Opcode::WRITE_MIDDLE, qpn, Psn::new(1)), &emit::Ext::default(), &[0; 1_024])
}

/// A WRITE of which the `bench_*` programs make the packets of so many flows.
fn turns(src: Addr, dst: Addr, flows: u32) -> Vec<u8> {
    let mut payload = [0; 1_024];
    payload[8..12].copy_from_slice(&flows.to_ne_bytes());
    let bth = Bth::new(Opcode::WRITE_MIDDLE, Qpn::new(FIRST_QPN), Psn::new(0));
    build(&path(src, dst), &bth, &emit::Ext::default(), &payload)
}

fn ack() -> Vec<u8> {
    let ext = emit::Ext { aeth: Some(Aeth { raw_syndrome: 0x1f, msn: 1 }), ..emit::Ext::default() };
    build(&path(PEER, LOCAL), &Bth::new(Opcode::ACKNOWLEDGE, LOCAL_QPN, Psn::new(1)), &ext, &[])
}

fn cnp() -> Vec<u8> {
    let mut out = [0; emit::CNP_FRAME_V6];
    let n = emit::cnp(&path(PEER, LOCAL), IpVersion::V4, LOCAL_QPN, &mut out);
    out[..n].to_vec()
}

/// A full-sized TCP segment.
fn tcp() -> Vec<u8> {
    let mut frame = write(PEER, LOCAL, LOCAL_QPN);
    frame[23] = 6;
    frame
}
