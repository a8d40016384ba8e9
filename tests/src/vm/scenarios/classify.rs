//! Every kind of RDMA traffic on a clean link: what we count is what passes the wire and what rxe counts, and nothing is lost.

use anyhow::{Result, bail};

use crate::{
    run::AgentProcess,
    vm::{
        Case, Counters, Fabric, Flows, JUMBO, Part, Perf, Placement, Report, Scenario, Wire, WireFlows, count, rping,
    },
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "classify",
    about: "every operation and service: our packets and bytes per queue pair are those of the wire and of rxe; nothing is lost",
    parts: &[
        Part::new("all", 300, everything).share(33),
        Part::new("ipv6-4096", 240, |r| reliable(r, &Bench::new(JUMBO, Placement::Initial)?, true)).share(33),
        Part::new("namespaces", 240, |r| reliable(r, &Bench::new(1_500, Placement::Separate)?, false))
            .since(7, 2)
            .share(33),
    ],
};

/// The host that asks, and the one that is asked.
const CLIENT: usize = 0;
const SERVER: usize = 1;

/// A fabric whose two hosts have an agent each.
struct Bench {
    fabric: Fabric,
    mtu: u32,
    _agents: Vec<AgentProcess>,
}

impl Bench {
    fn new(mtu: u32, placement: Placement) -> Result<Self> {
        let fabric = Fabric::new(2, mtu, placement)?;
        let agent = |host: usize| fabric.agent(host, &["--ingress", "tc"]);
        Ok(Self { _agents: vec![agent(CLIENT)?, agent(SERVER)?], fabric, mtu })
    }

    /// Whether it is IPv4 over a usual MTU, with both hosts in the first namespace.
    fn is_plain(&self, ipv6: bool) -> bool {
        !ipv6 && self.mtu != JUMBO && self.fabric.placement == Placement::Initial
    }

    /// Runs `traffic` and compares what everybody counted of it.
    fn compare(&self, case: &mut Case, traffic: impl FnOnce(&Fabric) -> Result<()>) -> Result<()> {
        let nodes = &self.fabric.nodes;
        let (rxe_before, before) = (Counters::all(&self.fabric)?, Flows::read(&self.fabric)?);
        let wires = [Wire::start(&nodes[CLIENT])?, Wire::start(&nodes[SERVER])?];
        traffic(&self.fabric)?;
        let [client, server] = wires.map(Wire::finish);
        let passed = [client?, server?];
        let (ours, rxe_after) = (Flows::read(&self.fabric)?.since(&before), Counters::all(&self.fabric)?);
        for (i, node) in nodes.iter().enumerate() {
            let rxe = rxe_after[i].since(&rxe_before[i]);
            let (sent, received) = (count(passed[i].sent()), count(passed[i].received()));
            same(case, &ours, &format!("{}/egress", node.port.name), &sent);
            same(case, &ours, &format!("{}/ingress", node.port.name), &received);
            let total = |flows: &WireFlows| flows.values().map(|(packets, _)| packets).sum::<u64>();
            case.equal(format_args!("{} sent_pkts and the wire", node.device), rxe.get("sent_pkts"), total(&sent));
            case.equal(format_args!("{} rcvd_pkts and the wire", node.device), rxe.get("rcvd_pkts"), total(&received));
            case.equal(format_args!("{} trouble", node.device), rxe.trouble(), vec![]);
            case.figure(&format!("{}_sent", node.device), total(&sent));
        }
        case.equal(
            "what the client sent, before the switch and behind it",
            count(passed[0].sent()),
            count(passed[1].received()),
        );
        case.equal(
            "what the server sent, before the switch and behind it",
            count(passed[1].sent()),
            count(passed[0].received()),
        );
        if passed[0].sent().next().is_none() {
            bail!("not one RoCE packet was seen");
        }
        for (id, tally) in ours.iter() {
            case.equal(
                format_args!("loss at {} of queue pair {} ({})", id.tap, id.dest_qp, id.space),
                tally.trouble(),
                vec![],
            );
        }
        Ok(())
    }
}

/// Compares our flows at a tap with those of the wire there, both ways.
fn same(case: &mut Case, ours: &Flows, tap: &str, wire: &WireFlows) {
    let ours: WireFlows = ours
        .at(tap)
        .map(|(id, tally)| {
            let space = if id.space == "response" { "response" } else { "request" };
            ((id.src.clone(), id.dst.clone(), id.dest_qp, space), (tally.get("packets"), tally.get("bytes")))
        })
        .collect();
    for (key, theirs) in wire {
        case.equal(
            format_args!("packets and bytes at {tap}, queue pair {} ({})", key.2, key.3),
            ours.get(key),
            Some(theirs),
        );
    }
    for key in ours.keys().filter(|key| !wire.contains_key(key)) {
        case.expect(false, format_args!("{tap} has {key:?}, which never passed the wire"));
    }
}

fn everything(report: &mut Report) -> Result<()> {
    let bench = Bench::new(1_500, Placement::Initial)?;
    reliable(report, &bench, false)?;
    others(report, &bench);
    Ok(())
}

/// Reliable connections.
fn reliable(report: &mut Report, bench: &Bench, ipv6: bool) -> Result<()> {
    let pmtu = if bench.mtu == JUMBO { 4_096 } else { 1_024 };
    let runs: [(&str, Perf); 10] = [
        ("write", Perf::new("ib_write_bw").args("-s 16384 -n 60")),
        ("write, odd length", Perf::new("ib_write_bw").args("-s 5001 -n 60")),
        ("send", Perf::new("ib_send_bw").args("-s 16384 -n 60")),
        ("read", Perf::new("ib_read_bw").args("-s 16384 -n 60")),
        ("atomic", Perf::new("ib_atomic_bw").args("-n 100")),
        ("write, four queue pairs", Perf::new("ib_write_bw").args("-s 16384 -n 30 -q 4")),
        ("write latency", Perf::new("ib_write_lat").args("-s 64 -n 100")),
        ("send latency", Perf::new("ib_send_lat").args("-s 4000 -n 50")),
        ("read latency", Perf::new("ib_read_lat").args("-s 64 -n 50")),
        ("atomic latency", Perf::new("ib_atomic_lat").args("-n 50")),
    ];
    // What differs elsewhere are headers and sizes, which the first ones show.
    let some = if bench.is_plain(ipv6) { runs.len() } else { 6 };
    for (name, perf) in &runs[..some] {
        report.case(format!("{name}, path MTU {pmtu}"), |case| {
            bench.compare(case, |fabric| {
                perf.clone().ipv6(ipv6).run(fabric, CLIENT, SERVER)?;
                Ok(())
            })
        });
    }
    Ok(())
}

/// Unreliable services, and connections by the connection manager.
fn others(report: &mut Report, bench: &Bench) {
    let runs = [
        ("unreliable connection, write", Perf::new("ib_write_bw").args("-c UC -s 4096 -n 100")),
        ("unreliable connection, send", Perf::new("ib_send_bw").args("-c UC -s 4096 -n 100 -r 200")),
        ("unreliable datagram", Perf::new("ib_send_bw").args("-c UD -s 1000 -n 200 -r 300")),
        ("unreliable datagram, IPv6", Perf::new("ib_send_bw").args("-c UD -s 1000 -n 200 -r 300").ipv6(true)),
        ("connection manager, write", Perf::new("ib_write_bw").args("-s 16384 -n 60").by_cm()),
    ];
    for (name, perf) in runs {
        report.case(name, |case| {
            bench.compare(case, |fabric| {
                perf.run(fabric, CLIENT, SERVER)?;
                Ok(())
            })
        });
    }
    for (name, ipv6) in [("rping", false), ("rping, IPv6", true)] {
        report.case(name, |case| bench.compare(case, |fabric| rping(fabric, CLIENT, SERVER, ipv6, 20, 512)));
    }
}
