//! Whether the machine ran its CPUs while something was measured: a hypervisor may take one away for longer than a short queue
//! lasts, and an emulator may have none itself.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// What became of the CPUs' time, in ticks.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    /// With what the nice take, who get it where nobody else wants it: a perftest that polls is never idle.
    idle: u64,
    stolen: u64,
    all: u64,
}

impl CpuTime {
    /// From now on.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read, or is not what proc(5) says.
    pub fn begin() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        let times = stat.lines().next().unwrap_or_default().split_ascii_whitespace().skip(1);
        let times: Vec<u64> = times.map_while(|t| t.parse().ok()).collect();
        // Guests' time, behind these, is part of user's.
        let [user, nice, system, idle, wait, irq, softirq, stolen, ..] = times[..] else {
            bail!("/proc/stat begins with {times:?}")
        };
        Ok(Self { idle: idle + wait + nice, stolen, all: user + nice + system + idle + wait + irq + softirq + stolen })
    }

    /// The part of it since then that a hypervisor gave to others, 0 to 1; 0 too where it does not tell.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn stolen(&self) -> Result<f64> {
        self.share(|time| time.stolen)
    }

    /// The part of it since then in which the CPUs were not idle, and not with the nice, 0 to 1.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn busy(&self) -> Result<f64> {
        self.share(|time| time.all - time.idle)
    }

    fn share(&self, of: fn(&Self) -> u64) -> Result<f64> {
        let now = Self::begin()?;
        // The kernel may take back a tick of what it called idle or waiting.
        let since = |of: fn(&Self) -> u64| of(&now).saturating_sub(of(self)) as f64;
        Ok(since(of) / since(|time| time.all).max(1.0))
    }
}

/// How late a thread woke that sleeps for one period after the other.
#[derive(Clone, Copy, Default, Debug)]
struct Late {
    longest: Duration,
    /// Beyond a period each time, which is the timer's and the scheduler's own.
    sum: Duration,
}

/// Threads that wake again and again, and notice when they are not let.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Late>>,
    begin: Instant,
}

impl Watch {
    /// Begins to watch every CPU that this process may use, twice a millisecond.
    pub fn every_cpu() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self::start(cpus, Duration::from_micros(500), |cpu| {
            let mut set = CpuSet::new();
            // Where it may not be bound, it watches wherever it is put.
            if set.set(cpu).is_ok() {
                let _unbound = sched_setaffinity(Pid::from_raw(0), &set);
            }
        })
    }

    /// Begins to watch with one thread of the highest priority, every millisecond: it waits for nothing but a CPU.
    pub fn urgent() -> Self {
        Self::start(1, Duration::from_millis(1), |_| {
            let priority = 50_i32;
            // SAFETY: the kernel reads the priority, which outlives the call; 0 is the calling thread. musl's own function says
            // ENOSYS. Where it is refused, waits count too.
            let _ = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_FIFO, &raw const priority) };
        })
    }

    fn start(threads: usize, period: Duration, prepare: fn(usize)) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let threads = (0..threads).map(|n| {
            let over = Arc::clone(&over);
            thread::spawn(move || {
                prepare(n);
                watch(period, &over)
            })
        });
        Self { threads: threads.collect(), over, begin: Instant::now() }
    }

    /// Ends it; the longest time for which one thread was not run.
    ///
    /// # Panics
    /// When a watching thread did.
    pub fn longest_pause(mut self) -> Duration {
        self.end().map(|late| late.longest).max().unwrap_or_default()
    }

    /// Ends it; the part of the time in which a CPU was away, 0 to 1.
    ///
    /// # Panics
    /// When a watching thread did.
    pub fn share_away(mut self) -> f64 {
        let time = self.begin.elapsed();
        self.end().map(|late| late.sum).sum::<Duration>().as_secs_f64() / time.as_secs_f64()
    }

    fn end(&mut self) -> impl Iterator<Item = Late> {
        self.over.store(true, Ordering::Relaxed);
        self.threads.drain(..).map(|thread| thread.join().expect("a watching thread panicked"))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

fn watch(period: Duration, over: &AtomicBool) -> Late {
    let mut late = Late::default();
    while !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        thread::sleep(period);
        let by = begin.elapsed().saturating_sub(period);
        late.longest = late.longest.max(by);
        late.sum += by.saturating_sub(period);
    }
    late
}
