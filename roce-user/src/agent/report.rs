//! What an agent shows: JSON lines (schema 1) or a table that is drawn anew.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    io::{self, IsTerminal as _, Write as _},
    rc::Rc,
};

use anyhow::Result;
use roce_common::{
    abi::{Counter, Counters, Direction, FlowKey, PeerQp, Space},
    flow::Flow,
    units::{Nanos, Rate},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Agent, Ends, Owners, Partners, Progress, Reactions, congestion_lines, monotonic, run::limit};
use crate::{
    control::{KernelStats, Unknown},
    dataplane::Maps,
    events::{EventLine, Record, Wall, tap_name},
    export::{FlowReport, SCHEMA},
    facts::RttReport,
    netlink::rdma::Rdma,
    tui,
};

/// Most flows of one report; the busiest are kept.
pub(super) const REPORTED_FLOWS: usize = 4_096;

/// One flow of a live report.
#[derive(Clone, Debug, Serialize)]
pub struct FlowLine {
    /// The flow, by the names of schema 1.
    #[serde(flatten)]
    pub flow: FlowReport,
    /// Its queue pairs, and whose the local one is.
    #[serde(flatten)]
    pub ends: Ends,
    /// Payload bits per second since the last report; since the start in a summary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_bps: Option<u64>,
    /// Frame bits per second its queue pair is limited to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bps: Option<u64>,
    /// Its episodes by cause and place, where an agent tells; in `roce flows`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub episodes: Option<Value>,
}

/// The flows of one interface's maps as report lines, the busiest first, at most as many as a report takes; and how many
/// there are. `rdma` is what the kernel said of its queue pairs, and `partners` has given the flows their CNPs.
pub fn flow_lines(
    name: &str,
    maps: &Maps,
    (rdma, partners): (&Rdma, &Partners),
    flows: &[(FlowKey, Flow)],
    mut rate: impl FnMut(&FlowKey, &Flow) -> Option<u64>,
) -> (Vec<FlowLine>, usize) {
    let mut order: Vec<&(FlowKey, Flow)> = flows.iter().filter(|(_, f)| f.packets != 0).collect();
    let total = order.len();
    let rank = |entry: &&(FlowKey, Flow)| (std::cmp::Reverse(entry.1.packets), entry.0);
    if total > REPORTED_FLOWS {
        order.select_nth_unstable_by_key(REPORTED_FLOWS, rank);
        order.truncate(REPORTED_FLOWS);
    }
    order.sort_unstable_by_key(rank);
    let mut owners = Owners::new(rdma, maps);
    let lines = order
        .into_iter()
        .map(|(key, flow)| {
            let mut report = FlowReport::new(key, flow, tap_name(name, key.tap));
            report.facts.cnp_sent = Some(partners.cnps_sent(key));
            if key.space() == Space::Request {
                report.facts.rtt_ns = partners.round_trips(maps, key).and_then(|times| RttReport::of(&times));
            }
            FlowLine {
                flow: report,
                ends: owners.ends(key, maps),
                rate_bps: rate(key, flow),
                limit_bps: (key.tap.direction() == Direction::Egress)
                    .then(|| limit(maps, PeerQp::new(key.dst, key.dest_qp())))
                    .flatten(),
                episodes: None,
            }
        })
        .collect();
    (lines, total)
}

/// Non-zero counters by name.
fn counters_json(counters: &Counters) -> BTreeMap<&'static str, u64> {
    Counter::ALL.iter().map(|c| (c.name(), counters[*c as usize])).filter(|(_, n)| *n != 0).collect()
}

/// Where reports go.
pub struct Output {
    json: bool,
    table: bool,
    start: Nanos,
    last_report: HashMap<String, Nanos>,
    /// The newest table of each interface.
    tables: BTreeMap<String, Vec<String>>,
    news: Vec<String>,
}

impl Output {
    /// JSON lines when asked for or when stdout is no terminal; a table otherwise.
    pub fn new(json: bool) -> Self {
        let terminal = io::stdout().is_terminal();
        Self {
            json: json || !terminal,
            table: !json && terminal,
            start: monotonic(),
            last_report: HashMap::new(),
            tables: BTreeMap::new(),
            news: Vec::new(),
        }
    }

    fn line(&self, value: &Value) -> Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{value}")?;
        out.flush()?;
        Ok(())
    }

    /// Attached and running.
    pub(super) fn ready(&mut self, agent: &Agent) -> Result<()> {
        let plan = &agent.plan;
        let s = &plan.settings;
        if let Some(stale) = &agent.attachment.stale {
            log::warn!(
                "{}: removed what an earlier agent had left: {} pins, {} filters{}",
                plan.link.name,
                stale.pins,
                stale.filters,
                if stale.qdisc { ", its root qdisc" } else { "" }
            );
        }
        if !plan.rdma.hardware.is_empty() {
            log::warn!(
                "{}: {} is RDMA hardware: its packets bypass the kernel, and nothing of them is seen here",
                plan.link.name,
                plan.rdma.hardware.join(", ")
            );
        }
        if self.json {
            return self.line(&json!({
                "schema": SCHEMA,
                "kind": "ready",
                "iface": plan.link.name,
                "role": s.role.to_string(),
                "ingress": plan.ingress.to_string(),
                "ingress_reason": plan.ingress_reason,
                "tc": agent.attachment.tc_hook,
                "pacer": agent.pacer,
                "pacer_reason": agent.pacer_reason,
                "pacer_qdisc": agent.qdisc,
                "start_rate_bps": agent.start_rate.map(Rate::bits_per_sec),
                "cnp_wait": agent.controller.as_ref().map(|c| c.wait().name()),
                "link_rate_bps": s.link_rate.bits_per_sec(),
                "link_rate_given": s.link_rate_given,
                "rxe": plan.rdma.soft,
                "rdma_hardware": plan.rdma.hardware,
                "rdma_netlink": agent.rdma.availability(),
            }));
        }
        let why = |reason: &Option<&str>| reason.map_or(String::new(), |r| format!(" ({r})"));
        self.news.push(format!(
            "{}: role {}, ingress {}{}, pacer {}{} [{}], link {}",
            plan.link.name,
            s.role,
            plan.ingress,
            why(&plan.ingress_reason),
            agent.pacer,
            why(&agent.pacer_reason.as_deref()),
            agent.qdisc,
            tui::bits(s.link_rate.bits_per_sec()),
        ));
        self.draw()
    }

    /// Something happened.
    pub(super) fn event(&mut self, name: &str, record: &Record) -> Result<()> {
        let line = EventLine::new(name, None, record, Wall::now());
        if self.json {
            return self.line(&serde_json::to_value(line)?);
        }
        self.news.push(line.to_string());
        Ok(())
    }

    fn draw(&mut self) -> Result<()> {
        if !self.table {
            return Ok(());
        }
        let keep = self.news.len().saturating_sub(tui::NEWS_LINES);
        self.news.drain(..keep);
        tui::draw(self.tables.values().flatten(), &self.news)
    }
}

impl Agent {
    /// The periodic report: the busiest flows of `total`.
    pub(super) fn report(
        &mut self,
        output: &Rc<RefCell<Output>>,
        progress: &Progress,
        flows: &[(FlowKey, Flow)],
        total: usize,
    ) -> Result<()> {
        let now = monotonic();
        let name = self.plan.link.name.clone();
        let mut output = output.borrow_mut();
        let since = output.last_report.insert(name.clone(), now).unwrap_or(output.start);
        let elapsed = now.since(since).0.max(1);
        let last = std::mem::take(&mut self.last_bytes);
        // A flow that was not in the last report is new, or was not among its busiest: then its rate is not known.
        let complete = last.len() < REPORTED_FLOWS;
        let maps = &self.attachment.maps;
        let partners = Partners::new(maps);
        let mut flows = flows.to_vec();
        partners.count_cnps(&mut flows);
        let (lines, _) = flow_lines(&name, maps, (&self.rdma, &partners), &flows, |key, flow| {
            let before = last.get(key).copied().or(complete.then_some(0))?;
            Some(bits_per_sec(flow.bytes.saturating_sub(before), elapsed))
        });
        self.last_bytes = flows.iter().map(|(key, flow)| (*key, flow.bytes)).collect();
        let congestion = congestion_lines(&self.attachment.maps, now)?;
        if output.json {
            return output.line(&json!({
                "schema": SCHEMA,
                "kind": "flows",
                "iface": name,
                "flows_total": total,
                "flows": lines,
                "congestion": congestion,
            }));
        }
        let counters = self.all_counters()?;
        let mut table =
            tui::table(&name, &self.plan.settings.role.to_string(), &counters, &progress.stats, &lines, total);
        table.extend(congestion.iter().map(ToString::to_string));
        output.tables.insert(name, table);
        output.draw()
    }

    fn all_counters(&self) -> Result<[Counters; 2]> {
        Ok([self.attachment.maps.counters(Direction::Ingress)?, self.attachment.maps.counters(Direction::Egress)?])
    }

    /// The last report.
    pub(super) fn summarise(&mut self, output: &Rc<RefCell<Output>>, progress: &Progress) -> Result<()> {
        let maps = &self.attachment.maps;
        let mut flows = maps.flows();
        let partners = Partners::new(maps);
        partners.count_cnps(&mut flows);
        let mut output = output.borrow_mut();
        let elapsed = monotonic().since(output.start).0.max(1);
        let name = &self.plan.link.name;
        let (lines, total) =
            flow_lines(name, maps, (&self.rdma, &partners), &flows, |_, flow| Some(bits_per_sec(flow.bytes, elapsed)));
        let counters = self.all_counters()?;
        let stats = progress.stats;
        if !output.json {
            let table = tui::table(name, &self.plan.settings.role.to_string(), &counters, &stats, &lines, total);
            output.tables.insert(name.clone(), table);
            return output.draw();
        }
        let unpaired = counters[0][Counter::CnpUnpaired as usize];
        output.line(&json!({
            "schema": SCHEMA,
            "kind": "summary",
            "iface": name,
            "role": self.plan.settings.role.to_string(),
            "seconds": elapsed as f64 / 1e9,
            "counters": {
                "ingress": counters_json(&counters[0]),
                "egress": counters_json(&counters[1]),
            },
            "congestion": congestion_lines(&self.attachment.maps, monotonic())?,
            "control": {
                "cnp_received": counters[0][Counter::Cnp as usize],
                "rp_handled": stats.rp_handled,
                "rp_ignored": stats.rp_ignored() + unpaired,
                "rp_ignored_by_reason": {
                    "unpaired": unpaired,
                    "unknown_qp": stats.ignored_unknown_qp,
                    "wrong_peer": stats.ignored_wrong_peer,
                    "limiters_full": stats.ignored_limiters_full,
                },
                "cuts": stats.cuts,
                "held_back": stats.held_back,
                "recovered": stats.recovered,
                "released": stats.released,
                "started": stats.started,
                "idled": stats.idled,
                "limited": progress.limited,
                "reaction_ns": reactions_json(&progress.reactions),
                "events_not_shown": progress.not_shown,
                "pairs": progress.pairs,
                "kernel_pairing": kernel_json(&progress.kernel),
            },
            "flows_total": total,
            "flows": lines,
        }))
    }
}

/// How long CNPs took from the kernel's stamp to the rate in the map, nanoseconds.
fn reactions_json(reactions: &Reactions) -> Value {
    let share = |s: f64| reactions.percentile(s).as_nanos() as u64;
    json!({
        "count": reactions.count(),
        "p50": share(0.5),
        "p99": share(0.99),
        "max": reactions.max().as_nanos() as u64,
    })
}

/// What the kernel's list of queue pairs was good for.
fn kernel_json(stats: &KernelStats) -> Value {
    let unknown: BTreeMap<_, _> = Unknown::ALL.iter().map(|why| (why.name(), stats.unknown[*why as usize])).collect();
    json!({
        "asked": stats.asked,
        "paired": stats.paired,
        "paired_first": stats.first,
        "withdrawn": stats.withdrawn,
        "unknown_by_reason": unknown,
    })
}

fn bits_per_sec(bytes: u64, elapsed_ns: u64) -> u64 {
    (u128::from(bytes) * 8 * u128::from(Nanos::SECOND.0) / u128::from(elapsed_ns)) as u64
}
