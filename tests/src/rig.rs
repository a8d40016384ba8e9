//! The agent under test on a lab that a test has built itself.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use aya::maps::{Array, Map, MapData};
use roce_common::abi::PairKey;
use roce_user::dataplane::{DEFAULT_BPFFS, Maps, Pins};
use serde_json::Value;

use crate::{
    capture::{Seen, save},
    lab::{Port, Star, run_roce},
    run::{AgentProcess, AgentRole},
};

/// Agents end by themselves after this long, should nobody end them.
const BOUND: &str = "600";

/// The program `roce`: `ROCE_BIN`, or the one beside the test executable's directory.
///
/// # Errors
/// When it is not there.
pub fn roce() -> Result<PathBuf> {
    let path = match std::env::var_os("ROCE_BIN") {
        Some(path) => path.into(),
        None => std::env::current_exe()?.ancestors().nth(2).context("no target directory")?.join("roce"),
    };
    if !path.is_file() {
        bail!("{}: no such program (build it with `cargo build --release -p roce-user`)", path.display());
    }
    Ok(path)
}

/// Starts an agent on a port, without waiting for it.
///
/// # Errors
/// When it cannot be started.
pub fn spawn(port: &Port, role: AgentRole, args: &[&str]) -> Result<AgentProcess> {
    let args: Vec<String> = args.iter().chain(&["--duration", BOUND]).map(|a| (*a).to_owned()).collect();
    AgentProcess::start(&roce()?, &port.ns, &port.name, role, &args)
}

/// Starts an agent on a port and waits until it is attached.
///
/// # Errors
/// What it said when it ended instead.
pub fn agent(port: &Port, role: AgentRole, args: &[&str]) -> Result<AgentProcess> {
    let mut agent = spawn(port, role, args)?;
    agent.wait_ready()?;
    Ok(agent)
}

/// The agents of a whole lab.
#[derive(Debug)]
pub struct Agents {
    /// Hosts, in the order of the senders.
    pub senders: Vec<AgentProcess>,
    /// The receiver, a host.
    pub receiver: AgentProcess,
    /// The switch's port to the receiver, a congestion point.
    pub switch: AgentProcess,
}

impl Agents {
    /// Starts them all for a link of `rate`; `host` goes to the hosts only.
    ///
    /// # Errors
    /// What the first that failed said.
    pub fn start(star: &Star, rate: &str, host: &[&str]) -> Result<Self> {
        let args: Vec<&str> = ["--link-rate", rate, "--pacer", "htb"].iter().chain(host).copied().collect();
        let mut agents = Self {
            senders: star.senders.iter().map(|s| spawn(&s.port, AgentRole::Host, &args)).collect::<Result<_>>()?,
            receiver: spawn(&star.receiver.port, AgentRole::Host, &args)?,
            switch: spawn(&star.receiver_port, AgentRole::Cp, &["--link-rate", rate])?,
        };
        for agent in agents.senders.iter_mut().chain([&mut agents.receiver, &mut agents.switch]) {
            agent.wait_ready()?;
        }
        Ok(agents)
    }
}

/// Ends an agent and takes its summary.
///
/// # Errors
/// When it does not end well or says nothing.
pub fn finish(mut agent: AgentProcess) -> Result<Value> {
    let status = agent.stop()?;
    if !status.success() {
        bail!("`{}` ended ({status}): {}", agent.name(), agent.stderr());
    }
    agent.summary().with_context(|| format!("`{}` gave no summary: {}", agent.name(), agent.stderr()))
}

/// A counter of a summary.
pub fn counter(summary: &Value, direction: &str, name: &str) -> u64 {
    summary["counters"][direction][name].as_u64().unwrap_or(0)
}

/// A number the controller counted.
pub fn control(summary: &Value, name: &str) -> u64 {
    summary["control"][name].as_u64().unwrap_or(0)
}

/// The maps of the agent on a port, read beside it.
///
/// # Errors
/// When no agent is attached there.
pub fn maps(port: &Port) -> Result<Maps> {
    port.ns.run(|| Maps::open(&Pins::of(Path::new(DEFAULT_BPFFS), port.index)?))
}

/// When the agent on a port last said that it is alive (CLOCK_MONOTONIC, nanoseconds), read beside it.
///
/// # Errors
/// When no agent is attached there.
pub fn heartbeat(port: &Port) -> Result<Array<MapData, u64>> {
    let path = port.ns.run(|| Ok(Pins::of(Path::new(DEFAULT_BPFFS), port.index)?.path("HEARTBEAT")))?;
    Ok(Map::from_map_data(MapData::from_pin(path)?)?.try_into()?)
}

/// What `roce` reports in the namespace of a port, in JSON, with findings or without.
///
/// # Panics
/// When it fails.
pub fn report(port: &Port, args: &[&str]) -> Value {
    let output = run_roce(&port.ns, args).expect("roce runs");
    assert!(output.status.code().is_some_and(|c| c < 2), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// What it reports of packets that were captured.
///
/// # Panics
/// When it fails, or they cannot be written to a file.
pub fn inspected(port: &Port, seen: &[Seen]) -> Value {
    let dir = tempfile::tempdir().expect("directory");
    let file = dir.path().join("wire.pcap");
    save(seen, &file).expect("file");
    report(port, &["inspect", "--json", file.to_str().expect("UTF-8")])
}

/// Waits until `condition` holds; false when it does not within `timeout`.
pub fn eventually(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + timeout;
    while !condition() {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Waits until an agent knows who sends the packets of `key`.
///
/// # Errors
/// When it does not within five seconds.
pub fn wait_paired(maps: &Maps, key: PairKey) -> Result<()> {
    if eventually(Duration::from_secs(5), || maps.pair(key).is_some()) {
        return Ok(());
    }
    bail!("{key:?} is not paired after 5 s; known: {:?}", maps.pairs())
}
