//! What an agent leaves on an interface, as other programs (`bpftool`, `tc`, `ip`) see it.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use roce_user::dataplane::{DEFAULT_BPFFS, QDISC_MAJOR};
use serde_json::Value;

use super::{Netns, Port};

/// How long the kernel may take to free a program nobody holds any more.
const FREED: Duration = Duration::from_secs(3);

/// The `roce` program under test: `ROCE_BIN`, else the one beside the test executable's directory.
pub fn roce() -> PathBuf {
    env::var_os("ROCE_BIN").map_or_else(
        || {
            let test = env::current_exe().unwrap_or_default();
            test.ancestors().nth(2).unwrap_or(Path::new(".")).join("roce")
        },
        PathBuf::from,
    )
}

/// Runs `roce` with these arguments in a namespace.
///
/// # Errors
/// When it cannot be started.
pub fn run_roce(ns: &Netns, args: &[&str]) -> Result<Output> {
    ns.command(roce()).args(args).output().context("cannot run roce")
}

/// One interface, how it was before, and the programs and links that were on it since.
#[derive(Debug)]
pub struct Traces {
    port: Port,
    before: String,
    programs: BTreeSet<u64>,
    links: BTreeSet<u64>,
}

impl Traces {
    /// To be called before anything is attached.
    ///
    /// # Errors
    /// When `tc` fails or something is attached already.
    pub fn before(port: &Port) -> Result<Self> {
        let before = said(port.ns.command("tc").args(["qdisc", "show", "dev", &port.name]))?;
        let traces = Self { port: port.clone(), before, programs: BTreeSet::new(), links: BTreeSet::new() };
        match traces.now()?.as_slice() {
            [] => Ok(traces),
            found => bail!("{}: {}", port.name, found.join("; ")),
        }
    }

    /// Notes what is attached now; returns how many programs.
    ///
    /// # Errors
    /// When `bpftool` fails.
    pub fn note(&mut self) -> Result<usize> {
        for dir in self.pin_dirs()? {
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                if !path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("link_")) {
                    continue;
                }
                let link = json(Command::new("bpftool").args(["-j", "link", "show", "pinned"]).arg(&path))?;
                self.links.extend(link["id"].as_u64());
                self.programs.extend(link["prog_id"].as_u64());
            }
        }
        // Filters of qdiscs are no links.
        let net = json(self.port.ns.command("bpftool").args(["-j", "net", "show", "dev", &self.port.name]))?;
        for hook in net.as_array().into_iter().flatten().flat_map(|n| [&n["xdp"], &n["tc"]]) {
            self.programs.extend(hook.as_array().into_iter().flatten().filter_map(|p| p["id"].as_u64()));
        }
        Ok(self.programs.len())
    }

    /// What is left of all that, one line each; none where everything is as before.
    ///
    /// # Errors
    /// When a tool fails.
    pub fn left(&self) -> Result<Vec<String>> {
        let end = Instant::now() + FREED;
        loop {
            let left = self.now()?;
            if left.is_empty() || Instant::now() > end {
                return Ok(left);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same without waiting for the kernel.
    ///
    /// # Errors
    /// When a tool fails.
    pub fn now(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for (what, ids) in [("prog", &self.programs), ("link", &self.links)] {
            for id in ids {
                let shown = Command::new("bpftool").args([what, "show", "id", &id.to_string()]).output()?;
                if shown.status.success() {
                    left.push(format!("{what} {}", String::from_utf8_lossy(&shown.stdout).trim()));
                }
            }
        }
        left.extend(self.pin_dirs()?.iter().map(|d| d.display().to_string()));
        let name = &self.port.name;
        let exists = self.port.ns.command("ip").args(["-o", "link", "show", "dev", name]).output()?;
        if !exists.status.success() {
            return Ok(left);
        }
        let link = String::from_utf8_lossy(&exists.stdout).into_owned();
        if link.contains("xdp") {
            left.push(link);
        }
        let qdisc = said(self.port.ns.command("tc").args(["qdisc", "show", "dev", name]))?;
        if qdisc != self.before {
            left.push(format!("{} instead of {}", qdisc.trim(), self.before.trim()));
        }
        let handle = format!("{QDISC_MAJOR:x}:");
        let classes = said(self.port.ns.command("tc").args(["class", "show", "dev", name]))?;
        left.extend(classes.lines().filter(|l| l.contains(&handle)).map(str::to_owned));
        for parent in [handle.as_str(), "ffff:fff2", "ffff:fff3"] {
            // Where there is no such parent tc fails, and there are no filters.
            let filters =
                self.port.ns.command("tc").args(["filter", "show", "dev", name, "parent", parent]).output()?;
            left.extend(String::from_utf8_lossy(&filters.stdout).lines().map(str::to_owned));
        }
        Ok(left)
    }

    /// Pin directories of the interface.
    fn pin_dirs(&self) -> Result<Vec<PathBuf>> {
        let name = format!("{}-{}", self.port.ns.inode()?, self.port.index);
        let Ok(versions) = fs::read_dir(Path::new(DEFAULT_BPFFS).join("roce")) else { return Ok(Vec::new()) };
        Ok(versions.flatten().map(|v| v.path().join(&name)).filter(|d| d.exists()).collect())
    }
}

/// A test that failed leaves nothing either.
impl Drop for Traces {
    fn drop(&mut self) {
        if self.pin_dirs().is_ok_and(|d| !d.is_empty()) {
            // The test has failed already; whoever still runs keeps what is his.
            let _ = run_roce(&self.port.ns, &["detach"]);
        }
    }
}

fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What bpftool answers. Version 7.5 ends with a failure behind a good answer for a pinned link.
/// What a program says in JSON: `tc -j`, `rdma -j`, `bpftool -j`.
///
/// # Errors
/// When it cannot be run, or says something else.
pub fn json(command: &mut Command) -> Result<Value> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    match serde_json::from_slice::<Value>(&output.stdout) {
        Ok(answer) if answer["error"].is_null() => Ok(answer),
        _ => bail!("{command:?}: {}", String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).trim()),
    }
}
