//! Given rates on real soft-RoCE: what a queue pair may send is what it sends, without a drop and without a repeat.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};

use super::{BUSY, MESSAGE, on_wire};
use crate::{
    lab::{CpuTime, Watch, json},
    rig,
    run::AgentProcess,
    vm::{Case, Counters, Fabric, Flows, JUMBO, Part, Perf, Placement, Report, Scenario, Wire, load, skip},
};

pub(super) const EDT: Scenario = Scenario {
    name: "pace-edt",
    about: "given rates by departure times: achieved within 1 or 2 %, without a drop or a repeat",
    parts: &[Part::new("rates", 400, |r| rates(r, "edt")).memory(1_024)],
};

pub(super) const HTB: Scenario = Scenario {
    name: "pace-htb",
    about: "given rates by HTB classes: achieved within 2 %, without a drop or a repeat",
    parts: &[Part::new("rates", 400, |r| rates(r, "htb")).memory(1_024)],
};

const CLIENT: usize = 0;
const SERVER: usize = 1;
/// An emulated CPU carries so many packets a second: the larger they are, the higher the rates that can be shown.
const PATH_MTU: u64 = 4_096;
/// Measured for this long, after a while in which the first packets pass.
const WINDOW: Duration = Duration::from_secs(3);
const SETTLE: Duration = Duration::from_secs(1);
/// Of what this machine carries without a limit, at most this part is asked of it: the line of these cables is the CPU.
const NEAR_LINE: f64 = 0.5;
/// The link of the agents, Mb/s.
const LINK: u64 = 1_000;

/// Queue pairs that send at a given rate.
struct Run {
    tool: &'static str,
    qps: u64,
    /// The host whose queue pairs send the data.
    sender: usize,
}

const fn run_of(tool: &'static str, qps: u64, sender: usize) -> Run {
    Run { tool, qps, sender }
}

/// Rates in Mb/s, with what is run at each. Each rate is an agent of its own, which takes an emulated CPU a while.
const PLAN: [(u64, &[Run]); 4] = [
    (1, &[run_of("ib_send_bw", 16, CLIENT)]),
    (5, &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 16, CLIENT), run_of("ib_read_bw", 1, SERVER)]),
    (20, &[run_of("ib_write_bw", 1, CLIENT)]),
    (50, &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 1, CLIENT), run_of("ib_read_bw", 1, SERVER)]),
];
/// What is run near the line.
const AT_MOST: &[Run] = &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 1, CLIENT)];

/// What host 0 sends without a limit, payload bits per second, while an agent and a capture do the same work as later.
fn unlimited(fabric: &Fabric) -> Result<f64> {
    let agent = unpaced(fabric, CLIENT)?;
    let wire = Wire::start(&fabric.nodes[CLIENT])?;
    let done = Perf::new("ib_send_bw").args(&format!("-e -s {MESSAGE} -n 400")).run(fabric, CLIENT, SERVER)?;
    wire.finish()?;
    rig::finish(agent)?;
    Ok(done.bits_per_sec())
}

fn rates(report: &mut Report, pacer: &str) -> Result<()> {
    load(&[if pacer == "edt" { "sch_fq" } else { "sch_htb" }])?;
    let fabric = Fabric::new(2, JUMBO, Placement::Initial)?;
    let carried = unlimited(&fabric)?;
    report.figure("carried_without_a_limit_mbit_per_sec", (carried / 1e6).round());
    let near_line = ((carried * NEAR_LINE / 1e6) as u64).min(LINK);
    for (rate, runs) in PLAN.into_iter().chain([(near_line, AT_MOST)]) {
        let mut agents = BTreeMap::new();
        for run in runs {
            let Run { tool, qps, sender } = *run;
            report.case(format!("{tool}, queue pairs: {qps}, {rate} Mb/s each"), |case| {
                if (rate * qps) as f64 * 1e6 > carried * NEAR_LINE {
                    return Err(skip(format!("without a limit this machine carries {:.0} Mb/s", carried / 1e6)));
                }
                if let std::collections::btree_map::Entry::Vacant(free) = agents.entry(sender) {
                    free.insert(agent(&fabric, sender, pacer, rate)?);
                }
                achieved(case, &fabric, pacer, rate, run)
            });
        }
        agents.into_values().try_for_each(|agent| rig::finish(agent).map(drop))?;
    }
    Ok(())
}

fn link() -> String {
    format!("{LINK}m")
}

/// An agent that paces nothing.
pub(super) fn unpaced(fabric: &Fabric, host: usize) -> Result<AgentProcess> {
    fabric.agent(host, &["--link-rate", &link(), "--pacer", "off", "--ingress", "tc"])
}

/// An agent whose queue pairs have a rate from their first packet on, never less and never more.
pub(super) fn agent(fabric: &Fabric, host: usize, pacer: &str, rate: u64) -> Result<AgentProcess> {
    let (rate, link) = (format!("{rate}m"), link());
    // The timer of a link this fast would only wake the controller a thousand times a second for nothing.
    let given = ["--start-rate", &rate, "--rpg-min-rate", &rate, "--rpg-max-rate", &rate, "--rpg-time-reset", "200ms"];
    fabric.agent(host, &[&["--link-rate", &link, "--pacer", pacer, "--ingress", "tc"][..], &given].concat())
}

/// Looks again where the emulator took the CPU away meanwhile: a pacer gives nobody a burst for time that has passed. Where the CPU
/// itself has no time left, this machine cannot show the rate.
fn achieved(case: &mut Case, fabric: &Fabric, pacer: &str, rate: u64, run: &Run) -> Result<()> {
    let tolerance = if pacer == "edt" && rate >= 50 { 0.01 } else { 0.02 };
    let mut tries = 0;
    loop {
        tries += 1;
        let (watch, cpu) = (Watch::urgent(), CpuTime::begin()?);
        let worst = measure(case, fabric, rate, run)?;
        let (away, busy) = (watch.share_away(), cpu.busy()?);
        case.figure("worst_percent_off", (worst * 10_000.0).round() / 100.0);
        case.percent("cpu_away_percent", away);
        case.percent("cpu_busy_percent", busy);
        case.figure("tries", tries);
        if worst.abs() <= tolerance || !case.holds() {
            return Ok(());
        }
        let what = format!("a queue pair is {:.2} % off its rate", worst * 100.0);
        if busy > BUSY {
            return Err(skip(format!("{what}, but the guest's CPU was busy for {:.1} % of the time", busy * 100.0)));
        }
        if away < tolerance / 2.0 {
            case.expect(false, what);
            return Ok(());
        }
        if tries == 3 {
            return Err(skip(format!("{what}, and this machine's CPU was away for {:.1} % of the time", away * 100.0)));
        }
    }
}

/// How far the queue pair that is farthest off is off its rate: 0.01 = one percent too fast.
fn measure(case: &mut Case, fabric: &Fabric, rate: u64, run: &Run) -> Result<f64> {
    let Run { tool, qps, sender } = *run;
    let (rxe, flows) = (Counters::all(fabric)?, Flows::read(fabric)?);
    // As many messages as the time takes; WRITE polls, the others sleep for what completes.
    let messages = (rate * 1_000_000 * (SETTLE + WINDOW).as_secs() / 8).div_ceil(on_wire(PATH_MTU));
    let how = if tool == "ib_write_bw" { "" } else { "-e" };
    let perf = Perf::new(tool).args(&format!("-s {MESSAGE} -q {qps} -n {messages} {how}"));
    let before = drops(fabric, sender)?;
    // Behind the qdisc that holds packets back, with the times at which they left it.
    let wire = Wire::start(&fabric.nodes[sender])?;
    perf.run(fabric, CLIENT, SERVER)?;
    let passed = wire.finish()?;
    let data: Vec<_> = passed.sent().filter(|seen| seen.packet.payload_len > 0).collect();
    let begin = data.first().context("nothing was sent")?.at + SETTLE;
    let mut queue_pairs: BTreeMap<u32, Vec<(Duration, u64)>> = BTreeMap::new();
    for seen in data.into_iter().filter(|seen| seen.at >= begin) {
        let of = queue_pairs.entry(seen.packet.bth.dest_qp.get()).or_default();
        of.push((seen.at, seen.frame.len() as u64));
    }
    case.equal("queue pairs that send", queue_pairs.len() as u64, qps);
    let mut worst: f64 = 0.0;
    for (qp, packets) in &queue_pairs {
        let (Some(first), Some(last)) = (packets.first(), packets.last()) else { continue };
        let bytes: u64 = packets[1..].iter().map(|(_, bytes)| bytes).sum();
        let time = last.0.saturating_sub(first.0);
        let off = bytes as f64 * 8.0 / time.as_secs_f64() / (rate as f64 * 1e6) - 1.0;
        if off.abs() > worst.abs() {
            worst = off;
        }
        case.expect(time * 10 > WINDOW * 9, format_args!("queue pair {qp} sent for {:.1} s only", time.as_secs_f64()));
    }
    case.equal("drops of the qdisc", drops(fabric, sender)? - before, 0);
    for (device, grown) in Counters::grown(fabric, &rxe)? {
        case.equal(format_args!("trouble of {device}"), grown.trouble(), vec![]);
    }
    for (id, tally) in Flows::read(fabric)?.since(&flows).iter() {
        case.equal(format_args!("loss at {} of queue pair {}", id.tap, id.dest_qp), tally.trouble(), vec![]);
    }
    Ok(worst)
}

/// What the sender's qdiscs have dropped.
fn drops(fabric: &Fabric, sender: usize) -> Result<u64> {
    let port = &fabric.nodes[sender].port;
    let json = json(port.ns.command("tc").args(["-j", "-s", "qdisc", "show", "dev", &port.name]))?;
    Ok(json.as_array().into_iter().flatten().filter_map(|q| q["drops"].as_u64()).sum())
}
