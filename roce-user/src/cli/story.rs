//! What `roce flows` adds to the counters: episodes and findings, of the maps and of the agent.

use std::{collections::HashMap, io::Write};

use anyhow::Result;
use roce_common::{
    abi::{Counters, FlowKey},
    flow::Flow,
    units::Addr,
};
use serde_json::{Value, json};

use crate::{
    agent::{FlowLine, Partners},
    events::tap_name,
    facts::PathReport,
    findings::{Findings, rules},
};

/// Flows named with each finding; JSON has more of them.
const MOST_NAMED: usize = 6;

/// Adds what the agent tells of flows.
pub(super) fn add(lines: &mut [FlowLine], story: &Value) {
    let name = |v: &Value| {
        let text = |field: &str| v[field].as_str().unwrap_or_default().to_owned();
        (text("tap"), text("src"), text("dst"), v["dest_qp"].as_u64().unwrap_or_default(), text("space"))
    };
    let told: HashMap<_, _> = story["flows"].as_array().into_iter().flatten().map(|f| (name(f), f)).collect();
    for line in lines {
        let f = &line.flow;
        let key = (f.tap.clone(), f.src.to_string(), f.dst.to_string(), f.dest_qp.into(), f.space.to_owned());
        if let Some(told) = told.get(&key) {
            line.flow.facts.connection = serde_json::from_value(told["connection"].clone()).ok();
            line.flow.facts.silences_ns = serde_json::from_value(told["silences_ns"].clone()).ok().flatten();
            line.flow.facts.recovery_ns = serde_json::from_value(told["recovery_ns"].clone()).ok();
            line.episodes = Some(told["episodes"].clone());
        }
    }
}

/// Connected queue pairs and source ports from host to host.
pub(super) fn paths(iface: &str, flows: &[(FlowKey, Flow)]) -> Vec<PathReport> {
    PathReport::all(views(flows, |_| None), |tap| tap_name(iface, tap))
}

/// The flows as the rules look at them.
fn views<'a>(
    flows: &'a [(FlowKey, Flow)],
    partner: impl Fn(&FlowKey) -> Option<&'a Flow> + Clone,
) -> impl Iterator<Item = rules::View<'a>> + Clone {
    let seen = flows.iter().filter(|(_, flow)| flow.packets != 0);
    seen.map(move |(key, flow)| rules::View { key, flow, partner: partner(key), first: None, ce: None })
}

/// What is found by the flows' counters and, where an agent tells, by their episodes; the gravest first.
pub(super) fn findings(
    iface: &str,
    partners: &Partners,
    locals: &[Addr],
    taps: &[Counters; 2],
    flows: &[(FlowKey, Flow)],
    story: Option<Value>,
) -> Vec<Value> {
    let mut judged = Findings::default();
    let index: HashMap<&FlowKey, &Flow> = flows.iter().map(|(key, flow)| (key, flow)).collect();
    let partner = |key: &FlowKey| partners.of(key)?.iter().find_map(|other| index.get(other).copied());
    rules::judge(&mut judged, views(flows, &partner));
    rules::judge_counters(&mut judged, taps);
    partners.judge_cnps(locals, &mut judged);
    let mut found: Vec<Value> = judged.report(|tap| tap_name(iface, tap)).into_iter().map(|f| json!(f)).collect();
    if let Some(mut story) = story
        && let Value::Array(told) = story["findings"].take()
    {
        found.extend(told);
    }
    for finding in &mut found {
        finding["iface"] = json!(iface);
    }
    found.sort_by_key(|f| std::cmp::Reverse(gravity(f)));
    found
}

fn gravity(finding: &Value) -> u8 {
    match finding["severity"].as_str() {
        Some("error") => 2,
        Some("warning") => 1,
        _ => 0,
    }
}

/// Whether a finding is a warning or worse.
pub(super) fn is_grave(finding: &Value) -> bool {
    gravity(finding) > 0
}

/// Findings for people.
pub(super) fn print(out: &mut impl Write, findings: &[Value]) -> Result<()> {
    if findings.is_empty() {
        writeln!(out, "nothing found")?;
    }
    for f in findings {
        let text = |v: &Value, field: &str| v[field].as_str().unwrap_or_default().to_owned();
        writeln!(out, "{:<8}{} ({}): {}", text(f, "severity"), text(f, "code"), text(f, "iface"), text(f, "seen"))?;
        let all = f["flows"].as_array().map(Vec::as_slice).unwrap_or_default();
        for flow in all.iter().take(MOST_NAMED) {
            let mut who = text(flow, "src");
            if let Some(dst) = flow["dst"].as_str() {
                who += &format!(" > {dst}");
            }
            if let Some(qp) = flow["dest_qp"].as_u64() {
                who += &format!(" QP {qp} {}", text(flow, "space"));
            }
            writeln!(out, "        {} {who}", text(flow, "tap"))?;
        }
        let more = f["subjects"].as_u64().unwrap_or(0).saturating_sub(MOST_NAMED.min(all.len()) as u64);
        if more != 0 {
            writeln!(out, "        and {more} more")?;
        }
        writeln!(out, "        check: {}", text(f, "check"))?;
    }
    Ok(())
}
