//! Forgetting: what is idle goes, and what the table has no room for is refused.

use roce_common::units::{Nanos, Qpn};

use super::{Group, Hosts, LocalQp, Pair, PairTable};

/// How often idle entries are looked for.
const SWEEP: Nanos = Nanos::SECOND;
/// With every so many entries a second more passes between two sweeps.
const SWEEP_ENTRIES: u64 = 8_192;
/// When the table is full, entries that belong to no pair go after this much idleness.
const PRESSED_IDLE: Nanos = Nanos::SECOND;

/// Entries and pairs that one step of a sweep looks at, or a few more: some hundred microseconds, in which no CNP is served.
const STEP: usize = 2_048;

/// What a sweep that has begun has still to look at.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    runs: bool,
    hosts: Vec<Hosts>,
    pairs: Vec<LocalQp>,
    /// Idleness at which an entry without a pair goes.
    unpaired_idle: Nanos,
}

impl Sweep {
    pub(super) const fn runs(&self) -> bool {
        self.runs
    }
}

impl PairTable {
    /// A sweep through a full table takes a tenth of a second of a CPU: the fuller, the less often.
    pub(super) const fn sweep_every(&self) -> Nanos {
        Nanos(SWEEP.0 * (1 + self.entries as u64 / SWEEP_ENTRIES))
    }

    /// Whether one more entry fits; where the table is full, entries without a pair are soon forgotten.
    pub(super) fn room(&mut self, hosts: Hosts, now: Nanos, count: impl Fn(&mut Group) -> usize) -> bool {
        if self.entries >= self.limits.entries && !self.sweep.runs && now.since(self.swept).0 >= SWEEP.0 / 8 {
            self.begin_sweep(now, PRESSED_IDLE);
        }
        let here = self.groups.get_mut(&hosts).map_or(0, count);
        let fits = self.entries < self.limits.entries && here < self.limits.entries_per_hosts;
        self.refused += u64::from(!fits);
        fits
    }

    pub(super) fn begin_sweep(&mut self, now: Nanos, unpaired_idle: Nanos) {
        self.swept = now;
        let (hosts, pairs) = (self.groups.keys().copied().collect(), self.by_local.keys().copied().collect());
        self.sweep = Sweep { runs: true, hosts, pairs, unpaired_idle };
    }

    /// One step of a sweep that has begun.
    pub(super) fn go_on_sweeping(&mut self, now: Nanos) {
        if !self.sweep.runs {
            return;
        }
        let mut looked_at = 0;
        while looked_at < STEP {
            if let Some(hosts) = self.sweep.hosts.pop() {
                looked_at += 1 + self.sweep_hosts(hosts, now);
            } else if let Some(local) = self.sweep.pairs.pop() {
                looked_at += 1;
                // A pair lives as long as one of the things that can show it.
                if self.by_local.get(&local).is_some_and(|pair| self.last_seen(pair) == Nanos(0)) {
                    self.remove(local);
                }
            } else {
                self.sweep.runs = false;
                self.overflowed &= self.entries >= self.limits.entries;
                self.sweep_open();
                return;
            }
        }
    }

    /// Forgets what is idle between two hosts, and says how many entries there were.
    fn sweep_hosts(&mut self, hosts: Hosts, now: Nanos) -> usize {
        let Some(group) = self.groups.get_mut(&hosts) else { return 0 };
        let before = group.len();
        let (by_local, by_remote) = (&self.by_local, &self.by_remote);
        let is_local = |qpn: u32| {
            by_local.get(&LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(qpn) }).is_some_and(|p| p.peer == hosts.peer)
        };
        let is_remote = |qpn: u32| by_remote.contains_key(&(hosts.ifindex, hosts.peer, qpn));
        let (idle, unpaired_idle) = (self.limits.idle, self.sweep.unpaired_idle);
        let keep = |seen: Nanos, paired: bool| now.since(seen) < if paired { idle } else { unpaired_idle };
        group.us.flows.retain(|&q, f| keep(f.seen, is_remote(q)));
        group.us.streams.retain(|&q, s| keep(s.seen, is_local(q)));
        group.peer.flows.retain(|&q, f| keep(f.seen, is_local(q)));
        group.peer.streams.retain(|&q, s| keep(s.seen, is_remote(q)));
        group.us.one_way.retain(|&q, seen| keep(*seen, is_remote(q)));
        group.peer.one_way.retain(|&q, seen| keep(*seen, is_local(q)));
        for side in [&mut group.us, &mut group.peer] {
            side.blind &= side.flows.len() >= self.limits.entries_per_hosts;
        }
        let after = group.len();
        if after == 0 {
            self.groups.remove(&hosts);
        }
        self.entries -= before - after;
        before
    }

    /// When one of a pair's flows and response streams was last seen; zero when none is remembered.
    pub(super) fn last_seen(&self, pair: &Pair) -> Nanos {
        let hosts = Hosts { ifindex: pair.local.ifindex, local: pair.local_addr, peer: pair.peer };
        let (l, r) = (pair.local.qpn.get(), pair.remote.get());
        let Some(group) = self.groups.get(&hosts) else { return Nanos(0) };
        let flows = [group.us.flows.get(&r), group.peer.flows.get(&l)].map(|f| f.map(|f| f.seen));
        let streams = [group.us.streams.get(&l), group.peer.streams.get(&r)].map(|s| s.map(|s| s.seen));
        let one_way = [group.us.one_way.get(&r), group.peer.one_way.get(&l)].map(Option::<&Nanos>::copied);
        flows.into_iter().chain(streams).chain(one_way).flatten().max().map_or(Nanos(0), |n| n.max(Nanos(1)))
    }
}
