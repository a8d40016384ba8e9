//! The loop of an agent.

use std::{cell::RefCell, rc::Rc, time::Duration};

use anyhow::{Context as _, Result, bail};
use aya::maps::{MapData, RingBuf};
use roce_common::{
    abi::{Counter, Direction, Event, EventKind, FlowKey, PairKey, PeerQp, Space},
    flow::Flow,
    psn::Psn,
    units::{Addr, Nanos, Rate},
};
use tokio::{
    io::unix::AsyncFdReadyMutGuard,
    sync::watch,
    task::{self, JoinHandle},
    time::{self, Instant, MissedTickBehavior},
};
use zerocopy::FromBytes as _;

use super::{
    Agent, Output, monotonic,
    open::{Logger, local_addresses},
    report::REPORTED_FLOWS,
};
use crate::{
    control::{Command, LocalQp},
    dataplane::{FlowWalker, Maps},
    netlink::Netlink,
    pacer::Pacer,
};

/// How often the BPF programs are told that the controller is alive.
const HEARTBEAT: Duration = Duration::from_millis(50);
/// How often flows are walked, reported and aged.
const REPORT: Duration = Duration::from_secs(1);
/// Events taken from a ring before everything else is looked at again.
const BATCH: usize = 256;
/// A flow that was silent for this long is forgotten.
const FLOW_IDLE: Nanos = Nanos(60 * Nanos::SECOND.0);
/// Flows of fewer packets than this are forgotten sooner: a flood of forged ones must not hold the table.
const FEW_PACKETS: u64 = 4;
/// How soon.
const FEW_IDLE: Nanos = Nanos(5 * Nanos::SECOND.0);
/// With more flows than this the table is walked every tenth time only.
const MANY_FLOWS: usize = 16_384;

impl Agent {
    /// Runs until `stop` says so, then detaches.
    ///
    /// # Errors
    /// The interface went away, a map or the kernel failed; everything is detached all the same.
    pub async fn run(mut self, output: Rc<RefCell<Output>>, mut stop: watch::Receiver<bool>) -> Result<()> {
        let logging = self.logger.take().map(|logger| task::spawn_local(pass_on(logger)));
        let result = self.drive(&output, &mut stop).await;
        if let Some(task) = logging {
            task.abort();
        }
        // The last report, while the maps still stand.
        let report = match &result {
            Ok(()) => self.summarise(&output),
            Err(_) => Ok(()),
        };
        let closed = self.close();
        result.and(report).and(closed)
    }

    /// Detaches and restores the interface, unless told to keep everything.
    ///
    /// # Errors
    /// What could not be removed; the rest is.
    pub fn close(mut self) -> Result<()> {
        if self.plan.keep {
            // Without a heartbeat nobody is paced after the failsafe time.
            return Ok(());
        }
        let gone =
            !matches!(Netlink::open()?.links(), Ok(links) if links.iter().any(|l| l.index == self.plan.link.index));
        // What the limiters hold leaves first, in order, for at most a second. Should that hang, the failsafe frees it.
        let paced = if gone { Ok(()) } else { self.pacer.close(&mut self.attachment.maps) };
        let quiet = self.attachment.maps.beat(0);
        let detached = self.attachment.detach();
        paced.and(quiet).and(detached)
    }

    async fn drive(&mut self, output: &Rc<RefCell<Output>>, stop: &mut watch::Receiver<bool>) -> Result<()> {
        output.borrow_mut().ready(self)?;
        let mut beat = time::interval(HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut report = time::interval_at(Instant::now() + REPORT, REPORT);
        report.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut round = 0u64;
        let mut walk = None;
        let mut commands = Vec::new();
        loop {
            // No flood of events keeps the controller from its timers or the programs from their heartbeat: both come
            // first, and every ring is left after a batch.
            let now = monotonic();
            if self.core.next_deadline().is_some_and(|d| d <= now) {
                let maps = &self.attachment.maps;
                self.core.advance(now, |_, key| maps.pace(*key).map(|cell| cell.bytes), &mut commands);
                self.carry_out(&mut commands, output)?;
            }
            let wake =
                self.core.next_deadline().map_or(HEARTBEAT, |d| Duration::from_nanos(d.since(now).0)).min(HEARTBEAT);
            tokio::select! {
                biased;
                _ = stop.changed() => return Ok(()),
                _ = beat.tick() => {
                    let now = monotonic();
                    self.attachment.maps.beat(now.0)?;
                    self.pacer.poll(&mut self.attachment.maps, now)?;
                }
                ready = self.cnp_ring.readable_mut() => {
                    let now = monotonic();
                    for event in batch(&mut ready.context("cannot wait for CNPs")?) {
                        self.core.on_event(&event, now, &mut commands);
                    }
                }
                () = time::sleep(wake) => {}
                _ = report.tick() => {
                    round += 1;
                    self.check_interface()?;
                    self.refresh_locals()?;
                    self.recover_cnps(&mut commands)?;
                    if self.flows_seen < MANY_FLOWS || round.is_multiple_of(10) {
                        self.start_walk(&mut walk);
                    }
                }
                walked = end_of(&mut walk) => {
                    let (walker, flows) = walked?;
                    self.walker = Some(walker);
                    self.take_flows(output, &flows?)?;
                }
                ready = self.telemetry.readable_mut() => {
                    let now = monotonic();
                    for event in batch(&mut ready.context("cannot wait for telemetry")?) {
                        self.core.on_event(&event, now, &mut commands);
                        if is_news(&event) {
                            output.borrow_mut().event(&self.plan.link.name, &event)?;
                        }
                    }
                }
            }
            self.carry_out(&mut commands, output)?;
        }
    }

    /// Carries out what the controller decided.
    fn carry_out(&mut self, commands: &mut Vec<Command>, output: &Rc<RefCell<Output>>) -> Result<()> {
        for command in commands.drain(..) {
            let line = self.plan.settings.link_rate;
            let notice = carry_out(command, &mut self.attachment.maps, self.pacer.as_mut(), line)?;
            if let Some(text) = notice {
                output.borrow_mut().notice(&self.plan.link.name, &text)?;
            }
        }
        Ok(())
    }

    /// A deleted interface ends the agent; a renamed one is followed.
    fn check_interface(&mut self) -> Result<()> {
        let links = Netlink::open()?.links()?;
        match links.into_iter().find(|l| l.index == self.plan.link.index) {
            Some(link) => {
                if link.name != self.plan.link.name {
                    log::warn!("interface {} is called {} now", self.plan.link.name, link.name);
                    self.plan.link.name = link.name;
                }
                Ok(())
            }
            None => bail!("interface {} was deleted", self.plan.link.name),
        }
    }

    fn refresh_locals(&mut self) -> Result<()> {
        let now = local_addresses()?;
        if now == self.locals {
            return Ok(());
        }
        for gone in self.locals.iter().filter(|a| !now.contains(a)) {
            self.core.remove_local(gone);
        }
        for new in now.iter().filter(|a| !self.locals.contains(a)) {
            self.core.add_local(*new);
        }
        self.attachment.maps.set_local(&now)?;
        self.locals = now;
        Ok(())
    }

    /// CNPs that did not fit the ring are still in their pair's counter. The reading after the ring was full shows them,
    /// and a second one that they were not just on their way.
    fn recover_cnps(&mut self, commands: &mut Vec<Command>) -> Result<()> {
        let full = self.attachment.maps.counters(Direction::Ingress)?[Counter::CnpRingFull as usize];
        let grown = full != self.cnp_ring_full;
        self.cnp_ring_full = full;
        if !grown && !self.cnps_to_confirm {
            return Ok(());
        }
        self.cnps_to_confirm = grown;
        let now = monotonic();
        for (key, value) in self.attachment.maps.pairs() {
            if self.core.is_local(&key.dst) {
                let local = LocalQp { ifindex: self.plan.link.index, qpn: key.dest_qp() };
                self.core.on_cnp_count(local, key.src, value.cnp_rx as u32, now, commands);
            }
        }
        Ok(())
    }

    /// Begins a walk over the flows on another thread, unless one is under way.
    fn start_walk(&mut self, walk: &mut Walk) {
        if let Some(mut walker) = self.walker.take() {
            let now = monotonic();
            let is_live = move |flow: &Flow| {
                let idle = if flow.packets < FEW_PACKETS { FEW_IDLE } else { FLOW_IDLE };
                now.since(Nanos(flow.last_seen_ns)) <= idle
            };
            *walk = Some(task::spawn_blocking(move || {
                let flows = walker.walk(is_live, REPORTED_FLOWS);
                (walker, flows)
            }));
        }
    }

    /// Tells the controller how far each flow has come, and reports them.
    fn take_flows(&mut self, output: &Rc<RefCell<Output>>, flows: &[(FlowKey, Flow)]) -> Result<()> {
        let now = monotonic();
        for (key, flow) in flows.iter().filter(|(key, flow)| key.space() == Space::Request && flow.packets != 0) {
            self.core.on_flow(
                key.tap.ifindex(),
                key.tap.direction(),
                key.src,
                key.dst,
                key.dest_qp(),
                Psn::new(flow.first_psn),
                Psn::new(flow.last_psn),
                now,
            );
        }
        self.flows_seen = flows.len();
        self.report(output, flows.get(..REPORTED_FLOWS).unwrap_or(flows), flows.len())
    }
}

/// A walk over the flows under way on another thread.
type Walk = Option<JoinHandle<(FlowWalker, Result<Vec<(FlowKey, Flow)>>)>>;

/// Waits for the end of a walk; for ever where there is none.
async fn end_of(walk: &mut Walk) -> Result<(FlowWalker, Result<Vec<(FlowKey, Flow)>>)> {
    let Some(running) = walk else { return std::future::pending().await };
    let ended = running.await;
    *walk = None;
    ended.context("the walk over the flows panicked")
}

/// Passes the BPF programs' development messages on to the log.
async fn pass_on(mut logger: Logger) {
    while let Ok(mut guard) = logger.readable_mut().await {
        guard.get_inner_mut().flush();
        guard.clear_ready();
    }
}

/// At most [`BATCH`] records of a ring that is ready; where there were fewer, the ring is waited for again.
fn batch(ring: &mut AsyncFdReadyMutGuard<'_, RingBuf<MapData>>) -> Vec<Event> {
    let mut events = Vec::new();
    while events.len() < BATCH {
        let Some(item) = ring.get_inner_mut().next() else {
            ring.clear_ready();
            break;
        };
        events.extend(Event::read_from_bytes(&item).ok());
    }
    events
}

/// What a person wants to hear of at once.
fn is_news(event: &Event) -> bool {
    matches!(
        EventKind::from_number(event.kind),
        Some(EventKind::Gap | EventKind::Nak | EventKind::RnrNak | EventKind::Discontinuity | EventKind::CnpSent)
    )
}

/// Both directions of a connection: packets from the peer for our queue pair, and ours for the peer's.
fn pair_keys(local: LocalQp, local_addr: Addr, peer: Addr, remote: roce_common::units::Qpn) -> [(PairKey, u32); 2] {
    [
        (PairKey::new(peer, local_addr, local.qpn), remote.get()),
        (PairKey::new(local_addr, peer, remote), local.qpn.get()),
    ]
}

/// Carries out a command; what the user should know is handed back.
fn carry_out(command: Command, maps: &mut Maps, pacer: &mut dyn Pacer, line: Rate) -> Result<Option<String>> {
    match command {
        Command::AddPair { local, local_addr, peer, remote } => {
            for (key, sender) in pair_keys(local, local_addr, peer, remote) {
                maps.add_pair(key, sender)?;
            }
        }
        Command::RemovePair { local, local_addr, peer, remote } => {
            for (key, _) in pair_keys(local, local_addr, peer, remote) {
                maps.remove_pair(key)?;
            }
        }
        Command::SetRate { key, rate, .. } => pacer.set_rate(maps, key, rate)?,
        Command::Release { key, .. } => pacer.release(maps, key)?,
        Command::ClearRate { key, .. } => {
            // What the limiter holds leaves in order first.
            if maps.rate(key).is_some() {
                pacer.set_rate(maps, key, line)?;
                pacer.release(maps, key)?;
            }
        }
        Command::Notice(notice) => return Ok(Some(format!("{}: {notice}", notice.name()))),
    }
    Ok(None)
}

/// Whether a queue pair is limited, for reports.
pub(super) fn limit(maps: &Maps, key: PeerQp) -> Option<u64> {
    maps.rate(key).map(|r| r.bytes_per_sec * 8)
}
