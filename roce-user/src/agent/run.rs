//! The loop of an agent: everything but the control loop itself, which has a thread of its own.

use std::{cell::RefCell, rc::Rc, time::Duration};

use anyhow::{Context as _, Result, bail};
use roce_common::{
    abi::{Counter, Direction, FlowKey, PeerQp, Space},
    flow::Flow,
    psn::Psn,
    units::Nanos,
};
use tokio::{
    sync::{mpsc, watch},
    task::{self, JoinHandle},
    time::{self, Instant, Interval, MissedTickBehavior},
};

use super::{
    Agent, News, Order, Output, Running, monotonic,
    open::{Logger, local_addresses},
    path_mtus::PathMtu,
    queue_pairs,
    report::REPORTED_FLOWS,
};
use crate::{
    control::{FlowSeen, LocalQp},
    dataplane::{FlowWalker, Maps},
    netlink::Netlink,
};

/// How often the agent looks after the interface, its addresses, and what news of the kernel side was lost.
const LOOK: Duration = Duration::from_secs(1);
/// A flow that was silent for this long is forgotten.
const FLOW_IDLE: Nanos = Nanos(60 * Nanos::SECOND.0);
/// Flows of fewer packets than this are forgotten sooner: a flood of forged ones must not hold the table.
const FEW_PACKETS: u64 = 4;
/// How soon.
const FEW_IDLE: Nanos = Nanos(5 * Nanos::SECOND.0);
/// With more flows than this the table is walked as rarely as it may be.
const MANY_FLOWS: usize = 16_384;
/// Flows are walked, and aged, as often as they are reported, but at least this often.
const WALK: Duration = Duration::from_secs(10);

impl Agent {
    /// Runs until `stop` says so, then detaches.
    ///
    /// # Errors
    /// The interface went away, a map or the kernel failed; everything is detached all the same.
    pub async fn run(mut self, output: Rc<RefCell<Output>>, mut stop: watch::Receiver<bool>) -> Result<()> {
        let logging = self.logger.take().map(|logger| task::spawn_local(pass_on(logger)));
        let result = self.work(&output, &mut stop).await;
        if let Some(task) = logging {
            task.abort();
        }
        let closed = self.close();
        result.and(closed)
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
        let paced = match self.controller.as_mut().filter(|_| !gone) {
            Some(controller) => controller.pacer.close(&mut controller.maps),
            None => Ok(()),
        };
        let quiet = self.attachment.maps.beat(0);
        let detached = self.attachment.detach();
        paced.and(quiet).and(detached)
    }

    /// Lets the controller work, and reports.
    async fn work(&mut self, output: &Rc<RefCell<Output>>, stop: &mut watch::Receiver<bool>) -> Result<()> {
        output.borrow_mut().ready(self)?;
        let (running, news) = self.controller.take().context("the agent has run before")?.start()?;
        let result = self.drive(&running, news, output, stop).await;
        let (controller, failed) = running.stop()?;
        let progress = controller.progress().clone();
        self.controller = Some(controller);
        result.and(failed)?;
        // The last report, while the maps still stand.
        self.summarise(output, &progress)
    }

    async fn drive(
        &mut self,
        running: &Running,
        mut news: mpsc::Receiver<News>,
        output: &Rc<RefCell<Output>>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<()> {
        let mut look = every(LOOK);
        let (period, walks) = rhythm(self.plan.interval);
        let mut next_walk = every(period);
        let (mut round, mut walked) = (0u32, Instant::now());
        let mut walk = None;
        let mut question = None;
        loop {
            tokio::select! {
                biased;
                _ = stop.changed() => return Ok(()),
                _ = look.tick() => {
                    self.check_interface()?;
                    self.refresh_locals(running)?;
                    self.recover_cnps(running)?;
                    self.publisher.not_shown(running.progress().not_shown);
                    self.recover_starts(running)?;
                    self.look_for_unpaired(running)?;
                }
                _ = next_walk.tick() => {
                    round += 1;
                    self.report_due |= round.is_multiple_of(walks);
                    if self.flows_seen < MANY_FLOWS || walked.elapsed() + period / 2 >= WALK {
                        walked = Instant::now();
                        self.start_walk(&mut walk);
                    }
                }
                done = end_of(&mut walk) => {
                    let (walker, flows) = done?;
                    self.walker = Some(walker);
                    self.take_flows(output, running, &flows?)?;
                }
                answer = end_of(&mut question) => {
                    let (list, rdma) = answer?;
                    running.tell(Order::Kernel(list));
                    self.rdma = rdma;
                }
                said = news.recv() => match said {
                    Some(News::Event(event)) => {
                        for record in self.publisher.packet(&event) {
                            output.borrow_mut().event(&self.plan.link.name, &record)?;
                        }
                    }
                    Some(News::Management(message)) => {
                        for PathMtu { key, bytes } in self.publisher.management(&message) {
                            self.attachment.maps.set_path_mtu(key, bytes)?;
                        }
                    }
                    Some(News::Rate(change)) => self.publisher.rate(&change),
                    Some(News::AskKernel) => {
                        question.get_or_insert_with(|| task::spawn_blocking(queue_pairs::ask));
                    }
                    Some(News::Notice(text)) => {
                        let record = self.publisher.notice(text);
                        output.borrow_mut().event(&self.plan.link.name, &record)?;
                    }
                    // It ended by itself. That the interface is gone explains any error of it; otherwise it says why when
                    // it is taken back.
                    None => return self.check_interface(),
                },
            }
        }
    }

    /// A deleted interface ends the agent; a renamed one is followed.
    fn check_interface(&mut self) -> Result<()> {
        let links = Netlink::open()?.links()?;
        match links.into_iter().find(|l| l.index == self.plan.link.index) {
            Some(link) => {
                if link.name != self.plan.link.name {
                    log::warn!("interface {} is called {} now", self.plan.link.name, link.name);
                    self.events.log().rename(&link.name);
                    self.plan.link.name = link.name;
                }
                Ok(())
            }
            None => bail!("interface {} was deleted", self.plan.link.name),
        }
    }

    fn refresh_locals(&mut self, running: &Running) -> Result<()> {
        let now = local_addresses()?;
        if now == self.locals {
            return Ok(());
        }
        let gone = self.locals.iter().filter(|a| !now.contains(a)).copied().collect();
        let new = now.iter().filter(|a| !self.locals.contains(a)).copied().collect();
        running.tell(Order::Locals { gone, new });
        self.attachment.maps.set_local(&now)?;
        self.locals = now;
        Ok(())
    }

    /// CNPs that did not fit the ring are still in their pair's counter. The reading after the ring was full shows them,
    /// and a second one that they were not just on their way.
    fn recover_cnps(&mut self, running: &Running) -> Result<()> {
        let full = self.attachment.maps.counters(Direction::Ingress)?[Counter::CnpRingFull as usize];
        let grown = full != self.cnp_ring_full;
        self.cnp_ring_full = full;
        if !grown && !self.cnps_to_confirm {
            return Ok(());
        }
        self.cnps_to_confirm = grown;
        let ifindex = self.plan.link.index;
        let counts = self
            .attachment
            .maps
            .pairs()
            .into_iter()
            .filter(|(key, _)| self.locals.contains(&key.dst))
            .map(|(key, value)| (LocalQp { ifindex, qpn: key.dest_qp() }, key.src, value.cnp_rx as u32))
            .collect();
        running.tell(Order::CnpCounts(counts));
        Ok(())
    }

    /// CNPs for queue pairs without a pair are a reason to ask the kernel once more.
    fn look_for_unpaired(&mut self, running: &Running) -> Result<()> {
        let unpaired = self.attachment.maps.counters(Direction::Ingress)?[Counter::CnpUnpaired as usize];
        if unpaired != self.cnps_unpaired {
            self.cnps_unpaired = unpaired;
            running.tell(Order::UnpairedCnps);
        }
        Ok(())
    }

    /// Limiters that the egress program made and whose news was lost are still in the map: no queue pair may stay at the
    /// start rate for that.
    fn recover_starts(&mut self, running: &Running) -> Result<()> {
        let made = self.attachment.maps.counters(Direction::Egress)?[Counter::StartLimited as usize];
        let missing = made.saturating_sub(running.progress().stats.started);
        // Some are always just on their way: only what is missing a second later is lost.
        if missing > 0 && missing == self.starts_missing {
            let keys = self.attachment.maps.rates().into_iter().map(|(key, _)| key).collect();
            running.tell(Order::Limiters { ifindex: self.plan.link.index, keys });
        }
        self.starts_missing = missing;
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
                let is_recent = |seen| now.since(seen) <= FLOW_IDLE;
                let flows = walker.walk(is_live, is_recent, REPORTED_FLOWS);
                (walker, flows)
            }));
        }
    }

    /// Tells the controller how far each flow has come, and reports them.
    fn take_flows(&mut self, output: &Rc<RefCell<Output>>, running: &Running, flows: &[(FlowKey, Flow)]) -> Result<()> {
        let seen = flows
            .iter()
            .filter(|(key, flow)| key.space() == Space::Request && flow.packets != 0)
            .map(|(key, flow)| FlowSeen {
                ifindex: key.tap.ifindex(),
                direction: key.tap.direction(),
                src: key.src,
                dst: key.dst,
                dest_qp: key.dest_qp(),
                first: Psn::new(flow.first_psn),
                highest: Psn::new(flow.last_psn),
            })
            .collect();
        running.tell(Order::Flows(seen));
        self.flows_seen = flows.len();
        for record in self.publisher.look(flows) {
            output.borrow_mut().event(&self.plan.link.name, &record)?;
        }
        if !std::mem::take(&mut self.report_due) {
            return Ok(());
        }
        let busiest = flows.get(..REPORTED_FLOWS).unwrap_or(flows);
        self.report(output, &running.progress(), busiest, flows.len())
    }
}

/// The time between two walks, and how many make up an interval between reports.
fn rhythm(interval: Duration) -> (Duration, u32) {
    let walks = interval.as_millis().div_ceil(WALK.as_millis()).max(1);
    let walks = u32::try_from(walks).unwrap_or(u32::MAX);
    (interval / walks, walks)
}

/// Ticks from one period on, and never twice at once.
fn every(period: Duration) -> Interval {
    let mut interval = time::interval_at(Instant::now() + period, period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// A walk over the flows under way on another thread.
type Walk = Option<JoinHandle<(FlowWalker, Result<Vec<(FlowKey, Flow)>>)>>;

/// Waits for the end of what is under way on another thread; for ever where nothing is.
async fn end_of<T>(work: &mut Option<JoinHandle<T>>) -> Result<T> {
    let Some(running) = work else { return std::future::pending().await };
    let ended = running.await;
    *work = None;
    ended.context("a thread of the agent panicked")
}

/// Passes the BPF programs' development messages on to the log.
async fn pass_on(mut logger: Logger) {
    while let Ok(mut guard) = logger.readable_mut().await {
        guard.get_inner_mut().flush();
        guard.clear_ready();
    }
}

/// Whether a queue pair is limited, for reports.
pub(super) fn limit(maps: &Maps, key: PeerQp) -> Option<u64> {
    maps.rate(key).map(|r| r.bytes_per_sec * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_walked_as_often_as_reported_and_every_ten_seconds_at_least() {
        let ms = Duration::from_millis;
        assert_eq!(rhythm(ms(100)), (ms(100), 1));
        assert_eq!(rhythm(ms(1_000)), (ms(1_000), 1));
        assert_eq!(rhythm(ms(10_000)), (ms(10_000), 1));
        assert_eq!(rhythm(ms(25_000)), (ms(25_000) / 3, 3));
        assert_eq!(rhythm(Duration::from_secs(3_600)), (ms(10_000), 360));
    }
}
