//! `roce status`: what is attached and how it does, from another shell, through the pins.

use std::{
    io::{self, Write as _},
    path::PathBuf,
};

use anyhow::{Result, bail};
use roce_common::{
    abi::{Pacer, Role},
    units::Nanos,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    agent::{CongestionLine, congestion_lines, monotonic},
    dataplane::{self, DEFAULT_BPFFS, Maps, Pins},
    export::{
        SCHEMA,
        prometheus::{Exposition, Kind},
    },
    netlink::{
        LinkInfo, Netlink,
        rdma::{self, Device},
    },
    tui,
};

/// Arguments of `roce status`.
#[derive(clap::Args, Debug)]
pub(super) struct StatusArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print the text format of Prometheus, for a collector that reads files or runs programs
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Where maps are pinned
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

/// One attached interface.
#[derive(Debug, Serialize)]
struct Line {
    iface: String,
    role: &'static str,
    pacer: &'static str,
    root_qdisc: String,
    start_rate_bps: Option<u64>,
    limited: usize,
    pairs: usize,
    controller_alive: bool,
    heartbeat_age_ms: u64,
    congestion: Vec<CongestionLine>,
}

/// Shows every attached interface of this network namespace.
pub(super) fn status(args: &StatusArgs) -> Result<()> {
    dataplane::check(&args.bpffs)?;
    let mut netlink = Netlink::open()?;
    let links = netlink.links()?;
    let mut lines = Vec::new();
    for (ifindex, pins) in Pins::all(&args.bpffs)? {
        let iface =
            links.iter().find(|l| l.index == ifindex).map_or_else(|| format!("if{ifindex}"), |l| l.name.clone());
        lines.push(line(iface, ifindex, &Maps::open(&pins)?, &mut netlink)?);
    }
    if lines.is_empty() {
        bail!("nothing is attached in this network namespace: start `roce run --iface …` first");
    }
    let rdma = rdma::list();
    let mut out = io::stdout().lock();
    if args.json {
        let devices: Vec<_> = rdma.devices().iter().map(|d| device(d, &links)).collect();
        let rdma = json!({"netlink": rdma.availability(), "devices": devices});
        let all = json!({"schema": SCHEMA, "kind": "status", "interfaces": lines, "rdma": rdma});
        writeln!(out, "{all}")?;
        return Ok(());
    }
    if args.prometheus {
        write!(out, "{}", exposition(&lines))?;
        return Ok(());
    }
    for l in &lines {
        let controller = if l.controller_alive {
            "controller alive".to_owned()
        } else {
            format!("NO CONTROLLER for {} ms: nobody is paced", l.heartbeat_age_ms)
        };
        let start = l.start_rate_bps.map_or(String::new(), |r| format!(", queue pairs start at {}", tui::bits(r)));
        writeln!(
            out,
            "{}: role {}, pacer {} [{}]{start}; {} limited, {} pairs; {controller}",
            l.iface, l.role, l.pacer, l.root_qdisc, l.limited, l.pairs
        )?;
        for class in &l.congestion {
            writeln!(out, "  {class}")?;
        }
    }
    writeln!(out, "RDMA netlink: {}", rdma.availability())?;
    for d in rdma.devices() {
        let on = interfaces(d, &links);
        let place = if on.is_empty() { "no interface of this network namespace".into() } else { on.join(", ") };
        writeln!(out, "  {} on {place}: {} queue pairs", d.name, d.qps.len())?;
    }
    Ok(())
}

fn interfaces(device: &Device, links: &[LinkInfo]) -> Vec<String> {
    links.iter().filter(|l| device.ifindexes.contains(&l.index)).map(|l| l.name.clone()).collect()
}

fn device(device: &Device, links: &[LinkInfo]) -> Value {
    json!({"name": device.name, "interfaces": interfaces(device, links), "queue_pairs": device.qps.len()})
}

/// What a monitoring system follows.
fn exposition(lines: &[Line]) -> Exposition {
    let mut all = Exposition::default();
    let gauge = |name, help| (name, Kind::Gauge, help);
    let counter = |name, help| (name, Kind::Counter, help);
    for l in lines {
        let iface = [("iface", l.iface.as_str())];
        let alive = f64::from(u8::from(l.controller_alive));
        all.add(gauge("roce_controller_alive", "1 while the controller beats."), &iface, alive);
        all.add(gauge("roce_limited_queue_pairs", "Queue pairs with a limiter."), &iface, l.limited as f64);
        all.add(gauge("roce_pairs", "Known pairs of queue pairs."), &iface, l.pairs as f64);
        for c in &l.congestion {
            let class = c.class.to_string();
            let labels = [("iface", l.iface.as_str()), ("class", class.as_str())];
            let rows = [
                (gauge("roce_cp_queue_bytes", "Bytes in the virtual queue now."), c.depth_bytes as f64),
                (gauge("roce_cp_queue_peak_bytes", "The most in the newest second with packets."), c.peak_bytes as f64),
                (gauge("roce_cp_mark_probability", "How likely a packet is marked now, 0 to 1."), c.mark_probability),
                (counter("roce_cp_packets_total", "Packets, RoCE or not."), c.packets as f64),
                (counter("roce_cp_bytes_total", "Frame bytes."), c.bytes as f64),
                (counter("roce_cp_marked_packets_total", "Packets made CE."), c.marked as f64),
            ];
            for (family, value) in rows {
                all.add(family, &labels, value);
            }
        }
    }
    all
}

fn line(iface: String, ifindex: u32, maps: &Maps, netlink: &mut Netlink) -> Result<Line> {
    let config = maps.config()?;
    let now = monotonic();
    let age = now.since(Nanos(maps.heartbeat()?));
    let role = [Role::Host, Role::Cp, Role::Observe].into_iter().find(|r| *r as u32 == config.role);
    let pacer = [Pacer::Edt, Pacer::Htb].into_iter().find(|p| *p as u32 == config.pacer);
    Ok(Line {
        role: match role {
            Some(Role::Host) => "host",
            Some(Role::Cp) => "cp",
            Some(Role::Observe) | None => "observe",
        },
        pacer: match pacer {
            Some(Pacer::Edt) => "edt",
            Some(Pacer::Htb) => "htb",
            Some(Pacer::Off) | None => "off",
        },
        root_qdisc: netlink.root_qdisc(ifindex)?.map_or_else(|| "none".into(), |q| q.kind),
        start_rate_bps: (config.start_bytes_per_sec != 0).then(|| config.start_bytes_per_sec.saturating_mul(8)),
        limited: maps.rates().len(),
        pairs: maps.pairs().len() / 2,
        controller_alive: age.0 <= config.failsafe_ns,
        heartbeat_age_ms: age.0 / 1_000_000,
        congestion: congestion_lines(maps, now)?,
        iface,
    })
}
