//! The agents of a pass: `roce run` as child processes in the lab's namespaces, spoken to in JSON lines.

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

use super::{live::LoopCounts, options::Options, traffic::Pass};
use crate::lab::{Netns, Star, signals};

/// How long an agent may take to attach.
const READY: Duration = Duration::from_secs(30);
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
    events: u64,
    cnp_events: u64,
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
            Some("event") => {
                self.events += 1;
                if value["event"].as_str().or(value["type"].as_str()).is_some_and(|e| e.contains("cnp")) {
                    self.cnp_events += 1;
                }
            }
            _ => {}
        }
    }
}

/// The agents of one pass.
#[derive(Debug)]
pub(super) struct Agents {
    hosts: Vec<AgentProcess>,
    receiver: AgentProcess,
    switch: AgentProcess,
}

impl Agents {
    /// Starts one on every host and one on the switch's slow port, and waits until all are attached.
    pub(super) fn start(program: &Path, star: &Star, options: &Options, pass: Pass) -> Result<Self> {
        let with = pass == Pass::With;
        let start = |ns: &Netns, iface: &str, role: AgentRole, pacer: &str| {
            let mut args: Vec<String> =
                ["--link-rate", &options.link.to_string(), "--pacer", pacer].iter().map(|s| (*s).to_owned()).collect();
            // A bound, should we be killed: far beyond the pass itself.
            args.extend(["--duration".into(), (options.time.as_secs() + 120).to_string()]);
            AgentProcess::start(program, ns, iface, role, &args)
        };
        let (host, pacer) = if with { (AgentRole::Host, "htb") } else { (AgentRole::Observe, "off") };
        let cp = if with { AgentRole::Cp } else { AgentRole::Observe };
        let mut hosts = Vec::new();
        for sender in &star.senders {
            hosts.push(start(&sender.port.ns, &sender.port.name, host, pacer)?);
        }
        let receiver = start(&star.receiver.port.ns, &star.receiver.port.name, host, pacer)?;
        let switch = start(star.switch(), &star.receiver_port.name, cp, "off")?;
        let mut agents = Self { hosts, receiver, switch };
        for agent in agents.all() {
            agent.wait_ready()?;
        }
        Ok(agents)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut AgentProcess> {
        self.hosts.iter_mut().chain([&mut self.receiver, &mut self.switch])
    }

    /// Fails when one has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        self.all().try_for_each(AgentProcess::check)
    }

    /// What they say while running; counters where their `flows` lines carry them, else the events.
    pub(super) fn live_counts(&self) -> LoopCounts {
        let counted = |a: &AgentProcess, name: &str| a.said(|s| s.flows.as_ref().map_or(0, |f| both(f, name)));
        let events: u64 = self.hosts.iter().map(|a| a.said(|s| s.cnp_events)).sum();
        LoopCounts { ce: counted(&self.switch, "ce_marked"), cnp: counted(&self.receiver, "np_cnp_sent").max(events) }
    }

    /// Ends them all and takes their summaries.
    pub(super) fn finish(mut self) -> Result<AgentReports> {
        // All at once, so that they detach side by side.
        for agent in self.all() {
            let _ = agent.signal(Signal::SIGINT);
        }
        let take = |agent: &mut AgentProcess| -> Result<Value> {
            let status = agent.stop()?;
            let Some(summary) = agent.summary() else {
                bail!("`{}` ended ({status}) without a summary: {}", agent.name, agent.stderr());
            };
            Ok(summary)
        };
        Ok(AgentReports {
            senders: self.hosts.iter_mut().map(take).collect::<Result<_>>()?,
            receiver: take(&mut self.receiver)?,
            switch: take(&mut self.switch)?,
        })
    }
}

/// A counter of both directions.
fn both(value: &Value, name: &str) -> u64 {
    ["ingress", "egress"].iter().filter_map(|d| value["counters"][*d][name].as_u64()).sum()
}

/// The summaries of one pass.
#[derive(Debug)]
pub(super) struct AgentReports {
    senders: Vec<Value>,
    receiver: Value,
    switch: Value,
}

impl AgentReports {
    /// Sum of a flow field over the request flows of one tap.
    fn tap(summary: &Value, direction: &str, field: &str) -> u64 {
        let flows = summary["flows"].as_array().map(Vec::as_slice).unwrap_or_default();
        flows
            .iter()
            .filter(|f| f["tap"].as_str().is_some_and(|t| t.ends_with(direction)) && f["space"] == "request")
            .filter_map(|f| f[field].as_u64())
            .sum()
    }

    pub(super) fn receiver_ingress(&self, field: &str) -> u64 {
        Self::tap(&self.receiver, "/ingress", field)
    }

    pub(super) fn senders_egress(&self, field: &str) -> u64 {
        self.senders.iter().map(|s| Self::tap(s, "/egress", field)).sum()
    }

    pub(super) fn switch_counter(&self, name: &str) -> u64 {
        both(&self.switch, name)
    }

    pub(super) fn host_counter(&self, name: &str) -> u64 {
        self.senders.iter().chain([&self.receiver]).map(|s| both(s, name)).sum()
    }

    pub(super) fn control(&self, name: &str) -> u64 {
        self.senders.iter().chain([&self.receiver]).filter_map(|s| s["control"][name].as_u64()).sum()
    }

    /// The limit a sender's agent reported for a flow.
    pub(super) fn limit(&self, src: &str, dst: &str, dest_qp: u32) -> Option<u64> {
        self.senders
            .iter()
            .filter_map(|s| s["flows"].as_array())
            .flatten()
            .filter(|f| f["src"] == src && f["dst"] == dst && f["dest_qp"] == dest_qp)
            .find_map(|f| f["rate_bps"].as_u64())
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
        assert_eq!((said.events, said.cnp_events, both(&said.flows.unwrap(), "ce_marked")), (1, 1, 3));
    }

    #[test]
    fn summaries_are_summed_by_tap_and_space() {
        let summary: Value = serde_json::from_str(
            r#"{"counters":{"ingress":{"np_cnp_sent":2},"egress":{"np_cnp_sent":1}},"control":{"rp_handled":5},
            "flows":[{"tap":"r/ingress","space":"request","lost":3,"src":"a","dst":"b","dest_qp":7,"rate_bps":9},
                     {"tap":"r/ingress","space":"response","lost":100},
                     {"tap":"r/egress","space":"request","lost":50}]}"#,
        )
        .unwrap();
        let reports = AgentReports { senders: vec![summary.clone()], receiver: summary, switch: Value::Null };
        assert_eq!((reports.receiver_ingress("lost"), reports.senders_egress("lost")), (3, 50));
        assert_eq!((reports.host_counter("np_cnp_sent"), reports.control("rp_handled")), (6, 10));
        assert_eq!(
            (reports.limit("a", "b", 7), reports.limit("a", "b", 8), reports.switch_counter("x")),
            (Some(9), None, 0)
        );
    }
}
