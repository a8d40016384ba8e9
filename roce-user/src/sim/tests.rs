//! What the simulator must show of the presets, as tables: `tables/*.md` beside this file.
//!
//! The simulation is the same on every machine, so a table changes only when a rule or a constant does. Then run the tests with
//! `UPDATE_TABLES=1` and review the difference.

use std::path::{Path, PathBuf};

use super::{
    plan::Plan,
    report,
    runner::{Finished, default_threads, run_all},
};
use crate::{config::Preset, sim::options::Options};

/// The plan of a file in `benches/` or `tests/plans/`.
fn plan(file: &str) -> Vec<super::options::Job> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    Plan::load(&path).unwrap().jobs(&Options::default(), &path).unwrap()
}

/// Compares the table of `finished` with the reviewed one.
fn reviewed(name: &str, finished: &[Finished]) {
    let mut table = Vec::new();
    report::write_table(&mut table, finished).unwrap();
    let table = String::from_utf8(table).unwrap();
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "src/sim/tables", name].iter().collect();
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(table == want, "{} differs (UPDATE_TABLES=1 writes it anew):\n{table}", path.display());
}

/// The queue, in bytes, at the fixed point of the paper's fluid model (SIGCOMM'15 §5: all derivatives zero, every flow at its
/// share) with the paper's constants, on 40 Gb/s with packets of 1000 bytes. It knows the equations alone, none of our code.
fn fixed_point(flows: u32) -> f64 {
    let (capacity, packet) = (5e6, 1_000.0);
    let (cnp, alpha, timer, bytes, stages, step) = (50e-6, 55e-6, 55e-6, 10e6 / packet, 5.0, 5e3);
    let rate = capacity / f64::from(flows);
    // Positive where cuts outweigh increases.
    let balance = |p: f64| {
        let marked = |packets: f64| 1.0 - (1.0 - p).powf(packets);
        let increases = |every: f64| p / ((1.0 - p).powf(-every) - 1.0);
        let (by_bytes, by_time) = (increases(bytes), increases(timer * rate));
        let additive = by_bytes * (1.0 - p).powf(stages * bytes) + by_time * (1.0 - p).powf(stages * timer * rate);
        marked(alpha * rate) * (marked(cnp * rate) / cnp).powi(2) - step * rate * additive * (by_bytes + by_time)
    };
    let (mut low, mut high) = (1e-6, 1e-2);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if balance(middle) > 0.0 { high = middle } else { low = middle }
    }
    5_000.0 + low / 0.01 * 195_000.0
}

#[test]
fn the_paper_set_stands_where_its_fluid_model_says() {
    // A part of the plan's seeds; all of them are in benches/sim-paper.md.
    let few = |job: super::options::Job| super::options::Job { seeds: if job.name == "4 us" { 8 } else { 2 }, ..job };
    let jobs = plan("benches/sim-paper.toml").into_iter().map(few).collect();
    let finished = run_all(jobs, default_threads()).unwrap();
    reviewed("paper.md", &finished);
    for (f, (flows, published)) in finished.iter().zip([(2, 20_200.0), (4, 41_800.0), (8, 93_800.0), (10, 122_600.0)]) {
        let queue = fixed_point(flows);
        assert!((queue / published - 1.0_f64).abs() < 0.005, "{flows} flows: {queue}");
        assert_eq!(f.job.scenario.flows, flows);
        let mean = f.mean().queue_bytes_mean;
        assert!((mean / queue - 1.0).abs() <= 0.3, "{flows} flows: mean queue {mean} of {queue}");
        for o in &f.outcomes {
            assert!(o.utilisation >= 0.98 && o.jain >= 0.99, "{flows} flows: {} {}", o.utilisation, o.jain);
            assert!(o.drops == [0, 0] && o.cnp_per_flow_per_s <= 20_000.0, "{flows} flows: {:?}", o.drops);
        }
    }
    // Twenty times the delay: two flows stand still, ten swing from an empty queue to one beyond Kmax.
    let (two, ten) = (finished[4].mean(), finished[5].mean());
    assert!(two.queue_bytes_std < 30_000.0 && two.utilisation >= 0.98, "{two:?}");
    assert!(ten.queue_bytes_std > 60_000.0 && ten.queue_bytes_std > ten.queue_bytes_mean, "{ten:?}");
    assert!(ten.utilisation < 0.95 && ten.queue_bytes_peak > 200_000.0, "{ten:?}");
}

#[test]
fn the_soft_set_fills_short_queues_without_loss_where_the_paper_set_collapses() {
    // A part of the plan; all of it, with five seeds, is benches/sim-soft.md.
    let jobs = plan("benches/sim-soft.toml").into_iter().filter(|job| {
        let megabits = job.scenario.link.bits_per_sec() / 1_000_000;
        let flows = job.scenario.flows;
        let part = matches!((megabits, flows), (50, 2 | 32) | (100 | 1_000, 8) | (10_000 | 25_000, 2 | 32));
        part && (job.preset == Some(Preset::Soft) || matches!((megabits, flows), (50, 32) | (100, 8)))
    });
    let jobs = jobs.map(|job| super::options::Job { seeds: 1, ..job }).collect();
    let finished = run_all(jobs, default_threads()).unwrap();
    reviewed("soft.md", &finished);
    let (soft, paper): (Vec<_>, Vec<_>) = finished.iter().partition(|f| f.job.preset == Some(Preset::Soft));
    assert_eq!((soft.len(), paper.len()), (8, 2));
    for f in soft {
        let (m, s) = (f.mean(), &f.job.scenario);
        let name = format!("{} flows on {}: {m:?}", s.flows, f.job.name);
        let kmax = f64::from(s.params.unwrap().kmax);
        assert!(m.utilisation >= 0.97 && m.jain >= 0.97, "{name}");
        assert!(m.drops == 0.0 && m.queue_bytes_p99 < kmax, "{name}");
        assert!(f.worst().join_periods.is_some_and(|n| n <= 50), "{name} joined after {:?}", f.worst().join_periods);
    }
    for f in paper {
        let m = f.mean();
        assert!(m.drops > 1_000.0 && (m.utilisation < 0.8 || m.jain < 0.6), "{m:?}");
    }
}

#[test]
fn the_lab_loses_nothing_once_started() {
    let finished = run_all(plan("tests/plans/lab.toml"), 1).unwrap();
    reviewed("lab.md", &finished);
    let m = finished[0].mean();
    assert!(m.drops == 0.0 && m.utilisation >= 0.95 && m.jain >= 0.95, "{m:?}");
}
