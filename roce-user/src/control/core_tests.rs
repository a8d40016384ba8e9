use proptest::prelude::*;
use roce_common::{
    abi::{Direction, Tap},
    dcqcn::{Fabric, Params},
    wire::{Service, source_port},
};

use super::*;
use crate::control::KernelQp;

const L: Addr = Addr::v4([10, 0, 0, 1]);
pub(super) const P: Addr = Addr::v4([10, 0, 0, 2]);
const EVIL: Addr = Addr::v4([10, 0, 0, 66]);
const IF: u32 = 3;
const LINE: Rate = Rate::from_bits_per_sec(100_000_000);
const MS: u64 = 1_000_000;

fn config() -> CoreConfig {
    CoreConfig::new(Params::soft(Fabric::new(LINE, 1_100)).rp, 1_100)
}

pub(super) fn local(qpn: u32) -> LocalQp {
    LocalQp { ifindex: IF, qpn: Qpn::new(qpn) }
}

#[expect(clippy::too_many_arguments, reason = "the fields of an event")]
fn event(
    kind: EventKind,
    direction: Direction,
    src: Addr,
    dst: Addr,
    dest_qp: u32,
    psn: u32,
    opcode: u8,
    src_port: u16,
) -> Event {
    let tap = Tap::new(IF, direction);
    Event {
        time_ns: 0,
        kind: kind as u32,
        tap,
        src,
        dst,
        dest_qp,
        psn,
        value: 0,
        src_port,
        opcode,
        tos: 0,
        account: 0,
        fate: 0,
        refused_qp: 0,
    }
}

pub(super) fn cnp(src: Addr, qpn: u32) -> Event {
    event(EventKind::Cnp, Direction::Ingress, src, L, qpn, 0, 0x81, 0)
}

pub(super) struct Harness {
    pub(super) core: Core,
    pub(super) out: Vec<Command>,
    pub(super) now: u64,
}

impl Harness {
    pub(super) fn new(config: CoreConfig) -> Self {
        let mut core = Core::new(config);
        core.add_local(L);
        Self { core, out: Vec::new(), now: MS }
    }

    fn feed(&mut self, event: Event) -> Vec<Command> {
        self.core.on_event(&event, Nanos(self.now), &|_| None, &mut self.out);
        self.taken()
    }

    /// What was commanded, questions to the kernel aside.
    fn taken(&mut self) -> Vec<Command> {
        self.out.retain(|c| *c != Command::AskKernel);
        std::mem::take(&mut self.out)
    }

    pub(super) fn pair(&mut self, qpn: u32, remote: u32) -> Vec<Command> {
        let port = source_port(Qpn::new(qpn), Qpn::new(remote));
        let mut all = self.feed(event(EventKind::FirstSight, Direction::Egress, L, P, remote, 7, 0x07, port));
        all.extend(self.feed(event(EventKind::Sample, Direction::Ingress, P, L, qpn, 7, 0x11, port)));
        all
    }

    fn advance(&mut self, ns: u64) -> Vec<Command> {
        self.now += ns;
        self.core.advance(Nanos(self.now), &|_| None, &mut self.out);
        self.taken()
    }

    /// The kernel answers at once.
    fn kernel(&mut self, qps: Option<&[KernelQp]>) -> Vec<Command> {
        let list = KernelList::new(Nanos(self.now), qps);
        self.core.on_kernel(&list, Nanos(self.now), &mut self.out);
        self.taken()
    }

    /// Follows the deadlines until no limiter is left.
    fn recover(&mut self) -> Vec<Command> {
        let mut all = Vec::new();
        for _ in 0..100_000 {
            if self.core.limited_len() == 0 {
                return all;
            }
            let at = self.core.next_deadline().expect("a limiter has a deadline").0;
            all.extend(self.advance(at.saturating_sub(self.now)));
        }
        panic!("a limiter was never released");
    }
}

#[test]
fn a_cnp_from_the_peer_cuts_the_rate_of_the_pair() {
    let mut h = Harness::new(config());
    let pair = Command::AddPair { local: local(17), local_addr: L, peer: P, remote: Qpn::new(42) };
    assert_eq!(h.pair(17, 42), [pair]);
    let key = PeerQp::new(P, Qpn::new(42));
    let rate = Rate::from_bits_per_sec(50_000_000);
    assert_eq!(h.feed(cnp(P, 17)), [Command::SetRate { key, rate }]);
    assert_eq!(h.core.rate(local(17)), Some(rate));
    let recovery = h.recover();
    assert!(recovery.contains(&Command::SetRate { key, rate: LINE }));
    assert_eq!(recovery.last(), Some(&Command::Release { key }));
    assert_eq!((h.core.stats().rp_handled, h.core.stats().released), (1, 1));
}

#[test]
fn strangers_cut_nothing_and_are_counted() {
    let mut h = Harness::new(config());
    assert!(h.feed(cnp(P, 17)).is_empty());
    h.pair(17, 42);
    assert!(h.feed(cnp(EVIL, 17)).is_empty());
    assert!(h.feed(cnp(P, 42)).is_empty(), "the remote QPN is not a local one");
    assert!(h.feed(cnp(P, 18)).is_empty());
    let s = h.core.stats();
    assert_eq!((s.ignored_unknown_qp, s.ignored_wrong_peer, s.rp_handled, s.rp_ignored()), (3, 1, 0, 4));
    // One that comes out of the host, or of another interface, is not for us either.
    assert!(h.feed(event(EventKind::Cnp, Direction::Egress, P, L, 17, 0, 0x81, 0)).is_empty());
    assert_eq!(h.core.stats().events_ignored, 1);
}

#[test]
fn transit_traffic_makes_no_pair() {
    let mut h = Harness::new(config());
    h.core.remove_local(&L);
    assert!(h.pair(17, 42).is_empty());
    assert_eq!((h.core.pairs().entries(), h.core.stats().events_ignored), (0, 2));
}

#[test]
fn a_flood_cuts_once_per_monitor_period() {
    let mut h = Harness::new(config());
    h.pair(17, 42);
    let mut commands = 0;
    for _ in 0..10_000 {
        commands += h.feed(cnp(P, 17)).len();
        h.now += 10_000;
    }
    let periods = 100 * MS / config().rp.monitor.0 + 1;
    assert!(commands as u64 <= periods && h.core.stats().cuts <= periods);
    assert_eq!(h.core.stats().rp_handled, 10_000);
    assert_eq!(h.core.stats().cuts + h.core.stats().held_back, 10_000);
    assert_eq!(h.core.limited_len(), 1);
    h.recover();
}

#[test]
fn cnps_lost_from_the_ring_are_recovered_once() {
    let mut h = Harness::new(config());
    h.pair(17, 42);
    h.feed(cnp(P, 17));
    let read = |h: &mut Harness, count| {
        h.now += 50 * MS;
        h.core.on_cnp_count((local(17), P, count), Nanos(h.now), &|_| None, &mut h.out);
        std::mem::take(&mut h.out).len()
    };
    assert_eq!(read(&mut h, 1), 0);
    assert_eq!(read(&mut h, 5), 0, "four may still be on their way");
    assert_eq!(read(&mut h, 5), 1, "they were lost");
    assert_eq!(read(&mut h, 5), 0);
    let s = h.core.stats();
    assert_eq!((s.recovered, s.rp_handled, s.cuts), (4, 5, 2));
    // On its way after all: counted by the kernel first, delivered before the next reading.
    assert_eq!(read(&mut h, 6), 0);
    h.feed(cnp(P, 17));
    assert_eq!(read(&mut h, 6), 0);
    assert_eq!(h.core.stats().recovered, 4);
    assert_eq!(h.core.stats().rp_handled, 6);
}

#[test]
fn a_pair_that_goes_takes_its_limiter_along() {
    let mut h = Harness::new(config());
    h.pair(17, 42);
    h.feed(cnp(P, 17));
    let commands = h.pair(17, 43);
    let key = PeerQp::new(P, Qpn::new(42));
    assert_eq!(
        commands,
        [
            Command::ClearRate { key },
            Command::RemovePair { local: local(17), local_addr: L, peer: P, remote: Qpn::new(42) },
            Command::AddPair { local: local(17), local_addr: L, peer: P, remote: Qpn::new(43) },
        ]
    );
    assert_eq!(h.core.limited_len(), 0);
}

#[test]
fn the_ack_timeout_bounds_the_rate_from_below() {
    // The reference table: 65 packets of PMTU 1024 in half of 67.1 ms need 16.8 Mb/s.
    let c = CoreConfig { ack_timeout: Some(14), packet_bytes: 1_082, ..config() };
    assert!(c.min_rate().bits_per_sec().abs_diff(16_800_000) < 100_000, "{}", c.min_rate().bits_per_sec());
    assert_eq!(config().min_rate(), config().rp.min_rate);
    assert_eq!(CoreConfig { ack_timeout: Some(0), ..c }.min_rate(), LINE, "never above the link");
    assert_eq!(CoreConfig { ack_timeout: Some(255), ..c }.min_rate(), config().rp.min_rate);

    let mut h = Harness::new(c);
    let mut notices = 0;
    for i in 0..8 {
        h.pair(100 + i, 900 + i);
        for _ in 0..20 {
            let commands = h.feed(cnp(P, 100 + i));
            notices +=
                commands.iter().filter(|c| matches!(c, Command::Notice(Notice::MinRateInfeasible { .. }))).count();
            h.now += config().rp.monitor.0;
        }
    }
    assert_eq!(notices, 1, "the sixth: six times 16.8 exceed 100; told once");
    assert!(h.core.limited().all(|(_, rate)| rate >= c.min_rate()));
}

#[test]
fn limiters_are_bounded_and_that_is_told() {
    let mut h = Harness::new(CoreConfig { limiters: 2, ..config() });
    let mut told = 0;
    for i in 0..5 {
        h.pair(100 + i, 900 + i);
        told += h.feed(cnp(P, 100 + i)).iter().filter(|c| matches!(c, Command::Notice(_))).count();
    }
    assert_eq!((h.core.limited_len(), told, h.core.stats().ignored_limiters_full), (2, 1, 3));
}

#[test]
fn bytes_sent_raise_the_rate_faster() {
    // The soft set raises by time alone.
    let by_bytes = RpParams { byte_period: 200_000, ..config().rp };
    let run = |bytes_per_ms: Option<u64>| {
        let mut h = Harness::new(CoreConfig { rp: by_bytes, ..config() });
        h.pair(17, 42);
        for _ in 0..6 {
            h.feed(cnp(P, 17));
            h.now += config().rp.monitor.0;
        }
        for ms in 0..1_500 {
            h.now += MS;
            let counter = bytes_per_ms.map(|b| b * ms);
            h.core.advance(Nanos(h.now), &|key| counter.filter(|_| key.qpn().get() == 42), &mut h.out);
        }
        h.core.rate(local(17)).unwrap_or(LINE)
    };
    let (busy, unknown, idle) = (run(Some(12_000)), run(None), run(Some(0)));
    assert!(busy > unknown && unknown > idle, "{busy:?} {unknown:?} {idle:?}");
}

fn started(remote: u32) -> Event {
    event(EventKind::Started, Direction::Egress, L, P, remote, 7, 0x06, 0)
}

#[test]
fn a_start_at_the_start_rate_is_taken_over_once() {
    let mut h = Harness::new(config());
    let key = PeerQp::new(P, Qpn::new(42));
    let start = h.core.start_rate().unwrap();
    assert!(start < LINE && start >= config().min_rate());
    let mut event = started(42);
    event.value = 0x726f_0007;
    assert_eq!(h.feed(event), [Command::Adopt { key, classid: 0x726f_0007 }]);
    assert!(h.feed(event).is_empty(), "told twice");
    assert_eq!(h.core.limited().collect::<Vec<_>>(), [(key, start)]);
    // The first CNP cuts the limiter that is there.
    h.pair(17, 42);
    assert_eq!(h.feed(cnp(P, 17)).len(), 1);
    assert!(h.core.rate(local(17)).unwrap() < start);
    // Another interface's packets, incoming ones and other hosts' start nothing.
    let mut foreign = started(43);
    foreign.src = EVIL;
    assert!(h.feed(foreign).is_empty());
    foreign = started(43);
    foreign.tap = Tap::new(IF, Direction::Ingress);
    assert!(h.feed(foreign).is_empty());
    assert_eq!((h.core.limited_len(), h.core.stats().started), (1, 1));
}

#[test]
fn a_started_limiter_lasts_while_it_sends_and_goes_when_it_idles() {
    let mut h = Harness::new(config());
    h.feed(started(42));
    let mut bytes = 0;
    let mut told = Vec::new();
    for _ in 0..3_000 {
        h.now += 5 * MS;
        bytes += 62_500;
        h.core.advance(Nanos(h.now), &|_| Some(bytes), &mut told);
    }
    assert_eq!(told.last(), Some(&Command::SetRate { key: PeerQp::new(P, Qpn::new(42)), rate: LINE }));
    assert_eq!(h.core.limited_len(), 1, "it is still sending");
    // First it falls back to the start rate, then it is forgotten.
    let start = h.core.start_rate().unwrap();
    for _ in 0..30 {
        h.now += 500 * MS;
        h.core.advance(Nanos(h.now), &|_| Some(bytes), &mut told);
    }
    let key = PeerQp::new(P, Qpn::new(42));
    assert_eq!(told[told.len() - 2..], [Command::SetRate { key, rate: start }, Command::Forget { key }]);
    assert_eq!((h.core.limited_len(), h.core.stats().idled), (0, 1));
}

#[test]
fn a_cnp_finds_a_queue_pair_that_only_the_kernel_knows() {
    let mut h = Harness::new(config());
    h.core.on_event(
        &event(EventKind::FirstSight, Direction::Egress, L, P, 42, 7, 0x07, 49_152),
        Nanos(h.now),
        &|_| None,
        &mut h.out,
    );
    assert_eq!(std::mem::take(&mut h.out), [Command::AskKernel]);
    let commands =
        h.kernel(Some(&[KernelQp { local: local(17), remote: Qpn::new(42), service: Service::Rc, expects: None }]));
    assert_eq!(commands, [Command::AddPair { local: local(17), local_addr: L, peer: P, remote: Qpn::new(42) }]);
    let cut = h.feed(cnp(P, 17));
    assert!(matches!(cut[..], [Command::SetRate { key, .. }] if key == PeerQp::new(P, Qpn::new(42))), "{cut:?}");
    assert!(h.feed(cnp(EVIL, 17)).is_empty());
    // The queue pair is destroyed: neither pair nor limiter stays.
    let gone = h.kernel(Some(&[]));
    assert!(matches!(gone[..], [Command::ClearRate { .. }, Command::RemovePair { .. }]), "{gone:?}");
}

#[test]
fn a_start_without_room_is_opened() {
    let mut h = Harness::new(CoreConfig { limiters: 1, ..config() });
    h.feed(started(42));
    let key = PeerQp::new(P, Qpn::new(43));
    let commands = h.feed(started(43));
    assert!(commands.contains(&Command::ClearRate { key }), "{commands:?}");
    assert_eq!(h.core.limited_len(), 1);
}

#[derive(Clone, Debug)]
enum Operation {
    /// A true connection (of eight) shows a request and its response.
    Traffic { qp: u32, psn: u32 },
    /// Its peer sends CNPs.
    Cnps { qp: u32, count: u16, gap: u32 },
    /// Somebody else sends one.
    Forged { src: u8, qpn: u32 },
    /// Any bytes in an event.
    Garbage { kind: u32, ingress: bool, src: u8, dst: u8, qpn: u32, psn: u32, opcode: u8, port: u16 },
    /// The kernel's counter of a pair.
    Count { qp: u32, count: u32 },
    /// The kernel lists some connections, these or their neighbours, or has no list.
    Kernel { from: u32, shift: u32, none: bool },
    /// Time passes; limiters report this many bytes.
    Time { ns: u64, bytes: u64 },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (0u32..8, 0u32..5_000).prop_map(|(qp, psn)| Operation::Traffic { qp, psn }),
        4 => (0u32..8, 1u16..200, 0u32..5_000_000).prop_map(|(qp, count, gap)| Operation::Cnps { qp, count, gap }),
        2 => (3u8..255, any::<u32>()).prop_map(|(src, qpn)| Operation::Forged { src, qpn: if qpn % 2 == 0 { 100 + qpn % 8 } else { qpn } }),
        4 => (0u32..14, any::<bool>(), 0u8..5, 0u8..5, prop_oneof![90u32..120, any::<u32>()], any::<u32>(), any::<u8>(), any::<u16>())
            .prop_map(|(kind, ingress, src, dst, qpn, psn, opcode, port)| Operation::Garbage { kind, ingress, src, dst, qpn, psn, opcode, port }),
        1 => (0u32..8, any::<u32>()).prop_map(|(qp, count)| Operation::Count { qp, count }),
        2 => (0u32..8, 0u32..2, any::<bool>()).prop_map(|(from, shift, none)| Operation::Kernel { from, shift, none }),
        4 => (0u64..20_000_000, any::<u64>()).prop_map(|(ns, bytes)| Operation::Time { ns, bytes }),
        1 => (0u64..3_600_000_000_000, any::<u64>()).prop_map(|(ns, bytes)| Operation::Time { ns, bytes }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_sequence_keeps_the_promises(operations in prop::collection::vec(operation(), 1..120)) {
        let limits = Limits { entries: 64, entries_per_hosts: 32, pairs: 12, ..Limits::default() };
        let c = CoreConfig { limiters: 4, pairs: limits, ..config() };
        let mut h = Harness::new(c);
        // What the commands say: rates and pairs as the shell would hold them.
        let mut rates: HashMap<PeerQp, Rate> = HashMap::new();
        let mut pairs: HashMap<LocalQp, (Addr, Qpn)> = HashMap::new();
        let mut last_cut: HashMap<PeerQp, u64> = HashMap::new();
        let start = h.core.start_rate();
        let apply = |commands: Vec<Command>, now: u64, may_cut: Option<Addr>,
                     rates: &mut HashMap<PeerQp, Rate>, pairs: &mut HashMap<LocalQp, (Addr, Qpn)>,
                     last_cut: &mut HashMap<PeerQp, u64>| -> Result<(), TestCaseError> {
            for command in commands {
                match command {
                    Command::AddPair { local, peer, remote, .. } => {
                        prop_assert!(pairs.insert(local, (peer, remote)).is_none(), "a pair over a pair");
                    }
                    Command::RemovePair { local, peer, remote, .. } => {
                        prop_assert_eq!(pairs.remove(&local), Some((peer, remote)));
                    }
                    Command::SetRate { key, rate } => {
                        prop_assert!(pairs.values().any(|p| *p == (key.peer, key.qpn())) || rates.contains_key(&key));
                        prop_assert!(rate >= c.min_rate() && rate <= LINE);
                        let before = rates.insert(key, rate).unwrap_or(LINE);
                        // A flow that idled is back at the start rate.
                        if rate < before && Some(rate) != start {
                            prop_assert_eq!(may_cut, Some(key.peer), "cut by somebody else");
                            if let Some(last) = last_cut.insert(key, now) {
                                prop_assert!(now - last >= c.rp.monitor.0, "two cuts in one monitor period");
                            }
                        }
                    }
                    Command::Release { key } => {
                        prop_assert_eq!(rates.remove(&key), Some(LINE));
                    }
                    Command::ClearRate { key } => {
                        rates.remove(&key);
                        // The next limiter of this key is another one.
                        last_cut.remove(&key);
                    }
                    Command::Adopt { key, .. } => {
                        prop_assert!(rates.insert(key, start.unwrap_or(LINE)).is_none(), "a limiter over a limiter");
                    }
                    Command::Forget { key } => {
                        prop_assert!(rates.remove(&key).is_some());
                        last_cut.remove(&key);
                    }
                    Command::AskKernel | Command::Notice(_) => {}
                }
            }
            Ok(())
        };
        for operation in operations {
            match operation {
                Operation::Traffic { qp, psn } => {
                    let port = source_port(Qpn::new(100 + qp), Qpn::new(900 + qp));
                    for e in [
                        event(EventKind::Sample, Direction::Egress, L, P, 900 + qp, psn, 0x07, port),
                        event(EventKind::Sample, Direction::Ingress, P, L, 100 + qp, psn, 0x11, port),
                    ] {
                        apply(h.feed(e), h.now, None, &mut rates, &mut pairs, &mut last_cut)?;
                    }
                }
                Operation::Cnps { qp, count, gap } => {
                    for _ in 0..count {
                        apply(h.feed(cnp(P, 100 + qp)), h.now, Some(P), &mut rates, &mut pairs, &mut last_cut)?;
                        h.now += u64::from(gap);
                    }
                }
                Operation::Forged { src, qpn } => {
                    let src = Addr::v4([10, 0, 9, src]);
                    apply(h.feed(cnp(src, qpn)), h.now, None, &mut rates, &mut pairs, &mut last_cut)?;
                }
                Operation::Garbage { kind, ingress, src, dst, qpn, psn, opcode, port } => {
                    let addr = |i| Addr::v4([10, 0, 0, i]);
                    let direction = if ingress { Direction::Ingress } else { Direction::Egress };
                    let mut e = event(EventKind::Sample, direction, addr(src), addr(dst), qpn, psn, opcode, port);
                    e.kind = kind;
                    let may_cut = (kind == EventKind::Cnp as u32).then_some(addr(src));
                    apply(h.feed(e), h.now, may_cut, &mut rates, &mut pairs, &mut last_cut)?;
                }
                Operation::Count { qp, count } => {
                    let now = Nanos(h.now);
                    h.core.on_cnp_count((local(100 + qp), P, count), now, &|_| None, &mut h.out);
                    let commands = std::mem::take(&mut h.out);
                    apply(commands, h.now, Some(P), &mut rates, &mut pairs, &mut last_cut)?;
                }
                Operation::Kernel { from, shift, none } => {
                    let qps: Vec<_> = (from..8)
                        .map(|i| KernelQp { local: local(100 + i), remote: Qpn::new(900 + i + shift), service: Service::Rc, expects: None })
                        .collect();
                    let commands = h.kernel((!none).then_some(&qps[..]));
                    apply(commands, h.now, None, &mut rates, &mut pairs, &mut last_cut)?;
                }
                Operation::Time { ns, bytes } => {
                    h.now += ns;
                    h.core.advance(Nanos(h.now), &|_| Some(bytes), &mut h.out);
                    let commands = std::mem::take(&mut h.out);
                    apply(commands, h.now, None, &mut rates, &mut pairs, &mut last_cut)?;
                }
            }
            prop_assert!(h.core.limited_len() <= 4 && h.core.deadlines.len() == h.core.limited_len());
            prop_assert!(h.core.pairs().entries() <= 64 && h.core.pairs().len() <= 12);
            prop_assert_eq!(h.core.pairs().len(), pairs.len());
            prop_assert_eq!(h.core.cnps.len(), pairs.len());
            prop_assert!(h.core.limited().all(|(key, _)| rates.contains_key(&key)));
            prop_assert_eq!(rates.len(), h.core.limited_len());
        }
        apply(h.recover(), h.now, None, &mut rates, &mut pairs, &mut last_cut)?;
        prop_assert!(rates.is_empty(), "every limiter is released once the CNPs stop");
    }
}
