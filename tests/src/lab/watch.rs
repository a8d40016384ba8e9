//! Whether the machine ran its CPUs while something was measured: a hypervisor may take one away for longer than a short queue
//! lasts, and an emulator may have none itself.

use std::{
    collections::BTreeMap,
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

/// What the programs that run, and the kernel's threads, have had of the CPUs, by name; in ticks.
#[derive(Clone, Debug)]
pub struct CpuByProgram {
    ticks: BTreeMap<String, u64>,
    all: u64,
}

impl CpuByProgram {
    /// From now on.
    ///
    /// # Errors
    /// As [`CpuTime::begin`].
    pub fn begin() -> Result<Self> {
        let mut ticks = BTreeMap::new();
        for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
            let number = entry.file_name().to_string_lossy().parse::<u32>().is_ok();
            // A process that has just ended has no file any more.
            let Some((name, used)) = fs::read_to_string(entry.path().join("stat"))
                .ok()
                .filter(|_| number)
                .and_then(|stat| of_process(&stat))
            else {
                continue;
            };
            *ticks.entry(name).or_default() += used;
        }
        Ok(Self { ticks, all: CpuTime::begin()?.all })
    }

    /// The names with the largest parts of the CPUs' time since then, at most `most` of them: `roce 12.5 %`. What has ended since is not
    /// among them.
    ///
    /// # Errors
    /// As [`CpuTime::begin`].
    pub fn most(&self, most: usize) -> Result<Vec<String>> {
        let now = Self::begin()?;
        let all = now.all.saturating_sub(self.all).max(1) as f64;
        let since = |(name, ticks): (&String, &u64)| {
            let used = ticks.saturating_sub(self.ticks.get(name).copied().unwrap_or(0));
            (used as f64 / all * 100.0, name.clone())
        };
        let mut by_share: Vec<_> = now.ticks.iter().map(since).filter(|(share, _)| *share >= 0.1).collect();
        by_share.sort_by(|a, b| b.0.total_cmp(&a.0));
        Ok(by_share.into_iter().take(most).map(|(share, name)| format!("{name} {share:.1} %")).collect())
    }
}

/// The name of a process, without what numbers it, and its ticks in user and kernel space, by `/proc/PID/stat` (proc_pid_stat(5)).
fn of_process(stat: &str) -> Option<(String, u64)> {
    let (begin, rest) = stat.rsplit_once(')')?;
    let (_, name) = begin.split_once('(')?;
    let name = name.split(['/', ':']).next().unwrap_or(name);
    let mut times = rest.split_ascii_whitespace().skip(11).map_while(|t| t.parse::<u64>().ok());
    Some((name.to_owned(), times.next()? + times.next()?))
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

    /// Begins to watch with one thread of the highest priority, once a period: it waits for nothing but a CPU.
    pub fn urgent(period: Duration) -> Self {
        Self::start(1, period, |_| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_those_of_user_and_kernel() {
        let line = "71 (kworker/0:1-rxe (a)) S 2 0 0 0 -1 69238880 0 0 0 0 7 11 5 6 20 0 1 0 31 0 0";
        assert_eq!(of_process(line), Some(("kworker".to_owned(), 18)));
        assert_eq!(of_process("71 (x) S 2"), None);
    }

    #[test]
    fn who_works_is_among_the_first() {
        let begin = CpuByProgram::begin().expect("there is /proc");
        let end = Instant::now() + Duration::from_millis(200);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        let most = begin.most(50).expect("there is /proc");
        let own = fs::read_to_string("/proc/self/comm").expect("there is /proc");
        assert!(most.iter().any(|line| line.starts_with(own.trim())), "{most:?}");
    }
}
