//! What the controller costs when very many queue pairs are limited: CPU for a thousand CNPs a second, and memory. CNPs pass
//! `roce_xdp` (`BPF_PROG_TEST_RUN`) and its ring buffer; rates are written into the maps of the EDT pacer.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use roce_common::{
    abi::Role,
    dcqcn::params::RpParams,
    units::{Addr, Nanos, Qpn, Rate},
    wire::{IpVersion, emit},
};
use roce_user::{
    agent::{Controller, Running, Wait},
    control::{Core, CoreConfig},
    dataplane::{DEFAULT_BPFFS, Maps, Object, Pins, ring},
    pacer::Edt,
};
use serde::Serialize;

use super::{introduce, micros, precise_timers};
use crate::{lab::Netns, progtest};

const LINE: Rate = Rate::from_bits_per_sec(25_000_000_000);
const LOCAL: Addr = Addr::v4([10, 1, 0, 1]);
/// Queue pairs at one peer.
const PER_PEER: u32 = 4_000;
/// CNPs per second of the measurement.
const CNPS_PER_SEC: u32 = 1_000;
/// How long each state is watched.
const WATCH: Duration = Duration::from_secs(5);
/// A name for the pins, not that of an interface.
const IFINDEX: u32 = 1;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this contract.
    pub schema: u32,
    /// Limited queue pairs.
    pub limited: usize,
    /// Time to limit them all, two CNPs each.
    pub limit_all_s: f64,
    /// CPU of the control thread while no CNP comes and all recover, in per cent of one.
    pub cpu_recovering_percent: f64,
    /// The same with 1,000 CNPs a second.
    pub cpu_with_cnps_percent: f64,
    /// CNP to rate in the map meanwhile, median.
    pub written_p50_ns: u64,
    /// 99th percentile.
    pub written_p99_ns: u64,
    /// The slowest.
    pub written_max_ns: u64,
    /// Resident memory of the controller's process, bytes, without the queue pairs.
    pub rss_empty: u64,
    /// The same with all of them limited.
    pub rss_full: u64,
}

impl Report {
    /// For people.
    pub fn table(&self) -> String {
        format!(
            "limited queue pairs                        {:>12}\n\
             all limited, two CNPs each                 {:>10.1} s\n\
             control thread while all recover           {:>10.1} %\n\
             with {CNPS_PER_SEC} CNPs a second                     {:>10.1} %\n\
             CNP to rate in the map, p50 / p99 / max    {:.1} / {:.1} / {:.1} µs\n\
             memory of the process, empty → full        {:.0} → {:.0} MB ({:.0} bytes per queue pair)\n",
            self.limited,
            self.limit_all_s,
            self.cpu_recovering_percent,
            self.cpu_with_cnps_percent,
            micros(self.written_p50_ns),
            micros(self.written_p99_ns),
            micros(self.written_max_ns),
            self.rss_empty as f64 / 1e6,
            self.rss_full as f64 / 1e6,
            (self.rss_full.saturating_sub(self.rss_empty)) as f64 / self.limited.max(1) as f64,
        )
    }
}

/// Removes the pins, however the measurement ends.
struct Unpin(Pins);

impl Drop for Unpin {
    fn drop(&mut self) {
        if let Err(error) = self.0.remove() {
            eprintln!("{error:#}");
        }
    }
}

/// Measures with `qps` limited queue pairs.
///
/// # Errors
/// Not root, or the kernel refuses a map.
pub fn run(qps: u32) -> Result<Report> {
    Netns::new()?.run(|| measure(qps))
}

fn measure(qps: u32) -> Result<Report> {
    let mut object = Object::load()?;
    let pins = Unpin(Pins::of(Path::new(DEFAULT_BPFFS), IFINDEX)?);
    pins.0.create()?;
    object.pin_maps(&pins.0)?;
    let rings = (ring(&mut object.ebpf, "CNP_RING")?, ring(&mut object.ebpf, "TELEMETRY")?);
    let mut maps = Maps::open(&pins.0)?;
    maps.set_config(progtest::config(Role::Host))?;
    maps.set_local(&[LOCAL])?;
    let rss_empty = resident()?;

    let mut config = CoreConfig::new(rp(), 1_098);
    config.limiters = qps as usize;
    let mut core = Core::new(config);
    core.add_local(LOCAL);
    for n in 0..qps {
        let (peer, qpn, remote) = names(n);
        introduce(&mut core, &mut maps, IFINDEX, LOCAL, peer, qpn, remote)?;
    }
    ensure!(core.pairs().len() == qps as usize, "only {} of {qps} pairs fit the table", core.pairs().len());
    let begin = Instant::now();
    let controller = Controller::new(IFINDEX, core, maps, Box::new(Edt::unkept(IFINDEX)), rings, LINE, Wait::Sleep);
    let (running, _news) = controller.start()?;
    precise_timers();
    for n in 0..qps {
        // The ring holds 3,000 CNPs and some; it must not overflow here.
        if n % 1_000 == 999 {
            wait_for(&running, 2 * n as usize)?;
        }
        // The second one takes the target below the line, so that all recover slowly.
        inject(&mut object, n)?;
        inject(&mut object, n)?;
    }
    wait_for(&running, 2 * qps as usize)?;
    let limit_all_s = begin.elapsed().as_secs_f64();

    let cpu_recovering_percent = watch(|| thread::sleep(WATCH))?;
    let limited = running.progress().limited;
    let before = running.progress().reactions;
    let mut n = 0u32;
    let cpu_with_cnps_percent = watch(|| {
        let begin = Instant::now();
        while begin.elapsed() < WATCH {
            n = n.wrapping_add(7_919);
            if let Err(error) = inject(&mut object, n % qps) {
                eprintln!("{error:#}");
            }
            let due = Duration::from_secs(1) / CNPS_PER_SEC * (n / 7_919);
            thread::sleep(due.saturating_sub(begin.elapsed()));
        }
    })?;
    let rss_full = resident()?;
    let (controller, result) = running.stop()?;
    result?;
    let reactions = controller.progress().reactions.since(&before);
    let ns = |share: f64| reactions.percentile(share).as_nanos() as u64;
    Ok(Report {
        schema: 1,
        limited,
        limit_all_s,
        cpu_recovering_percent,
        cpu_with_cnps_percent,
        written_p50_ns: ns(0.5),
        written_p99_ns: ns(0.99),
        written_max_ns: reactions.max().as_nanos() as u64,
        rss_empty,
        rss_full,
    })
}

/// Reaction points that recover for the whole measurement, busy or not, so that every look at one is a new rate: the most
/// work there can be. From a quarter the line rate to all of it they take two minutes.
fn rp() -> RpParams {
    let paper = roce_common::dcqcn::Params::paper(LINE).rp;
    RpParams {
        timer: Nanos::from_micros(500),
        byte_period: u64::MAX,
        // Both CNPs of a queue pair cut, and the second takes the target down too.
        monitor: Nanos(1),
        clamp_target: true,
        additive: Rate::from_bits_per_sec(52_000),
        ..paper
    }
}

/// Peer, local and remote QPN of queue pair `n`.
fn names(n: u32) -> (Addr, Qpn, Qpn) {
    let peer = n / PER_PEER;
    (Addr::v4([10, 2, (peer >> 8) as u8, peer as u8]), Qpn::new(0x1_0000 + n), Qpn::new(0x80_0000 + n))
}

/// A CNP for queue pair `n` passes the ingress program.
fn inject(object: &mut Object, n: u32) -> Result<()> {
    use aya::programs::{TestRun as _, TestRunOptions};
    let (peer, qpn, _) = names(n);
    let path = emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src: peer,
        dst: LOCAL,
        tos: 2,
        ttl: 64,
        ip_id: 0,
        src_port: 0xc123,
    };
    let mut frame = [0; emit::CNP_FRAME_V6];
    let len = emit::cnp(&path, IpVersion::V4, qpn, &mut frame);
    object
        .xdp("roce_xdp")?
        .test_run(TestRunOptions { data_in: Some(&frame[..len]), ..TestRunOptions::new() })
        .context("BPF_PROG_TEST_RUN")?;
    Ok(())
}

/// Waits until the controller has handled `cnps` CNPs.
fn wait_for(running: &Running, cnps: usize) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    while (running.progress().stats.rp_handled as usize) < cnps {
        if Instant::now() > end {
            bail!("of {cnps} CNPs only {} were handled", running.progress().stats.rp_handled);
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Per cent of one CPU that the control thread uses while `f` runs.
fn watch(f: impl FnOnce()) -> Result<f64> {
    let (begin, before) = (Instant::now(), control_cpu()?);
    f();
    Ok((control_cpu()? - before) as f64 / begin.elapsed().as_nanos() as f64 * 100.0)
}

/// CPU time of this process's control thread, nanoseconds.
fn control_cpu() -> Result<u64> {
    for task in fs::read_dir("/proc/self/task")? {
        let dir = task?.path();
        if fs::read_to_string(dir.join("comm"))?.trim() == "control" {
            let stat = fs::read_to_string(dir.join("schedstat"))?;
            return stat.split_whitespace().next().context("an empty schedstat")?.parse().context("schedstat");
        }
    }
    bail!("there is no control thread")
}

/// Resident memory of this process, bytes.
fn resident() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>().context("VmRSS")? * 1_024)
}
