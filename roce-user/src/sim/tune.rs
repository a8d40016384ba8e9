//! `roce sim tune`: searches the constants of the loop for a link and a range of flow counts.

use anyhow::{Result, ensure};
use roce_common::{
    dcqcn::{ONE, Params},
    units::{Nanos, Rate},
};

use super::{
    engine::{Outcome, Scenario, random::Random},
    options::{Counts, Job, Options},
    runner::{Finished, run_scenarios},
};
use crate::config::Preset;

/// What is asked of a set; a set that has all of it costs nothing but its queue.
const UTILISATION: f64 = 0.98;
const JAIN: f64 = 0.98;
const OF_KMAX: f64 = 0.9;
const JOIN_PERIODS: f64 = 45.0;
/// A try runs for this many of its own increase periods; the last flow joins at the first mark, and the measurement
/// begins at the second.
const PERIODS: u64 = 300;
const JOINS: u64 = 60;
const MEASURES: u64 = 120;

/// A set of constants and how it did.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The constants.
    pub params: Params,
    /// The lower the better; below 1 every wish is fulfilled.
    pub cost: f64,
    /// Least utilisation over the flow counts.
    pub utilisation: f64,
    /// Least Jain index.
    pub jain: f64,
    /// Highest 99th percentile of the queue, bytes.
    pub queue_bytes_p99: u64,
    /// Drops in all runs after the warm-up.
    pub drops: u64,
}

/// The whole search.
#[derive(Clone, Debug)]
pub struct Tuned {
    /// The preset it started from.
    pub preset: Preset,
    /// The flow counts it looked at.
    pub flows: Vec<u32>,
    /// The first candidate is the preset, the others are in the order of trying.
    pub candidates: Vec<Candidate>,
    /// Index of the best.
    pub best: usize,
    /// The runs of the preset, one per flow count.
    pub before: Vec<Finished>,
    /// The runs of the best.
    pub after: Vec<Finished>,
}

/// Tries `tries` sets beside the preset's own.
///
/// # Errors
/// The options make no scenario.
pub fn tune(options: &Options, flows: &[u32], tries: u32, threads: usize) -> Result<Tuned> {
    let mut jobs = Vec::new();
    for &n in flows {
        let options = Options { flows: Some(Counts(vec![n])), time: None, warmup: None, ..options.clone() };
        let mut job = options.jobs()?;
        ensure!(job.len() == 1, "tune works on one link, delay, window and preset at a time");
        jobs.append(&mut job);
    }
    let Some((preset, start)) = jobs[0].preset.zip(jobs[0].scenario.params) else {
        anyhow::bail!("tune needs the loop: leave --no-loop out");
    };
    let mut random = Random::new(jobs[0].scenario.seed);
    let mut search = Search { jobs: &jobs, threads };
    let (first, before) = search.evaluate(&start)?;
    let mut candidates = vec![first];
    let (mut best, mut after) = (0, before.clone());
    for _ in 0..tries {
        let params = vary(&candidates[best].params, &mut random);
        if params.validate().is_err() {
            continue;
        }
        let (candidate, runs) = search.evaluate(&params)?;
        candidates.push(candidate);
        if candidates[candidates.len() - 1].cost < candidates[best].cost {
            best = candidates.len() - 1;
            after = runs;
        }
    }
    Ok(Tuned { preset, flows: flows.to_vec(), candidates, best, before, after })
}

struct Search<'a> {
    jobs: &'a [Job],
    threads: usize,
}

impl Search<'_> {
    fn evaluate(&mut self, params: &Params) -> Result<(Candidate, Vec<Finished>)> {
        let period = params.rp.timer.0;
        let scenarios: Vec<Scenario> = self
            .jobs
            .iter()
            .flat_map(|job| {
                (0..u64::from(job.seeds)).map(|i| Scenario {
                    params: Some(*params),
                    time: Nanos(period * PERIODS),
                    warmup: Nanos(period * MEASURES),
                    join: (job.scenario.flows > 1).then_some(Nanos(period * JOINS)),
                    seed: job.scenario.seed.wrapping_add(i),
                    ..job.scenario.clone()
                })
            })
            .collect();
        let mut outcomes = run_scenarios(&scenarios, self.threads)?.into_iter();
        let mut each = scenarios.iter();
        let mut runs = Vec::new();
        for job in self.jobs {
            let outcomes: Vec<Outcome> = outcomes.by_ref().take(job.seeds as usize).collect();
            let scenario = each.by_ref().take(job.seeds as usize).next().unwrap_or(&job.scenario).clone();
            runs.push(Finished { job: Job { scenario, ..job.clone() }, outcomes });
        }
        let worst: Vec<_> = runs.iter().map(Finished::worst).collect();
        let candidate = Candidate {
            params: *params,
            cost: runs.iter().map(|f| cost(f, params)).sum(),
            utilisation: worst.iter().map(|w| w.utilisation).fold(1.0, f64::min),
            jain: worst.iter().map(|w| w.jain).fold(1.0, f64::min),
            queue_bytes_p99: worst.iter().map(|w| w.queue_bytes_p99).max().unwrap_or(0),
            drops: runs.iter().flat_map(|f| f.outcomes.iter().map(|o| o.drops[1])).sum(),
        };
        Ok((candidate, runs))
    }
}

/// What a set costs at one flow count: a small part for its queue, and more for every wish that it leaves open.
fn cost(f: &Finished, params: &Params) -> f64 {
    let short = |value: f64, wanted: f64, weight: f64| ((wanted - value).max(0.0) * weight).min(2.0);
    let over = |value: f64, most: f64, weight: f64| ((value - most).max(0.0) * weight).min(2.0);
    let of_one = |o: &Outcome| {
        let queue = o.queue.p99 as f64 / f64::from(params.kmax.max(1));
        let join = match (f.job.scenario.join, o.join_periods) {
            (None, _) => 0.0,
            (Some(_), None) => 2.0,
            (Some(_), Some(n)) => over(n as f64, JOIN_PERIODS, 0.02),
        };
        let drops = if o.drops[1] > 0 { 0.5 + over(o.drops[1] as f64, 0.0, 0.01) } else { 0.0 };
        let waits = o.queue.mean / f.job.scenario.queue_bytes as f64 * 0.05;
        short(o.utilisation, UTILISATION, 10.0)
            + short(o.jain, JAIN, 10.0)
            + over(queue, OF_KMAX, 2.0)
            + join
            + drops
            + waits
    };
    f.outcomes.iter().map(of_one).sum::<f64>() / f.outcomes.len().max(1) as f64
}

/// A neighbour: some constants larger or smaller by up to a factor of 1.6, now and then of 4.
fn vary(params: &Params, random: &mut Random) -> Params {
    let wild = random.unit() < 0.15;
    let mut factor = || {
        let spread = if wild { 1.4 } else { 0.5 };
        if wild || random.unit() < 0.35 { ((random.unit() - 0.5) * 2.0 * spread).exp() } else { 1.0 }
    };
    let scale = |value: u64, by: f64| ((value as f64 * by).round() as u64).max(1);
    let bytes = |value: u32, by: f64| u32::try_from(scale(u64::from(value), by)).unwrap_or(u32::MAX);
    let part = |value: u32, by: f64| bytes(value, by).min(ONE);
    let rate = |value: Rate, by: f64, most: Rate| Rate::from_bytes_per_sec(scale(value.bytes_per_sec(), by)).min(most);
    let mut p = *params;
    let most = p.rp.ceiling();
    let timer = factor();
    p.rp.timer = Nanos(scale(p.rp.timer.0, timer));
    p.rp.alpha_timer = Nanos(scale(p.rp.alpha_timer.0, timer * factor()));
    p.cnp_interval = Nanos(scale(p.cnp_interval.0, factor()));
    p.rp.monitor = Nanos(p.cnp_interval.0 / 2);
    p.rp.g = part(p.rp.g, factor());
    let additive = factor();
    p.rp.additive = rate(p.rp.additive, additive, most);
    if p.rp.start_additive.bytes_per_sec() > 0 {
        p.rp.start_additive = rate(p.rp.start_additive, additive, most).max(p.rp.additive);
    }
    p.rp.hyper = rate(p.rp.hyper, additive * factor(), most).max(p.rp.additive);
    p.kmin = bytes(p.kmin, factor());
    p.kmax = bytes(p.kmax, factor());
    p.pmax = part(p.pmax, factor());
    if p.rp.start_rate.bytes_per_sec() > 0 {
        p.rp.start_rate = rate(p.rp.start_rate, factor(), most).max(p.rp.min_rate);
    }
    p
}
