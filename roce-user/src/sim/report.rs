//! Outcomes as JSON (schema 1), as text for people, and as diagrams.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    engine::{Outcome, Workload, percentile},
    runner::Finished,
};
use crate::{
    export::SCHEMA,
    plot::{Axis, Panel, Series, Style},
};

/// The figures of a run, or their means over its seeds: counts are means too.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// Accepted packets as a share of what the bottleneck can carry.
    pub utilisation: f64,
    /// Jain's index of what the flows got.
    pub jain: f64,
    /// Depth of the bottleneck's queue over time: mean.
    pub queue_bytes_mean: f64,
    /// Standard deviation.
    pub queue_bytes_std: f64,
    /// Median.
    pub queue_bytes_p50: f64,
    /// 99th percentile.
    pub queue_bytes_p99: f64,
    /// Most.
    pub queue_bytes_peak: f64,
    /// CE-marked packets among those that reached the bottleneck.
    pub ce_share: f64,
    /// CNPs per flow and second.
    pub cnp_per_flow_per_s: f64,
    /// Packets dropped after the warm-up.
    pub drops: f64,
    /// Packets dropped before.
    pub drops_in_warmup: f64,
    /// Time that transmitters were paused, in sum, nanoseconds.
    pub pause_ns: f64,
    /// Packets sent again.
    pub retransmitted: f64,
    /// ACK timeouts.
    pub timeouts: f64,
    /// Share of the time in which the bottleneck sent.
    pub busy: f64,
}

/// The worst of the seeds, where a mean hides it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Worst {
    /// Least utilisation.
    pub utilisation: f64,
    /// Least Jain index.
    pub jain: f64,
    /// Highest 99th percentile of the queue.
    pub queue_bytes_p99: u64,
    /// Most drops after the warm-up.
    pub drops: u64,
    /// The longest that a joining flow took, in its increase periods; `None`: one never had its share, or none joined.
    pub join_periods: Option<u64>,
}

/// Of one outcome.
fn figures(o: &Outcome) -> Figures {
    Figures {
        utilisation: o.utilisation,
        jain: o.jain,
        queue_bytes_mean: o.queue.mean,
        queue_bytes_std: o.queue.std,
        queue_bytes_p50: o.queue.p50 as f64,
        queue_bytes_p99: o.queue.p99 as f64,
        queue_bytes_peak: o.queue.peak as f64,
        ce_share: o.ce_share,
        cnp_per_flow_per_s: o.cnp_per_flow_per_s,
        drops: o.drops[1] as f64,
        drops_in_warmup: o.drops[0] as f64,
        pause_ns: o.pause_ns as f64,
        retransmitted: o.retransmitted as f64,
        timeouts: o.timeouts as f64,
        busy: o.busy,
    }
}

impl Finished {
    /// Means over the seeds.
    pub fn mean(&self) -> Figures {
        let n = self.outcomes.len().max(1) as f64;
        let mean = |of: fn(&Figures) -> f64| self.outcomes.iter().map(|o| of(&figures(o))).sum::<f64>() / n;
        Figures {
            utilisation: mean(|f| f.utilisation),
            jain: mean(|f| f.jain),
            queue_bytes_mean: mean(|f| f.queue_bytes_mean),
            queue_bytes_std: mean(|f| f.queue_bytes_std),
            queue_bytes_p50: mean(|f| f.queue_bytes_p50),
            queue_bytes_p99: mean(|f| f.queue_bytes_p99),
            queue_bytes_peak: mean(|f| f.queue_bytes_peak),
            ce_share: mean(|f| f.ce_share),
            cnp_per_flow_per_s: mean(|f| f.cnp_per_flow_per_s),
            drops: mean(|f| f.drops),
            drops_in_warmup: mean(|f| f.drops_in_warmup),
            pause_ns: mean(|f| f.pause_ns),
            retransmitted: mean(|f| f.retransmitted),
            timeouts: mean(|f| f.timeouts),
            busy: mean(|f| f.busy),
        }
    }

    /// The worst of the seeds.
    pub fn worst(&self) -> Worst {
        let least = |of: fn(&Outcome) -> f64| self.outcomes.iter().map(of).fold(f64::INFINITY, f64::min);
        Worst {
            utilisation: least(|o| o.utilisation),
            jain: least(|o| o.jain),
            queue_bytes_p99: self.outcomes.iter().map(|o| o.queue.p99).max().unwrap_or(0),
            drops: self.outcomes.iter().map(|o| o.drops[1]).max().unwrap_or(0),
            join_periods: self
                .outcomes
                .iter()
                .map(|o| o.join_periods)
                .collect::<Option<Vec<_>>>()
                .and_then(|v| v.into_iter().max()),
        }
    }

    /// Events per second of one thread.
    pub fn events_per_s(&self) -> f64 {
        let took: f64 = self.outcomes.iter().map(|o| o.took.as_secs_f64()).sum();
        self.outcomes.iter().map(|o| o.events).sum::<u64>() as f64 / took.max(1e-9)
    }

    /// Increase periods that a joining flow needed, on the mean of seeds; `None` if one never had its share.
    fn fair_after_ns(&self) -> Option<u64> {
        self.outcomes.iter().map(|o| o.fair_after_ns).collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

/// What was simulated, for the reader of the JSON.
fn scenario(f: &Finished) -> Value {
    let s = &f.job.scenario;
    let mut object = json!({
        "preset": f.job.preset.map(|p| p.to_string()),
        "workload": name(&s.workload),
        "link_bps": s.link.bits_per_sec(),
        "host_link_bps": s.host_link.bits_per_sec(),
        "flows": s.flows,
        "hosts": s.hosts,
        "packet_bytes": s.packet,
        "queue_bytes": s.queue_bytes,
        "window": s.window,
        "ack_every": s.ack_every,
        "delay_ns": s.delay.0,
        "jitter_ns": s.jitter.0,
        "tick_ns": s.tick.0,
        "timeout_ns": s.timeout.0,
        "marking": name(&s.marking),
        "shaper": name(&s.shaper),
        "pfc_xoff_bytes": s.pfc.map(|p| p.xoff),
        "pfc_xon_bytes": s.pfc.map(|p| p.xon),
        "message_bytes": s.message,
        "load": s.load,
        "stagger_ns": s.stagger.0,
        "join_ns": s.join.map(|t| t.0),
        "time_ns": s.time.0,
        "warmup_ns": s.warmup.0,
        "seed": s.seed,
        "seeds": f.job.seeds,
    });
    if let (Some(p), Some(object)) = (&s.params, object.as_object_mut()) {
        object.insert("kmin_bytes".into(), p.kmin.into());
        object.insert("kmax_bytes".into(), p.kmax.into());
        object.insert("pmax".into(), (f64::from(p.pmax) / f64::from(roce_common::dcqcn::ONE)).into());
        object.insert("increase_period_ns".into(), p.rp.timer.0.into());
        object.insert("cnp_interval_ns".into(), p.cnp_interval.0.into());
    }
    object
}

/// The name of a choice, as options take it.
pub(super) fn name(choice: &impl clap::ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}

/// One run as an object of schema 1; counts are whole numbers where one seed ran.
pub fn to_json(f: &Finished) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("schema".into(), SCHEMA.into());
    object.insert("name".into(), f.job.name.clone().into());
    object.insert("scenario".into(), scenario(f));
    if let Ok(Value::Object(means)) = serde_json::to_value(f.mean()) {
        let whole = |v: &Value| match v.as_f64() {
            Some(x) if x.fract() == 0.0 && x.abs() < 9e15 => Value::from(x as u64),
            _ => v.clone(),
        };
        const SHARES: [&str; 4] = ["utilisation", "jain", "ce_share", "busy"];
        object.extend(means.into_iter().map(|(k, v)| {
            let v = if SHARES.contains(&k.as_str()) { v } else { whole(&v) };
            (k, v)
        }));
    }
    let first = &f.outcomes[0];
    object.insert("fair_after_ns".into(), f.fair_after_ns().into());
    object.insert("join_periods".into(), f.worst().join_periods.into());
    object.insert("completions_ns".into(), completions(f));
    let flows = first.rates_bps.iter().map(|r| json!({"rate_bps": r.round() as u64})).collect::<Vec<_>>();
    object.insert("flows".into(), flows.into());
    let curve = first.curve.iter().map(|p| {
        json!({
            "at_ns": p.at_ns, "queue_bytes_mean": p.queue_mean, "queue_bytes_peak": p.queue_peak,
            "jain": p.jain, "goodput_bps": p.goodput_bps,
        })
    });
    object.insert("over_time".into(), curve.collect::<Vec<_>>().into());
    if f.outcomes.len() > 1 {
        let seeds = f.outcomes.iter().enumerate().map(|(i, o)| {
            let mut v = serde_json::to_value(figures(o)).unwrap_or_default();
            if let Some(v) = v.as_object_mut() {
                v.insert("seed".into(), f.job.scenario.seed.wrapping_add(i as u64).into());
                v.insert("join_periods".into(), o.join_periods.into());
            }
            v
        });
        object.insert("seeds".into(), seeds.collect::<Vec<_>>().into());
    }
    object.insert("events".into(), f.outcomes.iter().map(|o| o.events).sum::<u64>().into());
    object.insert("events_per_s".into(), (f.events_per_s().round() as u64).into());
    object
}

/// Completion times of every seed's messages.
fn all_completions(f: &Finished) -> Vec<u64> {
    let mut all: Vec<u64> = f.outcomes.iter().flat_map(|o| o.completions_ns.iter().copied()).collect();
    all.sort_unstable();
    all
}

fn completions(f: &Finished) -> Value {
    let all = all_completions(f);
    if all.is_empty() {
        return Value::Null;
    }
    let at = |share| percentile(&all, share);
    json!({"count": all.len(), "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": at(1.0)})
}

/// The whole of a run for people.
pub fn write_text(out: &mut impl Write, f: &Finished) -> io::Result<()> {
    let (s, m, w) = (&f.job.scenario, f.mean(), f.worst());
    let kb = |bytes: f64| format!("{:.1} kB", bytes / 1e3);
    writeln!(out, "{}", headline(f))?;
    writeln!(out, "  utilisation     {:.4}   (the port sent {:.4} of the time)", m.utilisation, m.busy)?;
    let fair = f.fair_after_ns().map_or_else(|| "never".into(), time);
    writeln!(out, "  Jain index      {:.4}   (0.95 from {fair} on)", m.jain)?;
    let (mean, std) = (kb(m.queue_bytes_mean), kb(m.queue_bytes_std));
    let (p50, p99, peak) = (kb(m.queue_bytes_p50), kb(m.queue_bytes_p99), kb(m.queue_bytes_peak));
    writeln!(out, "  queue           mean {mean} ± {std}, p50 {p50}, p99 {p99}, peak {peak}")?;
    if let Some(p) = &s.params {
        let (kmin, kmax) = (kb(f64::from(p.kmin)), kb(f64::from(p.kmax)));
        let pmax = f64::from(p.pmax) / f64::from(roce_common::dcqcn::ONE);
        writeln!(
            out,
            "  thresholds      Kmin {kmin}, Kmax {kmax}, Pmax {pmax:.3}; increase period {}",
            time(p.rp.timer.0)
        )?;
    }
    writeln!(
        out,
        "  CE              {:.3} % of packets, {:.0} CNPs per flow and second",
        m.ce_share * 100.0,
        m.cnp_per_flow_per_s
    )?;
    writeln!(
        out,
        "  drops           {} ({} in the warm-up), {} sent again, {} timeouts",
        m.drops, m.drops_in_warmup, m.retransmitted, m.timeouts
    )?;
    if s.pfc.is_some() {
        writeln!(out, "  paused          {} in sum over all transmitters", time(m.pause_ns as u64))?;
    }
    if s.join.is_some() {
        let took = w
            .join_periods
            .map_or_else(|| "never had its share".into(), |n| format!("had its share after {n} increase periods"));
        writeln!(out, "  joining flow    {took}")?;
    }
    let all = all_completions(f);
    if !all.is_empty() {
        let at = |share| time(percentile(&all, share));
        writeln!(
            out,
            "  completion      p50 {}, p95 {}, p99 {}, max {} of {} messages",
            at(0.5),
            at(0.95),
            at(0.99),
            at(1.0),
            all.len()
        )?;
    }
    let steps =
        [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.995].map(|at: f64| (at * f.outcomes[0].curve.len() as f64) as usize);
    let over_time = steps.iter().filter_map(|&i| f.outcomes[0].curve.get(i));
    let over_time: Vec<String> = over_time.map(|p| format!("{} {:.3}", time(p.at_ns), p.jain)).collect();
    writeln!(out, "  Jain over time  {}", over_time.join(", "))?;
    let rates = &f.outcomes[0].rates_bps;
    if rates.len() <= 16 {
        let rates: Vec<String> = rates.iter().map(|r| rate(*r)).collect();
        writeln!(out, "  flows           {}", rates.join(", "))?;
    } else {
        let (low, high) = rates.iter().fold((f64::INFINITY, 0.0f64), |(l, h), r| (l.min(*r), h.max(*r)));
        writeln!(out, "  flows           {} of {} to {}", rates.len(), rate(low), rate(high))?;
    }
    if f.outcomes.len() > 1 {
        writeln!(
            out,
            "  worst seed      utilisation {:.4}, Jain {:.4}, queue p99 {}, drops {}",
            w.utilisation,
            w.jain,
            kb(w.queue_bytes_p99 as f64),
            w.drops
        )?;
    }
    writeln!(out, "  simulated at    {:.1} million events per second and thread", f.events_per_s() / 1e6)
}

fn headline(f: &Finished) -> String {
    let s = &f.job.scenario;
    let preset = f.job.preset.map_or_else(|| "without the loop".into(), |p| format!("preset {p}"));
    let flows = match s.workload {
        Workload::Incast if s.hosts < s.flows => format!("{} flows of {} hosts", s.flows, s.hosts),
        _ => format!("{} flows", s.flows),
    };
    let seeds = if f.job.seeds > 1 { format!(", means of {} seeds", f.job.seeds) } else { String::new() };
    let title = if f.job.name.is_empty() { String::new() } else { format!("{}: ", f.job.name) };
    format!(
        "{title}{} of {flows} at {}, {preset}; feedback {} + 0 to {}, {} measured after {}{seeds}",
        name(&s.workload),
        rate(s.link.bits_per_sec() as f64),
        time(s.delay.0),
        time(s.jitter.0),
        time(s.time.0 - s.warmup.0),
        time(s.warmup.0)
    )
}

/// Several runs as a table: means over seeds, and in the last columns the worst of them.
pub fn write_table(out: &mut impl Write, all: &[Finished]) -> io::Result<()> {
    writeln!(
        out,
        "| run | link | flows | preset | utilisation | Jain | queue mean kB | p50 | p99 | peak | p99/Kmax | CE % | CNP/flow/s | drops | in warm-up | paused | join T | FCT p50 | FCT p99 | worst util. | worst Jain | worst drops |"
    )?;
    writeln!(out, "|{}", "---|".repeat(22))?;
    for f in all {
        let (s, m, w) = (&f.job.scenario, f.mean(), f.worst());
        let preset = f.job.preset.map_or_else(|| "none".into(), |p| p.to_string());
        let of_kmax =
            s.params.map_or_else(|| "-".into(), |p| format!("{:.2}", m.queue_bytes_p99 / f64::from(p.kmax.max(1))));
        let join = match (s.join, w.join_periods) {
            (None, _) => "-".into(),
            (Some(_), None) => "never".into(),
            (Some(_), Some(n)) => n.to_string(),
        };
        let paused = if s.pfc.is_some() { time(m.pause_ns as u64) } else { "-".into() };
        let done = all_completions(f);
        let fct = |share| if done.is_empty() { "-".into() } else { time(percentile(&done, share)) };
        writeln!(
            out,
            "| {} | {} | {} | {preset} | {:.3} | {:.3} | {:.1} | {:.1} | {:.1} | {:.1} | {of_kmax} | {:.2} | {:.0} | {:.0} | {:.0} | {paused} | {join} | {} | {} | {:.3} | {:.3} | {} |",
            f.job.name,
            rate(s.link.bits_per_sec() as f64),
            s.flows,
            m.utilisation,
            m.jain,
            m.queue_bytes_mean / 1e3,
            m.queue_bytes_p50 / 1e3,
            m.queue_bytes_p99 / 1e3,
            m.queue_bytes_peak / 1e3,
            m.ce_share * 100.0,
            m.cnp_per_flow_per_s,
            m.drops,
            m.drops_in_warmup,
            fct(0.5),
            fct(0.99),
            w.utilisation,
            w.jain,
            w.drops
        )?;
    }
    Ok(())
}

/// The curves of a run: queue, fairness and rates over time.
pub fn panels(f: &Finished) -> Vec<Panel> {
    let first = &f.outcomes[0];
    let ms = |at_ns: u64| at_ns as f64 / 1e6;
    let curve =
        |of: fn(&super::engine::Point) -> f64| first.curve.iter().map(|p| (ms(p.at_ns), of(p))).collect::<Vec<_>>();
    let levels = f.job.scenario.params.map_or_else(Vec::new, |p| {
        vec![("Kmin".to_owned(), f64::from(p.kmin)), ("Kmax".to_owned(), f64::from(p.kmax))]
    });
    let rates = first.flow_curves.iter().enumerate().map(|(i, rates)| {
        let points = first.curve.iter().zip(rates).map(|(p, r)| (ms(p.at_ns), *r)).collect();
        Series::new(format!("flow {i}"), Style::Line, points)
    });
    vec![
        Panel {
            title: headline(f),
            x: Axis::linear("time, ms"),
            y: Axis::linear("queue, bytes"),
            series: vec![
                Series::new("mean", Style::Line, curve(|p| p.queue_mean)),
                Series::new("peak", Style::Dots, curve(|p| p.queue_peak as f64)),
            ],
            levels,
        },
        Panel {
            title: "rate of each flow".into(),
            x: Axis::linear("time, ms"),
            y: Axis::linear("bits per second"),
            series: rates.collect(),
            levels: Vec::new(),
        },
        Panel {
            title: "Jain's fairness index".into(),
            x: Axis::linear("time, ms"),
            y: Axis { range: Some((0.0, 1.0)), ..Axis::linear("index") },
            series: vec![Series::new("Jain", Style::Line, curve(|p| p.jain))],
            levels: vec![("0.97".into(), 0.97)],
        },
    ]
}

/// A rate for people.
pub(super) fn rate(bits: f64) -> String {
    let (scaled, unit) = match bits {
        b if b >= 1e9 => (b / 1e9, "G"),
        b if b >= 1e6 => (b / 1e6, "M"),
        b if b >= 1e3 => (b / 1e3, "k"),
        b => (b, ""),
    };
    format!("{} {unit}b/s", significant(scaled))
}

/// A time for people.
pub(super) fn time(ns: u64) -> String {
    let (scaled, unit) = match ns as f64 {
        t if t >= 1e9 => (t / 1e9, "s"),
        t if t >= 1e6 => (t / 1e6, "ms"),
        t if t >= 1e3 => (t / 1e3, "µs"),
        t => (t, "ns"),
    };
    format!("{} {unit}", significant(scaled))
}

/// Three digits.
fn significant(x: f64) -> String {
    let decimals = match x.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{x:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
