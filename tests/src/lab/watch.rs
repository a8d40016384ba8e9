//! Whether the machine ran its CPUs while something was measured: a hypervisor may take one away for longer than a short queue
//! lasts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// How often each CPU is asked for a sign of life.
const PERIOD: Duration = Duration::from_micros(500);

/// A thread on each CPU that finds out when it is not run.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Duration>>,
}

impl Watch {
    /// Begins to watch every CPU that this process may use.
    pub fn start() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..cpus).map(|cpu| {
            let over = Arc::clone(&over);
            thread::spawn(move || watch(cpu, &over))
        });
        Self { threads: threads.collect(), over }
    }

    /// Ends it; the longest time for which one CPU ran nothing of ours.
    ///
    /// # Panics
    /// When a watching thread did.
    pub fn longest_pause(self) -> Duration {
        self.over.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|t| t.join().expect("a watching thread panicked")).max().unwrap_or_default()
    }
}

fn watch(cpu: usize, over: &AtomicBool) -> Duration {
    let mut set = CpuSet::new();
    // Where it may not be bound, it watches wherever it is put.
    if set.set(cpu).is_ok() {
        let _unbound = sched_setaffinity(Pid::from_raw(0), &set);
    }
    let mut longest = Duration::ZERO;
    while !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        thread::sleep(PERIOD);
        longest = longest.max(begin.elapsed().saturating_sub(PERIOD));
    }
    longest
}
