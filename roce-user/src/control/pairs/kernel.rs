//! What the kernel says of its own queue pairs, joined with what passes.
//!
//! The kernel knows the two numbers of a connection, but not whom they belong to: no list of it names the peer's address. So
//! a packet is needed, and nothing else: one that leaves this host names the peer and its queue pair, and if the kernel
//! connected one local queue pair with a remote one of that number, it is this one. Of several, the source-port rule may
//! leave one. Where it does not, or where one local queue pair could belong to flows to several peers, there is no pair:
//! acknowledgements may find it. Whoever sends a packet that comes in chooses its source address. It is taken at its word where nothing
//! leaves, that is, of unreliable connections; and of reliable ones where its PSN is one that the kernel expects of that queue pair
//! now, which a stranger would have to guess: rxe answers a message when all of it has come, and the CE until then would have no
//! sender.
//!
//! The list is asked for when a flow begins, not now and then, and no answer is used for a flow that is younger than the
//! question.

use std::{
    collections::{HashMap, HashSet},
    ops::RangeInclusive,
};

use roce_common::{
    psn::Psn,
    units::{Nanos, Qpn},
    wire::{Kind, Service, source_port},
};

use super::{Hosts, LocalQp, Observation, Pair, PairTable, Requester};

/// Time between two questions, at least.
const ASK_EVERY: Nanos = Nanos::from_millis(100);
/// Where the kernel has no RDMA, and where it does not answer.
const ASK_RARELY: Nanos = Nanos(10 * Nanos::SECOND.0);
/// Most flows that wait for an answer, or for which there was none.
const MOST_OPEN: usize = 4_096;
/// Most of them that came in: others choose their number.
const MOST_INCOMING: usize = 512;
/// More flows of one number are not told apart.
const MOST_RIVALS: usize = 64;
/// How far what a queue pair expects may be ahead of a request that came before the kernel was asked, and behind it.
const NEAR: RangeInclusive<i32> = -128..=1_024;
/// With so many queue pairs the time between two questions doubles.
const LONG_LIST: u64 = 8_192;

/// A connected queue pair of this host, as the kernel lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelQp {
    /// The queue pair.
    pub local: LocalQp,
    /// The number at its peer.
    pub remote: Qpn,
    /// [`Service::Rc`] or [`Service::Uc`].
    pub service: Service,
    /// The PSN that it takes next, where the kernel says.
    pub expects: Option<Psn>,
}

/// The kernel's answer, made ready where time does not matter.
#[derive(Clone, Debug)]
pub struct KernelList {
    asked: Nanos,
    qps: Option<Index>,
}

#[derive(Clone, Debug, Default)]
struct Index {
    /// By interface, number at the peer, and service.
    by_remote: HashMap<(u32, u32, Service), Vec<u32>>,
    by_local: HashMap<LocalQp, KernelQp>,
    /// Two devices on one interface may both have a queue pair of one number.
    twice: HashSet<LocalQp>,
}

impl KernelList {
    /// What the kernel, asked at `asked`, said of its connected queue pairs; `None` where it has no RDMA or did not answer.
    pub fn new(asked: Nanos, qps: Option<&[KernelQp]>) -> Self {
        let qps = qps.map(|qps| {
            let mut index = Index::default();
            for qp in qps {
                let key = (qp.local.ifindex, qp.remote.get(), qp.service);
                index.by_remote.entry(key).or_default().push(qp.local.qpn.get());
                if index.by_local.insert(qp.local, *qp).is_some() {
                    index.twice.insert(qp.local);
                }
            }
            index
        });
        Self { asked, qps }
    }
}

/// Why the kernel's list left a flow without a pair. Acknowledgements may have found it since.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unknown {
    /// The kernel has no RDMA, or did not answer.
    NoList,
    /// It lists no queue pair with that number: the flow is another program's, or has ended.
    NotListed,
    /// Several local queue pairs are connected with one of that number, at different peers.
    SeveralLocal,
    /// Flows to several peers could be one local queue pair's.
    SeveralPeers,
    /// Too many flows waited.
    Full,
    /// A request that came in is none that its queue pair expects: an answer may tell.
    OtherPsn,
}

impl Unknown {
    /// Every reason, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::NoList, Self::NotListed, Self::SeveralLocal, Self::SeveralPeers, Self::Full, Self::OtherPsn];

    /// The name used in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoList => "no_list",
            Self::NotListed => "not_listed",
            Self::SeveralLocal => "several_local_qps",
            Self::SeveralPeers => "several_peers",
            Self::Full => "too_many",
            Self::OtherPsn => "other_psn",
        }
    }
}

/// What the list was good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelStats {
    /// Questions.
    pub asked: u64,
    /// Pairs that it named.
    pub paired: u64,
    /// Of those, made before anything else had found them.
    pub first: u64,
    /// Pairs that it took back, because their queue pair is gone or connected otherwise.
    pub withdrawn: u64,
    /// Flows without a pair, by [`Unknown`].
    pub unknown: [u64; Unknown::ALL.len()],
}

/// A flow whose other end is not known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Flow {
    /// It leaves, to this QPN of the peer.
    Out(Hosts, u32),
    /// It comes in, to this local QPN.
    In(Hosts, u32),
}

impl Flow {
    const fn hosts(self) -> Hosts {
        match self {
            Self::Out(hosts, _) | Self::In(hosts, _) => hosts,
        }
    }

    /// What flows have in common that could be one queue pair's: interface, way and number.
    const fn number(self) -> (u32, bool, u32) {
        match self {
            Self::Out(hosts, remote) => (hosts.ifindex, true, remote),
            Self::In(hosts, local) => (hosts.ifindex, false, local),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Open {
    since: Nanos,
    port: u16,
    psn: Psn,
    service: Service,
    /// The kernel has answered, without a pair.
    answered: bool,
}

/// Flows without a pair, and when to ask for the list.
#[derive(Debug, Default)]
pub(super) struct Asking {
    open: HashMap<Flow, Open>,
    incoming: usize,
    waiting: usize,
    /// Something speaks against a pair that the kernel named.
    doubt: bool,
    /// A question is under way since then.
    asked: Option<Nanos>,
    not_before: Nanos,
    /// Pairs that the kernel named.
    told: HashSet<LocalQp>,
    /// Of those, the ones whose peer was only heard of, by a request that came in: what leaves knows better.
    heard: HashSet<LocalQp>,
    stats: KernelStats,
}

impl PairTable {
    /// What the kernel's list was good for.
    pub fn kernel_stats(&self) -> &KernelStats {
        &self.asking.stats
    }

    /// Whether to ask the kernel for its list now; [`Self::tell_kernel`] is to be called with the answer.
    pub fn ask_kernel(&mut self, now: Nanos) -> bool {
        if self.ask_at().is_none_or(|at| at > now) {
            return false;
        }
        self.asking.asked = Some(now);
        self.asking.not_before = Nanos(now.0.saturating_add(ASK_EVERY.0));
        self.asking.stats.asked += 1;
        true
    }

    /// When [`Self::ask_kernel`] is to be called next.
    pub(super) fn ask_at(&self) -> Option<Nanos> {
        let asking = &self.asking;
        // An answer that never came must not end all questions.
        let free = asking.asked.map_or(Nanos(0), |at| Nanos(at.0.saturating_add(ASK_RARELY.0)));
        (asking.waiting > 0 || asking.doubt).then(|| free.max(asking.not_before))
    }

    /// Something came for a queue pair that is not paired: flows that were left without a pair are asked for once more.
    pub fn ask_again(&mut self, now: Nanos) {
        for open in self.asking.open.values_mut().filter(|o| o.answered) {
            *open = Open { since: now, answered: false, ..*open };
            self.asking.waiting += 1;
        }
    }

    /// A packet of a connected service: if it names an end whose other end is not known, the kernel may know it.
    pub(super) fn wonder(&mut self, hosts: Hosts, sent: bool, o: &Observation, now: Nanos) {
        let service = o.opcode.service();
        let number = o.dest_qp.get();
        let flow = if sent { Flow::Out(hosts, number) } else { Flow::In(hosts, number) };
        let known = match flow {
            Flow::Out(..) => self.of_remote(hosts.ifindex, hosts.peer, o.dest_qp).is_some(),
            Flow::In(..) => self.is_paired(flow),
        };
        let begins = o.first_sight || o.restart;
        // A flow that begins anew may be another queue pair's. What answers a flow out tells nothing more.
        if (known && !begins) || (!sent && o.opcode.kind() != Kind::Request) {
            return;
        }
        let asking = &mut self.asking;
        let new = Open { since: now, port: o.src_port, psn: o.psn, service, answered: false };
        if let Some(open) = asking.open.get_mut(&flow) {
            if begins || open.service != service || open.port != o.src_port {
                asking.waiting += usize::from(open.answered);
                *open = new;
            }
            return;
        }
        if asking.open.len() >= MOST_OPEN || (!sent && asking.incoming >= MOST_INCOMING) {
            asking.stats.unknown[Unknown::Full as usize] += u64::from(o.first_sight);
            return;
        }
        asking.open.insert(flow, new);
        asking.waiting += 1;
        asking.incoming += usize::from(!sent);
    }

    /// Takes the kernel's answer.
    pub fn tell_kernel(&mut self, list: &KernelList, now: Nanos) {
        self.asking.asked = None;
        self.asking.doubt = false;
        let due = self.due(list.asked);
        let Some(index) = &list.qps else {
            self.asking.not_before = Nanos(now.0.saturating_add(ASK_RARELY.0));
            for flow in due {
                self.leave(flow, Unknown::NoList);
            }
            return;
        };
        // A long list takes its time, in which no CNP is served: the longer, the less often.
        let wait = ASK_EVERY.0 * (1 + (index.by_local.len() + self.by_local.len()) as u64 / LONG_LIST);
        self.asking.not_before = Nanos(now.0.saturating_add(wait));
        self.withdraw(index);
        let rivals = self.rivals();
        let mut named = Vec::new();
        for flow in due {
            let Some(open) = self.asking.open.get(&flow).copied() else { continue };
            let others = rivals.get(&flow.number()).map_or(&[][..], Vec::as_slice);
            let answer = match flow {
                Flow::Out(hosts, remote) => self.sole_local(hosts, remote, &open, index, others),
                Flow::In(hosts, local) => self.sole_peer(hosts, local, &open, index, others),
            };
            match answer {
                Ok(pair) => named.push((flow, pair)),
                Err(why) => self.leave(flow, why),
            }
        }
        // Flows to two peers that are answered by one queue pair: neither is believed. Both ways of one connection may be.
        let end = |pair: &Pair| (pair.local_addr, pair.peer, pair.remote);
        let mut claims: HashMap<LocalQp, Option<_>> = HashMap::new();
        for (_, pair) in &named {
            let claim = claims.entry(pair.local).or_insert(Some(end(pair)));
            *claim = claim.filter(|other| *other == end(pair));
        }
        for (flow, pair) in named {
            if claims.get(&pair.local).is_some_and(Option::is_some) {
                self.close(flow);
                let (local, known) = (pair.local, self.of_local(pair.local).map(end) == Some(end(&pair)));
                self.named(pair);
                match flow {
                    Flow::Out(..) => {
                        self.asking.heard.remove(&local);
                    }
                    Flow::In(..) if !known => {
                        self.asking.heard.insert(local);
                    }
                    Flow::In(..) => {}
                }
            } else {
                self.leave(flow, Unknown::SeveralPeers);
            }
        }
    }

    /// Flows without a pair, by their number.
    fn rivals(&self) -> HashMap<(u32, bool, u32), Vec<(Hosts, Open)>> {
        let mut all: HashMap<_, Vec<_>> = HashMap::new();
        for (flow, open) in &self.asking.open {
            all.entry(flow.number()).or_default().push((flow.hosts(), *open));
        }
        all
    }

    /// Flows that were there when the kernel was asked and wait for the answer.
    fn due(&self, asked: Nanos) -> Vec<Flow> {
        self.asking.open.iter().filter(|(_, o)| !o.answered && o.since <= asked).map(|(f, _)| *f).collect()
    }

    /// The local queue pair behind a flow to `remote`, of those that the kernel connected with one of that number.
    fn sole_local(
        &self,
        hosts: Hosts,
        remote: u32,
        open: &Open,
        index: &Index,
        others: &[(Hosts, Open)],
    ) -> Result<Pair, Unknown> {
        let qpn = Qpn::new(remote);
        let key = (hosts.ifindex, remote, open.service);
        let listed = index.by_remote.get(&key).ok_or(Unknown::NotListed)?;
        // Those that belong to this number at somebody else are not it. What was only heard counts for less than the port.
        let at_another = |local: u32, heard: bool| {
            let local = LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(local) };
            let pair = self.of_local(local);
            pair.is_some_and(|p| p.remote == qpn && p.peer != hosts.peer) && self.asking.heard.contains(&local) == heard
        };
        let mut candidates: Vec<u32> = listed.iter().copied().filter(|&local| !at_another(local, false)).collect();
        let by_rule = |local: u32| source_port(Qpn::new(local), qpn) == open.port;
        if candidates.iter().any(|&local| by_rule(local)) {
            candidates.retain(|&local| by_rule(local));
        }
        if candidates.len() > 1 {
            candidates.retain(|&local| !at_another(local, true));
        }
        let local = match candidates[..] {
            [] => return Err(Unknown::SeveralPeers),
            [local] if index.twice.contains(&LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(local) }) => {
                return Err(Unknown::SeveralLocal);
            }
            [local] => local,
            _ => return Err(Unknown::SeveralLocal),
        };
        // Another flow to this number, of another peer, that nothing tells from this one.
        let rival = |(h, other): &(Hosts, Open)| {
            *h != hosts && other.service == open.service && (other.port == open.port || !by_rule(local))
        };
        if others.len() > MOST_RIVALS || others.iter().any(rival) {
            return Err(Unknown::SeveralPeers);
        }
        Ok(Self::pair_for(hosts, Requester::Us, local, remote, true))
    }

    /// The pair of a local queue pair to which `hosts.peer` sends, if it alone does.
    fn sole_peer(
        &self,
        hosts: Hosts,
        local: u32,
        open: &Open,
        index: &Index,
        others: &[(Hosts, Open)],
    ) -> Result<Pair, Unknown> {
        let local = LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(local) };
        let qp = index.by_local.get(&local).filter(|q| q.service == open.service).ok_or(Unknown::NotListed)?;
        if index.twice.contains(&local) {
            return Err(Unknown::SeveralLocal);
        }
        let expected =
            |o: &Open| o.service != Service::Rc || qp.expects.is_some_and(|psn| NEAR.contains(&psn.diff(o.psn)));
        if !expected(open) {
            return Err(Unknown::OtherPsn);
        }
        let taken = self.of_local(local).is_some_and(|p| p.peer != hosts.peer && p.remote == qp.remote);
        if taken || others.len() > MOST_RIVALS || others.iter().any(|(h, o)| *h != hosts && expected(o)) {
            return Err(Unknown::SeveralPeers);
        }
        Ok(Self::pair_for(hosts, Requester::Us, local.qpn.get(), qp.remote.get(), true))
    }

    /// Takes back what the kernel does not say any more, and what it contradicts.
    fn withdraw(&mut self, index: &Index) {
        let gone: Vec<LocalQp> = self
            .by_local
            .values()
            .filter(|p| match index.by_local.get(&p.local) {
                Some(qp) => qp.remote != p.remote,
                // Other stacks on the interface are not listed: what acknowledgements found may be theirs.
                None => self.asking.told.contains(&p.local),
            })
            .map(|p| p.local)
            .collect();
        for local in gone {
            self.asking.stats.withdrawn += 1;
            self.remove(local);
        }
    }

    /// Makes a pair that the kernel named, in place of whatever contradicts it.
    fn named(&mut self, pair: Pair) {
        let same = |p: &&Pair| p.peer == pair.peer && p.local_addr == pair.local_addr && p.remote == pair.remote;
        if self.of_local(pair.local).as_ref().is_some_and(same) {
            if let Some(known) = self.by_local.get_mut(&pair.local) {
                known.supported = true;
            }
        } else {
            self.remove(pair.local);
            if let Some(other) = self.of_remote(pair.local.ifindex, pair.peer, pair.remote) {
                self.remove(LocalQp { ifindex: pair.local.ifindex, qpn: other });
            }
            if !self.add(pair) {
                return;
            }
            self.asking.stats.first += 1;
        }
        self.asking.stats.paired += u64::from(self.asking.told.insert(pair.local));
    }

    /// Whether the kernel named this pair: nothing else takes it back.
    pub(super) fn is_told(&self, local: LocalQp) -> bool {
        self.asking.told.contains(&local)
    }

    /// What passes contradicts a pair that the kernel named: it is asked whether it still does.
    pub(super) const fn doubt(&mut self) {
        self.asking.doubt = true;
    }

    /// A pair is gone, and with it what was told of it.
    pub(super) fn untell(&mut self, local: LocalQp) {
        self.asking.told.remove(&local);
        self.asking.heard.remove(&local);
    }

    /// The kernel's answer leaves a flow without a pair, unless something else has found it meanwhile.
    fn leave(&mut self, flow: Flow, why: Unknown) {
        if self.is_paired(flow) {
            self.close(flow);
        } else if let Some(open) = self.asking.open.get_mut(&flow).filter(|o| !o.answered) {
            open.answered = true;
            self.asking.waiting -= 1;
            self.asking.stats.unknown[why as usize] += 1;
        }
    }

    fn is_paired(&self, flow: Flow) -> bool {
        match flow {
            Flow::Out(hosts, remote) => self.of_remote(hosts.ifindex, hosts.peer, Qpn::new(remote)).is_some(),
            Flow::In(hosts, local) => self
                .of_local(LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(local) })
                .is_some_and(|p| p.peer == hosts.peer && p.local_addr == hosts.local),
        }
    }

    fn close(&mut self, flow: Flow) {
        if let Some(open) = self.asking.open.remove(&flow) {
            self.asking.waiting -= usize::from(!open.answered);
            self.asking.incoming -= usize::from(matches!(flow, Flow::In(..)));
        }
    }

    /// Forgets flows that are paired, or that nothing remembers.
    pub(super) fn sweep_open(&mut self) {
        let over: Vec<Flow> = self
            .asking
            .open
            .keys()
            .copied()
            .filter(|&flow| {
                let (_, sent, number) = flow.number();
                self.is_paired(flow) || !self.remembers(flow.hosts(), sent, number)
            })
            .collect();
        for flow in over {
            self.close(flow);
        }
    }

    /// Whether something to this number is remembered between two hosts.
    fn remembers(&self, hosts: Hosts, sent: bool, number: u32) -> bool {
        let Some(group) = self.groups.get(&hosts) else { return false };
        let (asks, answers) = if sent { (&group.us, &group.peer) } else { (&group.peer, &group.us) };
        asks.flows.contains_key(&number) || asks.one_way.contains_key(&number) || answers.streams.contains_key(&number)
    }
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
