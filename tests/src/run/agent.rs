//! An agent: `roce run` as a child process in a namespace, spoken to in JSON lines.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::lab::{Netns, signals};

/// How long an agent may take to attach. In a guest without KVM on a busy machine the verifier alone takes half a minute.
const READY: Duration = Duration::from_secs(100);
/// How long an agent may take to detach after SIGINT.
const GOODBYE: Duration = Duration::from_secs(10);
/// Lines of stderr kept for an error message.
const KEPT_LINES: usize = 20;

/// The role an agent is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AgentRole {
    /// Marks, notifies and paces.
    Host,
    /// Congestion point.
    Cp,
    /// Looks only.
    Observe,
}

impl AgentRole {
    /// As `--role` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cp => "cp",
            Self::Observe => "observe",
        }
    }
}

/// What an agent has said so far.
#[derive(Debug, Default)]
struct Said {
    ready: bool,
    /// The last line of each kind.
    flows: Option<Value>,
    summary: Option<Value>,
    events: Vec<Value>,
    stderr: VecDeque<String>,
}

/// One running `roce run`. Dropping it ends the process, by SIGINT first.
#[derive(Debug)]
pub struct AgentProcess {
    child: Child,
    said: Arc<Mutex<Said>>,
    readers: Vec<JoinHandle<()>>,
    name: String,
}

impl AgentProcess {
    /// Starts `program run --iface iface --role role …args --json` in `ns`. The process gets SIGTERM when the calling
    /// thread ends.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(program: &Path, ns: &Netns, iface: &str, role: AgentRole, args: &[String]) -> Result<Self> {
        let mut command = ns.command(program);
        command
            .args(["run", "--iface", iface, "--role", role.name(), "--json"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| nix::sys::prctl::set_pdeathsig(Signal::SIGTERM).map_err(io::Error::from));
        }
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let said = Arc::new(Mutex::new(Said::default()));
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            let said = Arc::clone(&said);
            readers.push(thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    said.lock().unwrap_or_else(PoisonError::into_inner).hear(&line);
                }
            }));
        }
        if let Some(stderr) = child.stderr.take() {
            let said = Arc::clone(&said);
            readers.push(thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                    if said.stderr.len() == KEPT_LINES {
                        said.stderr.pop_front();
                    }
                    said.stderr.push_back(line);
                }
            }));
        }
        Ok(Self { child, said, readers, name: format!("roce run --iface {iface} --role {}", role.name()) })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn said<T>(&self, f: impl FnOnce(&Said) -> T) -> T {
        f(&self.said.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until it says it is ready.
    ///
    /// # Errors
    /// When it ends before, with what it wrote on stderr, or when it takes too long.
    pub fn wait_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY;
        while Instant::now() < end {
            if self.said(|s| s.ready) {
                return Ok(());
            }
            self.check()?;
            if signals::interrupted() {
                bail!("interrupted");
            }
            thread::sleep(Duration::from_millis(10));
        }
        bail!("`{}` was not ready after {} s: {}", self.name, READY.as_secs(), self.stderr())
    }

    /// Fails when the process has ended.
    ///
    /// # Errors
    /// With its exit status and what it wrote on stderr.
    pub fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        // The readers end with the pipes.
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        bail!("`{}` ended ({status}): {}", self.name, self.stderr())
    }

    /// The last lines it wrote on stderr.
    pub fn stderr(&self) -> String {
        self.said(|s| s.stderr.iter().cloned().collect::<Vec<_>>().join("\n"))
    }

    /// Its newest `flows` line.
    pub fn flows(&self) -> Option<Value> {
        self.said(|s| s.flows.clone())
    }

    /// Its `event` lines so far.
    pub fn events(&self) -> Vec<Value> {
        self.said(|s| s.events.clone())
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Its command line, shortened, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its `summary` line, once it has ended.
    pub fn summary(&self) -> Option<Value> {
        self.said(|s| s.summary.clone())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> nix::Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
    }

    /// Asks it to end (SIGINT), waits, and kills it where it does not.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let end = Instant::now() + GOODBYE;
        if self.child.try_wait()?.is_none() {
            // It may end in between; then there is nobody to signal.
            let _ = self.signal(Signal::SIGINT);
        }
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > end {
                self.child.kill()?;
                self.child.wait()?;
                bail!("`{}` did not end within {} s of SIGINT: {}", self.name, GOODBYE.as_secs(), self.stderr());
            }
            thread::sleep(Duration::from_millis(10));
        };
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(status)
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // Nothing more can be done about an agent that neither ends nor dies.
        let _ = self.stop();
    }
}

impl Said {
    fn hear(&mut self, line: &str) {
        // Lenient: a line that is not JSON is no reason to fail a run; a missing `ready` or `summary` is.
        let Ok(value) = serde_json::from_str::<Value>(line) else { return };
        match value["kind"].as_str() {
            Some("ready") => self.ready = true,
            Some("flows") => self.flows = Some(value),
            Some("summary") => self.summary = Some(value),
            Some("event") => self.events.push(value),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_heard_by_kind_and_noise_is_ignored() {
        let mut said = Said::default();
        for line in [
            "not json",
            r#"{"schema":1,"kind":"ready"}"#,
            r#"{"schema":1,"kind":"flows","flows":[],"counters":{"egress":{"ce_marked":3}}}"#,
            r#"{"schema":1,"kind":"event","event":"cnp"}"#,
            r#"{"schema":1,"kind":"later"}"#,
        ] {
            said.hear(line);
        }
        assert!(said.ready && said.summary.is_none());
        assert_eq!(said.events.len(), 1);
        assert_eq!(said.flows.unwrap()["counters"]["egress"]["ce_marked"], 3);
    }
}
