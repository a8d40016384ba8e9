//! The agents of a pass, and what their summaries say.

use std::path::Path;

use anyhow::{Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    agent::{AgentProcess, AgentRole},
    live::LoopCounts,
    options::Options,
    traffic::Pass,
};
use crate::lab::{Netns, Star};

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
            if let Some(ingress) = &options.ingress {
                args.extend(["--ingress".into(), ingress.clone()]);
            }
            AgentProcess::start(program, ns, iface, role, &args)
        };
        let (host, pacer) = if with { (AgentRole::Host, options.pacer.name()) } else { (AgentRole::Observe, "off") };
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

    /// What their newest `flows` lines add up to.
    pub(super) fn live_counts(&self) -> LoopCounts {
        let egress = |agent: &AgentProcess, field: fn(&Value) -> Option<u64>| {
            let said = agent.flows()?;
            let flows = said["flows"].as_array()?;
            let leaves = |flow: &Value| flow["tap"].as_str().is_some_and(|t| t.ends_with("/egress"));
            flows.iter().filter(|f| leaves(f)).filter_map(field).reduce(|a, b| a + b)
        };
        LoopCounts {
            ce: egress(&self.switch, |f| f["ecn"]["ce"].as_u64()),
            // An agent counts a CNP at the flow it slows down.
            cnp: self.hosts.iter().filter_map(|h| egress(h, |f| f["cnp"].as_u64())).reduce(|a, b| a + b),
        }
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
                bail!("`{}` ended ({status}) without a summary: {}", agent.name(), agent.stderr());
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

impl Drop for Agents {
    fn drop(&mut self) {
        // All at once; each one's own drop then waits for it.
        for agent in self.all() {
            if agent.is_running() {
                let _ = agent.signal(Signal::SIGINT);
            }
        }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_summed_by_tap_and_space() {
        let summary: Value = serde_json::from_str(
            r#"{"counters":{"ingress":{"np_cnp_sent":2},"egress":{"np_cnp_sent":1}},"control":{"rp_handled":5},
            "flows":[{"tap":"r/ingress","space":"request","lost":3,"src":"a"},
                     {"tap":"r/ingress","space":"response","lost":100},
                     {"tap":"r/egress","space":"request","lost":50}]}"#,
        )
        .unwrap();
        let reports = AgentReports { senders: vec![summary.clone()], receiver: summary, switch: Value::Null };
        assert_eq!((reports.receiver_ingress("lost"), reports.senders_egress("lost")), (3, 50));
        assert_eq!((reports.host_counter("np_cnp_sent"), reports.control("rp_handled")), (6, 10));
        assert_eq!(reports.switch_counter("np_cnp_sent"), 0);
    }
}
