//! The table behind the pairing rules of [`roce_common::pairing`]: it keeps the flows and responses seen between each
//! local and remote host, applies the elimination, and says which pairs came and went.
//!
//! Two things make live observation harder than a capture. Packets are sampled, so what is known of a flow may lag behind
//! what it sent: a response is therefore judged by PSN only after [`SETTLE`], when the requests it answers have had time
//! to show. (The source-port rule needs no such patience.) And flows may go unseen: one that turns up in mid-life puts
//! unsupported pairs it could explain back to nothing, and where the table had to refuse flows none is made.

mod age;
mod conclude;
mod kernel;
mod types;

use std::collections::{HashMap, VecDeque};

use roce_common::{
    abi::Direction,
    pairing::{CONFIRMATIONS, Evidence, Fit, Outcome, RequestFlow, Response, SLACK, fit, sole_match},
    units::{Addr, Nanos, Qpn},
    wire::{Kind, Service},
};

use self::{age::Sweep, kernel::Asking};
pub use self::{
    kernel::{KernelList, KernelQp, KernelStats, Unknown},
    types::{Change, FlowSeen, Limits, LocalQp, Observation, Pair},
};

/// How long a response waits before its PSN is held against flows that have not been seen to reach it: two of the
/// 1/16-second ticks by which the kernel side limits its events, and some.
pub const SETTLE: Nanos = Nanos::from_millis(150);
/// Responses of one QP that wait at the same time.
const WAITING: usize = CONFIRMATIONS as usize;
/// Settled responses that only another flow explains before an established pair falls.
const CONTRADICTIONS: u8 = 2;
/// A pair that was seen this recently is in use: another peer's claim to its local QP does not stand.
const ALIVE: Nanos = Nanos::SECOND;
/// Streams judged at a time: each may have to be held against every flow between two hosts, and CNPs wait meanwhile.
const JUDGED: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Hosts {
    ifindex: u32,
    local: Addr,
    peer: Addr,
}

/// Who sends the requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Requester {
    /// We do: flows go to remote QPNs, responses come to local ones.
    Us,
    /// The peer does: flows come to local QPNs, responses go to remote ones.
    Peer,
}

#[derive(Debug)]
struct Flow {
    rules: RequestFlow,
    seen: Nanos,
}

#[derive(Debug, Default)]
struct Stream {
    evidence: Evidence<u32>,
    waiting: VecDeque<(Nanos, Response)>,
    /// Settled responses in a row that the candidate does not explain.
    misses: u8,
    last: Option<Response>,
    seen: Nanos,
}

/// One direction of requests between two hosts.
#[derive(Debug, Default)]
struct Side {
    /// By the destination QPN of the requests.
    flows: HashMap<u32, Flow>,
    /// By the destination QPN of the responses.
    streams: HashMap<u32, Stream>,
    /// Flows of unreliable connections, which nobody answers, by their destination QPN: when they were seen.
    one_way: HashMap<u32, Nanos>,
    /// Flows had to be refused: something unseen may explain any response.
    blind: bool,
}

impl Side {
    fn len(&self) -> usize {
        self.flows.len() + self.streams.len() + self.one_way.len()
    }
}

#[derive(Debug, Default)]
struct Group {
    us: Side,
    peer: Side,
}

impl Group {
    fn side(&mut self, requester: Requester) -> &mut Side {
        match requester {
            Requester::Us => &mut self.us,
            Requester::Peer => &mut self.peer,
        }
    }

    fn len(&self) -> usize {
        self.us.len() + self.peer.len()
    }
}

/// See the module.
#[derive(Debug)]
pub struct PairTable {
    limits: Limits,
    groups: HashMap<Hosts, Group>,
    entries: usize,
    by_local: HashMap<LocalQp, Pair>,
    by_remote: HashMap<(u32, Addr, u32), Qpn>,
    /// Streams with waiting responses, in the order in which the first of them settles.
    due: VecDeque<(Nanos, Hosts, Requester, u32)>,
    changes: Vec<Change>,
    asking: Asking,
    /// As [`Side::blind`], for hosts of which nothing is remembered.
    overflowed: bool,
    swept: Nanos,
    sweep: Sweep,
    refused: u64,
    pairs_refused: u64,
}

impl PairTable {
    /// An empty table.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            groups: HashMap::new(),
            entries: 0,
            by_local: HashMap::new(),
            by_remote: HashMap::new(),
            due: VecDeque::new(),
            changes: Vec::new(),
            asking: Asking::default(),
            overflowed: false,
            swept: Nanos(0),
            sweep: Sweep::default(),
            refused: 0,
            pairs_refused: 0,
        }
    }

    /// The pair of a local queue pair.
    pub fn of_local(&self, local: LocalQp) -> Option<&Pair> {
        self.by_local.get(&local)
    }

    /// The local QPN connected to `remote` at `peer`.
    pub fn of_remote(&self, ifindex: u32, peer: Addr, remote: Qpn) -> Option<Qpn> {
        self.by_remote.get(&(ifindex, peer, remote.get())).copied()
    }

    /// Every pair.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.by_local.values()
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.by_local.len()
    }

    /// Whether there is no pair.
    pub fn is_empty(&self) -> bool {
        self.by_local.is_empty()
    }

    /// Flows and response streams remembered.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Flows and response streams for which there was no room, counted per packet.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Pairs for which there was no room.
    pub fn pairs_refused(&self) -> u64 {
        self.pairs_refused
    }

    /// What changed since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// When [`Self::advance`] or [`Self::ask_kernel`] next has something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let wait = if self.sweep.runs() { Nanos(0) } else { self.sweep_every() };
        let sweep = (self.entries > 0 || self.sweep.runs()).then_some(Nanos(self.swept.0.saturating_add(wait.0)));
        self.due.front().map(|d| d.0).into_iter().chain(sweep).chain(self.ask_at()).min()
    }

    /// Takes in one packet of a connected service; the GSI and everything else is passed over.
    pub fn observe(&mut self, o: &Observation, now: Nanos) {
        let service = o.opcode.service();
        if !matches!(service, Service::Rc | Service::Uc) || o.dest_qp == Qpn::GSI || o.dest_qp == Qpn::MULTICAST {
            return;
        }
        let sent = o.direction == Direction::Egress;
        let (local, peer) = if sent { (o.src, o.dst) } else { (o.dst, o.src) };
        let hosts = Hosts { ifindex: o.ifindex, local, peer };
        match (o.opcode.kind(), sent) {
            (Kind::Request, _) if service == Service::Uc => {
                self.one_way(hosts, if sent { Requester::Us } else { Requester::Peer }, o, now);
            }
            (Kind::Request, true) => self.request(hosts, Requester::Us, o, now),
            (Kind::Request, false) => self.request(hosts, Requester::Peer, o, now),
            (Kind::Response, false) => self.response(hosts, Requester::Us, o, now),
            (Kind::Response, true) => self.response(hosts, Requester::Peer, o, now),
            (Kind::Cnp, _) => {}
        }
        self.wonder(hosts, sent, o, now);
    }

    /// Takes in what the kernel's own table knows of a request flow: exact where samples lag.
    pub fn observe_flow(&mut self, seen: &FlowSeen, now: Nanos) {
        let (hosts, requester) = match seen.direction {
            Direction::Egress => (Hosts { ifindex: seen.ifindex, local: seen.src, peer: seen.dst }, Requester::Us),
            Direction::Ingress => (Hosts { ifindex: seen.ifindex, local: seen.dst, peer: seen.src }, Requester::Peer),
        };
        // Without the source port a flow cannot be created from here, only corrected.
        let side = self.groups.get_mut(&hosts).map(|g| g.side(requester));
        let Some(flow) = side.and_then(|s| s.flows.get_mut(&seen.dest_qp.get())) else { return };
        let rules = &mut flow.rules;
        if seen.highest.diff(rules.highest) >= 0 {
            rules.extend(seen.highest, Some(1), rules.src_port);
            rules.open_ended = false;
            flow.seen = now;
        }
        let lag = rules.first.diff(seen.first);
        if lag > 0 && lag < 1 << 20 {
            rules.first = seen.first;
        }
    }

    /// Judges at most [`JUDGED`] streams whose responses have settled ([`Self::next_deadline`] says whether more have), and
    /// forgets what is idle, a part at a time.
    pub fn advance(&mut self, now: Nanos) {
        for _ in 0..JUDGED {
            let Some(&(_, hosts, requester, stream)) = self.due.front().filter(|d| d.0 <= now) else { break };
            self.due.pop_front();
            self.judge(hosts, requester, stream, now);
        }
        if !self.sweep.runs() && now.since(self.swept) >= self.sweep_every() {
            self.begin_sweep(now, self.limits.idle);
        }
        self.go_on_sweeping(now);
    }

    fn request(&mut self, hosts: Hosts, requester: Requester, o: &Observation, now: Nanos) {
        let psns = if o.opcode.is_read_request() { None } else { Some(1) };
        let new = || RequestFlow {
            src: o.src,
            dst: o.dst,
            dest_qp: o.dest_qp,
            src_port: o.src_port,
            first: o.psn,
            highest: o.psn,
            open_ended: psns.is_none(),
        };
        if let Some(flow) = self.groups.get_mut(&hosts).and_then(|g| g.side(requester).flows.get_mut(&o.dest_qp.get()))
        {
            flow.seen = now;
            if o.restart || o.first_sight {
                flow.rules = new();
            } else {
                flow.rules.extend(o.psn, psns, o.src_port);
            }
            return;
        }
        if !self.room(hosts, now, |g| g.side(requester).flows.len()) {
            match self.groups.get_mut(&hosts) {
                Some(group) => group.side(requester).blind = true,
                None => self.overflowed = true,
            }
            self.drop_unsupported(hosts, requester, |_| true);
            return;
        }
        let rules = new();
        let side = self.groups.entry(hosts).or_default().side(requester);
        side.flows.insert(o.dest_qp.get(), Flow { rules, seen: now });
        self.entries += 1;
        if !o.first_sight {
            // It existed before, unseen: what was concluded without it may be wrong.
            let slack = self.slack();
            self.drop_unsupported(hosts, requester, |last| fit(&rules, last, slack) != Fit::No);
        }
    }

    /// A packet of an unreliable connection: only the kernel knows its other end.
    fn one_way(&mut self, hosts: Hosts, requester: Requester, o: &Observation, now: Nanos) {
        let key = o.dest_qp.get();
        let known = self.groups.get_mut(&hosts).is_some_and(|g| g.side(requester).one_way.contains_key(&key));
        if !known {
            if !self.room(hosts, now, |g| g.side(requester).one_way.len()) {
                return;
            }
            self.entries += 1;
        }
        self.groups.entry(hosts).or_default().side(requester).one_way.insert(key, now);
    }

    fn response(&mut self, hosts: Hosts, requester: Requester, o: &Observation, now: Nanos) {
        let response = Response { src: o.src, dst: o.dst, dest_qp: o.dest_qp, src_port: o.src_port, psn: o.psn };
        let key = o.dest_qp.get();
        let known = self.groups.get_mut(&hosts).is_some_and(|g| g.side(requester).streams.contains_key(&key));
        if !known {
            if !self.room(hosts, now, |g| g.side(requester).streams.len()) {
                return;
            }
            self.entries += 1;
        }
        let stream = self.groups.entry(hosts).or_default().side(requester).streams.entry(key).or_default();
        stream.seen = now;
        stream.last = Some(response);
        if stream.waiting.len() < WAITING && stream.waiting.iter().all(|(_, w)| w.psn != response.psn) {
            if stream.waiting.is_empty() {
                self.due.push_back((Nanos(now.0.saturating_add(SETTLE.0)), hosts, requester, key));
            }
            stream.waiting.push_back((now, response));
        }
        // What the port rule named and still names needs no look at every other flow of the two hosts.
        let named = stream.evidence.candidate().filter(|_| stream.evidence.supported());
        if named.is_some_and(|flow| self.fit_of(hosts, requester, flow, &response) == Fit::Port) {
            return;
        }
        // The port rule does not depend on how far a flow has been seen: no need to wait.
        let outcome = self.outcome(hosts, requester, key, &response);
        if let Outcome::One { key: flow, fit: Fit::Port } = outcome
            && let Some(stream) = self.stream(hosts, requester, key)
        {
            if stream.evidence.candidate() == Some(flow) && stream.evidence.supported() {
                return;
            }
            stream.evidence.add(outcome, response.psn);
            stream.misses = 0;
            self.establish(hosts, requester, key, flow, true, now);
        }
    }

    /// Judges the responses of one stream that have waited long enough.
    fn judge(&mut self, hosts: Hosts, requester: Requester, key: u32, now: Nanos) {
        loop {
            let Some(stream) = self.stream(hosts, requester, key) else { return };
            match stream.waiting.front() {
                None => return,
                Some((at, _)) if now.since(*at) < SETTLE => {
                    let due = Nanos(at.0.saturating_add(SETTLE.0));
                    // Late entries wait behind: the queue stays sorted well enough, `advance` takes what is due.
                    self.due.push_back((due, hosts, requester, key));
                    return;
                }
                Some(_) => {}
            }
            let Some((_, response)) = stream.waiting.pop_front() else { return };
            let (candidate, sure) = (stream.evidence.candidate(), stream.evidence.supported());
            let own = candidate.map(|c| self.fit_of(hosts, requester, c, &response));
            if sure && own == Some(Fit::Port) {
                // As expected. The others are not looked at: there may be thousands.
                if let Some(stream) = self.stream(hosts, requester, key) {
                    stream.misses = 0;
                }
                continue;
            }
            let outcome = self.outcome(hosts, requester, key, &response);
            let pair = candidate.and_then(|c| self.pair_of(hosts, requester, key, c));
            let Some(stream) = self.stream(hosts, requester, key) else { return };
            if own == Some(Fit::No) {
                stream.misses = stream.misses.saturating_add(1);
                let enough = match outcome {
                    _ if pair.is_none() => 1,
                    Outcome::One { .. } => CONTRADICTIONS,
                    Outcome::Nothing | Outcome::Several => CONFIRMATIONS,
                };
                if stream.misses < enough {
                    continue;
                }
                stream.misses = 0;
                if let Some(pair) = pair {
                    if self.is_told(pair.local) {
                        self.doubt();
                        continue;
                    }
                    self.remove(pair.local);
                }
                if let Some(stream) = self.stream(hosts, requester, key) {
                    stream.evidence.contradict();
                }
            } else {
                stream.misses = 0;
            }
            let Some(stream) = self.stream(hosts, requester, key) else { return };
            // `Nothing` here means that what was seen is not enough, not that the candidate is wrong: that is judged above.
            // An established pair is contradicted above only; what else explains the response is no news.
            let news = match outcome {
                Outcome::Nothing => false,
                Outcome::One { key: flow, .. } => {
                    stream.evidence.candidate().is_none_or(|c| c == flow || !stream.evidence.supported())
                }
                Outcome::Several => true,
            };
            if news {
                stream.evidence.add(outcome, response.psn);
            }
            let (sure, supported) = (stream.evidence.sure(), stream.evidence.supported());
            if let Some(flow) = sure {
                self.establish(hosts, requester, key, flow, supported, now);
            }
        }
    }

    fn stream(&mut self, hosts: Hosts, requester: Requester, key: u32) -> Option<&mut Stream> {
        self.groups.get_mut(&hosts)?.side(requester).streams.get_mut(&key)
    }

    fn slack(&self) -> u32 {
        SLACK.saturating_add(self.limits.sample_every.saturating_mul(2))
    }

    fn fit_of(&self, hosts: Hosts, requester: Requester, flow: u32, response: &Response) -> Fit {
        let side = self.groups.get(&hosts).map(|g| match requester {
            Requester::Us => &g.us,
            Requester::Peer => &g.peer,
        });
        side.and_then(|s| s.flows.get(&flow)).map_or(Fit::No, |f| fit(&f.rules, response, self.slack()))
    }

    /// The elimination: by address, PSN and port over all flows, then without those that belong to somebody else.
    fn outcome(&self, hosts: Hosts, requester: Requester, stream: u32, response: &Response) -> Outcome<u32> {
        let Some(group) = self.groups.get(&hosts) else { return Outcome::Nothing };
        let side = match requester {
            Requester::Us => &group.us,
            Requester::Peer => &group.peer,
        };
        let all = side.flows.iter().map(|(&key, f)| (key, f.rules));
        let named = sole_match(all.clone(), response, self.slack());
        // A flow the port names is named even if somebody else had it: QPNs are used again.
        if matches!(named, Outcome::One { fit: Fit::Port, .. } | Outcome::Nothing) {
            return named;
        }
        sole_match(all.filter(|&(flow, _)| !self.taken(hosts, requester, stream, flow)), response, self.slack())
    }
}

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
