//! The report for people: what the file holds, what that means, then the flows.

use std::io::{Result, Write};

use roce_common::units::Nanos;

use crate::{
    export::{CaptureReport, Counters, FlowReport, NakCounts},
    findings::SubjectReport,
};

/// Flows shown; JSON has them all.
pub(super) const MOST_ROWS: usize = 64;

/// Writes the report.
pub(super) fn write(out: &mut impl Write, report: &CaptureReport, duration: Nanos) -> Result<()> {
    summary(out, report, duration)?;
    findings(out, report)?;
    flows(out, report)
}

fn summary(out: &mut impl Write, r: &CaptureReport, duration: Nanos) -> Result<()> {
    let malformed = r.malformed_total();
    let micros = duration.0 / 1_000;
    writeln!(out, "{}", r.file)?;
    writeln!(
        out,
        "  {} frames in {}.{:06} s: {} RoCEv2, {} RoCEv1, {} other, {malformed} malformed",
        r.frames,
        micros / 1_000_000,
        micros % 1_000_000,
        r.rocev2,
        r.rocev1,
        r.not_roce
    )?;
    if malformed > 0 {
        let reasons = r.malformed.iter().filter(|&(_, &n)| n > 0).map(|(name, n)| format!("{name} {n}"));
        writeln!(out, "  malformed:  {}", join(reasons))?;
    }
    if let Some(t) = r.tunnels {
        writeln!(
            out,
            "  tunnels:    {} frames out of VXLAN, {} out of GENEVE; outer CE {}, ECT(0) {}, ECT(1) {}, Not-ECT {}",
            t.vxlan, t.geneve, t.outer_ecn.ce, t.outer_ecn.ect0, t.outer_ecn.ect1, t.outer_ecn.not_ect
        )?;
    }
    if r.rocev2 == 0 {
        return Ok(());
    }
    writeln!(
        out,
        "  ECN:        CE {}, ECT(0) {}, ECT(1) {}, Not-ECT {}; {} CNPs",
        r.ecn.ce, r.ecn.ect0, r.ecn.ect1, r.ecn.not_ect, r.cnp
    )?;
    let mut dscps: Vec<_> = r.dscp.iter().collect();
    dscps.sort_by_key(|(dscp, _)| dscp.parse::<u8>().unwrap_or(u8::MAX));
    if !dscps.is_empty() {
        writeln!(out, "  DSCP:       {}", join(dscps.iter().map(|(dscp, n)| format!("{dscp}: {n}"))))?;
    }
    writeln!(out, "  ICRC:       {} valid, {} wrong, {} not checked", r.icrc.valid, r.icrc.invalid, r.icrc.unchecked)?;
    let c = &r.counters;
    writeln!(
        out,
        "  PSNs:       {} missing = {} lost + {} reordered + {} open; {} lost again",
        c.missing_psns, c.lost, c.reordered, c.open, c.lost_again
    )?;
    writeln!(
        out,
        "  packets:    {} retransmitted, {} duplicates, {} discontinuities",
        c.retransmitted, c.duplicates, c.discontinuities
    )?;
    writeln!(
        out,
        "  responder:  {} NAKs{}, {} RNR NAKs; {} losses after this tap, {} READs asked again",
        c.nak.total(),
        nak_kinds(&c.nak),
        c.rnr_nak,
        c.lost_after_tap,
        c.reasked
    )
}

fn nak_kinds(nak: &NakCounts) -> String {
    let kinds = [
        (nak.psn_sequence, "sequence"),
        (nak.invalid_request, "invalid request"),
        (nak.remote_access, "remote access"),
        (nak.remote_operational, "remote operational"),
        (nak.other, "other"),
    ];
    if nak.total() == 0 {
        return String::new();
    }
    format!(" ({})", join(kinds.iter().filter(|k| k.0 > 0).map(|(n, name)| format!("{n} {name}"))))
}

/// Frames and flows named with each finding; JSON has more of them.
const MOST_NAMED: usize = 6;

fn findings(out: &mut impl Write, r: &CaptureReport) -> Result<()> {
    if let Some(reason) = &r.incomplete {
        writeln!(out, "  ! incomplete: {reason}")?;
    }
    if r.flows_refused > 0 {
        writeln!(out, "  ! {} packets of flows beyond the number kept are in no flow", r.flows_refused)?;
    }
    for f in &r.findings {
        writeln!(out, "  {:<8}{}: {}", f.severity.name(), f.code, f.seen)?;
        let named = f.flows.iter().take(MOST_NAMED).filter_map(subject);
        let named: Vec<_> = named.collect();
        if !named.is_empty() {
            let more = f.subjects.saturating_sub(named.len() as u64);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            writeln!(out, "            {}{more}", named.join(", "))?;
        }
        let frames: Vec<_> =
            f.evidence.iter().filter_map(|e| e.frame).take(MOST_NAMED).map(|n| n.to_string()).collect();
        if !frames.is_empty() {
            let more = if f.evidence.len() > frames.len() { ", …" } else { "" };
            writeln!(out, "            frames {}{more}", frames.join(", "))?;
        }
        writeln!(out, "            check: {}", f.check)?;
    }
    Ok(())
}

/// Whom a finding is about; `None` where it is the capture.
fn subject(s: &SubjectReport) -> Option<String> {
    let src = s.src?;
    Some(match (s.dst, s.dest_qp) {
        (Some(dst), Some(qp)) => format!("{src} → {dst} QP {qp}"),
        (Some(dst), None) => format!("{src} → {dst}"),
        _ => src.to_string(),
    })
}

/// A column: title, value, and whether it is shown where every value is 0.
type Column = (&'static str, fn(&FlowReport) -> String, bool);

const COLUMNS: [Column; 20] = [
    ("TAP", |f| f.tap.clone(), true),
    ("SOURCE", |f| f.src.to_string(), true),
    ("DESTINATION", |f| f.dst.to_string(), true),
    ("QP", |f| f.dest_qp.to_string(), true),
    ("SPACE", |f| f.space.to_owned(), true),
    ("SVC", |f| f.service.to_owned(), true),
    ("PACKETS", |f| f.packets.to_string(), true),
    ("BYTES", |f| f.bytes.to_string(), true),
    ("FIRST", |f| f.first_psn.to_string(), true),
    ("LAST", |f| f.last_psn.to_string(), true),
    ("CE", |f| f.ecn.ce.to_string(), false),
    ("CNP", |f| f.cnp.to_string(), false),
    ("MISSING", |f| f.counters.missing_psns.to_string(), false),
    ("LOST", |f| f.counters.lost.to_string(), false),
    ("AGAIN", |f| f.counters.lost_again.to_string(), false),
    ("OPEN", |f| f.counters.open.to_string(), false),
    ("REORD", |f| f.counters.reordered.to_string(), false),
    ("DUP", |f| f.counters.duplicates.to_string(), false),
    ("RETX", |f| f.counters.retransmitted.to_string(), false),
    ("NOTES", |f| notes(&f.counters), false),
];
/// Columns of words; numbers stand right.
const WORDS: [&str; 6] = ["TAP", "SOURCE", "DESTINATION", "SPACE", "SVC", "NOTES"];

/// The rarer counters, by name.
fn notes(c: &Counters) -> String {
    let all = [
        (c.nak.total(), "NAK"),
        (c.rnr_nak, "RNR"),
        (c.lost_after_tap, "lost after tap"),
        (c.reasked, "reasked"),
        (c.discontinuities, "discontinuities"),
    ];
    join(all.iter().filter(|n| n.0 > 0).map(|(n, name)| format!("{n} {name}")))
}

fn flows(out: &mut impl Write, r: &CaptureReport) -> Result<()> {
    if r.flows.is_empty() {
        return Ok(());
    }
    let mut rows: Vec<&FlowReport> = r.flows.iter().collect();
    if rows.len() > MOST_ROWS {
        rows.sort_by_key(|f| std::cmp::Reverse(f.packets));
        rows.truncate(MOST_ROWS);
    }
    writeln!(out)?;
    let columns: Vec<(&str, Vec<String>)> = COLUMNS
        .iter()
        .map(|(title, value, always)| (*title, rows.iter().map(|f| value(f)).collect::<Vec<_>>(), *always))
        .filter(|(_, values, always)| *always || values.iter().any(|v| v != "0" && !v.is_empty()))
        .map(|(title, values, _)| (title, values))
        .collect();
    let widths: Vec<usize> = columns
        .iter()
        .map(|(title, values)| values.iter().map(String::len).chain([title.len()]).max().unwrap_or(0))
        .collect();
    let mut line = |cell: &dyn Fn(usize) -> String| {
        let mut text = String::from(" ");
        for (i, (title, _)) in columns.iter().enumerate() {
            let (cell, width) = (cell(i), widths[i]);
            text.push(' ');
            text += &if WORDS.contains(title) { format!("{cell:<width$}") } else { format!("{cell:>width$}") };
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&|i| columns[i].0.to_owned())?;
    for row in 0..rows.len() {
        line(&|i| columns[i].1[row].clone())?;
    }
    if r.flows.len() > rows.len() {
        writeln!(out, "  the {} flows with most packets of {}; --json lists all", rows.len(), r.flows.len())?;
    }
    Ok(())
}

fn join(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}
