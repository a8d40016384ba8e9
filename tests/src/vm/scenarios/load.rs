//! The part of `lifecycle` in which rxe sends all the time: agents attach, detach, die and stand still, no queue pair fails, and
//! nothing stays behind.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, Scope, ScopedJoinHandle},
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;
use roce_common::abi::{Counter, Direction};

use crate::{
    lab::{Traces, run_roce},
    rig,
    run::AgentProcess,
    vm::{Case, Counters, Fabric, Perf, Placement, Report, load},
};

/// Counters that mean that a queue pair is lost, or soon will be.
const FATAL: [&str; 3] = ["retry_exceeded_err", "retry_rnr_exceeded_err", "send_err"];

/// What one run may take while an agent holds it back.
const LIMIT: Duration = Duration::from_secs(100);

/// Sends from host 0 to host 1, until it is told to stop, in runs that last while an agent stands still: the next one would have a queue
/// pair that nobody has slowed.
struct Load<'scope> {
    stop: &'scope AtomicBool,
    thread: ScopedJoinHandle<'scope, Result<u32>>,
}

impl<'scope> Load<'scope> {
    fn start<'env>(scope: &'scope Scope<'scope, 'env>, fabric: &'scope Fabric, stop: &'scope AtomicBool) -> Self {
        let run = || {
            let mut runs = 0;
            while !stop.load(Ordering::Relaxed) {
                // It sleeps for its completions (-e): an emulated CPU has more to do than to poll.
                Perf::new("ib_send_bw").args("-e -s 16384 -n 1500").limit(LIMIT).run(fabric, 0, 1)?;
                runs += 1;
            }
            Ok(runs)
        };
        let load = Self { stop, thread: scope.spawn(run) };
        thread::sleep(Duration::from_secs(1));
        load
    }

    /// Runs that ended well.
    fn finish(self) -> Result<u32> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(runs) => runs,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Agents come, go, die and stand still. The switch marks every packet to host 1, so that host 0 always has a limiter.
pub(super) fn agents(report: &mut Report) -> Result<()> {
    load(&["sch_tbf"])?;
    let fabric = Fabric::new(2, 1_500, Placement::Initial)?;
    let port = &fabric.nodes[1].switch_port;
    // What agents need of the CPU is left, and nothing is dropped: 64 packets of the queue pair fit.
    port.ns.tc(&[format!("qdisc add dev {} root tbf rate 60mbit burst 20k limit 500k", port.name)])?;
    fabric.nodes[1].mark_all_with_ce()?;
    let _receiver = fabric.agent(1, &["--ingress", "tc", "--pacer", "off"])?;
    let before = Counters::all(&fabric)?;
    let stop = AtomicBool::new(false);
    let runs = thread::scope(|scope| {
        let load = Load::start(scope, &fabric, &stop);
        for (what, pacer, event) in EVENTS {
            report.case(format!("{what}, {pacer}"), |case| {
                let mut traces = Traces::before(&fabric.nodes[0].port)?;
                let args = ["--ingress", "tc", "--link-rate", "100m", "--pacer", pacer];
                let agent = fabric.agent(0, &args)?;
                at_work(&fabric)?;
                traces.note()?;
                event(case, &fabric, agent)?;
                case.equal("what the agent left", traces.left()?, vec![]);
                Ok(())
            });
        }
        load.finish()
    });
    report.case("no queue pair failed", |case| {
        for (device, grown) in Counters::grown(&fabric, &before)? {
            for name in FATAL {
                case.equal(format_args!("{name} of {device}"), grown.get(name), 0);
            }
            case.figure(&format!("{device}_trouble"), grown.trouble());
        }
        case.figure("runs", runs?);
        Ok(())
    });
    Ok(())
}

/// Waits until the agent has taken in CNPs, which takes a run of the load that has begun, and leaves it at work for a while.
fn at_work(fabric: &Fabric) -> Result<()> {
    let maps = rig::maps(&fabric.nodes[0].port)?;
    let cnps = || maps.counters(Direction::Ingress).is_ok_and(|counters| counters[Counter::Cnp as usize] > 0);
    ensure!(rig::eventually(BEGINS, cnps), "no CNP came within {} s: there was no load", BEGINS.as_secs());
    thread::sleep(PAUSE);
    Ok(())
}

/// How soon an agent takes in the first CNP.
const BEGINS: Duration = Duration::from_secs(10);
/// How long an agent is left at work before something happens to it.
const PAUSE: Duration = Duration::from_millis(1_500);

/// What happens to an agent that has just been at work.
type Event = fn(&mut Case, &Fabric, AgentProcess) -> Result<()>;

const EVENTS: [(&str, &str, Event); 5] = [
    ("attached and detached", "edt", detached),
    ("attached and detached", "htb", detached),
    ("killed, and the rest detached", "htb", killed),
    ("killed, and the rest detached", "edt", killed),
    ("stopped for three seconds", "edt", stopped),
];

fn detached(case: &mut Case, _: &Fabric, agent: AgentProcess) -> Result<()> {
    let summary = rig::finish(agent)?;
    let cnps = rig::counter(&summary, "ingress", "cnp");
    case.expect(cnps > 0, "no CNP came: there was no load");
    case.figure("cnps", cnps);
    case.figure("paced", rig::counter(&summary, "egress", "paced"));
    Ok(())
}

fn killed(_: &mut Case, fabric: &Fabric, mut agent: AgentProcess) -> Result<()> {
    agent.signal(Signal::SIGKILL)?;
    agent.stop()?;
    thread::sleep(PAUSE);
    let detach = run_roce(&fabric.nodes[0].port.ns, &["detach", "--iface", &fabric.nodes[0].port.name])?;
    if !detach.status.success() {
        bail!("roce detach: {}", String::from_utf8_lossy(&detach.stderr).trim());
    }
    Ok(())
}

fn stopped(case: &mut Case, _: &Fabric, agent: AgentProcess) -> Result<()> {
    agent.signal(Signal::SIGSTOP)?;
    thread::sleep(Duration::from_secs(3));
    agent.signal(Signal::SIGCONT)?;
    thread::sleep(PAUSE);
    let summary = rig::finish(agent)?;
    let freed = rig::counter(&summary, "egress", "pacing_failsafe");
    case.expect(freed > 0, "packets were held back by an agent that did not run");
    case.figure("pacing_failsafe", freed);
    Ok(())
}
