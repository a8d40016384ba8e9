//! The control thread: CNPs in, rates out. Nothing that takes long happens on it: flows are walked and reports written
//! elsewhere, and what it owes them it hands over without waiting.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result, anyhow};
use aya::maps::{MapData, RingBuf};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeSpec,
    },
};
use roce_common::{
    abi::{Event, EventKind, MadEvent, PairKey, PeerQp},
    units::{Addr, Nanos, Rate},
};
use tokio::sync::mpsc;
use zerocopy::FromBytes as _;

use super::{
    monotonic,
    publish::{RateChange, RatesTold},
    reaction::Reactions,
};
use crate::{
    control::{Command, Core, FlowSeen, KernelList, KernelStats, LocalQp, Stats},
    dataplane::Maps,
    pacer::Pacer,
};

/// How often the BPF programs are told that the controller is alive.
const HEARTBEAT: Nanos = Nanos::from_millis(50);
/// CNPs taken before anything else is looked at again.
const CNP_BATCH: usize = 256;
/// Telemetry records, or flows, taken in before CNPs are looked at again.
const BATCH: usize = 32;
/// News that wait to be shown; what comes on top is counted and not shown.
const NEWS: usize = 8_192;
/// A timer of this thread may fire this late, in nanoseconds; by default the kernel allows itself 50 µs.
const TIMER_SLACK: libc::c_ulong = 1_000;
/// Nice value of the thread: it runs for microseconds at a time, and every one it waits for a CPU a queue grows.
const NICE: libc::c_int = -20;

/// How the thread waits for CNPs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Asleep, until the kernel wakes it.
    Sleep,
    /// Awake, on a CPU of its own.
    Busy,
}

impl Wait {
    /// The name shown to the user.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Busy => "busy-poll",
        }
    }
}

/// What the rest of the agent tells the controller.
pub enum Order {
    /// Addresses that are no longer this host's, and new ones.
    Locals {
        /// Gone.
        gone: Vec<Addr>,
        /// New.
        new: Vec<Addr>,
    },
    /// How far each request flow has come.
    Flows(Vec<FlowSeen>),
    /// The kernel's count of CNPs of each pair.
    CnpCounts(Vec<(LocalQp, Addr, u32)>),
    /// The kernel's answer to [`News::AskKernel`].
    Kernel(KernelList),
    /// CNPs came for queue pairs that are not paired.
    UnpairedCnps,
    /// Limiters that stand in the map: those nobody has heard of were started, and the news was lost.
    Limiters {
        /// The interface.
        ifindex: u32,
        /// Where they are.
        keys: Vec<PeerQp>,
    },
}

/// What the controller tells the rest of the agent.
pub enum News {
    /// Something happened to a flow.
    Event(Event),
    /// A message of connection management passed.
    Management(Box<MadEvent>),
    /// A queue pair may send more or less.
    Rate(RateChange),
    /// The kernel is to be asked for its connected queue pairs.
    AskKernel,
    /// Something the user should know.
    Notice(String),
}

/// How the controller is doing.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// What it counted.
    pub stats: Stats,
    /// What the kernel's list of queue pairs was good for.
    pub kernel: KernelStats,
    /// Pairs.
    pub pairs: usize,
    /// Limited queue pairs.
    pub limited: usize,
    /// How long CNPs took to become rates.
    pub reactions: Reactions,
    /// Events that were not shown, because the output was slower than they.
    pub not_shown: u64,
}

/// The controller with everything it needs: the core, the maps it writes, the pacer and the rings it reads.
pub struct Controller {
    ifindex: u32,
    /// The core.
    pub core: Core,
    /// Handles of its own.
    pub maps: Maps,
    /// What makes rates of the core rates of the wire.
    pub pacer: Box<dyn Pacer>,
    cnps: RingBuf<MapData>,
    telemetry: RingBuf<MapData>,
    line: Rate,
    wait: Wait,
    commands: Vec<Command>,
    flows: VecDeque<FlowSeen>,
    rates_told: RatesTold,
    progress: Progress,
}

/// A controller at work on its thread. Dropping it without [`Running::stop`] ends the thread and gives up the controller.
pub struct Running {
    orders: Option<Sender<Order>>,
    wake: Arc<EventFd>,
    progress: Arc<Mutex<Progress>>,
    thread: Option<JoinHandle<(Controller, Result<()>)>>,
}

impl Running {
    /// Tells the controller something; what it cannot hear any more is lost with it.
    pub fn tell(&self, order: Order) {
        if let Some(orders) = &self.orders
            && orders.send(order).is_ok()
        {
            self.wake();
        }
    }

    /// How it is doing; at most a heartbeat old.
    pub fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the thread and takes the controller back, with what went wrong.
    ///
    /// # Errors
    /// The thread panicked: there is no controller any more.
    pub fn stop(mut self) -> Result<(Controller, Result<()>)> {
        let thread = self.end();
        thread.context("the controller was stopped before")?.join().map_err(|_| anyhow!("the controller panicked"))
    }

    fn end(&mut self) -> Option<JoinHandle<(Controller, Result<()>)>> {
        // A closed channel is the order to stop.
        self.orders = None;
        self.wake();
        self.thread.take()
    }

    fn wake(&self) {
        if let Err(error) = self.wake.write(1) {
            log::error!("cannot wake the controller: {error}");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

impl Controller {
    /// A controller for interface `ifindex` with a link of rate `line`.
    pub fn new(
        ifindex: u32,
        core: Core,
        maps: Maps,
        pacer: Box<dyn Pacer>,
        (cnps, telemetry): (RingBuf<MapData>, RingBuf<MapData>),
        line: Rate,
        wait: Wait,
    ) -> Self {
        Self {
            ifindex,
            core,
            maps,
            pacer,
            cnps,
            telemetry,
            line,
            wait,
            commands: Vec::new(),
            flows: VecDeque::new(),
            rates_told: RatesTold::default(),
            progress: Progress::default(),
        }
    }

    /// How it is doing, as of its last heartbeat.
    pub const fn progress(&self) -> &Progress {
        &self.progress
    }

    /// How it waits for CNPs.
    pub const fn wait(&self) -> Wait {
        self.wait
    }

    /// Puts it to work on a thread of its own, in the caller's network namespace. The channel closes when it ends by itself,
    /// which is always a failure.
    ///
    /// # Errors
    /// The kernel has no thread or descriptor left.
    pub fn start(self) -> Result<(Running, mpsc::Receiver<News>)> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .context("cannot make an event descriptor")?;
        let wake = Arc::new(wake);
        let (orders, inbox) = channel();
        let (outbox, news) = mpsc::channel(NEWS);
        let progress = Arc::default();
        let (shared, woken) = (Arc::clone(&progress), Arc::clone(&wake));
        let thread = thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                let mut controller = self;
                let result = controller.work(&inbox, &woken, &outbox, &shared);
                controller.publish(&shared);
                (controller, result)
            })
            .context("cannot start the control thread")?;
        Ok((Running { orders: Some(orders), wake, progress, thread: Some(thread) }, news))
    }

    /// Works until the channel of orders closes.
    fn work(
        &mut self,
        inbox: &Receiver<Order>,
        wake: &EventFd,
        outbox: &mpsc::Sender<News>,
        shared: &Mutex<Progress>,
    ) -> Result<()> {
        be_prompt();
        let mut next_beat = Nanos(0);
        loop {
            // No flood keeps the controller from its timers or the programs from their heartbeat: everything is left after
            // a batch. CNPs are looked at before each of the others.
            let now = monotonic();
            if now >= next_beat {
                self.maps.beat(now.0)?;
                self.pacer.poll(&mut self.maps, now)?;
                self.publish(shared);
                next_beat = Nanos(now.0 + HEARTBEAT.0);
            }
            let mut busy = self.serve_cnps(outbox)?;
            let now = monotonic();
            if self.core.next_deadline().is_some_and(|d| d <= now) {
                self.core.advance(now, &bytes_sent(&self.maps), &mut self.commands);
                self.carry_out(outbox, Nanos(0))?;
                busy = true;
            }
            busy |= self.serve_cnps(outbox)?;
            busy |= self.serve_telemetry(outbox)?;
            busy |= self.serve_flows(outbox)?;
            match inbox.try_recv() {
                Ok(order) => {
                    self.obey(order, outbox)?;
                    busy = true;
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            if !busy && self.wait == Wait::Sleep {
                let until = self.core.next_deadline().map_or(next_beat, |d| d.min(next_beat));
                self.sleep(wake, until)?;
            }
        }
    }

    /// Sleeps until there is something to read, or `until`.
    fn sleep(&self, wake: &EventFd, until: Nanos) -> Result<()> {
        let timeout = until.since(monotonic());
        // SAFETY: the rings own their descriptors and outlive the call.
        let rings = [&self.cnps, &self.telemetry].map(|r| unsafe { BorrowedFd::borrow_raw(r.as_raw_fd()) });
        let mut fds = [rings[0], rings[1], wake.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let timeout = TimeSpec::new((timeout.0 / Nanos::SECOND.0) as _, (timeout.0 % Nanos::SECOND.0) as _);
        match ppoll(&mut fds, Some(timeout), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(io::Error::from(e)).context("cannot wait for the rings"),
        }
        // Orders are looked for in any case; what remains to be done is to become silent.
        match wake.read() {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(e) => Err(io::Error::from(e)).context("cannot read an event descriptor"),
        }
    }

    fn serve_cnps(&mut self, outbox: &mpsc::Sender<News>) -> Result<bool> {
        let mut any = false;
        for _ in 0..CNP_BATCH {
            let Some(event) = take(&mut self.cnps) else { break };
            any = true;
            self.core.on_event(&event, monotonic(), &bytes_sent(&self.maps), &mut self.commands);
            self.carry_out(outbox, Nanos(event.time_ns))?;
            self.show(outbox, News::Event(event));
        }
        Ok(any)
    }

    fn serve_telemetry(&mut self, outbox: &mpsc::Sender<News>) -> Result<bool> {
        let now = monotonic();
        let mut any = false;
        for _ in 0..BATCH {
            let Some(record) = next(&mut self.telemetry) else { break };
            any = true;
            let event = match record {
                Taken::Event(event) => event,
                Taken::Management(message) => {
                    self.show(outbox, News::Management(message));
                    continue;
                }
            };
            self.core.on_event(&event, now, &bytes_sent(&self.maps), &mut self.commands);
            if event.kind != EventKind::Sample as u32 {
                self.show(outbox, News::Event(event));
            }
        }
        self.carry_out(outbox, Nanos(0))?;
        Ok(any)
    }

    fn serve_flows(&mut self, outbox: &mpsc::Sender<News>) -> Result<bool> {
        let now = monotonic();
        let some = self.flows.len().min(BATCH);
        for flow in self.flows.drain(..some) {
            self.core.on_flow(&flow, now);
        }
        self.carry_out(outbox, Nanos(0))?;
        Ok(some != 0)
    }

    fn obey(&mut self, order: Order, outbox: &mpsc::Sender<News>) -> Result<()> {
        match order {
            Order::Locals { gone, new } => {
                for address in &gone {
                    self.core.remove_local(address);
                }
                for address in new {
                    self.core.add_local(address);
                }
            }
            // The newest walk says all that one before it did.
            Order::Flows(flows) => self.flows = flows.into(),
            Order::CnpCounts(counts) => {
                let now = monotonic();
                for count in counts {
                    self.core.on_cnp_count(count, now, &bytes_sent(&self.maps), &mut self.commands);
                }
            }
            Order::Kernel(list) => self.core.on_kernel(&list, monotonic(), &mut self.commands),
            Order::UnpairedCnps => self.core.on_unpaired_cnps(monotonic(), &mut self.commands),
            Order::Limiters { ifindex, keys } => {
                let now = monotonic();
                for key in keys {
                    // It may have gone since.
                    if !self.core.is_limited(&key)
                        && let Some(rate) = self.maps.rate(key)
                    {
                        self.core.on_started(ifindex, key, rate.classid, now, &mut self.commands);
                    }
                }
            }
        }
        self.carry_out(outbox, Nanos(0))
    }

    /// Carries out what the core decided; `cause` is the kernel's stamp of the CNP it decided upon, 0 where there was none.
    fn carry_out(&mut self, outbox: &mpsc::Sender<News>, cause: Nanos) -> Result<()> {
        if self.commands.is_empty() {
            return Ok(());
        }
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            match command {
                Command::AddPair { local, local_addr, peer, remote } => {
                    for (key, sender) in pair_keys(local, local_addr, peer, remote) {
                        self.maps.add_pair(key, sender)?;
                    }
                }
                Command::RemovePair { local, local_addr, peer, remote } => {
                    for (key, _) in pair_keys(local, local_addr, peer, remote) {
                        self.maps.remove_pair(key)?;
                    }
                }
                Command::SetRate { key, rate } => {
                    self.pacer.set_rate(&mut self.maps, key, rate, cause)?;
                    if cause.0 != 0 {
                        self.progress.reactions.add(monotonic().since(cause).0);
                    }
                }
                Command::Adopt { key, classid } => self.pacer.adopt(&mut self.maps, key, classid)?,
                Command::Forget { key } => self.pacer.forget(&mut self.maps, key)?,
                Command::Release { key } => self.pacer.release(&mut self.maps, key)?,
                Command::ClearRate { key } => {
                    // What the limiter holds leaves in order first.
                    if self.maps.rate(key).is_some() {
                        self.pacer.set_rate(&mut self.maps, key, self.line, Nanos(0))?;
                        self.pacer.release(&mut self.maps, key)?;
                    }
                }
                Command::AskKernel => self.show(outbox, News::AskKernel),
                Command::Notice(notice) => self.show(outbox, News::Notice(format!("{}: {notice}", notice.name()))),
            }
            // The rate first: whoever is told can wait.
            let (core, ifindex) = (&self.core, self.ifindex);
            let local_of = |key: &PeerQp| core.pairs().of_remote(ifindex, key.peer, key.qpn());
            if let Some(change) = self.rates_told.change(&command, core.start_rate(), local_of) {
                self.show(outbox, News::Rate(change));
            }
        }
        self.commands = commands;
        Ok(())
    }

    fn show(&mut self, outbox: &mpsc::Sender<News>, news: News) {
        if outbox.try_send(news).is_err() {
            self.progress.not_shown += 1;
        }
    }

    fn publish(&mut self, shared: &Mutex<Progress>) {
        self.progress.stats = self.core.stats();
        self.progress.limited = self.core.limited_len();
        self.progress.kernel = *self.core.pairs().kernel_stats();
        self.progress.pairs = self.core.pairs().len();
        shared.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&self.progress);
    }
}

/// The egress program's count of what a limited queue pair has sent.
fn bytes_sent(maps: &Maps) -> impl Fn(&PeerQp) -> Option<u64> {
    |key| maps.pace(*key).map(|cell| cell.bytes)
}

/// A record of a ring.
enum Taken {
    Event(Event),
    Management(Box<MadEvent>),
}

/// The next record of a ring; what is none is skipped.
fn next(ring: &mut RingBuf<MapData>) -> Option<Taken> {
    loop {
        let item = ring.next()?;
        if let Ok(event) = Event::read_from_bytes(&item) {
            return Some(Taken::Event(event));
        }
        if let Ok(message) = MadEvent::read_from_bytes(&item) {
            return Some(Taken::Management(Box::new(message)));
        }
    }
}

/// The next event of a ring that holds nothing else.
fn take(ring: &mut RingBuf<MapData>) -> Option<Event> {
    loop {
        if let Taken::Event(event) = next(ring)? {
            return Some(event);
        }
    }
}

/// Both directions of a connection: packets from the peer for our queue pair, and ours for the peer's.
fn pair_keys(local: LocalQp, local_addr: Addr, peer: Addr, remote: roce_common::units::Qpn) -> [(PairKey, u32); 2] {
    [
        (PairKey::new(peer, local_addr, local.qpn), remote.get()),
        (PairKey::new(local_addr, peer, remote), local.qpn.get()),
    ]
}

/// Makes the calling thread wake up at once. Where that is not allowed it is a little slower, nothing else.
fn be_prompt() {
    // SAFETY: neither call takes a pointer; thread id 0 is the calling thread.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK) != 0 || libc::setpriority(libc::PRIO_PROCESS, 0, NICE) != 0
    };
    if failed {
        log::debug!("the control thread runs at normal priority: {}", io::Error::last_os_error());
    }
}
