//! `roce flows` and `roce detach`: from another shell, through the pins.

use std::{
    io::{self, Write as _},
    path::PathBuf,
};

use anyhow::{Result, bail};
use roce_common::abi::Direction;
use serde_json::json;

use super::story;
use crate::{
    agent::{FlowLine, Partners, flow_lines},
    control::Stats,
    dataplane::{self, DEFAULT_BPFFS, Maps, Pins},
    events,
    export::{FlowReport, SCHEMA},
    facts::detail,
    netlink::{LinkInfo, Netlink, rdma, require_link},
    tui,
};

/// Arguments of `roce flows`.
#[derive(clap::Args, Debug)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct FlowsArgs {
    /// Only this interface
    #[arg(long, value_name = "IF")]
    iface: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also print the facts of each flow: messages, round trips, ACKs, recovery, waits
    #[arg(long, conflicts_with_all = ["json", "findings"])]
    detail: bool,
    /// Show what was found instead of the flows, and end with exit code 1 where a finding is a warning or worse
    #[arg(long)]
    findings: bool,
    /// Where maps are pinned
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

/// Flows and paths with details; `--json` has all.
const MOST_DETAILED: usize = 64;

const EXAMPLES: &str = "\
Counters come from the pinned maps. Why packets were repeated and where they were lost is told by the agent (`roce run`), since it
started; without one the counters remain. Queue pairs, devices and processes are named by the kernel where it has RDMA
(`roce status` says), both ends where they are paired.

Examples:
  roce flows                       a table of every attached interface
  roce flows --json | jq '.flows[] | select(.lost > 0) | {src, dst, dest_qp, episodes}'
  roce flows --detail              also sizes, ACKs and how long repair took
  roce flows --findings            what to look at, and what to check

Exit codes: 0 fine, 1 with --findings: a warning or worse was found, 2 nothing is attached, or not permitted.";

/// Arguments of `roce detach`.
#[derive(clap::Args, Debug)]
pub(super) struct DetachArgs {
    /// Only this interface
    #[arg(long, value_name = "IF")]
    iface: Option<String>,
    /// Where maps are pinned
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

fn only(name: Option<&String>) -> Result<Option<LinkInfo>> {
    name.map(|n| require_link(n)).transpose()
}

/// Shows the flows of every attached interface of this network namespace. Whether something was found that should have been
/// asked for.
pub(super) fn flows(args: &FlowsArgs) -> Result<bool> {
    dataplane::check(&args.bpffs)?;
    let only = only(args.iface.as_ref())?;
    let links = Netlink::open()?.links()?;
    let rdma = rdma::list();
    let mut lines: Vec<FlowLine> = Vec::new();
    let mut tables = Vec::new();
    let mut attached = 0;
    let mut found = Vec::new();
    let mut paths = Vec::new();
    for (ifindex, pins) in Pins::all(&args.bpffs)? {
        if only.as_ref().is_some_and(|o| o.index != ifindex) {
            continue;
        }
        attached += 1;
        let link = links.iter().find(|l| l.index == ifindex);
        let name = link.map_or_else(|| format!("if{ifindex}"), |l| l.name.clone());
        let maps = Maps::open(&pins)?;
        let mut all = maps.flows();
        let partners = Partners::new(&maps);
        partners.count_cnps(&mut all);
        let (mut these, total) = flow_lines(&name, &maps, (&rdma, &partners), &all, |_, _| None);
        let told = link.map_or(Ok(None), events::story)?;
        if let Some(told) = &told {
            story::add(&mut these, told);
        }
        let counters = [maps.counters(Direction::Ingress)?, maps.counters(Direction::Egress)?];
        found.extend(story::findings(&name, &partners, &maps.locals(), &counters, &all, told));
        paths.extend(story::paths(&name, &all));
        if !args.json {
            tables.extend(tui::table(&name, "flows", &counters, &Stats::default(), &these, total));
        }
        lines.extend(these);
    }
    if attached == 0 {
        let place = args.iface.as_ref().map_or_else(|| "in this network namespace".into(), |n| format!("on {n}"));
        bail!("nothing is attached {place}: start `roce run --iface …` first");
    }
    let mut out = io::stdout().lock();
    if args.json {
        let all = json!({"schema": SCHEMA, "kind": "flows", "flows": lines, "paths": paths, "findings": found});
        writeln!(out, "{all}")?;
    } else if args.findings {
        story::print(&mut out, &found)?;
    } else {
        for line in tables {
            writeln!(out, "{line}")?;
        }
        if args.detail {
            let flows: Vec<FlowReport> = lines.into_iter().map(|line| line.flow).collect();
            detail::write(&mut out, &paths, &flows, MOST_DETAILED)?;
            writeln!(out)?;
        }
        if !found.is_empty() {
            writeln!(out, "{} findings: roce flows --findings", found.len())?;
        }
    }
    Ok(args.findings && found.iter().any(story::is_grave))
}

/// Removes everything of ours from this network namespace.
pub(super) fn detach(args: &DetachArgs) -> Result<()> {
    dataplane::check(&args.bpffs)?;
    let only = only(args.iface.as_ref())?;
    let removed = dataplane::detach(&args.bpffs, only.as_ref())?;
    let mut out = io::stdout().lock();
    if removed.is_empty() {
        writeln!(out, "nothing was attached")?;
    }
    for r in removed {
        let name = r.name.unwrap_or_else(|| format!("interface {} (gone)", r.ifindex));
        let qdisc = if r.qdisc { ", the root qdisc with its classes" } else { "" };
        writeln!(out, "{name}: removed {} pins, {} filters{qdisc}", r.pins, r.filters)?;
    }
    Ok(())
}
