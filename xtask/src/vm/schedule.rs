//! Jobs on a few CPUs: several at once, none on a CPU that another has.

use std::{
    num::NonZero,
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

/// Something to do that occupies CPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<T> {
    pub(super) cpus: usize,
    pub(super) what: T,
}

struct State<T> {
    waiting: Vec<Job<T>>,
    free: usize,
}

/// Does all jobs on `cpus` CPUs, in their order as far as CPUs are free for the next; a job that wants more CPUs than there
/// are gets all. What each gave, in the order in which they ended; or the first error, with the jobs not yet begun left out.
pub(super) fn run<T: Copy + Send, R: Send>(
    jobs: Vec<Job<T>>,
    cpus: usize,
    work: impl Fn(&T) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<(T, R)>> {
    let cpus = NonZero::new(cpus).map_or(1, NonZero::get);
    let state = Mutex::new(State { waiting: jobs, free: cpus });
    let (changed, done) = (Condvar::new(), Mutex::new(Vec::new()));
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let worker = || -> anyhow::Result<()> {
        loop {
            let mut now = lock();
            let (job, taken) = loop {
                let Some(next) = now.waiting.first() else { return Ok(()) };
                // Only the first: a large job would wait for ever behind small ones that pass it.
                let wanted = next.cpus.clamp(1, cpus);
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
        let workers: Vec<_> = (0..cpus).map(|_| scope.spawn(worker)).collect();
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
        let jobs = [1, 2, 1, 1, 3, 1].map(|cpus| Job { cpus, what: cpus }).to_vec();
        let done = run(jobs, 2, |&cpus| {
            let now = busy.fetch_add(cpus.min(2), Ordering::SeqCst) + cpus.min(2);
            most.fetch_max(now, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(2));
            busy.fetch_sub(cpus.min(2), Ordering::SeqCst);
            Ok(cpus * 10)
        });
        let mut done = done.expect("none failed");
        done.sort_unstable();
        assert_eq!(done, [(1, 10), (1, 10), (1, 10), (1, 10), (2, 20), (3, 30)]);
        assert_eq!(most.into_inner(), 2);
    }

    #[test]
    fn an_error_ends_what_has_not_begun() {
        let begun = AtomicUsize::new(0);
        let jobs = vec![Job { cpus: 1, what: () }; 50];
        let result = run(jobs, 1, |()| {
            begun.fetch_add(1, Ordering::SeqCst);
            anyhow::bail!("broken") as anyhow::Result<()>
        });
        assert_eq!(result.expect_err("it failed").to_string(), "broken");
        assert_eq!(begun.into_inner(), 1);
    }
}
