use proptest::prelude::*;
use roce_common::{
    psn::Psn,
    wire::{Opcode, source_port},
};

use super::*;

const L: Addr = Addr::v4([10, 0, 0, 1]);
const P: Addr = Addr::v4([10, 0, 0, 2]);
const IF: u32 = 3;
const MS: u64 = 1_000_000;

fn op(byte: u8) -> Opcode {
    Opcode::new(byte).expect("a known opcode")
}

/// One connection, as it really is.
#[derive(Clone, Copy, Debug)]
struct Qp {
    local: u32,
    remote: u32,
    psn: u32,
    /// The kernel's source-port rule, or some other sender's.
    rule: bool,
    sent: u32,
}

impl Qp {
    fn new(local: u32, remote: u32, psn: u32, rule: bool) -> Self {
        Self { local, remote, psn, rule, sent: 0 }
    }

    fn port(&self) -> u16 {
        if self.rule { source_port(Qpn::new(self.local), Qpn::new(self.remote)) } else { 49_152 }
    }

    /// We send a WRITE packet.
    fn request(&mut self) -> Observation {
        let o = Observation {
            ifindex: IF,
            direction: Direction::Egress,
            src: L,
            dst: P,
            dest_qp: Qpn::new(self.remote),
            psn: Psn::new(self.psn + self.sent),
            opcode: op(0x07),
            src_port: self.port(),
            first_sight: self.sent == 0,
            restart: false,
        };
        self.sent += 1;
        o
    }

    /// The ACK of a packet `behind` the last one.
    fn response(&self, behind: u32) -> Observation {
        Observation {
            ifindex: IF,
            direction: Direction::Ingress,
            src: P,
            dst: L,
            dest_qp: Qpn::new(self.local),
            psn: Psn::new(self.psn + self.sent.saturating_sub(1 + behind)),
            opcode: op(0x11),
            src_port: self.port(),
            first_sight: false,
            restart: false,
        }
    }
}

/// The same connection with the peer as requester: everything mirrored.
fn mirrored(o: Observation, qp: &Qp) -> Observation {
    let direction = if o.direction == Direction::Egress { Direction::Ingress } else { Direction::Egress };
    let dest_qp = Qpn::new(if o.dest_qp.get() == qp.remote { qp.local } else { qp.remote });
    Observation { direction, src: o.dst, dst: o.src, dest_qp, ..o }
}

fn table() -> PairTable {
    PairTable::new(Limits::default())
}

/// Every pair must be the truth; returns how many there are.
fn check(table: &PairTable, qps: &[Qp]) -> usize {
    for pair in table.pairs() {
        let qp = qps.iter().find(|q| q.local == pair.local.qpn.get()).expect("a QP that exists");
        assert_eq!(pair.remote.get(), qp.remote, "wrong pair for {qp:?}");
        assert_eq!((pair.peer, pair.local_addr), (P, L));
        assert_eq!(table.of_remote(IF, P, pair.remote), Some(pair.local.qpn));
    }
    table.len()
}

/// Runs all connections in lockstep, one packet per millisecond, ACKs 10 packets later.
fn run(table: &mut PairTable, qps: &mut [Qp], from: u64, packets: u64) -> u64 {
    for i in 0..packets {
        let now = Nanos((from + i) * MS);
        for qp in qps.iter_mut() {
            table.observe(&qp.request(), now);
        }
        for qp in qps.iter() {
            if qp.sent > 10 {
                table.observe(&qp.response(10), now);
            }
        }
        table.advance(now);
        check(table, qps);
    }
    from + packets
}

/// Local and remote numbers in different order, so that copying one to the other shows.
fn eight(rule: bool, psn: impl Fn(u32) -> u32) -> Vec<Qp> {
    (0..8).map(|i| Qp::new(100 + i, 900 + (i * 3) % 8, psn(i), rule)).collect()
}

#[test]
fn the_port_rule_pairs_lockstep_at_the_first_response() {
    let (mut t, mut qps) = (table(), eight(true, |_| 0));
    run(&mut t, &mut qps, 0, 11);
    assert_eq!(check(&t, &qps), 8);
    assert!(t.pairs().all(|p| p.supported));
    run(&mut t, &mut qps, 11, 2_000);
    assert_eq!(t.take_changes().len(), 8, "and nothing ever contradicts it");
}

#[test]
fn lockstep_without_ports_makes_no_pair_at_all() {
    let (mut t, mut qps) = (table(), eight(false, |_| 0));
    run(&mut t, &mut qps, 0, 3_000);
    assert_eq!(check(&t, &qps), 0);
}

#[test]
fn different_psns_pair_without_ports_after_several_responses() {
    let (mut t, mut qps) = (table(), eight(false, |i| 0x10_0000 * i));
    run(&mut t, &mut qps, 0, 100);
    assert_eq!(check(&t, &qps), 0, "nothing has settled yet");
    run(&mut t, &mut qps, 100, 500);
    assert_eq!(check(&t, &qps), 8);
    assert!(t.pairs().all(|p| !p.supported));
}

#[test]
fn seven_known_connections_leave_the_eighth() {
    // Two of equal PSN: elimination by one-to-one-ness once one of them is sure.
    let mut qps = eight(false, |i| if i < 2 { 0 } else { 0x10_0000 * i });
    qps[0].rule = true;
    let mut t = table();
    run(&mut t, &mut qps, 0, 600);
    assert_eq!(check(&t, &qps), 8);
}

#[test]
fn the_peers_requests_pair_as_well() {
    let (mut t, mut qps) = (table(), eight(true, |_| 0));
    for i in 0..50u64 {
        let now = Nanos(i * MS);
        for qp in &mut qps {
            let request = qp.request();
            t.observe(&mirrored(request, qp), now);
            t.observe(&mirrored(qp.response(1), qp), now);
        }
        t.advance(now);
        check(&t, &qps);
    }
    assert_eq!(check(&t, &qps), 8);
}

#[test]
fn a_flow_that_turns_up_in_mid_life_puts_unsupported_pairs_back() {
    let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 5_000, false)]);
    run(&mut t, &mut qps, 0, 600);
    assert_eq!(t.len(), 1);
    // A second connection at the same PSNs existed all along, unseen.
    let mut late = Qp::new(101, 901, 5_000, false);
    late.sent = 580;
    t.observe(&late.request(), Nanos(600 * MS));
    assert_eq!(t.len(), 0);
    qps.push(late);
    run(&mut t, &mut qps, 601, 600);
    assert_eq!(check(&t, &qps), 0);
    // With a port to support it, it would have stayed.
    let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 5_000, true)]);
    run(&mut t, &mut qps, 0, 600);
    t.observe(&late.request(), Nanos(600 * MS));
    assert_eq!(t.len(), 1);
}

#[test]
fn contradicting_responses_drop_a_pair_and_find_the_next() {
    for rule in [false, true] {
        let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 5_000, rule)]);
        let at = run(&mut t, &mut qps, 0, 600);
        assert_eq!(t.len(), 1);
        t.take_changes();
        // The local QPN is used again, connected to another remote QP.
        let mut next = vec![Qp::new(100, 901, 0x20_0000, rule)];
        for i in 0..1_000u64 {
            let now = Nanos((at + i) * MS);
            t.observe(&next[0].request(), now);
            t.observe(&next[0].response(0), now);
            t.advance(now);
        }
        assert_eq!(check(&t, &next), 1, "rule {rule}");
        let changes = t.take_changes();
        assert!(matches!(changes[0], Change::Removed(p) if p.remote.get() == 900));
        assert!(matches!(changes[1], Change::Added(p) if p.remote.get() == 901));
        next.clear();
    }
}

#[test]
fn another_peer_cannot_take_a_qp_in_use() {
    const P2: Addr = Addr::v4([10, 0, 0, 9]);
    let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 5_000, true)]);
    let at = run(&mut t, &mut qps, 0, 100);
    // P2 has a connection of ours, 101 to a QPN it chose so that (100, it) gives the same port, and claims to be 100's peer.
    let remote = (1..0xff_ffff)
        .find(|&b| source_port(Qpn::new(100), Qpn::new(b)) == source_port(Qpn::new(101), Qpn::new(b)))
        .expect("14 bits collide");
    let mut other = Qp::new(101, remote, 0, true);
    let claim = |t: &mut PairTable, at: u64, other: &mut Qp| {
        t.observe(&Observation { dst: P2, ..other.request() }, Nanos(at * MS));
        t.observe(&Observation { src: P2, dest_qp: Qpn::new(100), ..other.response(0) }, Nanos(at * MS));
        t.advance(Nanos(at * MS));
    };
    for i in 0..500 {
        claim(&mut t, at + i, &mut other);
        t.observe(&qps[0].request(), Nanos((at + i) * MS));
        assert_eq!(check(&t, &qps), 1);
    }
    // Once the old connection has fallen silent the number may have been used again.
    claim(&mut t, at + 3_000, &mut other);
    assert_eq!(t.of_local(LocalQp { ifindex: IF, qpn: Qpn::new(100) }).map(|p| p.peer), Some(P2));
}

#[test]
fn a_read_of_unknown_length_contradicts_nothing() {
    let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 0, true), Qp::new(101, 901, 0, true)]);
    let mut at = run(&mut t, &mut qps, 0, 300);
    assert_eq!(t.len(), 2);
    t.take_changes();
    for _ in 0..20 {
        let qp = &mut qps[0];
        t.observe(&Observation { opcode: op(0x0c), ..qp.request() }, Nanos(at * MS));
        for i in 0..1_000 {
            qp.sent += 1;
            at += 1;
            t.observe(&Observation { opcode: op(0x0e), ..qp.response(0) }, Nanos(at * MS));
            t.advance(Nanos(at * MS));
            assert_eq!(t.len(), 2, "response {i}");
        }
    }
    assert!(t.take_changes().is_empty());
}

#[test]
fn a_flood_of_first_sights_stays_in_bounds_and_harms_no_pair() {
    let limits = Limits { entries: 1_000, entries_per_hosts: 300, ..Limits::default() };
    let (mut t, mut qps) = (PairTable::new(limits), vec![Qp::new(100, 900, 0, true)]);
    let at = run(&mut t, &mut qps, 0, 20);
    assert_eq!(t.len(), 1);
    let mut x = 1u64;
    for i in 0..50_000u64 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let [.., a, b, c, d] = x.to_be_bytes();
        // Half from the peer's own address, half from anywhere.
        let src = if i % 2 == 0 { P } else { Addr::v4([a, b, c, d]) };
        let o = Observation {
            direction: Direction::Ingress,
            src,
            dst: L,
            dest_qp: Qpn::new((x >> 32) as u32),
            psn: Psn::new((x >> 8) as u32),
            first_sight: true,
            ..qps[0].request()
        };
        t.observe(&o, Nanos(at * MS + i * 10_000));
        t.advance(Nanos(at * MS + i * 10_000));
        assert!(t.entries() <= 1_000 && t.groups.len() <= 1_001 && t.due.len() <= 2_000);
    }
    assert!(t.refused() > 10_000);
    assert_eq!(t.len(), 1);
    // A new connection is still found once the flood is over.
    qps.push(Qp::new(101, 901, 0, true));
    run(&mut t, &mut qps, at + 5_000, 50);
    assert_eq!(check(&t, &qps), 2);
}

#[test]
fn idle_pairs_are_forgotten() {
    let (mut t, mut qps) = (table(), eight(true, |_| 0));
    let at = run(&mut t, &mut qps, 0, 20);
    t.take_changes();
    t.advance(Nanos((at + 119_000) * MS));
    assert_eq!(t.len(), 8);
    t.advance(Nanos((at + 121_000) * MS));
    assert_eq!((t.len(), t.entries(), t.next_deadline()), (0, 0, None));
    assert_eq!(t.take_changes().len(), 8);
}

#[test]
fn a_full_table_is_swept_a_part_at_a_time() {
    let mut t = PairTable::new(Limits { entries: 100_000, ..Limits::default() });
    for host in 0..20u8 {
        for qpn in 0..1_000 {
            let o = Qp::new(2 + qpn, 2 + qpn, 0, true).request();
            t.observe(&Observation { dst: Addr::v4([10, 1, 2, host]), ..o }, Nanos(0));
        }
    }
    assert_eq!(t.entries(), 20_000);
    let late = Nanos(200_000 * MS);
    let mut left = vec![t.entries()];
    while t.next_deadline().is_some_and(|d| d <= late) {
        t.advance(late);
        left.push(t.entries());
        assert!(left.len() < 100, "{left:?}");
    }
    assert!(left.windows(2).all(|w| w[0] - w[1] <= 3_000) && left.len() > 7, "{left:?}");
    assert_eq!((t.entries(), t.next_deadline()), (0, None));
}

#[test]
fn other_services_and_the_gsi_never_pair() {
    let mut t = table();
    for (opcode, qpn) in [(0x64, 900), (0xa7, 900), (0x81, 900), (0x07, 1), (0x07, 0xff_ffff)] {
        let o = Qp::new(100, qpn, 0, true).request();
        t.observe(&Observation { opcode: op(opcode), ..o }, Nanos(0));
    }
    assert_eq!(t.entries(), 0);
}

#[test]
fn the_kernels_flow_table_corrects_what_samples_missed() {
    let (mut t, mut qps) = (table(), vec![Qp::new(100, 900, 1_000, false)]);
    run(&mut t, &mut qps, 0, 20);
    let seen = |qpn, first, highest| FlowSeen {
        ifindex: IF,
        direction: Direction::Egress,
        src: L,
        dst: P,
        dest_qp: Qpn::new(qpn),
        first: Psn::new(first),
        highest: Psn::new(highest),
    };
    t.observe_flow(&seen(900, 990, 9_000), Nanos(20 * MS));
    let hosts = Hosts { ifindex: IF, local: L, peer: P };
    let flow = t.groups[&hosts].us.flows[&900].rules;
    assert_eq!((flow.first, flow.highest), (Psn::new(990), Psn::new(9_000)));
    t.observe_flow(&seen(7, 0, 1), Nanos(0));
    assert_eq!(t.entries(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Connections of any speed and start, some under the port rule, seen through lossy sampling: never a wrong pair.
    #[test]
    fn lossy_sampling_never_makes_a_wrong_pair(
        qps in prop::collection::vec((prop::bool::ANY, prop_oneof![Just(0u32), Just(0u32), 0u32..0xff_0000], 1u64..6), 1..10),
        loss in 0u64..70, seed: u64
    ) {
        let speeds: Vec<u64> = qps.iter().map(|q| q.2).collect();
        let n = qps.len() as u32;
        let mut qps: Vec<Qp> = qps
            .iter()
            .enumerate()
            .map(|(i, &(rule, psn, _))| Qp::new(100 + i as u32, 900 + n - i as u32, psn, rule))
            .collect();
        let mut t = table();
        let mut x = seed | 1;
        let mut seen = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % 100 >= loss
        };
        for i in 0..1_500u64 {
            let now = Nanos(i * MS);
            for (qp, &speed) in qps.iter_mut().zip(&speeds) {
                if i % speed == 0 {
                    let request = qp.request();
                    if seen() {
                        t.observe(&request, now);
                    }
                    if qp.sent > 5 && seen() {
                        t.observe(&qp.response(5), now);
                    }
                }
            }
            t.advance(now);
            check(&t, &qps);
        }
        let by_rule = qps.iter().filter(|q| q.rule).count();
        prop_assert!(t.len() >= by_rule, "{} pairs, {by_rule} under the rule", t.len());
    }
}
