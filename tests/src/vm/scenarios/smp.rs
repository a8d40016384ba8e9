//! Two CPUs: where packets change their order. Every flow is looked at where rxe hands it over (before the qdisc), behind the
//! qdisc, behind the switch, and where the receiver takes it in.

use std::collections::{HashMap, HashSet};

use anyhow::Result;
use roce_common::{psn::Psn, units::Qpn};

use super::{MESSAGE, pace};
use crate::{
    capture::{Capture, Seen},
    lab::steer,
    rig,
    vm::{Case, Counters, Fabric, Flows, Part, Perf, Placement, Report, Scenario, Wire, load},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smp",
    about: "queue pairs on two CPUs, not paced and paced by EDT and HTB: where packets change their order",
    parts: &[Part::new("order", 500, order).cpus(2).share(100).memory(1_024)],
};

const CLIENT: usize = 0;
const SERVER: usize = 1;
/// What a paced queue pair has, Mb/s, and how much it sends: for nearly three seconds.
const RATE: u64 = 1;
const PACED_MESSAGES: u32 = 5;
const MESSAGES: u32 = 40;
/// Masks of CPUs.
const BOTH: u32 = 0b11;
const NONE: u32 = 0;

fn order(report: &mut Report) -> Result<()> {
    load(&["sch_fq", "sch_htb"])?;
    let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
    for pacer in ["off", "edt", "htb"] {
        let agent = |host| match pacer {
            "off" => pace::unpaced(&fabric, host),
            _ => pace::agent(&fabric, host, pacer, RATE),
        };
        let agents = [agent(CLIENT)?, agent(SERVER)?];
        for qps in [4, 16] {
            in_order(report, &fabric, pacer, qps, false);
        }
        if pacer != "off" {
            // A veth hands a packet to the backlog of the CPU that sends it. Steering puts all packets of a flow into one CPU's.
            steer_flows(&fabric, BOTH)?;
            in_order(report, &fabric, pacer, 16, true);
            steer_flows(&fabric, NONE)?;
        }
        agents.into_iter().try_for_each(|agent| rig::finish(agent).map(drop))?;
    }
    Ok(())
}

fn in_order(report: &mut Report, fabric: &Fabric, pacer: &str, qps: u32, steered: bool) {
    let messages = if pacer == "off" { MESSAGES } else { PACED_MESSAGES };
    let steering = if steered { ", each flow steered to one CPU" } else { "" };
    report.case(format!("{qps} queue pairs, pacer {pacer}{steering}"), |case| {
        let overtaken = run(case, fabric, qps, messages)?;
        case.equal("handed over by rxe out of order", overtaken.handed_over, 0);
        case.equal("overtaken in the qdisc", overtaken.behind_the_qdisc, 0);
        if steered {
            case.equal("overtaken behind it, though each flow has one CPU", overtaken.behind_the_switch, 0);
        }
        Ok(())
    });
}

/// Receive packet steering on every interface of the fabric.
fn steer_flows(fabric: &Fabric, cpus: u32) -> Result<()> {
    let ports = fabric.nodes.iter().flat_map(|node| [&node.port, &node.switch_port]);
    ports.into_iter().try_for_each(|port| port.ns.run(|| steer(&port.name, cpus)))
}

/// Packets that came behind one that was sent after them, at each place.
struct Overtaken {
    handed_over: u64,
    behind_the_qdisc: u64,
    behind_the_switch: u64,
}

/// Queue pair and PSN of the packets with payload.
fn data<'a>(packets: impl Iterator<Item = &'a Seen>) -> impl Iterator<Item = (Qpn, Psn)> {
    packets.filter(|seen| seen.packet.payload_len > 0).map(|seen| (seen.packet.bth.dest_qp, seen.packet.bth.psn))
}

/// Those whose PSN is new and below the highest. Repeats are not new. It needs all packets: none is dropped here.
fn overtaken(packets: impl Iterator<Item = (Qpn, Psn)>) -> u64 {
    let (mut highest, mut known) = (HashMap::new(), HashSet::new());
    let mut late = 0;
    for (qp, psn) in packets {
        let highest = highest.entry(qp).or_insert(psn);
        late += u64::from(known.insert((qp, psn)) && psn.diff(*highest) < 0);
        if psn.diff(*highest) > 0 {
            *highest = psn;
        }
    }
    late
}

fn run(case: &mut Case, fabric: &Fabric, qps: u32, messages: u32) -> Result<Overtaken> {
    let (client, server) = (&fabric.nodes[CLIENT], &fabric.nodes[SERVER]);
    let (rxe, flows) = (Counters::all(fabric)?, Flows::read(fabric)?);
    let (behind_qdisc, behind_switch) = (Capture::headers(&client.port)?, Wire::headers(server)?);
    let perf = Perf::new("ib_send_bw").args(&format!("-e -s {MESSAGE} -q {qps} -n {messages}"));
    let done = perf.run(fabric, CLIENT, SERVER);
    let (behind_qdisc, behind_switch) = (behind_qdisc.finish()?, behind_switch.finish()?);
    let flows = Flows::read(fabric)?.since(&flows);
    let sent = behind_qdisc.iter().filter(|seen| seen.frame.get(6..12) == Some(&client.port.mac));
    let seen = Overtaken {
        handed_over: flows.sum(&format!("{}/egress", client.port.name), "missing_psns"),
        behind_the_qdisc: overtaken(data(sent)),
        behind_the_switch: overtaken(data(behind_switch.received())),
    };
    case.figure("handed_over_out_of_order", seen.handed_over);
    case.figure("overtaken_behind_the_qdisc", seen.behind_the_qdisc);
    case.figure("overtaken_behind_the_switch", seen.behind_the_switch);
    case.figure("missing_when_taken_in", flows.sum(&format!("{}/ingress", server.port.name), "missing_psns"));
    for (device, grown) in Counters::grown(fabric, &rxe)? {
        case.figure(device, grown.trouble());
    }
    done?;
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_overtaken_once_and_a_repeat_is_not() {
        let late = |psns: &[(u32, u32)]| overtaken(psns.iter().map(|(qp, psn)| (Qpn::new(*qp), Psn::new(*psn))));
        assert_eq!(late(&[(1, 5), (1, 6), (1, 7)]), 0);
        assert_eq!(late(&[(1, 5), (1, 7), (1, 6), (1, 8)]), 1, "6 behind 7");
        assert_eq!(late(&[(1, 5), (1, 8), (1, 6), (1, 7), (1, 9)]), 2, "6 and 7 behind 8");
        assert_eq!(late(&[(1, 5), (1, 6), (1, 7), (1, 5), (1, 6), (1, 7), (1, 8)]), 0, "go-back-N");
        assert_eq!(late(&[(1, 5), (1, 7), (1, 6), (1, 6), (1, 7), (1, 8)]), 1, "and repeated then");
        assert_eq!(late(&[(1, 7), (2, 5), (1, 8), (2, 6)]), 0, "queue pairs apart");
        assert_eq!(late(&[(1, 0xff_fffe), (1, 0), (1, 0xff_ffff), (1, 1)]), 1, "beyond the last PSN");
    }
}
