//! Jobs on a few CPUs: several at once, together never more than the CPUs have.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

/// What a CPU has, in percent.
const CPU: usize = 100;

/// Something to do that occupies CPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<T> {
    /// Of one CPU, in percent: 200 are two.
    pub(super) share: usize,
    pub(super) what: T,
}

struct State<T> {
    waiting: Vec<Job<T>>,
    free: usize,
}

/// Does all jobs on `cpus` CPUs, in their order as far as there is room for the next; a job that wants more than there is gets all.
/// What each gave, in the order in which they ended; or the first error, with the jobs not yet begun left out.
pub(super) fn run<T: Copy + Send, R: Send>(
    jobs: Vec<Job<T>>,
    cpus: usize,
    work: impl Fn(&T) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<(T, R)>> {
    let all = cpus.max(1) * CPU;
    let smallest = jobs.iter().map(|job| job.share).min().unwrap_or(CPU).max(1);
    let state = Mutex::new(State { waiting: jobs, free: all });
    let (changed, done) = (Condvar::new(), Mutex::new(Vec::new()));
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let worker = || -> anyhow::Result<()> {
        loop {
            let mut now = lock();
            let (job, taken) = loop {
                let Some(next) = now.waiting.first() else { return Ok(()) };
                // Only the first: a large job would wait for ever behind small ones that pass it.
                let wanted = next.share.clamp(1, all);
                if wanted <= now.free {
                    now.free -= wanted;
                    break (now.waiting.remove(0), wanted);
                }
                now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
            };
            drop(now);
            let result = work(&job.what);
            let mut now = lock();
            now.free += taken;
            if result.is_err() {
                now.waiting.clear();
            }
            drop(now);
            changed.notify_all();
            done.lock().unwrap_or_else(PoisonError::into_inner).push((job.what, result?));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..all.div_ceil(smallest)).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|w| match w.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;

    #[test]
    fn no_more_cpus_are_used_than_there_are() {
        let (busy, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let jobs = [100, 200, 60, 60, 80, 300, 100].map(|share| Job { share, what: share }).to_vec();
        let done = run(jobs, 2, |&share| {
            let now = busy.fetch_add(share.min(200), Ordering::SeqCst) + share.min(200);
            most.fetch_max(now, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(2));
            busy.fetch_sub(share.min(200), Ordering::SeqCst);
            Ok(share * 10)
        });
        let mut done = done.expect("none failed");
        done.sort_unstable();
        assert_eq!(done, [(60, 600), (60, 600), (80, 800), (100, 1_000), (100, 1_000), (200, 2_000), (300, 3_000)]);
        assert_eq!(most.into_inner(), 200);
    }

    #[test]
    fn jobs_that_take_a_part_of_a_cpu_share_it() {
        let (begun, changed) = (Mutex::new(0), Condvar::new());
        let jobs = vec![Job { share: 33, what: () }; 3];
        let done = run(jobs, 1, |()| {
            let mut begun = begun.lock().expect("no job panics");
            *begun += 1;
            changed.notify_all();
            // Each waits for the other two.
            let (begun, _) =
                changed.wait_timeout_while(begun, Duration::from_secs(5), |begun| *begun < 3).expect("no job panics");
            Ok(*begun)
        });
        assert_eq!(done.expect("none failed").into_iter().map(|(_, begun)| begun).collect::<Vec<_>>(), [3; 3]);
    }

    #[test]
    fn an_error_ends_what_has_not_begun() {
        let begun = AtomicUsize::new(0);
        let jobs = vec![Job { share: 100, what: () }; 50];
        let result = run(jobs, 1, |()| {
            begun.fetch_add(1, Ordering::SeqCst);
            anyhow::bail!("broken") as anyhow::Result<()>
        });
        assert_eq!(result.expect_err("it failed").to_string(), "broken");
        assert_eq!(begun.into_inner(), 1);
    }
}
