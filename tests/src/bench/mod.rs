//! Measurements of the control loop on this machine: `roce-bench reaction` and `roce-bench scale`.

pub mod inspect;
pub mod reaction;
pub mod scale;

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use roce_common::{
    abi::{Direction, Event, EventKind, PairKey, Tap},
    units::{Addr, Qpn},
    wire::{Opcode, source_port},
};
use roce_user::{
    agent::monotonic,
    control::{Command, Core, LocalQp},
    dataplane::Maps,
};

/// Makes a core and its maps certain that local queue pair `qpn` at `local` is connected to `remote` at `peer`: a request,
/// and its answer from the port that the kernel's rule names.
fn introduce(
    core: &mut Core,
    maps: &mut Maps,
    ifindex: u32,
    local: Addr,
    peer: Addr,
    qpn: Qpn,
    remote: Qpn,
) -> Result<()> {
    let now = monotonic();
    let port = source_port(qpn, remote);
    let event = |kind: EventKind, direction: Direction, src: Addr, dst: Addr, to: Qpn, opcode: Opcode| Event {
        time_ns: now.0,
        kind: kind as u32,
        tap: Tap::new(ifindex, direction),
        src,
        dst,
        dest_qp: to.get(),
        psn: 1,
        value: 0,
        src_port: port,
        opcode: opcode.get(),
        tos: 2,
        account: 0,
        fate: 0,
        refused_qp: 0,
    };
    let mut commands = Vec::new();
    let request = event(EventKind::FirstSight, Direction::Egress, local, peer, remote, Opcode::WRITE_ONLY);
    core.on_event(&request, now, &|_| None, &mut commands);
    let answer = event(EventKind::Sample, Direction::Ingress, peer, local, qpn, Opcode::ACKNOWLEDGE);
    core.on_event(&answer, now, &|_| None, &mut commands);
    for command in commands {
        if let Command::AddPair { local: LocalQp { qpn, .. }, local_addr, peer, remote } = command {
            maps.add_pair(PairKey::new(peer, local_addr, qpn), remote.get())?;
        }
    }
    Ok(())
}

/// p50, p99 and the largest of some times, in nanoseconds.
fn percentiles(mut ns: Vec<u64>) -> [u64; 3] {
    ns.sort_unstable();
    let at = |share: f64| ns.get(((ns.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied().unwrap_or(0);
    [at(0.5), at(0.99), at(1.0)]
}

/// Nanoseconds as microseconds.
fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Binds the calling thread, and those it starts from now on, to `cpu`, or with `apart` to the other CPUs. What is
/// measured then shares no CPU with what drives the measurement, and no packet changes the CPU on its way: in a virtual
/// machine waking an idle one costs tens of microseconds. `None`: one CPU only, nothing to choose.
///
/// # Errors
/// The kernel refuses.
fn place(cpu: Option<usize>, apart: bool) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = CpuSet::new();
    for other in 0..CpuSet::count() {
        if (other == cpu) != apart {
            set.set(other)?;
        }
    }
    sched_setaffinity(Pid::from_raw(0), &set).context("cannot bind a thread to a CPU")
}

/// Sleeps to the microsecond, and gets a CPU at once where others want it too: what drives a measurement must not be what
/// is measured.
fn precise_timers() {
    // SAFETY: neither call takes a pointer; 0 is the calling thread.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong);
        libc::setpriority(libc::PRIO_PROCESS, 0, -20);
    }
}
