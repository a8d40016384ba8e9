//! The facts of each flow for people: `--detail`.

use std::io::{Result, Write};

use super::{FactsReport, PathReport, SpreadReport};
use crate::export::FlowReport;

/// Writes the first `most` paths, and the facts of as many flows, one paragraph each.
///
/// # Errors
/// What `out` says.
pub fn write(out: &mut impl Write, paths: &[PathReport], flows: &[FlowReport], most: usize) -> Result<()> {
    if !paths.is_empty() {
        writeln!(out)?;
    }
    for path in paths.iter().take(most) {
        let (qps, ports) = (path.qps, path.src_ports);
        writeln!(out, "  {} → {}: {qps} connected QPs, {ports} source ports, tap {}", path.src, path.dst, path.tap)?;
    }
    for flow in flows.iter().take(most) {
        writeln!(out)?;
        for (number, line) in lines(flow, &flow.facts).iter().enumerate() {
            writeln!(out, "  {}{line}", if number == 0 { "" } else { "  " })?;
        }
    }
    if flows.len() > most {
        writeln!(out, "\n  the facts of {most} flows of {}; --json has all", flows.len())?;
    }
    Ok(())
}

fn lines(flow: &FlowReport, facts: &FactsReport) -> Vec<String> {
    let mut lines = vec![format!(
        "{} → {} QP {}, {}, {}, tap {}",
        flow.src, flow.dst, flow.dest_qp, flow.space, flow.service, flow.tap
    )];
    let mut line = |name: &str, text: String| lines.push(format!("{name:<12}{text}"));
    line("packets", join(facts.opcodes.iter().map(|(name, n)| format!("{n} {}", name.replace('_', " ")))));
    let cnp_sent = facts.cnp_sent.unwrap_or(0);
    if flow.cnp + cnp_sent > 0 {
        line("CNPs", format!("{} for its sender, {cnp_sent} by its sender", flow.cnp));
    }
    if facts.messages > 0 {
        let sizes = &facts.message_sizes;
        let bytes = sizes.bytes.map(|b| format!(", {} bytes", range(&b, ToString::to_string)));
        line("messages", format!("{}{}", facts.messages, bytes.unwrap_or_default()));
        if sizes.by_size.len() > 1 {
            let mut sizes: Vec<(u64, u32)> =
                sizes.by_size.iter().filter_map(|(size, n)| Some((size.parse().ok()?, *n))).collect();
            sizes.sort_unstable();
            line("by size", join(sizes.iter().map(|(size, n)| format!("{n} from {size}"))));
        }
    }
    let dscp = join(flow.dscp.iter().map(|(dscp, n)| format!("{n} in DSCP {dscp}")));
    line("marking", format!("{dscp}; CE {:.1} %", facts.ce_share * 100.0));
    let changes = match facts.src_port_changes {
        0 => String::new(),
        n => format!(", changed {n} times"),
    };
    line("source port", format!("{}{changes}", facts.src_port));
    if let Some(c) = &facts.connection {
        let mtu = c.path_mtu.map_or("of an unknown path MTU".to_owned(), |mtu| format!("path MTU {mtu}"));
        let timeout = c.ack_timeout_ns.map_or("none".to_owned(), time);
        line(
            "connection",
            format!(
                "from QP {}, PSN {}, {mtu}; ACK timeout {timeout}, {} retries, {} after RNR NAKs",
                c.sender_qp, c.starting_psn, c.retries, c.rnr_retries
            ),
        );
    }
    if let Some(acks) = &facts.psns_per_ack {
        line("ACKs", format!("cover {} PSNs each", range(acks, ToString::to_string)));
    }
    if let Some(credits) = &facts.credits {
        let granted = credits.granted.map(|g| format!("{}, ", range(&g, ToString::to_string)));
        line("credits", format!("{}{} AETHs without", granted.unwrap_or_default(), credits.without));
    }
    if let Some(rtt) = &facts.rtt_ns {
        let (p50, p99) = (time(rtt.p50), time(rtt.p99));
        line(
            "round trip",
            format!("p50 {p50}, p99 {p99}; {}, {} samples", range(&rtt.spread, time_of), rtt.spread.count),
        );
    }
    let recovery = facts.recovery_ns.clone().unwrap_or_default();
    for (name, spread) in [
        ("gap to NAK", recovery.gap_to_nak),
        ("NAK to fill", recovery.nak_to_refill),
        ("gap to fill", recovery.gap_to_refill),
        ("RNR timer", recovery.rnr_timer),
        ("RNR wait", recovery.rnr_wait),
        ("silences", facts.silences_ns),
    ] {
        if let Some(spread) = spread {
            line(name, format!("{}, {} times", range(&spread, time_of), spread.count));
        }
    }
    if facts.retransmitted_bytes > 0 {
        let share = facts.retransmitted_share * 100.0;
        line("sent again", format!("{} bytes, {share:.1} % of all", facts.retransmitted_bytes));
    }
    lines
}

/// Least, mean and greatest, or the one value that all have.
fn range(spread: &SpreadReport, show: impl Fn(&u64) -> String) -> String {
    if spread.min == spread.max {
        return show(&spread.min);
    }
    format!("{} … {} (mean {})", show(&spread.min), show(&spread.max), show(&spread.mean))
}

fn time_of(nanos: &u64) -> String {
    time(*nanos)
}

/// A time in the unit that suits it, three digits.
fn time(nanos: u64) -> String {
    let (value, unit) = match nanos {
        0..1_000 => return format!("{nanos} ns"),
        1_000..1_000_000 => (nanos as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (nanos as f64 / 1e6, "ms"),
        _ => (nanos as f64 / 1e9, "s"),
    };
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {unit}")
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_unit() {
        let shown = [999, 1_000, 12_345, 999_499, 1_507_328, 67_458_000, 3_000_000_000].map(time);
        assert_eq!(shown, ["999 ns", "1.00 µs", "12.3 µs", "999 µs", "1.51 ms", "67.5 ms", "3.00 s"]);
    }
}
