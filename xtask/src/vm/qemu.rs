//! The emulator: found or unpacked, with KVM where that really works, and never without a limit.

use std::{
    ffi::OsString,
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    sys::{signal::Signal, utsname::uname},
    time::{ClockId, clock_gettime},
};
use serde_json::{Value, json};

use super::{apt::Apt, dirs};
use crate::exec::{self, say};

const PROGRAM: &str = "qemu-system-x86_64";
/// What a probe of KVM may take. A guest that KVM really runs is up within one second.
const PROBE: Duration = Duration::from_secs(6);
/// How often a guest is looked after.
const PERIOD: Duration = Duration::from_millis(50);
/// Rids stock kernels of what they spend time on at boot, and makes a panic end the guest.
const KERNEL_ARGS: &str = "quiet panic=-1 mitigations=off nokaslr audit=0 apparmor=0 nowatchdog random.trust_cpu=on \
                           init_on_alloc=0 rodata=off tsc=reliable no_timer_check rcupdate.rcu_expedited=1 retain_initrd cryptomgr.notests rdinit=/init";

/// What an emulated CPU is slower with, where the emulator knows it: page tables of five levels, and string instructions that are said
/// to be fast. A kernel copies byte by byte with those, each a turn of a loop here.
const SLOW: [&str; 5] = ["la57", "erms", "fsrm", "fsrs", "fzrm"];

/// How guests' CPUs are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Accel {
    Kvm,
    Tcg,
}

impl Accel {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The emulator.
#[derive(Clone, Debug)]
pub(super) struct Qemu {
    /// The program and its first arguments.
    program: Vec<OsString>,
    pub(super) accel: Accel,
    /// The model of an emulated CPU.
    emulated: String,
    /// How fast its time stamp counter counts, which is this machine's: kHz.
    tsc_khz: u64,
}

/// One guest.
#[derive(Clone, Debug)]
pub(super) struct Machine<'a> {
    pub(super) image: &'a Path,
    pub(super) initramfs: &'a Path,
    pub(super) cpus: usize,
    pub(super) memory_mib: u64,
    /// Added to the kernel's command line.
    pub(super) args: &'a str,
    /// The directory that host and guest share; the guest's console and results are written beside what it puts there.
    pub(super) share: &'a Path,
}

/// How a guest ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    /// By itself.
    Off,
    /// It ran into its limit and was ended.
    Late,
    /// The emulator failed.
    Failed,
}

impl Qemu {
    /// The installed one, or Debian's, unpacked below `dir`; with TCG until [`Qemu::choose`].
    pub(super) fn get(dir: &Path, refresh: bool, apt: &mut dyn FnMut() -> anyhow::Result<Apt>) -> anyhow::Result<Self> {
        let program = match exec::find(PROGRAM) {
            Some(program) => vec![program.into()],
            None => unpacked(&dir.join("qemu"), refresh, apt)?,
        };
        let known = exec::capture(Command::new(&program[0]).args(&program[1..]).args(["-cpu", "help"]))?;
        Ok(Self {
            program,
            accel: Accel::Tcg,
            emulated: emulated(&String::from_utf8_lossy(&known)),
            tsc_khz: tsc_khz()?,
        })
    }

    /// Takes KVM if a guest boots with it. What came of it is remembered in `dir`, for this kernel of the host.
    pub(super) fn choose(&mut self, dir: &Path, probe: &Machine<'_>, refresh: bool) -> anyhow::Result<()> {
        let kvm = Path::new("/dev/kvm");
        if fs::File::options().read(true).write(true).open(kvm).is_err() {
            return Ok(());
        }
        let host = uname().context("uname")?.release().to_string_lossy().into_owned();
        let file = dir.join("accel.json");
        let known: Option<Value> = fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let works = match known {
            Some(known) if known["host"] == host.as_str() && !refresh => known["kvm"] == true,
            _ => {
                let with_kvm = Self { accel: Accel::Kvm, ..self.clone() };
                let works = with_kvm.run(probe, PROBE)? == Ended::Off && probe.results()?.contains("ready");
                let word = if works { "works" } else { "is there but runs no guest: guests are emulated" };
                say(format_args!("KVM {word}"));
                fs::write(&file, json!({"host": host, "kvm": works}).to_string()).context("writing accel.json")?;
                works
            }
        };
        if works {
            self.accel = Accel::Kvm;
        }
        Ok(())
    }

    fn command(&self, machine: &Machine<'_>, console: &str) -> Command {
        let (accel, cpu) = match self.accel {
            Accel::Kvm => ("kvm", "host"),
            Accel::Tcg => ("tcg,thread=multi", self.emulated.as_str()),
        };
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]);
        command.args(["-M", "q35,usb=off,vmport=off,smm=off,hpet=off", "-accel", accel, "-cpu", cpu]);
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-monitor",
            "none",
            "-nic",
            "none",
        ]);
        command.arg("-smp").arg(machine.cpus.to_string()).arg("-m").arg(machine.memory_mib.to_string());
        command.arg("-kernel").arg(machine.image).arg("-initrd").arg(machine.initramfs);
        // An emulated CPU that has to wait for one of this machine's while its kernel measures the counter has a clock that is many
        // times too fast from then on.
        let tsc = if self.accel == Accel::Tcg { format!("tsc_early_khz={}", self.tsc_khz) } else { String::new() };
        command.arg("-append").arg(format!("console=ttyS0 {KERNEL_ARGS} {tsc} {}", machine.args));
        command.arg("-serial").arg(console);
        command.arg("-serial").arg(format!("file:{}", machine.results_file().display()));
        command.arg("-fsdev").arg(format!("local,id=share,security_model=none,path={}", machine.share.display()));
        command.args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
        command
    }

    /// Boots a guest, and ends it after `limit`.
    pub(super) fn run(&self, machine: &Machine<'_>, limit: Duration) -> anyhow::Result<Ended> {
        dirs::make(machine.share)?;
        // The emulator appends to a file that is there.
        for file in [machine.results_file(), machine.console_file(), machine.errors_file()] {
            fs::write(&file, "").with_context(|| format!("writing {}", file.display()))?;
        }
        let errors = fs::File::create(machine.errors_file()).context("writing the emulator's errors")?;
        let mut command = self.command(machine, &format!("file:{}", machine.console_file().display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            // A guest must not outlive the thread that looks after it, however that ends.
            command.pre_exec(|| nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(Into::into));
        }
        let mut child = command.spawn().with_context(|| format!("starting {PROGRAM}"))?;
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = child.try_wait().context("waiting for a guest")? {
                return Ok(how(status));
            }
            if Instant::now() > end {
                // It may have ended just now.
                let _ = child.kill();
                child.wait().context("waiting for a guest")?;
                return Ok(Ended::Late);
            }
            thread::sleep(PERIOD);
        }
    }

    /// Boots a guest whose console is our terminal.
    pub(super) fn shell(&self, machine: &Machine<'_>) -> anyhow::Result<u8> {
        dirs::make(machine.share)?;
        exec::run(&mut self.command(machine, "stdio"))
    }
}

/// The model of an emulated CPU: all that the emulator can do but what is slow. `known` is what it says to `-cpu help`.
fn emulated(known: &str) -> String {
    let off = SLOW.iter().filter(|slow| known.split_ascii_whitespace().any(|word| word == **slow));
    off.fold("max".to_owned(), |model, slow| model + "," + slow + "=off")
}

/// How fast the time stamp counter of this machine counts, by its clock: kHz.
fn tsc_khz() -> anyhow::Result<u64> {
    // Of several looks the one in whose middle nothing came between.
    let look = || -> anyhow::Result<(u64, Duration)> {
        let looks = (0..8).map(|_| {
            let before = tsc();
            let at = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC_RAW)?);
            Ok((tsc() - before, before, at))
        });
        let looks: Vec<(u64, u64, Duration)> = looks.collect::<nix::Result<_>>().context("reading the clock")?;
        let (_, counter, at) = looks.into_iter().min_by_key(|(took, ..)| *took).context("no look")?;
        Ok((counter, at))
    };
    let (first, begin) = look()?;
    thread::sleep(Duration::from_millis(50));
    let (last, end) = look()?;
    let micros = end.saturating_sub(begin).as_nanos() / 1_000;
    u64::try_from(u128::from(last - first) * 1_000 / micros.max(1)).context("measuring the time stamp counter")
}

#[cfg(target_arch = "x86_64")]
fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU counts.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Guests run on x86-64 only.
#[cfg(not(target_arch = "x86_64"))]
fn tsc() -> u64 {
    0
}

fn how(status: ExitStatus) -> Ended {
    if status.success() { Ended::Off } else { Ended::Failed }
}

impl Machine<'_> {
    fn results_file(&self) -> PathBuf {
        self.share.join("results.jsonl")
    }

    fn console_file(&self) -> PathBuf {
        self.share.join("console.log")
    }

    fn errors_file(&self) -> PathBuf {
        self.share.join("qemu.log")
    }

    /// What the guest has written into its second serial port.
    pub(super) fn results(&self) -> anyhow::Result<String> {
        let file = self.results_file();
        let bytes = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// What the guest has written on its console, and the emulator on stderr.
    pub(super) fn console(&self) -> String {
        let read = |file: PathBuf| fs::read(file).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        read(self.console_file()) + &read(self.errors_file())
    }
}

/// Debian's emulator below `root`, started by its own loader with its own libraries, so that nothing is installed.
fn unpacked(root: &Path, refresh: bool, apt: &mut dyn FnMut() -> anyhow::Result<Apt>) -> anyhow::Result<Vec<OsString>> {
    let program = root.join("usr/bin").join(PROGRAM);
    if !program.is_file() || refresh {
        dirs::remove(root)?;
        let apt = apt()?;
        say(format_args!("{PROGRAM} is not installed: unpacking Debian's into {}", root.display()));
        let unfinished = root.with_extension("part");
        dirs::remove(&unfinished)?;
        apt.unpack_closure(&["qemu-system-x86", "seabios"], &unfinished)?;
        fs::rename(&unfinished, root).context("renaming the emulator's directory")?;
    }
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let loader = libraries.join("ld-linux-x86-64.so.2");
    if !loader.is_file() {
        bail!("{} is missing: remove {} and try again", loader.display(), root.display());
    }
    let command = |args: &[&str]| -> Vec<OsString> {
        let mut command =
            vec![loader.clone().into(), "--library-path".into(), libraries.clone().into(), program.clone().into()];
        for dir in ["usr/share/qemu", "usr/share/seabios"] {
            command.push("-L".into());
            command.push(root.join(dir).into());
        }
        command.extend(args.iter().map(OsString::from));
        command
    };
    let version = command(&["--version"]);
    exec::capture(Command::new(&version[0]).args(&version[1..])).map_err(|e| {
        anyhow!("the unpacked {PROGRAM} does not run; install it: apt-get install qemu-system-x86 ({e:#})")
    })?;
    Ok(command(&[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_stamp_counter_is_measured_alike_twice() {
        let (a, b) = (tsc_khz().expect("measured"), tsc_khz().expect("measured"));
        assert!(a.abs_diff(b) < a / 1_000 && (200_000..10_000_000).contains(&a), "{a} and {b} kHz");
    }

    #[test]
    fn an_emulated_cpu_goes_without_what_is_slow_and_known() {
        assert_eq!(
            emulated("Recognized CPUID flags:\n  3dnow erms fsrm\n  kvm-la57 la57 x2apic\n"),
            "max,la57=off,erms=off,fsrm=off"
        );
        assert_eq!(emulated(""), "max");
    }
}
