//! Real soft-RoCE: stock Debian kernels in small guests, which run the scenarios of `roce_tests::vm`.
//!
//! Everything that is fetched lies in `target/vm` and is fetched once. A guest is disposable: it boots, runs one part of a
//! scenario, writes what came of it into its second serial port, and is ended by us if it does not end itself.

mod apt;
mod cpio;
mod dirs;
mod elf;
mod guest;
mod image;
mod kernels;
mod mirror;
mod modules;
mod options;
mod qemu;
mod results;
mod schedule;
mod userland;

use std::{
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use anyhow::{Context as _, anyhow};

pub(crate) use options::Options;

use self::{
    apt::Apt,
    guest::{Guest, Part, Scenario},
    kernels::Kernel,
    mirror::Mirror,
    qemu::{Machine, Qemu},
    results::{Outcome, PartResult, Row},
};
use crate::{
    exec::{Stop, print, say},
    project::Project,
};

/// Does what was asked for. 0: nothing failed; 1: something did; 2: nothing could run.
pub(crate) fn run(project: &Project, options: &Options) -> Result<u8, Stop> {
    let start = Instant::now();
    if !cfg!(target_arch = "x86_64") {
        return Err(anyhow!("the guests are x86-64 machines, and their programs are built on one").into());
    }
    if options.list {
        for s in chosen(Guest::build(project)?.scenarios()?, &options.scenarios)? {
            print(format_args!("{:<12} {}", s.name, s.about));
        }
        return Ok(0);
    }
    // Fetching waits for the network, building for the CPU.
    let (parts, guest) = thread::scope(|scope| {
        let parts = scope.spawn(|| Parts::get(project, options));
        let guest = Guest::build(project);
        (parts.join(), guest)
    });
    let (guest, parts) = (guest?, parts.map_err(|_| anyhow!("fetching has panicked"))??);
    let scenarios = chosen(guest.scenarios()?, &options.scenarios)?;
    let lab = Lab::prepare(parts, options, &guest)?;
    if options.shell {
        return Ok(lab.shell()?);
    }
    let rows = lab.run(&scenarios, options.jobs)?;
    let accel = lab.qemu.accel.name();
    if options.json {
        print(results::json(&rows, accel, start.elapsed()));
    } else {
        print(results::table(&rows, accel, start.elapsed()));
        say(format_args!("consoles, captures and results are in {}", lab.runs.display()));
    }
    let any = |name: &str| rows.iter().any(|row| row.outcome().name() == name);
    Ok(if any("failed") {
        1
    } else if any("passed") {
        0
    } else {
        2
    })
}

/// The scenarios of these names, all where none is given.
fn chosen(all: Vec<Scenario>, names: &[String]) -> anyhow::Result<Vec<Scenario>> {
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|s| s.name != **name)) {
        let known: Vec<&str> = all.iter().map(|s| s.name.as_str()).collect();
        return Err(anyhow!("there is no scenario `{unknown}`: use {}", known.join(", ")));
    }
    Ok(all.into_iter().filter(|s| names.is_empty() || names.contains(&s.name)).collect())
}

/// Percent of a CPU. A guest that uses less waits for most of its time.
const LITTLE: usize = 25;

/// What is fetched.
struct Parts {
    dir: PathBuf,
    userland: PathBuf,
    qemu: Qemu,
    kernels: Vec<Kernel>,
}

impl Parts {
    /// Takes from the cache what is there, and fetches the rest.
    fn get(project: &Project, options: &Options) -> anyhow::Result<Self> {
        let dir = project.target.join("vm");
        dirs::make(&dir)?;
        let mut opened = false;
        // The lists of packages are fetched at most once, and not at all where everything is in the cache.
        let mut apt = || -> anyhow::Result<Apt> {
            let place = dir.join("apt");
            if std::mem::replace(&mut opened, true) {
                return Ok(Apt::again(&place));
            }
            Apt::open(&place, &Mirror::find(options.mirror.as_deref())?)
        };
        let userland = userland::get(&dir, options.refresh, &mut apt)?;
        let qemu = Qemu::get(&dir, options.refresh, &mut apt)?;
        let kernels = kernels::get(&options.kernels, &dir.join("kernels"), options.refresh, &mut apt)?;
        Ok(Self { dir, userland, qemu, kernels })
    }
}

/// All that guests are made of.
struct Lab {
    qemu: Qemu,
    /// With the initramfs of each.
    kernels: Vec<(Kernel, PathBuf)>,
    /// Below it a directory for each kernel, scenario and part.
    runs: PathBuf,
}

impl Lab {
    fn prepare(parts: Parts, options: &Options, guest: &Guest) -> anyhow::Result<Self> {
        let Parts { dir, userland, mut qemu, kernels } = parts;
        let runs = dir.join("runs");
        let kernels = kernels
            .into_iter()
            .map(|mut kernel| {
                let dir = runs.join(&kernel.release);
                dirs::make(&dir)?;
                let initramfs = dir.join("initramfs.cpio");
                guest.initramfs(&userland, &kernel, &initramfs)?;
                kernel.image = image::unpacked(&kernel.image)?;
                Ok((kernel, initramfs))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some((kernel, initramfs)) = kernels.first() {
            let share = runs.join("probe");
            qemu.choose(&dir, &machine(kernel, initramfs, &share, "roce.probe"), options.refresh)?;
        }
        Ok(Self { qemu, kernels, runs })
    }

    fn shell(&self) -> anyhow::Result<u8> {
        let (kernel, initramfs) = self.kernels.first().context("no kernel was asked for")?;
        let share = self.runs.join("shell");
        say(format_args!("Linux {}; leave by `poweroff -f`; {} is /share there", kernel.release, share.display()));
        self.qemu.shell(&machine(kernel, initramfs, &share, "roce.shell"))
    }

    /// Runs every part of every scenario on every kernel, as many guests at once as there are CPUs for. `jobs` CPUs are used at most.
    fn run(&self, scenarios: &[Scenario], jobs: Option<usize>) -> anyhow::Result<Vec<Row>> {
        let mut plan = Vec::new();
        // Kernels innermost: guests that run at once are mostly of different kernels, and end together.
        for (s, scenario) in scenarios.iter().enumerate() {
            for (p, part) in scenario.parts.iter().enumerate() {
                plan.extend((0..self.kernels.len()).map(|k| schedule::Job { share: part.share, what: (k, s, p) }));
            }
        }
        // What hardly uses a CPU goes first: others run beside it.
        plan.sort_by_key(|job| job.share >= LITTLE);
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let done = schedule::run(plan, jobs.unwrap_or(cpus).min(cpus), |&(k, s, p)| {
            let (scenario, (kernel, initramfs)) = (&scenarios[s], &self.kernels[k]);
            self.part(kernel, initramfs, scenario, &scenario.parts[p])
        })?;
        let mut rows = Vec::new();
        for (k, (kernel, _)) in self.kernels.iter().enumerate() {
            for (s, scenario) in scenarios.iter().enumerate() {
                let of_row = done.iter().filter(|((kernel, scenario, _), _)| (*kernel, *scenario) == (k, s));
                let mut parts: Vec<_> = of_row.map(|((.., p), result)| (*p, result.clone())).collect();
                parts.sort_by_key(|(p, _)| *p);
                rows.push(Row {
                    kernel: kernel.name.clone(),
                    release: kernel.release.clone(),
                    scenario: scenario.name.clone(),
                    parts: parts.into_iter().map(|(_, result)| result).collect(),
                });
            }
        }
        Ok(rows)
    }

    /// Runs one part in one guest.
    fn part(&self, kernel: &Kernel, initramfs: &Path, scenario: &Scenario, part: &Part) -> anyhow::Result<PartResult> {
        if let Some((major, minor)) = part.since.filter(|since| guest::version(&kernel.release) < Some(*since)) {
            let why = format!("needs Linux {major}.{minor} or later, this is {}", kernel.release);
            return Ok(PartResult::unbooted(&part.name, Outcome::Skipped(why)));
        }
        let share = self.runs.join(&kernel.release).join(&scenario.name).join(&part.name);
        dirs::empty(&share)?;
        let args = format!("roce.run={}/{}", scenario.name, part.name);
        let machine =
            Machine { cpus: part.cpus, memory_mib: part.memory_mib, ..machine(kernel, initramfs, &share, &args) };
        let start = Instant::now();
        let ended = self.qemu.run(&machine, part.limit)?;
        let time = start.elapsed();
        let result = PartResult::read(&part.name, ended, part.limit, &machine.results()?, &machine.console(), time);
        let (name, word) = (&kernel.release, result.outcome.name());
        say(format_args!("{name} {}/{}: {word} ({:.0} s)", scenario.name, part.name, time.as_secs_f64()));
        Ok(result)
    }
}

/// A small guest.
fn machine<'a>(kernel: &'a Kernel, initramfs: &'a Path, share: &'a Path, args: &'a str) -> Machine<'a> {
    Machine { image: &kernel.image, initramfs, cpus: 1, memory_mib: 512, args, share }
}
