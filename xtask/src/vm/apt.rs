//! Debian packages through apt, by a configuration of our own below the target directory: the machine's package lists and
//! installed packages are neither asked nor changed, and no root is needed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, anyhow, bail};

use super::{dirs, mirror::Mirror};
use crate::exec::{self, say};

/// The suite that userland and qemu come from. Its C library is old enough for every kernel here.
pub(super) const USERLAND: &str = "trixie";
/// The suites that kernels are looked for in.
const SUITES: [&str; 4] = ["bookworm", USERLAND, "trixie-backports", "sid"];

/// apt with its own lists, cache, and an empty record of installed packages.
#[derive(Debug)]
pub(super) struct Apt {
    dir: PathBuf,
}

impl Apt {
    /// Fetches the lists of packages of `mirror` into `dir`.
    pub(super) fn open(dir: &Path, mirror: &Mirror) -> anyhow::Result<Self> {
        for program in ["apt-get", "apt-cache", "dpkg-deb"] {
            if exec::find(program).is_none() {
                bail!("{program} is missing: Debian's kernels are fetched with Debian's tools (packages apt, dpkg)");
            }
        }
        let apt = Self { dir: dir.to_owned() };
        for part in ["lists/partial", "cache/archives/partial"] {
            dirs::make(&dir.join(part))?;
        }
        let keyring = mirror.keyring.display();
        let sources: String =
            SUITES.iter().map(|suite| format!("deb [signed-by={keyring}] {} {suite} main\n", mirror.url)).collect();
        fs::write(dir.join("sources.list"), sources).context("writing sources.list")?;
        fs::write(dir.join("status"), "").context("writing an empty package status")?;
        say(format_args!("fetching the package lists of {} from {}", SUITES.join(", "), mirror.url));
        apt.run(apt.command("apt-get").arg("update"))?;
        Ok(apt)
    }

    /// The one that was opened before in this directory.
    pub(super) fn again(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let dir = |part: &str| self.dir.join(part).display().to_string();
        for option in [
            format!("Dir::Etc::sourcelist={}", dir("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".into(),
            "Dir::Etc::preferences=/dev/null".into(),
            "Dir::Etc::preferencesparts=/dev/null".into(),
            format!("Dir::State::lists={}", dir("lists")),
            format!("Dir::State::status={}", dir("status")),
            format!("Dir::State::extended_states={}", dir("extended_states")),
            format!("Dir::Cache={}", dir("cache")),
            format!("Dir::Log={}", dir("log")),
            "APT::Architecture=amd64".into(),
            "APT::Architectures=amd64".into(),
            format!("APT::Default-Release={USERLAND}"),
            "APT::Install-Recommends=false".into(),
            // As root apt would fetch as a user who may not write here.
            "APT::Sandbox::User=".into(),
            "APT::Update::Post-Invoke=".into(),
            "APT::Update::Post-Invoke-Success=".into(),
            "Acquire::Languages=none".into(),
            "Acquire::Retries=3".into(),
            "Debug::NoLocking=1".into(),
        ] {
            command.arg("-o").arg(option);
        }
        command.arg("-q").arg("-q");
        command
    }

    /// What apt writes on stdout is chatter; what it says on stderr is shown when it fails.
    fn run(&self, command: &mut Command) -> anyhow::Result<()> {
        let output = command.stdin(Stdio::null()).output().context("starting apt")?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(anyhow!("apt failed, is the Debian mirror (--mirror) reachable? {}", said.trim().replace('\n', "; ")))
    }

    /// The names of all packages that start with `prefix`.
    pub(super) fn names(&self, prefix: &str) -> anyhow::Result<Vec<String>> {
        let text = exec::capture(self.command("apt-cache").arg("pkgnames").arg(prefix))?;
        Ok(String::from_utf8_lossy(&text).lines().map(str::to_owned).collect())
    }

    /// Fetches these packages and unpacks them into `root`.
    pub(super) fn unpack(&self, packages: &[String], root: &Path) -> anyhow::Result<()> {
        let debs = self.scratch("debs")?;
        self.run(self.command("apt-get").arg("download").args(packages).current_dir(&debs))?;
        unpack_all(&debs, root)
    }

    /// Fetches these packages with everything that they depend on, and unpacks all into `root`.
    pub(super) fn unpack_closure(&self, packages: &[&str], root: &Path) -> anyhow::Result<()> {
        let debs = self.scratch("closure")?;
        dirs::make(&debs.join("partial"))?;
        let mut get = self.command("apt-get");
        get.arg("-o").arg(format!("Dir::Cache::archives={}", debs.display()));
        self.run(get.args(["install", "--yes", "--download-only"]).args(packages))?;
        unpack_all(&debs, root)
    }

    /// An empty directory.
    fn scratch(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.dir.join(name);
        dirs::empty(&dir)?;
        Ok(dir)
    }
}

/// Unpacks every package in `debs` into `root`, and removes the packages.
fn unpack_all(debs: &Path, root: &Path) -> anyhow::Result<()> {
    dirs::make(root)?;
    let mut count = 0;
    for entry in fs::read_dir(debs).with_context(|| format!("reading {}", debs.display()))? {
        let deb = entry?.path();
        if deb.extension().is_some_and(|e| e == "deb") {
            exec::capture(Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(root))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("apt has fetched no package into {}", debs.display());
    }
    dirs::remove(debs)
}
