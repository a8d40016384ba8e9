//! Jobs to outcomes, in parallel.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Result, anyhow};

use super::{
    engine::{self, Outcome, Scenario},
    options::Job,
};

/// A job and what came of each of its seeds.
#[derive(Clone, Debug)]
pub struct Finished {
    /// What was run.
    pub job: Job,
    /// One per seed, in their order.
    pub outcomes: Vec<Outcome>,
}

/// Runs every seed of every job on `threads` threads. The outcomes do not depend on how many these are.
///
/// # Errors
/// A scenario that cannot be simulated.
pub fn run_all(jobs: Vec<Job>, threads: usize) -> Result<Vec<Finished>> {
    let scenarios: Vec<Scenario> = jobs.iter().flat_map(seeds).collect();
    let mut outcomes = run_scenarios(&scenarios, threads)?.into_iter();
    Ok(jobs
        .into_iter()
        .map(|job| Finished { outcomes: outcomes.by_ref().take(job.seeds as usize).collect(), job })
        .collect())
}

/// Runs `scenarios` on `threads` threads; the outcomes are in their order.
///
/// # Errors
/// A scenario that cannot be simulated.
pub fn run_scenarios(scenarios: &[Scenario], threads: usize) -> Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let slots: Vec<Mutex<Option<Result<Outcome, String>>>> = scenarios.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, scenarios.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let (Some(scenario), Some(slot)) = (scenarios.get(i), slots.get(i)) else { break };
                    let outcome = engine::run(scenario);
                    *slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(outcome);
                }
            });
        }
    });
    slots
        .into_iter()
        .map(|slot| match slot.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(outcome) => outcome.map_err(|e| anyhow!("{e}")),
            None => Err(anyhow!("a simulation thread ended early")),
        })
        .collect()
}

/// As many as the machine runs at once.
pub fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn seeds(job: &Job) -> Vec<Scenario> {
    (0..u64::from(job.seeds))
        .map(|i| Scenario { seed: job.scenario.seed.wrapping_add(i), ..job.scenario.clone() })
        .collect()
}
