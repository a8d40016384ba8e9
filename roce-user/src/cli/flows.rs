//! `roce flows` and `roce detach`: from another shell, through the pins.

use std::{
    io::{self, Write as _},
    path::PathBuf,
};

use anyhow::{Result, bail};
use roce_common::abi::Direction;
use serde_json::json;

use crate::{
    agent::{FlowLine, flow_lines},
    control::Stats,
    dataplane::{self, DEFAULT_BPFFS, Maps, Pins},
    export::SCHEMA,
    netlink::{LinkInfo, Netlink, require_link},
    tui,
};

/// Arguments of `roce flows`.
#[derive(clap::Args, Debug)]
pub(super) struct FlowsArgs {
    /// Only this interface
    #[arg(long, value_name = "IF")]
    iface: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Where maps are pinned
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

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

/// Shows the flows of every attached interface of this network namespace.
pub(super) fn flows(args: &FlowsArgs) -> Result<()> {
    dataplane::check(&args.bpffs)?;
    let only = only(args.iface.as_ref())?;
    let links = Netlink::open()?.links()?;
    let mut lines: Vec<FlowLine> = Vec::new();
    let mut tables = Vec::new();
    let mut attached = 0;
    for (ifindex, pins) in Pins::all(&args.bpffs)? {
        if only.as_ref().is_some_and(|o| o.index != ifindex) {
            continue;
        }
        attached += 1;
        let name = links.iter().find(|l| l.index == ifindex).map_or_else(|| format!("if{ifindex}"), |l| l.name.clone());
        let maps = Maps::open(&pins)?;
        let all = maps.flows();
        let (these, total) = flow_lines(&name, &maps, &all, |_, _| None);
        if args.json {
            lines.extend(these);
        } else {
            let counters = [maps.counters(Direction::Ingress)?, maps.counters(Direction::Egress)?];
            tables.extend(tui::table(&name, "flows", &counters, &Stats::default(), &these, total));
        }
    }
    if attached == 0 {
        let place = args.iface.as_ref().map_or_else(|| "in this network namespace".into(), |n| format!("on {n}"));
        bail!("nothing is attached {place}: start `roce run --iface …` first");
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", json!({"schema": SCHEMA, "kind": "flows", "flows": lines}))?;
    }
    for line in tables {
        writeln!(out, "{line}")?;
    }
    Ok(())
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
