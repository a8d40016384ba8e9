//! From evidence to pairs: which are made, which stand against a rival, and which fall.

use roce_common::{
    pairing::Response,
    units::{Nanos, Qpn},
};

use super::{ALIVE, Change, Hosts, LocalQp, Pair, PairTable, Requester};

impl PairTable {
    /// Whether `flow` surely belongs to another QP than `stream`.
    pub(super) fn taken(&self, hosts: Hosts, requester: Requester, stream: u32, flow: u32) -> bool {
        match requester {
            Requester::Us => {
                self.of_remote(hosts.ifindex, hosts.peer, Qpn::new(flow)).is_some_and(|local| local.get() != stream)
            }
            Requester::Peer => self
                .of_local(LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(flow) })
                .is_some_and(|p| p.peer != hosts.peer || p.remote.get() != stream),
        }
    }

    pub(super) fn pair_for(hosts: Hosts, requester: Requester, stream: u32, flow: u32, supported: bool) -> Pair {
        let (local, remote) = match requester {
            Requester::Us => (stream, flow),
            Requester::Peer => (flow, stream),
        };
        Pair {
            local: LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(local) },
            local_addr: hosts.local,
            peer: hosts.peer,
            remote: Qpn::new(remote),
            supported,
        }
    }

    /// The established pair of exactly these two.
    pub(super) fn pair_of(&self, hosts: Hosts, requester: Requester, stream: u32, flow: u32) -> Option<Pair> {
        let want = Self::pair_for(hosts, requester, stream, flow, false);
        self.of_local(want.local).filter(|p| p.peer == want.peer && p.remote == want.remote).copied()
    }

    pub(super) fn establish(
        &mut self,
        hosts: Hosts,
        requester: Requester,
        stream: u32,
        flow: u32,
        supported: bool,
        now: Nanos,
    ) {
        if let Some(known) = self.pair_of(hosts, requester, stream, flow) {
            if supported && let Some(pair) = self.by_local.get_mut(&known.local) {
                pair.supported = true;
            }
            return;
        }
        let pair = Self::pair_for(hosts, requester, stream, flow, supported);
        let by_local = self.of_local(pair.local).copied();
        let by_remote = self
            .of_remote(hosts.ifindex, pair.peer, pair.remote)
            .and_then(|qpn| self.of_local(LocalQp { ifindex: hosts.ifindex, qpn }).copied());
        // A peer cannot take a QP away from another that is using it: it chooses its own ports, PSNs and QPNs.
        let stands = |p: &Pair| {
            // What the kernel says of a queue pair only the kernel takes back.
            let alive = || (p.supported || !supported) && now.since(self.last_seen(p)) < ALIVE;
            self.is_told(p.local) || (p.peer != pair.peer && alive())
        };
        if by_local.as_ref().is_some_and(stands) || by_remote.as_ref().is_some_and(|p| self.is_told(p.local)) {
            if let Some(s) = self.stream(hosts, requester, stream) {
                s.evidence.contradict();
            }
            return;
        }
        if !supported {
            let Some(group) = self.groups.get_mut(&hosts) else { return };
            let side = group.side(requester);
            let rival = side.streams.iter().any(|(&k, s)| k != stream && s.evidence.candidate() == Some(flow));
            if side.blind || rival || self.overflowed {
                return;
            }
            let others: Vec<Pair> = by_local.into_iter().chain(by_remote).collect();
            if !others.is_empty() {
                // Two conclusions without a port contradict each other: neither is used. A supported one stays.
                if let Some(s) = self.stream(hosts, requester, stream) {
                    s.evidence.contradict();
                }
                for other in others.iter().filter(|p| !p.supported) {
                    self.remove(other.local);
                }
                return;
            }
        }
        for other in by_local.into_iter().chain(by_remote) {
            self.remove(other.local);
        }
        self.add(pair);
    }

    /// Adds a pair; says whether there was room.
    pub(super) fn add(&mut self, pair: Pair) -> bool {
        if self.by_local.len() >= self.limits.pairs {
            self.pairs_refused += 1;
            return false;
        }
        self.by_remote.insert((pair.local.ifindex, pair.peer, pair.remote.get()), pair.local.qpn);
        self.by_local.insert(pair.local, pair);
        self.changes.push(Change::Added(pair));
        true
    }

    /// Drops a pair and what led to it.
    pub(super) fn remove(&mut self, local: LocalQp) {
        let Some(pair) = self.by_local.remove(&local) else { return };
        self.by_remote.remove(&(local.ifindex, pair.peer, pair.remote.get()));
        self.untell(local);
        let hosts = Hosts { ifindex: local.ifindex, local: pair.local_addr, peer: pair.peer };
        let ends = [
            (Requester::Us, local.qpn.get(), pair.remote.get()),
            (Requester::Peer, pair.remote.get(), local.qpn.get()),
        ];
        for (requester, stream, flow) in ends {
            if let Some(s) = self.stream(hosts, requester, stream)
                && s.evidence.candidate() == Some(flow)
            {
                s.evidence.contradict();
            }
        }
        self.changes.push(Change::Removed(pair));
    }

    /// Forgets conclusions without a port whose last response satisfies `doubtful`.
    pub(super) fn drop_unsupported(
        &mut self,
        hosts: Hosts,
        requester: Requester,
        doubtful: impl Fn(&Response) -> bool,
    ) {
        let Some(group) = self.groups.get_mut(&hosts) else { return };
        let mut doubted = Vec::new();
        for (&key, stream) in &mut group.side(requester).streams {
            if stream.evidence.supported() || !stream.last.as_ref().is_some_and(&doubtful) {
                continue;
            }
            if let Some(flow) = stream.evidence.candidate() {
                doubted.push((key, flow));
                stream.evidence.contradict();
            }
        }
        for (stream, flow) in doubted {
            if let Some(pair) = self.pair_of(hosts, requester, stream, flow).filter(|p| !p.supported) {
                self.remove(pair.local);
            }
        }
    }
}
