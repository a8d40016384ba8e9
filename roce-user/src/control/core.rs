//! CNPs in, rates out: one reaction point per local queue pair.

use std::collections::{BTreeSet, HashMap, HashSet};

use roce_common::{
    abi::{Direction, Event, EventKind, MAX_LOCAL_ADDRS, PeerQp},
    dcqcn::{Reaction, Rp, params::RpParams},
    psn::Psn,
    units::{Addr, Nanos, Qpn, Rate},
    wire::Opcode,
};

use super::{
    Command, Notice,
    pairs::{Change, FlowSeen, KernelList, Limits, LocalQp, Observation, Pair, PairTable},
};

/// A rate is worth a command when it differs from the last one by more than this part of it. Cuts and the arrival at
/// line rate always are.
const SIGNIFICANT: u64 = 64;

/// Most limiters that one call of [`Core::advance`] looks at: a CNP waits no longer than they take.
pub(super) const LOOKS: usize = 64;

/// Time between two looks at any limiters, on average, where there are very many: with 100,000 each is looked at once a
/// second, and made up for. A look with its system calls takes a few microseconds.
const LOOK_EVERY: Nanos = Nanos::from_micros(10);

/// A queue pair that was limited from its first packet on and has sent nothing for this long is forgotten; its next packet
/// makes the next limiter, at the start rate.
const FORGET: Nanos = Nanos(10 * Nanos::SECOND.0);

/// Packets an rxe queue pair can have waiting in a shaper: it pauses above 64 (`RXE_INFLIGHT_SKBS_PER_QP_HIGH`).
const HELD_PACKETS: u64 = 65;

/// What the controller works by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoreConfig {
    /// Constants of the reaction points.
    pub rp: RpParams,
    /// The queue pairs' ACK timeout exponent (4.096 µs · 2^n), where it is known.
    pub ack_timeout: Option<u8>,
    /// Size of a full packet on the wire, for the minimum rate that the ACK timeout allows.
    pub packet_bytes: u32,
    /// No limiter is looked at more often than this, whatever its timer.
    pub tick: Nanos,
    /// Most limiters.
    pub limiters: usize,
    /// Bounds of the pair table.
    pub pairs: Limits,
}

impl CoreConfig {
    /// The defaults around `rp`.
    pub fn new(rp: RpParams, packet_bytes: u32) -> Self {
        Self {
            rp,
            ack_timeout: None,
            packet_bytes,
            tick: Nanos::from_millis(1),
            limiters: 60_000,
            pairs: Limits::default(),
        }
    }

    /// The rate no limiter goes below: what lets the packets a shaper holds drain in half the ACK timeout, so that pacing
    /// never looks like loss; the configured minimum where that is higher or the timeout is not known.
    pub fn min_rate(&self) -> Rate {
        let line = self.rp.line.bytes_per_sec();
        let by_timeout = self.ack_timeout.map_or(0, |exponent| {
            let half_ns = (4_096_u64 << exponent.min(31)) / 2;
            (HELD_PACKETS * u64::from(self.packet_bytes)).saturating_mul(Nanos::SECOND.0) / half_ns
        });
        Rate::from_bytes_per_sec(self.rp.min_rate.bytes_per_sec().max(by_timeout).min(line))
    }
}

/// The cumulative byte counter of a limiter, where it has one.
pub type BytesSent<'a> = &'a dyn Fn(&PeerQp) -> Option<u64>;

/// Why a CNP cut nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ignored {
    /// The local QP is not known to be connected to anybody.
    UnknownQp,
    /// It is connected to somebody else.
    WrongPeer,
    /// There was no room for another limiter.
    LimitersFull,
}

/// What the controller counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// CNPs handed to a reaction point.
    pub rp_handled: u64,
    /// CNPs for a QP that is not paired.
    pub ignored_unknown_qp: u64,
    /// CNPs from an address that is not the QP's peer.
    pub ignored_wrong_peer: u64,
    /// CNPs of QPs for which there was no limiter left.
    pub ignored_limiters_full: u64,
    /// Handled CNPs that cut a rate.
    pub cuts: u64,
    /// Handled CNPs within the monitor period of a cut.
    pub held_back: u64,
    /// Handled CNPs that the ring buffer had lost and the pair's counter still knew.
    pub recovered: u64,
    /// Limiters released because their queue pair was back at line rate.
    pub released: u64,
    /// Limiters that the egress program made at the start rate, taken over.
    pub started: u64,
    /// Of these, forgotten because their queue pair sent nothing for long.
    pub idled: u64,
    /// Events with a kind, opcode or address that says nothing here.
    pub events_ignored: u64,
    /// Local addresses for which there was no room.
    pub locals_refused: u64,
}

impl Stats {
    /// All CNPs that cut nothing, whatever the reason.
    pub const fn rp_ignored(&self) -> u64 {
        self.ignored_unknown_qp + self.ignored_wrong_peer + self.ignored_limiters_full
    }
}

#[derive(Debug)]
struct Limiter {
    rp: Rp,
    ifindex: u32,
    /// The egress program made it at the start rate, and makes another should it go.
    started: bool,
    /// When its queue pair was last seen to have sent something.
    active: Nanos,
    /// The rate of the last command.
    sent: Rate,
    /// The byte counter at the last look.
    bytes: Option<u64>,
    deadline: Nanos,
}

impl Limiter {
    /// Brings the reaction point to `now`; `counter` is the cumulative byte counter.
    fn advance(&mut self, now: Nanos, counter: Option<u64>) {
        let sent = match (counter, self.bytes) {
            // A counter that went back was made anew.
            (Some(now), Some(before)) => Some(now.checked_sub(before).unwrap_or(now)),
            _ => None,
        };
        if sent.is_some_and(|n| n > 0) {
            self.active = now;
        }
        self.bytes = counter.or(self.bytes);
        self.rp.advance(now, sent);
    }
}

/// CNPs of one pair: seen in the ring buffer, and counted by the kernel.
#[derive(Clone, Copy, Debug, Default)]
struct CnpCount {
    seen: u32,
    last_reading: u32,
}

/// The controller. Every method appends what has to be done to `out`.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    rp: RpParams,
    locals: HashSet<Addr>,
    pairs: PairTable,
    /// By where a queue pair sends to, which names it as well as its own number does, and is known from its first packet.
    limiters: HashMap<PeerQp, Limiter>,
    deadlines: BTreeSet<(Nanos, PeerQp)>,
    cnps: HashMap<LocalQp, CnpCount>,
    /// Limiters of each interface, and whether their minimum rates were found infeasible.
    per_interface: HashMap<u32, (usize, bool)>,
    full_told: bool,
    stats: Stats,
}

impl Core {
    /// A controller that knows nothing yet.
    pub fn new(config: CoreConfig) -> Self {
        Self {
            config,
            rp: RpParams { min_rate: config.min_rate(), ..config.rp },
            locals: HashSet::new(),
            pairs: PairTable::new(config.pairs),
            limiters: HashMap::new(),
            deadlines: BTreeSet::new(),
            cnps: HashMap::new(),
            per_interface: HashMap::new(),
            full_told: false,
            stats: Stats::default(),
        }
    }

    /// `addr` is one of this host's.
    pub fn add_local(&mut self, addr: Addr) {
        if self.locals.len() >= MAX_LOCAL_ADDRS as usize && !self.locals.contains(&addr) {
            self.stats.locals_refused += 1;
            return;
        }
        self.locals.insert(addr);
    }

    /// `addr` is no longer one of this host's.
    pub fn remove_local(&mut self, addr: &Addr) {
        self.locals.remove(addr);
    }

    /// Whether `addr` is one of this host's.
    pub fn is_local(&self, addr: &Addr) -> bool {
        self.locals.contains(addr)
    }

    /// The counters.
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// The pairs.
    pub const fn pairs(&self) -> &PairTable {
        &self.pairs
    }

    /// The rate of a limited queue pair.
    pub fn rate(&self, local: LocalQp) -> Option<Rate> {
        let pair = self.pairs.of_local(local)?;
        self.limiters.get(&PeerQp::new(pair.peer, pair.remote)).map(|l| l.rp.rate())
    }

    /// The rate at which queue pairs are limited from their first packet on; `None` where they are not.
    pub fn start_rate(&self) -> Option<Rate> {
        (self.rp.start_rate.bytes_per_sec() > 0).then(|| Rp::start(self.rp, Nanos(0)).rate())
    }

    /// The limiters: where and how fast.
    pub fn limited(&self) -> impl Iterator<Item = (PeerQp, Rate)> {
        self.limiters.iter().map(|(&key, l)| (key, l.rp.rate()))
    }

    /// Whether there is a limiter at `key`.
    pub fn is_limited(&self, key: &PeerQp) -> bool {
        self.limiters.contains_key(key)
    }

    /// Number of limited queue pairs.
    pub fn limited_len(&self) -> usize {
        self.limiters.len()
    }

    /// When [`Self::advance`] next has something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().map(|d| d.0).into_iter().chain(self.pairs.next_deadline()).min()
    }

    /// One record of a ring buffer. `bytes_sent` is the cumulative byte counter of a limiter, where it has one.
    pub fn on_event(&mut self, event: &Event, now: Nanos, bytes_sent: BytesSent<'_>, out: &mut Vec<Command>) {
        let ifindex = event.tap.ifindex();
        let direction = event.tap.direction();
        let kind = match EventKind::from_number(event.kind) {
            Some(EventKind::Cnp) if direction == Direction::Ingress => {
                let local = LocalQp { ifindex, qpn: Qpn::new(event.dest_qp) };
                self.on_cnp(local, (event.src, event.dst), now, bytes_sent, out);
                return;
            }
            Some(EventKind::Cnp | EventKind::CnpSent | EventKind::CnpUnpaired) | None => {
                self.stats.events_ignored += 1;
                return;
            }
            Some(kind) => kind,
        };
        let own = match direction {
            Direction::Ingress => event.dst,
            Direction::Egress => event.src,
        };
        let Some(opcode) = Opcode::new(event.opcode).filter(|_| self.is_local(&own)) else {
            self.stats.events_ignored += 1;
            return;
        };
        if kind == EventKind::Started {
            if direction == Direction::Egress {
                self.on_started(ifindex, PeerQp::new(event.dst, Qpn::new(event.dest_qp)), event.value, now, out);
            }
            return;
        }
        let observation = Observation {
            ifindex,
            direction,
            src: event.src,
            dst: event.dst,
            dest_qp: Qpn::new(event.dest_qp),
            psn: Psn::new(event.psn),
            opcode,
            src_port: event.src_port,
            first_sight: kind == EventKind::FirstSight,
            restart: kind == EventKind::Discontinuity,
        };
        self.pairs.observe(&observation, now);
        self.follow_pairs(out);
        self.ask_kernel(now, out);
    }

    /// The kernel's answer to [`Command::AskKernel`].
    pub fn on_kernel(&mut self, list: &KernelList, now: Nanos, out: &mut Vec<Command>) {
        self.pairs.tell_kernel(list, now);
        self.follow_pairs(out);
        self.ask_kernel(now, out);
    }

    /// CNPs came for queue pairs that are not paired.
    pub fn on_unpaired_cnps(&mut self, now: Nanos, out: &mut Vec<Command>) {
        self.pairs.ask_again(now);
        self.ask_kernel(now, out);
    }

    fn ask_kernel(&mut self, now: Nanos, out: &mut Vec<Command>) {
        if self.pairs.ask_kernel(now) {
            out.push(Command::AskKernel);
        }
    }

    /// The egress program has limited a queue pair of interface `ifindex` at the start rate. Told twice it is heard once.
    pub fn on_started(&mut self, ifindex: u32, key: PeerQp, classid: u32, now: Nanos, out: &mut Vec<Command>) {
        if self.start_rate().is_none() {
            self.stats.events_ignored += 1;
            return;
        }
        if let Some(limiter) = self.limiters.get_mut(&key) {
            // A CNP was quicker than the news of the start.
            limiter.started = true;
            return;
        }
        if !self.has_room(1, out) {
            // Whoever is not looked after must not stay at the start rate.
            out.push(Command::Adopt { key, classid });
            out.push(Command::ClearRate { key });
            return;
        }
        self.stats.started += 1;
        let rp = Rp::start(self.rp, now);
        let limiter =
            Limiter { rp, ifindex, started: true, active: now, sent: rp.rate(), bytes: Some(0), deadline: now };
        self.limiters.insert(key, limiter);
        out.push(Command::Adopt { key, classid });
        self.count_limiter(ifindex, out);
        self.schedule(key, now);
    }

    /// What the kernel's flow table knows of a request flow; see [`PairTable::observe_flow`].
    pub fn on_flow(&mut self, flow: &FlowSeen, now: Nanos) {
        self.pairs.observe_flow(flow, now);
    }

    /// The kernel's cumulative count of CNPs for a pair, read now and then. What it has more than the ring buffer
    /// delivered was lost there; it counts once a second reading confirms that it was not just on its way.
    pub fn on_cnp_count(
        &mut self,
        (local, peer, count): (LocalQp, Addr, u32),
        now: Nanos,
        bytes_sent: BytesSent<'_>,
        out: &mut Vec<Command>,
    ) {
        let Some(pair) = self.pairs.of_local(local).filter(|p| p.peer == peer).copied() else { return };
        let cnp = self.cnps.entry(local).or_default();
        // Serial arithmetic: the kernel's counter wraps.
        let lost = cnp.last_reading.wrapping_sub(cnp.seen) as i32;
        cnp.last_reading = count;
        if lost <= 0 {
            return;
        }
        let lost = lost.unsigned_abs();
        cnp.seen = cnp.seen.wrapping_add(lost);
        self.stats.recovered += u64::from(lost);
        // They may lie anywhere in the past: together they are one sign of congestion.
        self.react(pair, u64::from(lost), now, bytes_sent, out);
    }

    /// Brings pairs and at most [`LOOKS`] limiters that are due to `now`; [`Self::next_deadline`] says whether more are. A
    /// limiter that is looked at late has lost nothing: any number of its periods is made up for at once.
    pub fn advance(&mut self, now: Nanos, bytes_sent: BytesSent<'_>, out: &mut Vec<Command>) {
        self.pairs.advance(now);
        self.follow_pairs(out);
        self.ask_kernel(now, out);
        for _ in 0..LOOKS {
            let Some(&(_, key)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now) else { break };
            self.deadlines.pop_first();
            let Some(limiter) = self.limiters.get_mut(&key) else { continue };
            limiter.advance(now, bytes_sent(&key));
            let rate = limiter.rp.rate();
            let idle = limiter.started && now.since(limiter.active) >= FORGET;
            if !idle && worth_telling(limiter.sent, rate, self.rp.line) {
                limiter.sent = rate;
                out.push(Command::SetRate { key, rate });
            }
            if idle {
                self.forget_limiter(key);
                self.stats.idled += 1;
                out.push(Command::Forget { key });
            } else if limiter.rp.released(now) {
                self.forget_limiter(key);
                self.stats.released += 1;
                out.push(Command::Release { key });
            } else {
                self.schedule(key, now);
            }
        }
    }

    fn on_cnp(
        &mut self,
        local: LocalQp,
        (src, dst): (Addr, Addr),
        now: Nanos,
        bytes_sent: BytesSent<'_>,
        out: &mut Vec<Command>,
    ) {
        let Some(pair) = self.pairs.of_local(local).copied() else {
            self.stats.ignored_unknown_qp += 1;
            return;
        };
        if pair.peer != src || pair.local_addr != dst {
            self.stats.ignored_wrong_peer += 1;
            return;
        }
        let cnp = self.cnps.entry(local).or_default();
        cnp.seen = cnp.seen.wrapping_add(1);
        self.react(pair, 1, now, bytes_sent, out);
    }

    /// `cnps` valid CNPs for `pair`, which together are one.
    fn react(&mut self, pair: Pair, cnps: u64, now: Nanos, bytes_sent: BytesSent<'_>, out: &mut Vec<Command>) {
        let key = PeerQp::new(pair.peer, pair.remote);
        if !self.limiters.contains_key(&key) {
            if !self.has_room(cnps, out) {
                return;
            }
            let (rp, ifindex) = (Rp::new(self.rp, now), pair.local.ifindex);
            let limiter =
                Limiter { rp, ifindex, started: false, active: now, sent: self.rp.line, bytes: None, deadline: now };
            self.limiters.insert(key, limiter);
            self.count_limiter(ifindex, out);
        }
        let Some(limiter) = self.limiters.get_mut(&key) else { return };
        self.stats.rp_handled += cnps;
        // What was sent before the CNP raises the rate first. A CNP also puts off the next look; if that alone told the bytes,
        // CNPs that come more often than looks would hide them all, and a flow could only be cut.
        limiter.advance(now, bytes_sent(&key));
        match limiter.rp.on_cnp(now) {
            Reaction::Cut => {
                self.stats.cuts += 1;
                self.stats.held_back += cnps - 1;
                let rate = limiter.rp.rate();
                if rate != limiter.sent {
                    limiter.sent = rate;
                    out.push(Command::SetRate { key, rate });
                }
                self.schedule(key, now);
            }
            Reaction::HeldBack => self.stats.held_back += cnps,
        }
    }

    /// Whether another limiter fits; `cnps` are ignored where none does, and the user is told once.
    fn has_room(&mut self, cnps: u64, out: &mut Vec<Command>) -> bool {
        if self.limiters.len() < self.config.limiters {
            return true;
        }
        self.stats.ignored_limiters_full += cnps;
        if !self.full_told {
            self.full_told = true;
            out.push(Command::Notice(Notice::LimitersFull { limit: self.config.limiters }));
        }
        false
    }

    /// Sets the time at which a limiter is looked at next.
    fn schedule(&mut self, key: PeerQp, now: Nanos) {
        let tick = self.config.tick.0.max(self.limiters.len() as u64 * LOOK_EVERY.0);
        let Some(limiter) = self.limiters.get_mut(&key) else { return };
        self.deadlines.remove(&(limiter.deadline, key));
        let after = |time: u64| Nanos(now.0.saturating_add(time));
        let forget = if limiter.started { after(FORGET.0) } else { Nanos(u64::MAX) };
        limiter.deadline = limiter.rp.next_deadline().min(forget).max(after(tick));
        self.deadlines.insert((limiter.deadline, key));
    }

    fn forget_limiter(&mut self, key: PeerQp) {
        let Some(limiter) = self.limiters.remove(&key) else { return };
        self.deadlines.remove(&(limiter.deadline, key));
        self.full_told = false;
        if let Some((count, infeasible)) = self.per_interface.get_mut(&limiter.ifindex) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.per_interface.remove(&limiter.ifindex);
            } else {
                *infeasible &= *count as u64 * self.rp.min_rate.bytes_per_sec() > self.rp.line.bytes_per_sec();
            }
        }
    }

    /// Says once that the minimum rates together exceed the link.
    fn count_limiter(&mut self, ifindex: u32, out: &mut Vec<Command>) {
        let (count, infeasible) = self.per_interface.entry(ifindex).or_default();
        *count += 1;
        if !*infeasible && *count as u64 * self.rp.min_rate.bytes_per_sec() > self.rp.line.bytes_per_sec() {
            *infeasible = true;
            out.push(Command::Notice(Notice::MinRateInfeasible {
                ifindex,
                limited: *count,
                min_rate: self.rp.min_rate,
                link: self.rp.line,
            }));
        }
    }

    fn follow_pairs(&mut self, out: &mut Vec<Command>) {
        for change in self.pairs.take_changes() {
            match change {
                Change::Added(Pair { local, local_addr, peer, remote, .. }) => {
                    self.cnps.insert(local, CnpCount::default());
                    out.push(Command::AddPair { local, local_addr, peer, remote });
                }
                Change::Removed(Pair { local, local_addr, peer, remote, .. }) => {
                    self.cnps.remove(&local);
                    let key = PeerQp::new(peer, remote);
                    // One that was there before the pair outlives it.
                    if self.limiters.get(&key).is_some_and(|l| !l.started) {
                        self.forget_limiter(key);
                        out.push(Command::ClearRate { key });
                    }
                    out.push(Command::RemovePair { local, local_addr, peer, remote });
                }
            }
        }
    }
}

fn worth_telling(told: Rate, rate: Rate, line: Rate) -> bool {
    let (told, rate) = (told.bytes_per_sec(), rate.bytes_per_sec());
    told != rate && (rate == line.bytes_per_sec() || told.abs_diff(rate) > told / SIGNIFICANT)
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
#[cfg(test)]
#[path = "core_use_tests.rs"]
mod use_tests;
