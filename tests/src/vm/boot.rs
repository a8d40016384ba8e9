//! Process 1 of a guest.

use std::{
    fs,
    path::Path,
    process::{Command, ExitStatus},
};

use anyhow::{Context, Result, bail};
use nix::{
    mount::{MsFlags, mount},
    sys::reboot::{RebootMode, reboot},
};

use super::{Report, modules};

/// Where the host's directory is mounted.
pub(super) const SHARE: &str = "/share";
const PATH: &str = "/usr/bin:/usr/sbin";

/// Boots, does what the kernel's command line asks for, and powers the guest off.
pub fn init() -> ! {
    if let Err(e) = boot() {
        println!("guest: {e:#}");
        if let Ok(mut report) = Report::open() {
            report.end(&Err(e));
        }
    }
    nix::unistd::sync();
    // Fails without CAP_SYS_BOOT only; then the host ends us.
    let _ = reboot(RebootMode::RB_POWER_OFF);
    std::process::exit(1)
}

fn boot() -> Result<()> {
    for (kind, place) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/run"),
        ("tmpfs", "/tmp"),
        ("bpf", "/sys/fs/bpf"),
        ("debugfs", "/sys/kernel/debug"),
        ("devpts", "/dev/pts"),
    ] {
        if place == "/dev/pts" {
            fs::create_dir_all(place)?;
        }
        mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting {place}"))?;
    }
    // SAFETY: there is one thread.
    unsafe {
        std::env::set_var("PATH", PATH);
        std::env::set_var("HOME", "/root");
        std::env::set_var("ROCE_BIN", "/usr/bin/roce");
    }
    let args = fs::read_to_string("/proc/cmdline").context("/proc/cmdline")?;
    let arg = |name: &str| args.split_ascii_whitespace().find_map(|arg| arg.strip_prefix(name));
    if arg("roce.probe").is_some() {
        Report::open()?.note("ready");
        return Ok(());
    }
    println!("guest: Linux {}", modules::kernel_release());
    done(Command::new("ip").args(["link", "set", "lo", "up"]).status().context("ip")?)?;
    modules::load(&["virtio_pci", "9pnet_virtio", "9p"])?;
    mount(
        Some("share"),
        SHARE,
        Some("9p"),
        MsFlags::empty(),
        Some("trans=virtio,version=9p2000.L,msize=512000,cache=none"),
    )
    .context("mounting the directory that is shared with the host")?;
    if arg("roce.shell").is_some() {
        return shell();
    }
    let Some(part) = arg("roce.run=") else { bail!("the command line asks for nothing: {}", args.trim()) };
    // A process of its own: what it does to its namespaces and signals is gone with it, and process 1 must not die.
    let status = Command::new("/usr/bin/roce-guest").args(["run", part]).status().context("starting the scenario")?;
    done(status)
}

fn done(status: ExitStatus) -> Result<()> {
    if status.success() { Ok(()) } else { bail!("a program of the guest ended with {status}") }
}

fn shell() -> Result<()> {
    let busybox = Path::new("/usr/bin/busybox");
    done(Command::new(busybox).args(["--install", "-s", "/usr/sbin"]).status().context("busybox")?)?;
    // A session with a terminal of its own, so that Ctrl-C works.
    Command::new("setsid").args(["cttyhack", "sh"]).status().context("starting a shell")?;
    Ok(())
}
