//! What happens around attached agents: they stay, traffic goes on, and nothing stays behind.

use std::{thread, time::Duration};

use anyhow::Result;

use super::load;
use crate::{
    lab::Traces,
    rig,
    run::AgentProcess,
    vm::{Case, Fabric, Flows, JUMBO, Part, Perf, Placement, Report, Scenario},
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "lifecycle",
    about: "agents that come, go and die under load, devices, links and MTU that change: no queue pair fails, nothing stays",
    parts: &[Part::new("devices", 240, devices).share(33), Part::new("load", 300, load::agents).share(66)],
};

/// Whether traffic passes and host 0's agent counts it.
fn works(case: &mut Case, fabric: &Fabric, what: &str) -> Result<()> {
    let before = Flows::read(fabric)?;
    Perf::new("ib_write_bw").args("-s 16384 -n 50").run(fabric, 0, 1)?;
    let flows = Flows::read(fabric)?.since(&before);
    case.expect(
        flows.sum("v0/egress", "packets") >= 50 * 4,
        format_args!("{what}: host 0's agent counts too little: {flows:?}"),
    );
    case.expect(
        flows.sum("v1/ingress", "packets") >= 50 * 4,
        format_args!("{what}: host 1's agent counts too little: {flows:?}"),
    );
    for (id, tally) in flows.iter() {
        // A new device gives the QPNs of the old one again: the flow goes on at another place, which is no loss.
        let missing: Vec<u64> = ["missing_psns", "duplicates", "retransmitted"].map(|name| tally.get(name)).to_vec();
        case.equal(format_args!("{what}: missing and repeated at {}", id.tap), missing, vec![0; 3]);
    }
    Ok(())
}

/// Things change under agents that stay attached.
fn devices(report: &mut Report) -> Result<()> {
    let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
    let mut traces = Traces::before(&fabric.nodes[0].port)?;
    let agent = |host: usize| fabric.agent(host, &["--ingress", "xdp"]);
    let mut agents = [agent(0)?, agent(1)?];
    traces.note()?;
    let alive = |case: &mut Case, agents: &mut [AgentProcess; 2]| {
        for agent in agents {
            case.expect(agent.is_running(), format_args!("an agent has ended: {}", agent.stderr()));
        }
    };
    report.case("rxe devices removed and added", |case| {
        works(case, &fabric, "before")?;
        for node in &fabric.nodes {
            node.remove_device()?;
        }
        thread::sleep(Duration::from_millis(500));
        alive(case, &mut agents);
        for node in &fabric.nodes {
            node.add_device()?;
        }
        fabric.wait_active()?;
        works(case, &fabric, "after")
    });
    report.case("interface down and up", |case| {
        let port = &fabric.nodes[0].port;
        port.ns.ip(&[format!("link set dev {} down", port.name)])?;
        thread::sleep(Duration::from_millis(500));
        alive(case, &mut agents);
        fabric.introduce()?;
        fabric.wait_active()?;
        works(case, &fabric, "after")
    });
    report.case("another MTU", |case| {
        for node in &fabric.nodes {
            for port in [&node.switch_port, &node.port] {
                port.ns.ip(&[format!("link set dev {} mtu {}", port.name, JUMBO)])?;
            }
        }
        fabric.wait_active()?;
        alive(case, &mut agents);
        let before = Flows::read(&fabric)?;
        works(case, &fabric, "after")?;
        let flows = Flows::read(&fabric)?.since(&before);
        let (packets, bytes) = (flows.sum("v0/egress", "packets"), flows.sum("v0/egress", "bytes"));
        case.expect(
            bytes > packets * 2_000,
            format_args!("{packets} packets of {bytes} bytes: the path MTU is still small"),
        );
        Ok(())
    });
    report.case("nothing stays", |case| {
        for agent in agents {
            rig::finish(agent)?;
        }
        case.equal("what the agent left", traces.left()?, vec![]);
        Ok(())
    });
    Ok(())
}
