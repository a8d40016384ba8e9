//! Others on the same interface: TCP beside RoCE, and other people's programs.

use std::{
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::programs::{TcAttachType, XdpMode, tc};
use roce_user::dataplane::Object;
use serde_json::Value;

use crate::{
    lab::{json, run_roce},
    rig,
    vm::{Fabric, Flows, Part, Perf, Placement, Report, Scenario, Wire, count, load},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "neighbours",
    about: "TCP beside RoCE with and without us, and other people's tc and XDP programs on the interface",
    parts: &[Part::new("all", 400, all)],
};

/// Seconds of one measurement.
const SECONDS: u32 = 1;
/// What TCP keeps of its throughput beside an agent on an emulated CPU, at the least.
const KEPT: f64 = 0.5;

/// TCP's goodput from host 0 to host 1, bits per second.
fn iperf(fabric: &Fabric) -> Result<f64> {
    let [client, server] = [&fabric.nodes[0].port, &fabric.nodes[1].port];
    let (from, to) = (client.v4.to_string(), server.v4.to_string());
    let mut listen = server.ns.command("iperf3");
    let mut listening = listen.args(["-s", "-1", "-B", &to]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let end = Instant::now() + Duration::from_secs(10);
    let goodput = loop {
        thread::sleep(Duration::from_millis(200));
        let mut ask = client.ns.command("iperf3");
        let output = ask.args(["-c", &to, "-B", &from, "-J", "-t", &SECONDS.to_string()]).output().context("iperf3")?;
        let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if let Some(goodput) = json["end"]["sum_received"]["bits_per_second"].as_f64() {
            break goodput;
        }
        if Instant::now() > end {
            bail!("iperf3: {}", json["error"]);
        }
    };
    listening.wait()?;
    Ok(goodput)
}

/// The same while host 0 writes to host 1.
fn beside(fabric: &Fabric) -> Result<(f64, f64)> {
    let writing = format!("-s 16384 -D {}", SECONDS + 3);
    let running = Perf::new("ib_write_bw").args(&writing).start(fabric, 0, 1)?;
    thread::sleep(Duration::from_millis(500));
    let tcp = iperf(fabric)?;
    Ok((tcp, running.wait()?.bits_per_sec()))
}

fn all(report: &mut Report) -> Result<()> {
    let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
    tcp(report, &fabric);
    programs(report, &fabric)
}

fn tcp(report: &mut Report, fabric: &Fabric) {
    let mut alone = 0.0;
    let mut shared = (0.0, 0.0);
    report.case("without us", |case| {
        alone = iperf(fabric)?.max(iperf(fabric)?);
        shared = beside(fabric)?;
        case.figure("tcp_mbit_per_sec", alone / 1e6);
        case.figure("tcp_beside_roce_mbit_per_sec", shared.0 / 1e6);
        case.figure("roce_beside_tcp_mbit_per_sec", shared.1 / 1e6);
        Ok(())
    });
    let mut ratios = Vec::new();
    for ingress in ["tc", "xdp"] {
        report.case(format!("with us, {ingress} ingress"), |case| {
            let agent = |host: usize| fabric.agent(host, &["--ingress", ingress]);
            let agents = [agent(0)?, agent(1)?];
            let with = iperf(fabric)?.max(iperf(fabric)?);
            let (tcp, roce) = beside(fabric)?;
            case.figure("tcp_mbit_per_sec", with / 1e6);
            case.figure("tcp_ratio", with / alone);
            case.figure("tcp_beside_roce_ratio", tcp / shared.0);
            case.figure("roce_beside_tcp_ratio", roce / shared.1);
            ratios.push((format!("{ingress}_tcp_ratio"), with / alone));
            if ingress == "tc" {
                case.expect(with / alone >= KEPT, format_args!("TCP falls from {alone:.0} to {with:.0} b/s"));
            }
            case.expect(tcp > 0.0 && roce > 0.0, "one of both starves");
            agents.map(rig::finish).into_iter().try_for_each(|summary| summary.map(drop))
        });
    }
    for (name, ratio) in ratios {
        report.figure(&name, ratio);
    }
}

/// How often a program has run, by bpftool.
fn runs(id: u32) -> Result<u64> {
    let json = json(Command::new("bpftool").args(["-j", "prog", "show", "id", &id.to_string()]))?;
    Ok(json["run_cnt"].as_u64().unwrap_or(0))
}

fn programs(report: &mut Report, fabric: &Fabric) -> Result<()> {
    load(&["sch_ingress", "cls_bpf"])?;
    std::fs::write("/proc/sys/kernel/bpf_stats_enabled", "1").context("kernel.bpf_stats_enabled")?;
    let port = &fabric.nodes[0].port;
    let traffic = || Perf::new("ib_write_bw").args("-s 16384 -n 50").run(fabric, 0, 1).map(drop);
    for first in [true, false] {
        let order = if first { "before" } else { "behind" };
        report.case(format!("another tc program attached {order} us"), |case| {
            let mut other = Object::load_for_benchmark()?;
            let agent = if first { None } else { Some(fabric.agent(0, &["--ingress", "tc"])?) };
            let program = other.tc("baseline_tc_empty")?;
            // On kernels before TCX this makes a filter of clsact, as other people do.
            let _ = tc::qdisc_add_clsact(&port.name);
            let links = [TcAttachType::Ingress, TcAttachType::Egress].map(|at| program.attach(&port.name, at));
            let id = program.info()?.id();
            let agent = match agent {
                Some(agent) => agent,
                None => fabric.agent(0, &["--ingress", "tc"])?,
            };
            for link in links {
                link.context("attaching the other program")?;
            }
            let (before, ran) = (Flows::read(fabric)?, runs(id)?);
            let wire = Wire::start(&fabric.nodes[0])?;
            traffic()?;
            let passed = wire.finish()?;
            let (flows, ran) = (Flows::read(fabric)?.since(&before), runs(id)? - ran);
            let total = |all: crate::vm::WireFlows| all.values().map(|(packets, _)| packets).sum::<u64>();
            let (sent, received) = (total(count(passed.sent())), total(count(passed.received())));
            case.equal("packets that we saw leave", flows.sum("v0/egress", "packets"), sent);
            case.equal("packets that we saw come", flows.sum("v0/ingress", "packets"), received);
            case.expect(
                ran >= sent + received,
                format_args!("the other program ran {ran} times for {} packets", sent + received),
            );
            case.figure("runs", ran);
            rig::finish(agent).map(drop)
        });
    }
    report.case("another XDP program", |case| {
        let mut other = Object::load_for_benchmark()?;
        let program = other.xdp("baseline_empty")?;
        let link = program.attach_to_if_index(port.index, XdpMode::Driver).context("attaching the other program")?;
        let id = program.info()?.id();
        let refused = run_roce(&port.ns, &["run", "--iface", &port.name, "--duration", "1", "--ingress", "xdp"])?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        case.equal("the exit code of roce run beside it", refused.status.code(), Some(2));
        case.expect(said.contains("--ingress tc"), format_args!("the refusal names no way out: {said}"));
        let agent = fabric.agent(0, &["--ingress", "tc"])?;
        let (before, ran) = (Flows::read(fabric)?, runs(id)?);
        traffic()?;
        let (flows, ran) = (Flows::read(fabric)?.since(&before), runs(id)? - ran);
        let received = flows.sum("v0/ingress", "packets");
        case.expect(received > 0 && ran >= received, format_args!("it ran {ran} times, and we saw {received} packets"));
        rig::finish(agent)?;
        let program = other.xdp("baseline_empty")?;
        program.detach(link).context("detaching the other program")
    });
    Ok(())
}
