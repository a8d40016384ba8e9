//! Forgetting: what is idle goes, and what the table has no room for is refused.

use roce_common::units::{Nanos, Qpn};

use super::{Group, Hosts, LocalQp, Pair, PairTable};

/// How often idle entries are looked for.
const SWEEP: Nanos = Nanos::SECOND;
/// With every so many entries a second more passes between two sweeps.
const SWEEP_ENTRIES: u64 = 8_192;
/// When the table is full, entries that belong to no pair go after this much idleness.
const PRESSED_IDLE: Nanos = Nanos::SECOND;

impl PairTable {
    /// A full table takes a tenth of a second to go through, in which no CNP is served: the fuller, the less often.
    pub(super) const fn sweep_every(&self) -> Nanos {
        Nanos(SWEEP.0 * (1 + self.entries as u64 / SWEEP_ENTRIES))
    }

    /// Whether one more entry fits; makes room by forgetting idle entries without a pair, at most once in a while.
    pub(super) fn room(&mut self, hosts: Hosts, now: Nanos, count: impl Fn(&mut Group) -> usize) -> bool {
        if self.entries >= self.limits.entries && now.since(self.swept).0 >= SWEEP.0 / 8 {
            self.sweep(now, self.limits.idle, PRESSED_IDLE);
        }
        let here = self.groups.get_mut(&hosts).map_or(0, count);
        let fits = self.entries < self.limits.entries && here < self.limits.entries_per_hosts;
        self.refused += u64::from(!fits);
        fits
    }

    pub(super) fn sweep(&mut self, now: Nanos, idle: Nanos, unpaired_idle: Nanos) {
        self.swept = now;
        let (by_local, by_remote) = (&self.by_local, &self.by_remote);
        let per_hosts = self.limits.entries_per_hosts;
        let mut entries = 0;
        self.groups.retain(|hosts, group| {
            let is_local = |qpn: u32| {
                by_local
                    .get(&LocalQp { ifindex: hosts.ifindex, qpn: Qpn::new(qpn) })
                    .is_some_and(|p| p.peer == hosts.peer)
            };
            let is_remote = |qpn: u32| by_remote.contains_key(&(hosts.ifindex, hosts.peer, qpn));
            let keep = |seen: Nanos, paired: bool| now.since(seen) < if paired { idle } else { unpaired_idle };
            group.us.flows.retain(|&q, f| keep(f.seen, is_remote(q)));
            group.us.streams.retain(|&q, s| keep(s.seen, is_local(q)));
            group.peer.flows.retain(|&q, f| keep(f.seen, is_local(q)));
            group.peer.streams.retain(|&q, s| keep(s.seen, is_remote(q)));
            group.us.one_way.retain(|&q, seen| keep(*seen, is_remote(q)));
            group.peer.one_way.retain(|&q, seen| keep(*seen, is_local(q)));
            for side in [&mut group.us, &mut group.peer] {
                side.blind &= side.flows.len() >= per_hosts;
            }
            entries += group.len();
            group.len() > 0
        });
        self.entries = entries;
        self.overflowed &= entries >= self.limits.entries;
        // A pair lives as long as one of the things that can show it.
        let dead: Vec<LocalQp> =
            self.by_local.values().filter(|p| self.last_seen(p) == Nanos(0)).map(|p| p.local).collect();
        for local in dead {
            self.remove(local);
        }
        self.sweep_open();
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
