//! The result of a search: TOML to paste, before and after, and the trade-off as a diagram.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::{
    report,
    runner::Finished,
    tune::{Candidate, Tuned},
};
use crate::{
    config::Dcqcn,
    export::SCHEMA,
    plot::{Axis, Panel, Series, Style},
};

/// The table `[dcqcn]` of the best set.
fn toml(tuned: &Tuned) -> String {
    Dcqcn::of(tuned.preset, &tuned.candidates[tuned.best].params).to_toml()
}

pub(super) fn write_text(out: &mut impl Write, tuned: &Tuned) -> io::Result<()> {
    let best = &tuned.candidates[tuned.best];
    let scenario = &tuned.before[0].job.scenario;
    let link = report::rate(scenario.link.bits_per_sec() as f64);
    writeln!(
        out,
        "# {} sets tried for {:?} flows at {link}; worst run of the preset, and of the best:",
        tuned.candidates.len(),
        tuned.flows
    )?;
    for (name, c) in [("preset", &tuned.candidates[0]), ("best", best)] {
        writeln!(
            out,
            "# {name:7} cost {:.3}, utilisation {:.4}, Jain {:.4}, queue p99 {:.1} kB, drops {}",
            c.cost,
            c.utilisation,
            c.jain,
            c.queue_bytes_p99 as f64 / 1e3,
            c.drops
        )?;
    }
    writeln!(out, "# Paste into the configuration file of every sender and of the congestion point:\n")?;
    writeln!(out, "{}", toml(tuned))?;
    let commented = |runs: &[Finished], title: &str, out: &mut dyn Write| -> io::Result<()> {
        let mut table = Vec::new();
        report::write_table(&mut table, runs)?;
        writeln!(out, "# {title}")?;
        String::from_utf8_lossy(&table).lines().try_for_each(|line| writeln!(out, "# {line}"))
    };
    commented(&tuned.before, "preset:", out)?;
    commented(&tuned.after, "best:", out)
}

fn candidate(c: &Candidate) -> Value {
    json!({
        "cost": c.cost, "utilisation": c.utilisation, "jain": c.jain, "queue_bytes_p99": c.queue_bytes_p99, "drops": c.drops,
    })
}

pub(super) fn to_json(tuned: &Tuned) -> Value {
    let runs = |all: &[Finished]| all.iter().map(report::to_json).map(Value::Object).collect::<Vec<_>>();
    json!({
        "schema": SCHEMA,
        "flow_counts": tuned.flows,
        "toml": toml(tuned),
        "preset": candidate(&tuned.candidates[0]),
        "best": candidate(&tuned.candidates[tuned.best]),
        "candidates": tuned.candidates.iter().map(candidate).collect::<Vec<_>>(),
        "runs_of_preset": runs(&tuned.before),
        "runs": runs(&tuned.after),
    })
}

pub(super) fn panels(tuned: &Tuned) -> Vec<Panel> {
    let point = |c: &Candidate| (c.queue_bytes_p99 as f64 / 1e3, c.utilisation);
    let sets = |dropped: bool| tuned.candidates.iter().filter(|c| (c.drops > 0) == dropped).map(point).collect();
    let against = |of: fn(&Finished) -> f64, runs: &[Finished]| {
        runs.iter().map(|f| (f64::from(f.job.scenario.flows), of(f))).collect::<Vec<_>>()
    };
    let by_flows = |title: &str, of: fn(&Finished) -> f64| Panel {
        title: title.into(),
        x: Axis::log("flows"),
        y: Axis::linear(title),
        series: vec![
            Series::new("preset", Style::Line, against(of, &tuned.before)),
            Series::new("best", Style::Line, against(of, &tuned.after)),
        ],
        levels: Vec::new(),
    };
    vec![
        Panel {
            title: "sets tried, each by its worst run: utilisation against queue".into(),
            x: Axis::linear("queue p99, kB"),
            y: Axis { range: Some((0.5, 1.0)), ..Axis::linear("utilisation") },
            series: vec![
                Series::new("without drops", Style::Dots, sets(false)),
                Series::new("with drops", Style::Dots, sets(true)),
                Series::new("preset", Style::Crosses, vec![point(&tuned.candidates[0])]),
                Series::new("best", Style::Crosses, vec![point(&tuned.candidates[tuned.best])]),
            ],
            levels: Vec::new(),
        },
        by_flows("utilisation", |f| f.worst().utilisation),
        by_flows("Jain index", |f| f.worst().jain),
        by_flows("queue p99, bytes", |f| f.worst().queue_bytes_p99 as f64),
    ]
}
