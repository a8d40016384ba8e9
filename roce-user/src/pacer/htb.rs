//! The HTB pacer: one class per limited queue pair under a root qdisc of ours; `roce_htb` steers packets to them, and
//! what it does not steer is sent at once.

use std::{collections::HashMap, io};

use anyhow::{Context as _, Result, bail};
use aya::{
    Ebpf,
    programs::{
        SchedClassifier, TcAttachType,
        tc::{NlOptions, SchedClassifierLink, TcAttachOptions},
    },
};
use netlink_packet_route::tc::TcHandle;
use roce_common::{
    abi::{self, PeerQp, RateValue},
    units::{Nanos, Rate},
};

use super::{Leaving, Pacer, ROOT_HANDLE, drain, refuse_foreign, remove_root};
use crate::{
    agent::monotonic,
    config,
    dataplane::{Maps, QDISC_MAJOR},
    netlink::{LinkInfo, Netlink},
};

/// Most classes: a minor number has 16 bits, and some are kept free.
const MAX_CLASSES: u16 = 60_000;
/// Packets a class holds: more than rxe puts in flight, and a whole READ response burst.
const LEAF_PACKETS: u32 = 65_536;
/// Packets that wait while the device is busy and have no class.
const DIRECT_PACKETS: u32 = 100_000;
/// A class may send this much time's worth at once.
const BURST: Nanos = Nanos::from_micros(500);
/// Classes at the start rate that wait for queue pairs to start: as many may start at once.
const STARTS: u32 = 128;
/// Most of them made at a time while the controller works: each takes the kernel some tens of microseconds.
const STARTS_AT_ONCE: u32 = 4;
/// How often a releasing class is looked at.
const POLL: Nanos = Nanos::from_millis(20);

/// Paces by HTB classes.
pub struct Htb {
    netlink: Netlink,
    link: LinkInfo,
    classes: HashMap<PeerQp, Class>,
    free: Vec<u16>,
    next: u16,
    next_poll: Nanos,
    /// The rate of queue pairs that start, where they are limited.
    start: Option<Rate>,
    /// Classes that wait for them.
    waiting: u32,
    filter: Option<SchedClassifierLink>,
}

struct Class {
    minor: u16,
    rate: Rate,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Packets are steered to it.
    Used,
    /// At line rate, until its queue pair pauses.
    Leaving(Leaving),
    /// No packet is steered to it any more; a straggler may still be in it.
    Unused(Nanos),
}

impl Htb {
    /// Makes an HTB root in place of the kernel's default and attaches the filter to it.
    ///
    /// # Errors
    /// The kernel has no HTB, or somebody's qdisc is in the way.
    pub fn open(link: &LinkInfo, ebpf: &mut Ebpf) -> Result<Self> {
        let mut netlink = Netlink::open()?;
        let name = &link.name;
        refuse_foreign(name, &netlink.qdiscs(link.index)?, Some(config::Pacer::Htb))?;
        match netlink.add_htb_root(link.index, ROOT_HANDLE, DIRECT_PACKETS) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                bail!("{name}: this kernel has no HTB qdisc (CONFIG_NET_SCH_HTB): use --pacer edt or --pacer off")
            }
            Err(e) => return Err(e).with_context(|| format!("{name}: cannot make HTB the root qdisc")),
        }
        let filter = match attach_filter(name, ebpf) {
            Ok(filter) => filter,
            Err(e) => {
                remove_root(&mut netlink, link.index, None)?;
                return Err(e);
            }
        };
        Ok(Self {
            netlink,
            link: link.clone(),
            classes: HashMap::new(),
            free: Vec::new(),
            next: 1,
            next_poll: Nanos(0),
            start: None,
            waiting: 0,
            filter: Some(filter),
        })
    }

    fn handle(minor: u16) -> TcHandle {
        TcHandle { major: QDISC_MAJOR, minor }
    }

    fn burst(&self, rate: Rate) -> u64 {
        let two_frames = 2 * (u64::from(self.link.mtu) + 14);
        two_frames.max(rate.bytes_per_sec() / (Nanos::SECOND.0 / BURST.0))
    }

    /// Makes at most `most` classes for queue pairs that start.
    fn stock(&mut self, maps: &mut Maps, most: u32) -> Result<()> {
        let Some(rate) = self.start else { return Ok(()) };
        for _ in 0..most.min(STARTS.saturating_sub(self.waiting)) {
            // When all are in use queue pairs start without; the limit itself is told by the controller.
            let Ok(minor) = self.create(rate) else { break };
            maps.offer_start_class(classid(minor))?;
            self.waiting += 1;
        }
        Ok(())
    }

    fn create(&mut self, rate: Rate) -> Result<u16> {
        let minor = match self.free.pop() {
            Some(minor) => minor,
            None if self.next <= MAX_CLASSES => {
                self.next += 1;
                self.next - 1
            }
            None => bail!("{}: all {MAX_CLASSES} HTB classes are in use: use --pacer edt", self.link.name),
        };
        let burst = self.burst(rate);
        let made = self
            .netlink
            .set_htb_class(self.link.index, Self::handle(minor), ROOT_HANDLE, rate.bytes_per_sec().max(1), burst, true)
            .and_then(|()| self.netlink.add_pfifo_leaf(self.link.index, Self::handle(minor), LEAF_PACKETS));
        if let Err(e) = made {
            self.free.push(minor);
            return Err(e).with_context(|| format!("{}: cannot add an HTB class", self.link.name));
        }
        Ok(minor)
    }
}

fn classid(minor: u16) -> u32 {
    u32::from(QDISC_MAJOR) << 16 | u32::from(minor)
}

fn attach_filter(name: &str, ebpf: &mut Ebpf) -> Result<SchedClassifierLink> {
    let program: &mut SchedClassifier =
        ebpf.program_mut("roce_htb").context("the BPF object has no program roce_htb")?.try_into()?;
    let parent = u32::from(QDISC_MAJOR) << 16;
    // The program chooses the minor number only; the major one is the filter's.
    let options = NlOptions { classid: Some(aya::programs::tc::TcHandle::new(QDISC_MAJOR, 0)), ..NlOptions::default() };
    let id = program
        .attach_with_options(name, TcAttachType::Custom(parent), TcAttachOptions::Netlink(options))
        .with_context(|| format!("{name}: cannot attach the HTB filter"))?;
    program.take_link(id).with_context(|| format!("{name}: cannot keep the HTB filter"))
}

impl Pacer for Htb {
    fn name(&self) -> &'static str {
        "htb"
    }

    fn qdisc(&self) -> String {
        "htb, ours".into()
    }

    fn kind(&self) -> abi::Pacer {
        abi::Pacer::Htb
    }

    fn capacity(&self) -> usize {
        usize::from(MAX_CLASSES)
    }

    fn set_rate(&mut self, maps: &mut Maps, key: PeerQp, rate: Rate, cause: Nanos) -> Result<()> {
        let bytes_per_sec = rate.bytes_per_sec().max(1);
        let burst = self.burst(rate);
        if !self.classes.contains_key(&key)
            && let Some(started) = maps.rate(key).filter(|r| r.classid != 0)
        {
            // A CNP was quicker than the news of the start: its packets wait in that class.
            self.adopt(maps, key, started.classid)?;
        }
        let minor = match self.classes.get_mut(&key) {
            Some(class) => {
                if class.rate != rate {
                    self.netlink
                        .set_htb_class(
                            self.link.index,
                            Self::handle(class.minor),
                            ROOT_HANDLE,
                            bytes_per_sec,
                            burst,
                            false,
                        )
                        .with_context(|| format!("{}: cannot change an HTB class", self.link.name))?;
                    class.rate = rate;
                }
                class.phase = Phase::Used;
                class.minor
            }
            None => {
                let minor = self.create(rate)?;
                self.classes.insert(key, Class { minor, rate, phase: Phase::Used });
                minor
            }
        };
        maps.set_rate(key, RateValue { bytes_per_sec, cause_ns: cause.0, classid: classid(minor), reserved: 0 })
    }

    fn prepare(&mut self, maps: &mut Maps, rate: Rate) -> Result<()> {
        self.start = Some(rate);
        self.stock(maps, STARTS)
    }

    fn adopt(&mut self, maps: &mut Maps, key: PeerQp, classid: u32) -> Result<()> {
        let Some(rate) = self.start.filter(|_| classid != 0 && !self.classes.contains_key(&key)) else { return Ok(()) };
        // The minor number is the low half.
        self.classes.insert(key, Class { minor: classid as u16, rate, phase: Phase::Used });
        self.waiting = self.waiting.saturating_sub(1);
        self.stock(maps, STARTS_AT_ONCE)
    }

    fn forget(&mut self, maps: &mut Maps, key: PeerQp) -> Result<()> {
        maps.clear_rate(key)?;
        if let Some(class) = self.classes.get_mut(&key) {
            class.phase = Phase::Unused(monotonic());
        }
        Ok(())
    }

    fn release(&mut self, _: &mut Maps, key: PeerQp) -> Result<()> {
        if let Some(class) = self.classes.get_mut(&key) {
            class.phase = Phase::Leaving(Leaving::NEW);
        }
        Ok(())
    }

    fn poll(&mut self, maps: &mut Maps, now: Nanos) -> Result<()> {
        self.stock(maps, STARTS_AT_ONCE)?;
        if now < self.next_poll || self.classes.values().all(|c| c.phase == Phase::Used) {
            return Ok(());
        }
        self.next_poll = Nanos(now.0 + POLL.0);
        let busy: Vec<u16> = self
            .netlink
            .classes(self.link.index)?
            .into_iter()
            .filter(|c| c.backlog_packets != 0)
            .map(|c| c.handle.minor)
            .collect();
        let mut gone = Vec::new();
        for (key, class) in &mut self.classes {
            if busy.contains(&class.minor) {
                continue;
            }
            match &mut class.phase {
                Phase::Used => {}
                Phase::Leaving(leaving) => {
                    if leaving.may_go(maps.pace(*key), now) {
                        maps.clear_rate(*key)?;
                        class.phase = Phase::Unused(now);
                    }
                }
                Phase::Unused(since) if now.since(*since) >= POLL => gone.push((*key, class.minor)),
                Phase::Unused(_) => {}
            }
        }
        for (key, minor) in gone {
            self.netlink
                .delete_class(self.link.index, Self::handle(minor))
                .with_context(|| format!("{}: cannot delete an HTB class", self.link.name))?;
            self.classes.remove(&key);
            self.free.push(minor);
        }
        Ok(())
    }

    fn close(&mut self, maps: &mut Maps) -> Result<()> {
        // The classes open while packets are still steered to them: what HTB sends without a class overtakes what waits
        // in one, and the receiver takes that for loss.
        drain(&mut self.netlink, self.link.index)?;
        for (key, _) in maps.rates() {
            maps.clear_rate(key)?;
        }
        self.classes.clear();
        drop(self.filter.take());
        remove_root(&mut self.netlink, self.link.index, Some(maps))
    }
}
