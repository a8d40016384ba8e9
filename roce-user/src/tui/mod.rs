//! The live table on a terminal.

use std::io::{self, Write as _};

use anyhow::Result;
use crossterm::{
    cursor::MoveTo,
    queue,
    terminal::{Clear, ClearType, size},
};
use roce_common::abi::{Counter, Counters};

use crate::{agent::FlowLine, control::Stats};

/// Events shown below the table.
pub const NEWS_LINES: usize = 8;
/// Flows shown when the terminal's height is not known.
const ROWS: usize = 30;

/// A rate in bits per second with a unit.
pub fn bits(n: u64) -> String {
    match n {
        0..1_000 => format!("{n} b/s"),
        1_000..1_000_000 => format!("{:.1} kb/s", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} Mb/s", n as f64 / 1e6),
        _ => format!("{:.2} Gb/s", n as f64 / 1e9),
    }
}

/// The lines of one interface.
pub fn table(
    name: &str,
    role: &str,
    counters: &[Counters; 2],
    stats: &Stats,
    flows: &[FlowLine],
    total: usize,
) -> Vec<String> {
    let [ingress, egress] = counters;
    let at = |c: &Counters, which: Counter| c[which as usize];
    let qp = |number: Option<u32>| number.map_or_else(|| "-".into(), |n| n.to_string());
    let mut lines = vec![
        format!(
            "{name} ({role})   RoCEv2 in {} out {}   CE in {} marked {}   CNP in {} sent {}   handled {} ignored {}   unpaired {}",
            at(ingress, Counter::Rocev2),
            at(egress, Counter::Rocev2),
            at(ingress, Counter::Ce),
            at(egress, Counter::CeMarked),
            at(ingress, Counter::Cnp),
            at(egress, Counter::NpCnpSent),
            stats.rp_handled,
            stats.rp_ignored() + at(ingress, Counter::CnpUnpaired),
            at(ingress, Counter::NpUnpaired),
        ),
        format!(
            "{:<18} {:<39} {:>8} {:>8} {:>9} {:<8} {:>11} {:>11} {:>10} {:>7} {:>6} {:>7} {:>6} {:>5}  {}",
            "tap",
            "source > destination",
            "dest QP",
            "local QP",
            "remote QP",
            "space",
            "rate",
            "limit",
            "packets",
            "missing",
            "lost",
            "retrans",
            "CE",
            "CNP",
            "device and process"
        ),
    ];
    for line in flows {
        let f = &line.flow;
        lines.push(format!(
            "{:<18} {:<39} {:>8} {:>8} {:>9} {:<8} {:>11} {:>11} {:>10} {:>7} {:>6} {:>7} {:>6} {:>5}  {}",
            f.tap,
            format!("{} > {}", f.src, f.dst),
            f.dest_qp,
            qp(line.ends.local_qp),
            qp(line.ends.remote_qp),
            f.space,
            line.rate_bps.map_or(String::new(), bits),
            line.limit_bps.map_or("-".into(), bits),
            f.packets,
            f.counters.missing_psns,
            f.counters.lost,
            f.counters.retransmitted,
            f.ecn.ce,
            f.cnp,
            line.ends.owner(),
        ));
    }
    if total > flows.len() {
        lines.push(format!("… and {} more flows", total - flows.len()));
    }
    lines.push(String::new());
    lines
}

/// Draws the tables and the news over what was drawn before.
///
/// # Errors
/// The terminal is gone.
pub fn draw<'a>(tables: impl Iterator<Item = &'a String>, news: &'a [String]) -> Result<()> {
    let (width, height) = size().map_or((200, ROWS), |(w, h)| (usize::from(w), usize::from(h)));
    let mut out = io::stdout().lock();
    queue!(out, Clear(ClearType::All), MoveTo(0, 0))?;
    let room = height.saturating_sub(news.len() + 2).max(4);
    for line in tables.take(room).chain(news) {
        let cut: String = line.chars().take(width).collect();
        writeln!(out, "{cut}\r")?;
    }
    out.flush()?;
    Ok(())
}
