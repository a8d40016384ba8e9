//! A host: queue pairs with packet sockets and threads, in a network namespace.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use roce_common::{
    units::{Nanos, Qpn},
    wire::{self, Packet, Verdict, icrc},
};

use super::{
    Qp, QpConfig, QpStats,
    socket::{Receiver, Sender, Sent},
};
use crate::lab::Port;

/// Longest frame we can receive.
const BUFFER: usize = 9_216;
/// Longest wait of any thread before it looks whether it should stop.
const TICK: Duration = Duration::from_millis(50);

/// Decides for each received packet whether it is lost.
pub type Lose = Box<dyn FnMut(&Packet) -> bool + Send>;

/// The clock of the endpoints, common to the hosts of one lab.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn now(&self) -> Nanos {
        Nanos(self.0.elapsed().as_nanos() as u64)
    }

    /// A point of the clock as an [`Instant`].
    pub fn instant(&self, at: Nanos) -> Instant {
        self.0 + Duration::from_nanos(at.0)
    }
}

#[derive(Debug)]
struct Slot {
    qp: Mutex<Qp>,
    wake: Condvar,
    stop: AtomicBool,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Qp> {
        self.qp.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Counters {
    icrc_errors: AtomicU64,
    malformed: AtomicU64,
    unknown_qp: AtomicU64,
    cnps: AtomicU64,
    injected: AtomicU64,
}

/// What a host counts besides its queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostStats {
    /// Packets with a wrong ICRC.
    pub icrc_errors: u64,
    /// Frames to port 4791 that are not RoCEv2.
    pub malformed: u64,
    /// Packets for a queue pair the host does not have.
    pub unknown_qp: u64,
    /// CNPs that reached the host (the dataplane should have consumed them).
    pub cnps: u64,
    /// Packets the [`Lose`] hook took.
    pub injected_losses: u64,
    /// Frames lost because the receive buffer was full: a measurement with any is not to be trusted.
    pub receive_overruns: u64,
}

/// A host with its queue pairs; stops its threads when dropped.
#[derive(Debug)]
pub struct Host {
    port: Port,
    clock: Clock,
    slots: Arc<Mutex<HashMap<Qpn, Arc<Slot>>>>,
    counters: Arc<Counters>,
    overruns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Host {
    /// Begins to receive on `port`.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, or when RoCEv2's port is taken in that namespace.
    pub fn start(port: &Port, clock: Clock) -> Result<Self> {
        Self::start_lossy(port, clock, Box::new(|_| false))
    }

    /// The same with a hook that loses packets before they reach their queue pair.
    ///
    /// # Errors
    /// See [`Host::start`].
    pub fn start_lossy(port: &Port, clock: Clock, mut lose: Lose) -> Result<Self> {
        let receiver =
            port.ns.run(|| Receiver::open(port.index).with_context(|| format!("cannot receive on {}", port.name)))?;
        let mut host = Self {
            port: port.clone(),
            clock,
            slots: Arc::default(),
            counters: Arc::default(),
            overruns: Arc::default(),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let (slots, counters) = (Arc::clone(&host.slots), Arc::clone(&host.counters));
        let (stop, overruns) = (Arc::clone(&host.stop), Arc::clone(&host.overruns));
        host.threads.push(thread::Builder::new().name(format!("{}-rx", port.name)).spawn(move || {
            let mut buffer = vec![0; BUFFER];
            let mut cache = HashMap::new();
            while !stop.load(Ordering::Relaxed) {
                let result = receiver.receive(TICK, &mut buffer, |frame| {
                    dispatch(frame, clock, &counters, &mut lose, |qpn| {
                        if let Some(slot) = cache.get(&qpn) {
                            return Some(Arc::clone(slot));
                        }
                        let slot = Arc::clone(slots.lock().unwrap_or_else(PoisonError::into_inner).get(&qpn)?);
                        cache.insert(qpn, Arc::clone(&slot));
                        Some(slot)
                    });
                });
                overruns.fetch_add(u64::from(receiver.dropped().unwrap_or(0)), Ordering::Relaxed);
                if result.is_err() {
                    break;
                }
            }
        })?);
        Ok(host)
    }

    /// Its port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Adds a queue pair, which begins at once with what its configuration asks for.
    ///
    /// # Errors
    /// When the number is taken or a socket cannot be opened.
    pub fn add(&mut self, cfg: QpConfig) -> Result<QpHandle> {
        let qpn = cfg.local_qpn;
        let qp = Qp::new(cfg);
        let frame = qp.max_frame();
        let sender = self.port.ns.run(|| {
            Sender::open(self.port.index, frame).with_context(|| format!("cannot send on {}", self.port.name))
        })?;
        let slot = Arc::new(Slot { qp: Mutex::new(qp), wake: Condvar::new(), stop: AtomicBool::new(false) });
        {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            if slots.contains_key(&qpn) {
                bail!("queue pair {qpn} exists on {}", self.port.name);
            }
            slots.insert(qpn, Arc::clone(&slot));
        }
        let (clock, stop) = (self.clock, Arc::clone(&self.stop));
        self.threads.push(thread::Builder::new().name(format!("{}-tx{qpn}", self.port.name)).spawn({
            let slot = Arc::clone(&slot);
            move || transmit(&slot, &sender, clock, &stop, frame)
        })?);
        Ok(QpHandle { slot })
    }

    /// Its counters.
    pub fn stats(&self) -> HostStats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        HostStats {
            icrc_errors: get(&self.counters.icrc_errors),
            malformed: get(&self.counters.malformed),
            unknown_qp: get(&self.counters.unknown_qp),
            cnps: get(&self.counters.cnps),
            injected_losses: get(&self.counters.injected),
            receive_overruns: get(&self.overruns),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for slot in self.slots.lock().unwrap_or_else(PoisonError::into_inner).values() {
            slot.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            // A panic in the thread was printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn dispatch(
    frame: &[u8],
    clock: Clock,
    counters: &Counters,
    lose: &mut Lose,
    mut find: impl FnMut(Qpn) -> Option<Arc<Slot>>,
) {
    let count = |c: &AtomicU64| {
        c.fetch_add(1, Ordering::Relaxed);
    };
    let Verdict::Roce(packet) = wire::parse(frame) else { return count(&counters.malformed) };
    if icrc::is_valid(frame, &packet) != Some(true) {
        return count(&counters.icrc_errors);
    }
    if packet.bth.opcode == wire::Opcode::CNP {
        return count(&counters.cnps);
    }
    if lose(&packet) {
        return count(&counters.injected);
    }
    let Some(slot) = find(packet.bth.dest_qp) else { return count(&counters.unknown_qp) };
    let wake = {
        let mut qp = slot.lock();
        qp.receive(clock.now(), &packet);
        qp.has_work()
    };
    if wake {
        slot.wake.notify_one();
    }
}

/// Sends what the queue pair has to send; blocks where the socket blocks.
fn transmit(slot: &Slot, sender: &Sender, clock: Clock, stop: &AtomicBool, frame: usize) {
    let mut buffer = vec![0; frame];
    let stopping = || stop.load(Ordering::Relaxed) || slot.stop.load(Ordering::Relaxed);
    while !stopping() {
        let mut qp = slot.lock();
        let now = clock.now();
        // The buffer has the length the queue pair asked for.
        let Ok(Some(n)) = qp.next_frame(now, &mut buffer) else {
            let wait = qp.deadline().map_or(TICK, |t| Duration::from_nanos(t.since(now).0).min(TICK));
            drop(slot.wake.wait_timeout(qp, wait));
            continue;
        };
        drop(qp);
        loop {
            match sender.send(&buffer[..n]) {
                Sent::Taken => break,
                Sent::Blocked if stopping() => return,
                Sent::Blocked => {}
                Sent::Refused => {
                    slot.lock().transmit_failed();
                    break;
                }
            }
        }
    }
}

/// A queue pair of a running [`Host`].
#[derive(Clone, Debug)]
pub struct QpHandle {
    slot: Arc<Slot>,
}

impl QpHandle {
    /// Its counters now.
    pub fn stats(&self) -> QpStats {
        self.slot.lock().stats().clone()
    }

    /// What it was made with.
    pub fn config(&self) -> QpConfig {
        self.slot.lock().config().clone()
    }

    /// Whether everything asked for has completed.
    pub fn is_done(&self) -> bool {
        self.slot.lock().is_done()
    }

    /// Begins no further message; those under way go on.
    pub fn stop_requesting(&self) {
        self.slot.lock().stop_requesting();
    }

    /// Falls silent at once: sends nothing more, not even an ACK.
    pub fn kill(&self) {
        self.slot.stop.store(true, Ordering::Relaxed);
        self.slot.wake.notify_all();
    }

    /// Waits until everything asked for has completed; false when that takes longer than `timeout` or the queue pair
    /// failed.
    pub fn wait_done(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            {
                let qp = self.slot.lock();
                if qp.stats().fatal.is_some() {
                    return false;
                }
                if qp.is_done() {
                    return true;
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
        false
    }
}
