//! Keeps frames in order on a veth.
//!
//! A veth hands frames to the backlog of whichever CPU sent them. Behind a shaper that is now the CPU of a sending thread,
//! now that of the shaper's timer, and later frames overtake earlier ones: no cable does that, and an RC queue pair takes
//! it for loss (seen at 200 Mb/s with two queue pairs: 6 to 17 NAKs in 3 s, in every run). Receive packet steering to one
//! CPU per interface gives all frames one backlog.

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, sched_getaffinity, unshare},
    unistd::Pid,
};

/// Steers all frames that `name` receives to one CPU, chosen by `number`, and says which; `None` where there is one CPU
/// only. Where it must run, and its errors: [`steer`].
pub(super) fn one_backlog(name: &str, number: u8) -> Result<Option<usize>> {
    let cpus = sched_getaffinity(Pid::from_raw(0)).context("sched_getaffinity")?;
    // A mask above 32 bits has another syntax; two CPUs are enough to spread the work.
    let usable: Vec<u32> = (0..32).filter(|c| cpus.is_set(*c as usize).unwrap_or(false)).collect();
    let Some(cpu) = usable.get(usize::from(number) % usable.len().max(1)) else { return Ok(None) };
    if usable.len() == 1 {
        return Ok(None);
    }
    steer(name, 1 << cpu)?;
    Ok(Some(*cpu as usize))
}

/// Steers the frames that `name` receives to the CPUs of a mask, those of one flow to one of them. Must run on a thread of its own,
/// in the interface's namespace: the thread gets a private /sys that shows that namespace's interfaces.
///
/// # Errors
/// When /sys cannot be mounted or the kernel has no receive packet steering.
pub fn steer(name: &str, cpus: u32) -> Result<()> {
    let none: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS).context("private mount namespace")?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("make mounts private")?;
    match mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none) {
        // What is mounted there is this namespace's.
        Ok(()) | Err(Errno::EBUSY) => {}
        Err(e) => return Err(e).context("mount /sys"),
    }
    let path = format!("/sys/class/net/{name}/queues/rx-0/rps_cpus");
    std::fs::write(&path, format!("{cpus:x}")).with_context(|| format!("cannot steer: {path}"))
}
