//! Given rates on real soft-RoCE: what a queue pair may send is what it sends, without a drop and without a repeat.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};

use super::{MESSAGE, on_wire};
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
const WINDOW: Duration = Duration::from_secs(2);
const SETTLE: Duration = Duration::from_millis(500);
/// How far a queue pair may be off its rate, by HTB and at less than 50 Mb/s.
const TOLERANCE: f64 = 0.02;
/// So often a rate is measured where the sender stood still.
const TRIES: u32 = 2;
/// Of what this machine carries without a limit, at most this part is asked of it: the line of these cables is the CPU.
const NEAR_LINE: f64 = 1.0 / 3.0;
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
const PLAN: [(u64, &[Run]); 3] = [
    (1, &[run_of("ib_send_bw", 16, CLIENT)]),
    (5, &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 16, CLIENT)]),
    (50, &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 1, CLIENT), run_of("ib_read_bw", 1, SERVER)]),
];
/// What is run near the line.
const AT_MOST: &[Run] = &[run_of("ib_write_bw", 1, CLIENT), run_of("ib_send_bw", 1, CLIENT)];

/// What host 0 sends without a limit, payload bits per second, while an agent and a capture do the same work as later.
fn unlimited(fabric: &Fabric) -> Result<f64> {
    let agent = unpaced(fabric, CLIENT)?;
    let wire = Wire::headers(&fabric.nodes[CLIENT])?;
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

/// Looks again where the sender stood still: a pacer gives nobody a burst for time that has passed. Only what it sent when it did not is
/// the pacer's; a machine whose timers come late twice cannot show the rate itself.
fn achieved(case: &mut Case, fabric: &Fabric, pacer: &str, rate: u64, run: &Run) -> Result<()> {
    let tolerance = if pacer == "edt" && rate >= 50 { TOLERANCE / 2.0 } else { TOLERANCE };
    for tries in 1.. {
        let (watch, cpu) = (Watch::urgent(Duration::from_millis(1)), CpuTime::begin()?);
        let worst = measure(case, fabric, rate, run)?;
        let (away, busy) = (watch.share_away(), cpu.busy()?);
        case.figure("worst_percent_off", (worst.off * 10_000.0).round() / 100.0);
        case.percent("stood_still_percent", worst.still);
        case.percent("cpu_away_percent", away);
        case.percent("cpu_busy_percent", busy);
        case.figure("tries", tries);
        if worst.off.abs() <= tolerance || !case.holds() {
            break;
        }
        let said = format!("a queue pair is {:.2} % off its rate", worst.off * 100.0);
        // What stood still for less than a burst lasts is not in it, but never most of it.
        let late = worst.off < 0.0 && worst.still >= -worst.off / 2.0 && worst.off_between >= -TOLERANCE;
        if !late {
            let between = worst.off_between * 100.0;
            case.expect(false, format_args!("{said}, and {between:.2} % where it did not stand still"));
            break;
        }
        if tries == TRIES {
            return Err(skip(format!(
                "{said}: for {:.1} % of the time nothing was let out, and between {:.2} % off; the guest's CPU was busy for {:.1} %, and \
                 this machine's away for {:.1} %",
                worst.still * 100.0,
                worst.off_between * 100.0,
                busy * 100.0,
                away * 100.0
            )));
        }
    }
    Ok(())
}

/// How a queue pair kept its rate.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Kept {
    /// How far it is off: 0.01 = one percent too fast.
    off: f64,
    /// The part of the time for which it sent nothing though it was its turn.
    still: f64,
    /// How far it is off in the rest.
    off_between: f64,
}

/// What the times and sizes of a queue pair's packets say of its rate, bits per second. What a gap of more than two packets adds beyond
/// the burst of an HTB class, two packets too, is time in which it stood still (htb_class_mode() and htb_charge_class() of
/// net/sched/sch_htb.c, 6.1 to 7.3, throw it away). A pacer that is too slow has many gaps that are a little longer than one packet.
fn kept(packets: &[(Duration, u64)], bits_per_sec: f64) -> Kept {
    let (Some(first), Some(last)) = (packets.first(), packets.last()) else { return Kept::default() };
    let lasts = |(_, bytes): (Duration, u64)| bytes as f64 * 8.0 / bits_per_sec;
    let bits: f64 = packets[1..].iter().map(|(_, bytes)| *bytes as f64 * 8.0).sum();
    let time = last.0.saturating_sub(first.0).as_secs_f64();
    let mut still = 0.0;
    // What the class has in store, as time: it sends with nothing in store, and owes then.
    let mut tokens = -lasts(*first);
    for pair in packets.windows(2) {
        let (gap, burst) = (pair[1].0.saturating_sub(pair[0].0).as_secs_f64(), 2.0 * lasts(pair[1]));
        tokens += gap;
        if gap > burst {
            still += (tokens - burst).max(0.0);
        }
        tokens = tokens.min(burst) - lasts(pair[1]);
    }
    Kept {
        off: bits / time / bits_per_sec - 1.0,
        still: still / time,
        off_between: bits / (time - still) / bits_per_sec - 1.0,
    }
}

/// How the queue pair that is farthest off kept its rate.
fn measure(case: &mut Case, fabric: &Fabric, rate: u64, run: &Run) -> Result<Kept> {
    let Run { tool, qps, sender } = *run;
    let (rxe, flows) = (Counters::all(fabric)?, Flows::read(fabric)?);
    // As many messages as the time takes; WRITE polls, the others sleep for what completes.
    let messages = (rate * 1_000 * (SETTLE + WINDOW).as_millis() as u64 / 8).div_ceil(on_wire(PATH_MTU));
    let how = if tool == "ib_write_bw" { "" } else { "-e" };
    let perf = Perf::new(tool).args(&format!("-s {MESSAGE} -q {qps} -n {messages} {how}"));
    let before = drops(fabric, sender)?;
    // Behind the qdisc that holds packets back, with the times at which they left it.
    let wire = Wire::headers(&fabric.nodes[sender])?;
    perf.run(fabric, CLIENT, SERVER)?;
    let passed = wire.finish()?;
    let data: Vec<_> = passed.sent().filter(|seen| seen.packet.payload_len > 0).collect();
    let begin = data.first().context("nothing was sent")?.at + SETTLE;
    let mut queue_pairs: BTreeMap<u32, Vec<(Duration, u64)>> = BTreeMap::new();
    for seen in data.into_iter().filter(|seen| seen.at >= begin) {
        let of = queue_pairs.entry(seen.packet.bth.dest_qp.get()).or_default();
        of.push((seen.at, seen.wire_len as u64));
    }
    case.equal("queue pairs that send", queue_pairs.len() as u64, qps);
    let mut worst = Kept::default();
    for (qp, packets) in &queue_pairs {
        let (Some(first), Some(last)) = (packets.first(), packets.last()) else { continue };
        let kept = kept(packets, rate as f64 * 1e6);
        if kept.off.abs() > worst.off.abs() {
            worst = kept;
        }
        let time = last.0.saturating_sub(first.0);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets of 1,000 bytes after these gaps, µs. At 8 Mb/s each takes 1,000.
    fn sent(gaps: &[u64]) -> Kept {
        let mut at = Duration::from_secs(7);
        let mut packets = vec![(at, 1_000)];
        for gap in gaps {
            at += Duration::from_micros(*gap);
            packets.push((at, 1_000));
        }
        kept(&packets, 8e6)
    }

    #[track_caller]
    fn is(kept: Kept, off: f64, still: f64, off_between: f64) {
        for (is, wanted) in [(kept.off, off), (kept.still, still), (kept.off_between, off_between)] {
            assert!((is - wanted).abs() < 1e-6, "{kept:?}");
        }
    }

    #[test]
    fn a_pacer_that_is_too_slow_does_not_stand_still() {
        is(sent(&[1_000; 50]), 0.0, 0.0, 0.0);
        is(sent(&[1_250; 50]), -0.2, 0.0, -0.2);
        is(sent(&[800; 50]), 0.25, 0.0, 0.25);
    }

    #[test]
    fn what_a_burst_makes_up_for_is_no_standstill_and_the_rest_is() {
        // 900 µs late, and the next at once.
        is(sent(&[1_000, 1_900, 100, 1_000]), 0.0, 0.0, 0.0);
        // 6 ms late: two are made up for, 4 are lost.
        is(sent(&[1_000, 7_000, 0, 0, 1_000, 1_000]), -0.4, 0.4, 0.0);
        // And too slow beside it: what it does not send then is not what it stood still for.
        is(sent(&[&[7_000, 0, 0][..], &[1_250; 8]].concat()), 11.0 / 17.0 - 1.0, 4.0 / 17.0, 11.0 / 13.0 - 1.0);
    }
}
