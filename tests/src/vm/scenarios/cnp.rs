//! Congestion notifications by hand against a queue pair of rxe: the right ones slow exactly the one they name, all others
//! nobody; and rxe sees none of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use roce_common::{
    abi::{Counter, Direction, PeerQp},
    psn::Psn,
    units::{Addr, Qpn},
};
use roce_user::netlink::rdma::{self, QpType, QueuePair};

use crate::{
    forge::{Forger, altered},
    lab::{HostPort, json},
    rig,
    run::AgentProcess,
    vm::{Case, Counters, Fabric, Node, Part, Perf, Placement, Report, Running, Scenario, load},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cnp",
    about: "hand-made CNPs slow exactly the queue pair they name; unknown, damaged and forged ones nobody; rxe sees none",
    parts: &[Part::new("forged", 240, forged).share(33)],
};

const CLIENT: usize = 0;
const SERVER: usize = 1;
/// CNPs of one kind, and the time between two.
const COUNT: u64 = 100;
/// Kinds of forged packets.
const KINDS: u64 = 7;
const GAP: Duration = Duration::from_millis(5);
/// CNPs of a ConnectX-4 Lx carry DSCP 48 with ECT(0) and leave from UDP port 0; all else is as the standard has it.
const NIC_TOS: u8 = 48 << 2 | 2;
const NIC_PORT: u16 = 0;
/// What each queue pair may send at most: little, so that an emulated CPU is idle beside it, and a cut shows at once.
const MOST: &str = "10m";
/// Most of it, bytes per second: 8 Mb/s.
const RECOVERED: u64 = 1_000_000;
/// Messages of 64 KiB, 55 ms each at that rate: as long as all cases take.
const MESSAGES: u32 = 280;

/// A client with two queue pairs that send, and somebody who sends CNPs from where the server is.
struct Bench {
    fabric: Fabric,
    forger: Forger,
    /// Local and remote numbers.
    qps: Vec<(Qpn, Qpn)>,
    /// rxe's counters, and what the switch had let through to it, before the first packet.
    begin: (Counters, u64),
    traffic: Running,
}

impl Bench {
    /// Agent first: beside traffic, attaching takes an emulated CPU a minute.
    fn start() -> Result<(Self, AgentProcess)> {
        load(&["sch_htb", "sch_ingress", "cls_u32", "act_gact"])?;
        let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
        let towards = &fabric.nodes[CLIENT].switch_port;
        towards.ns.tc(&[
            format!("qdisc add dev {} clsact", towards.name),
            format!(
                "filter add dev {} egress protocol ip u32 match ip protocol 17 0xff match ip dport 4791 0xffff action pass",
                towards.name
            ),
        ])?;
        let rates = ["--start-rate", MOST, "--rpg-max-rate", MOST, "--rpg-min-rate", "500k"];
        let agent = fabric
            .agent(CLIENT, &[&["--link-rate", "100m", "--pacer", "htb", "--ingress", "tc"][..], &rates].concat())?;
        let traffic =
            Perf::new("ib_send_bw").args(&format!("-e -s 65536 -q 2 -n {MESSAGES}")).limit(Duration::from_secs(100));
        let (client, server) = (&fabric.nodes[CLIENT], &fabric.nodes[SERVER]);
        let from = HostPort { port: server.port.clone(), next_hop_mac: client.port.mac };
        let forger = Forger::new(&from, client.port.v4.into())?;
        let begin = (Counters::read(&client.device)?, passed_to(client)?);
        let traffic = traffic.start(&fabric, CLIENT, SERVER)?;
        let mut bench = Self { fabric, forger, qps: Vec::new(), begin, traffic };
        let listed = rig::eventually(Duration::from_secs(20), || {
            bench.qps = bench.connected().map(|qp| (qp.lqpn, qp.rqpn.unwrap_or_default())).collect();
            bench.qps.len() == 2
        });
        ensure!(listed, "the kernel lists {} connected queue pairs of the client", bench.qps.len());
        let maps = rig::maps(&bench.fabric.nodes[CLIENT].port)?;
        let paired = rig::eventually(Duration::from_secs(10), || maps.pairs().len() >= 4 && maps.rates().len() == 2);
        ensure!(paired, "the queue pairs were not paired: {:?}, {:?}", maps.pairs(), maps.rates());
        Ok((bench, agent))
    }

    /// The client's queue pairs that send, as the kernel lists them.
    fn connected(&self) -> impl Iterator<Item = QueuePair> {
        let device = &self.fabric.nodes[CLIENT].device;
        let list = rdma::list();
        let qps: Vec<_> = list.devices().iter().filter(|d| d.name == *device).flat_map(|d| d.qps.clone()).collect();
        qps.into_iter().filter(|qp| qp.qp_type == QpType::Rc && qp.state.is_connected() && qp.rqpn.is_some())
    }

    /// Waits until a queue pair that was slowed has most of what it may have again. What waits in HTB leaves at that rate, too; with EDT
    /// it would keep its times.
    fn recovered(&self, qp: usize) -> Result<()> {
        let server = Addr::from(self.fabric.nodes[SERVER].address(false));
        let key = PeerQp::new(server, self.qps[qp].1);
        let maps = rig::maps(&self.fabric.nodes[CLIENT].port)?;
        let has = || maps.rate(key).is_none_or(|rate| rate.bytes_per_sec >= RECOVERED);
        ensure!(rig::eventually(Duration::from_secs(15), has), "{:?} stays slow: {:?}", key, maps.rate(key));
        Ok(())
    }

    /// Where rxe says that the queue pairs are, in the order of `qps`.
    fn psns(&self) -> Result<Vec<Psn>> {
        let list: Vec<_> = self.connected().collect();
        let of = |lqpn: Qpn| list.iter().find(|qp| qp.lqpn == lqpn).and_then(|qp| qp.sq_psn);
        self.qps.iter().map(|(lqpn, _)| of(*lqpn).with_context(|| format!("{lqpn} has no PSN"))).collect()
    }

    /// Sends frames of some kinds in turns, and compares what was counted and who was slowed.
    fn send(&self, case: &mut Case, kinds: &[(&[u8], &[Counter])], named: Option<usize>) -> Result<()> {
        let server = Addr::from(self.fabric.nodes[SERVER].address(false));
        let key = |i: usize| PeerQp::new(server, self.qps[i].1);
        let maps = rig::maps(&self.fabric.nodes[CLIENT].port)?;
        let counters = || maps.counters(Direction::Ingress);
        let rates =
            || maps.rates().into_iter().map(|(key, rate)| (key, rate.bytes_per_sec)).collect::<BTreeMap<_, _>>();
        let (before, mut others) = (counters()?, rates());
        let mut slowed = BTreeSet::new();
        let mut psns = self.psns()?;
        for n in 0..COUNT {
            if n == COUNT / 2 {
                psns = self.psns()?;
            }
            for (frame, _) in kinds {
                self.forger.send(frame);
            }
            thread::sleep(GAP);
            if n % 10 == 9 {
                let now = rates();
                // A limiter of an earlier case may still be there, and only rise.
                slowed.extend(
                    now.iter().filter(|(key, rate)| others.get(key).is_none_or(|was| was > rate)).map(|(k, _)| *k),
                );
                others = now;
            }
        }
        let after = counters()?;
        let sent = self.psns()?.iter().zip(&psns).map(|(now, then)| now.diff(*then)).collect::<Vec<_>>();
        let mut wanted = BTreeMap::new();
        for which in kinds.iter().flat_map(|(_, counters)| *counters) {
            *wanted.entry(which.name()).or_insert(0) += COUNT;
        }
        let counted = |which: &Counter| (which.name(), after[*which as usize] - before[*which as usize]);
        let counted = WATCHED.iter().map(counted).filter(|(_, n)| *n != 0).collect();
        case.equal("what was counted", counted, wanted);
        case.equal("who was slowed", slowed, named.map(key).into_iter().collect());
        // rxe's own view: the PSNs that each queue pair used in the second half.
        case.figure("packets_by_queue_pair", &sent);
        if let (Some(named), &[a, b]) = (named, &sent[..]) {
            let (named, other) = if named == 0 { (a, b) } else { (b, a) };
            case.expect(named * 2 < other, format_args!("it sent {named} packets, the other one {other}"));
        }
        Ok(())
    }
}

/// RoCEv2 packets that the switch has let out to a host, by its own count.
fn passed_to(node: &Node) -> Result<u64> {
    let port = &node.switch_port;
    let json = json(port.ns.command("tc").args(["-s", "-j", "filter", "show", "dev", &port.name, "egress"]))?;
    let mut actions =
        json.as_array().into_iter().flatten().filter_map(|f| f["options"]["actions"][0]["stats"]["packets"].as_u64());
    actions.next_back().with_context(|| format!("tc shows no count: {json}"))
}

/// What is counted of frames that are no data.
const WATCHED: [Counter; 7] = [
    Counter::Cnp,
    Counter::CnpConsumed,
    Counter::CnpUnpaired,
    Counter::CnpBadIcrc,
    Counter::UnknownOpcode,
    Counter::GuardDropped,
    Counter::NpUnpaired,
];

fn forged(report: &mut Report) -> Result<()> {
    use Counter::{Cnp, CnpBadIcrc, CnpConsumed, CnpUnpaired, GuardDropped, UnknownOpcode};
    let (mut bench, agent) = Bench::start()?;
    let (first, second) = (bench.qps[0].0, bench.qps[1].0);
    let standard = bench.forger.cnp(first.get());
    let unknown = bench.forger.cnp(0xab_cdef);
    let multicast = bench.forger.cnp(0xff_ffff);
    let mut damaged = standard.clone();
    damaged[70] ^= 0x10;
    let stranger = altered(&standard, |frame| frame[29] = 66);
    let mut nonsense = standard.clone();
    nonsense[42] = 0x1f;
    report.case("unknown and multicast queue pairs, a wrong ICRC, a stranger, no such opcode: nobody", |case| {
        let unpaired = &[Cnp, CnpConsumed, CnpUnpaired][..];
        let kinds = [
            (&unknown[..], unpaired),
            (&multicast, unpaired),
            (&stranger, unpaired),
            (&damaged, &[Cnp, CnpConsumed, CnpBadIcrc]),
            (&nonsense, &[UnknownOpcode, GuardDropped]),
        ];
        bench.send(case, &kinds, None)
    });
    report.case("a standard CNP: the queue pair that it names", |case| {
        bench.send(case, &[(&standard, &[Cnp, CnpConsumed])], Some(0))
    });
    (bench.forger.path.tos, bench.forger.path.src_port) = (NIC_TOS, NIC_PORT);
    let of_a_nic = bench.forger.cnp(second.get());
    report.case("one as a ConnectX-4 Lx sends it: the queue pair that it names", |case| {
        bench.recovered(0)?;
        bench.send(case, &[(&of_a_nic, &[Cnp, CnpConsumed])], Some(1))
    });
    report.case("the transfer, and what rxe saw", |case| {
        let Bench { fabric, traffic, begin: (rxe, passed), .. } = bench;
        let begin = Instant::now();
        traffic.wait().context("the transfer that the CNPs were for")?;
        case.figure("seconds_left", begin.elapsed().as_secs());
        let client = &fabric.nodes[CLIENT];
        let rxe = Counters::read(&client.device)?.since(&rxe);
        case.equal("trouble", rxe.trouble(), vec![]);
        let passed = passed_to(client)? - passed;
        case.equal("packets that rxe took, of those that came", rxe.get("rcvd_pkts"), passed - KINDS * COUNT);
        case.figure("packets_to_the_client", passed);
        let summary = rig::finish(agent)?;
        case.figure("cuts", rig::control(&summary, "cuts"));
        case.equal("CNPs handled", rig::control(&summary, "rp_handled"), 2 * COUNT);
        case.figure("kernel_pairing", &summary["control"]["kernel_pairing"]);
        Ok(())
    });
    Ok(())
}
