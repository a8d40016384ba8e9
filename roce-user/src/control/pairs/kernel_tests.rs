use proptest::prelude::*;
use roce_common::{
    abi::Direction,
    psn::Psn,
    units::Addr,
    wire::{Opcode, Service, source_port},
};

use super::*;
use crate::control::{Change, Limits};

const L: Addr = Addr::v4([10, 0, 0, 1]);
const P: Addr = Addr::v4([10, 0, 0, 2]);
const Q: Addr = Addr::v4([10, 0, 0, 3]);
const EVIL: Addr = Addr::v4([10, 0, 0, 66]);
const IF: u32 = 3;
const MS: u64 = 1_000_000;
const RC: u8 = 0x07;
const UC: u8 = 0x27;
const ACK: u8 = 0x11;

fn local(qpn: u32) -> LocalQp {
    LocalQp { ifindex: IF, qpn: Qpn::new(qpn) }
}

fn packet(direction: Direction, peer: Addr, dest_qp: u32, opcode: u8, src_port: u16) -> Observation {
    let (src, dst) = if direction == Direction::Egress { (L, peer) } else { (peer, L) };
    Observation {
        ifindex: IF,
        direction,
        src,
        dst,
        dest_qp: Qpn::new(dest_qp),
        psn: Psn::new(100),
        opcode: Opcode::new(opcode).expect("a known opcode"),
        src_port,
        first_sight: true,
        restart: false,
    }
}

/// Another stack's port, which says nothing.
const PLAIN: u16 = 49_152;

fn out(peer: Addr, remote: u32) -> Observation {
    packet(Direction::Egress, peer, remote, RC, PLAIN)
}

fn port(local: u32, remote: u32) -> u16 {
    source_port(Qpn::new(local), Qpn::new(remote))
}

fn rc(qpn: u32, remote: u32) -> KernelQp {
    KernelQp { local: local(qpn), remote: Qpn::new(remote), service: Service::Rc, expects: None }
}

fn uc(qpn: u32, remote: u32) -> KernelQp {
    KernelQp { service: Service::Uc, ..rc(qpn, remote) }
}

/// A table, a kernel that answers it, and a clock.
struct World {
    table: PairTable,
    kernel: Option<Vec<KernelQp>>,
    now: Nanos,
    questions: u64,
}

impl World {
    fn new(kernel: &[KernelQp]) -> Self {
        let table = PairTable::new(Limits::default());
        Self { table, kernel: Some(kernel.to_vec()), now: Nanos(1_000 * MS), questions: 0 }
    }

    fn see(&mut self, o: &Observation) {
        self.table.observe(o, self.now);
        self.settle();
    }

    /// Asks as often as the table wants to, and answers at once.
    fn settle(&mut self) {
        if self.table.ask_kernel(self.now) {
            self.questions += 1;
            let list = KernelList::new(self.now, self.kernel.as_deref());
            self.table.tell_kernel(&list, self.now);
        }
    }

    fn pass(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now = Nanos(self.now.0 + MS);
            self.table.advance(self.now);
            while self.table.sweep.runs() {
                self.table.advance(self.now);
            }
            self.settle();
        }
    }

    fn pair(&self, qpn: u32) -> Option<(Addr, u32)> {
        self.table.of_local(local(qpn)).map(|p| (p.peer, p.remote.get()))
    }

    fn unknown(&self, why: Unknown) -> u64 {
        self.table.kernel_stats().unknown[why as usize]
    }
}

#[test]
fn one_packet_out_is_enough() {
    let mut w = World::new(&[rc(17, 42), rc(18, 43)]);
    w.see(&out(P, 42));
    assert_eq!(w.pair(17), Some((P, 42)));
    assert_eq!(w.pair(18), None, "nobody knows its peer's address");
    assert_eq!((w.table.kernel_stats().paired, w.table.kernel_stats().first), (1, 1));
    // A responder's first ACK does the same.
    w.pass(200);
    w.see(&packet(Direction::Egress, Q, 43, ACK, PLAIN));
    assert_eq!(w.pair(18), Some((Q, 43)));
}

/// That expects a PSN next; [`packet`] has 100.
fn expecting(qpn: u32, remote: u32, psn: u32) -> KernelQp {
    KernelQp { expects: Some(Psn::new(psn)), ..rc(qpn, remote) }
}

#[test]
fn a_request_that_comes_in_pairs_where_the_kernel_expects_it() {
    for (expects, pair) in [
        (Some(100), true),
        (Some(101), true),
        (Some(164), true),
        (Some(90), true),
        (Some(100 + 1_024), true),
        (Some(100 + 1_025), false),
        (Some(0xff_ff00), false),
        (Some(0x80_0000), false),
        (None, false),
    ] {
        let qp = KernelQp { expects: expects.map(Psn::new), ..rc(17, 42) };
        let mut w = World::new(&[qp]);
        w.see(&packet(Direction::Ingress, P, 17, RC, PLAIN));
        assert_eq!(w.pair(17), pair.then_some((P, 42)), "{expects:?}");
        assert_eq!(w.unknown(Unknown::OtherPsn), u64::from(!pair), "{expects:?}");
        // An answer tells whatever the kernel expects, and changes nothing where all is known.
        w.pass(200);
        w.see(&packet(Direction::Egress, P, 42, ACK, PLAIN));
        assert_eq!(w.pair(17), Some((P, 42)), "{expects:?}");
    }
    // An answer that comes in says nothing of who asked.
    let mut w = World::new(&[expecting(17, 42, 100)]);
    w.see(&packet(Direction::Ingress, EVIL, 17, ACK, PLAIN));
    w.pass(500);
    assert_eq!((w.pair(17), w.questions), (None, 0));
}

#[test]
fn a_stranger_who_does_not_know_the_psn_takes_nothing_away() {
    let strange = |psn| Observation { psn: Psn::new(psn), ..packet(Direction::Ingress, EVIL, 17, RC, PLAIN) };
    for stranger_first in [true, false] {
        let mut w = World::new(&[expecting(17, 42, 110)]);
        let (stranger, peer) = (strange(0x70_0000), packet(Direction::Ingress, P, 17, RC, PLAIN));
        let order = if stranger_first { [&stranger, &peer] } else { [&peer, &stranger] };
        order.into_iter().for_each(|o| w.table.observe(o, w.now));
        w.settle();
        assert_eq!(w.pair(17), Some((P, 42)), "{stranger_first}");
    }
    // One who does is as good as the peer, so neither is believed, until an answer tells.
    let mut w = World::new(&[expecting(17, 42, 110)]);
    [strange(105), packet(Direction::Ingress, P, 17, RC, PLAIN)].iter().for_each(|o| w.table.observe(o, w.now));
    w.settle();
    assert_eq!((w.pair(17), w.unknown(Unknown::SeveralPeers)), (None, 2));
    w.pass(200);
    w.see(&packet(Direction::Egress, P, 42, ACK, PLAIN));
    assert_eq!(w.pair(17), Some((P, 42)));
    // And one who was first loses it by the answer.
    let mut w = World::new(&[expecting(17, 42, 110)]);
    w.see(&strange(105));
    assert_eq!(w.pair(17), Some((EVIL, 42)));
    w.pass(200);
    w.see(&packet(Direction::Egress, P, 42, ACK, PLAIN));
    w.pass(200);
    assert_eq!(w.pair(17), Some((P, 42)), "what leaves is not to be forged");
    w.pass(200);
    w.see(&Observation { restart: true, ..strange(105) });
    w.pass(200);
    assert_eq!(w.pair(17), Some((P, 42)), "and is not taken back by what is");
}

#[test]
fn what_was_heard_tells_one_number_at_two_peers_apart_where_no_port_does() {
    // Both peers have a queue pair 42. Which local one answers whom no packet out says, but those that come in do.
    let mut w = World::new(&[expecting(17, 42, 100), KernelQp { local: local(18), ..expecting(17, 42, 7_000) }]);
    w.see(&packet(Direction::Ingress, P, 17, RC, PLAIN));
    w.pass(200);
    w.see(&packet(Direction::Egress, Q, 42, ACK, PLAIN));
    assert_eq!((w.pair(17), w.pair(18)), (Some((P, 42)), Some((Q, 42))));
    // The port does, if there is a rule, whatever was heard.
    let mut w = World::new(&[expecting(17, 42, 100), KernelQp { local: local(18), ..expecting(17, 42, 7_000) }]);
    w.see(&packet(Direction::Ingress, EVIL, 17, RC, PLAIN));
    w.pass(200);
    w.see(&packet(Direction::Egress, P, 42, ACK, port(17, 42)));
    assert_eq!(w.pair(17), Some((P, 42)));
    w.pass(200);
    w.see(&packet(Direction::Egress, Q, 42, ACK, port(18, 42)));
    assert_eq!(w.pair(18), Some((Q, 42)));
}

#[test]
fn both_ways_of_one_connection_are_one_pair() {
    let mut w = World::new(&[expecting(17, 42, 100)]);
    w.table.observe(&packet(Direction::Ingress, P, 17, RC, PLAIN), w.now);
    w.table.observe(&out(P, 42), w.now);
    w.settle();
    assert_eq!((w.pair(17), w.unknown(Unknown::SeveralPeers)), (Some((P, 42)), 0));
}

#[test]
fn unreliable_connections_pair_at_both_ends() {
    let mut w = World::new(&[uc(17, 42), uc(18, 43)]);
    w.see(&packet(Direction::Ingress, P, 17, UC, PLAIN));
    assert_eq!(w.pair(17), Some((P, 42)));
    w.pass(200);
    w.see(&packet(Direction::Egress, P, 43, UC, PLAIN));
    assert_eq!(w.pair(18), Some((P, 43)));
    // They live while they are seen, and no longer.
    for _ in 0..130 {
        w.pass(1_000);
        w.table.observe(&Observation { first_sight: false, ..packet(Direction::Ingress, P, 17, UC, PLAIN) }, w.now);
    }
    assert_eq!((w.pair(17), w.pair(18)), (Some((P, 42)), None));
}

#[test]
fn two_who_claim_an_unreliable_queue_pair_both_get_none() {
    let mut w = World::new(&[uc(17, 42)]);
    w.table.observe(&packet(Direction::Ingress, P, 17, UC, PLAIN), w.now);
    w.table.observe(&packet(Direction::Ingress, EVIL, 17, UC, PLAIN), w.now);
    w.settle();
    assert_eq!((w.pair(17), w.unknown(Unknown::SeveralPeers)), (None, 2));
    // Whoever comes later takes nothing away.
    let mut w = World::new(&[uc(17, 42)]);
    w.see(&packet(Direction::Ingress, P, 17, UC, PLAIN));
    w.pass(200);
    w.see(&packet(Direction::Ingress, EVIL, 17, UC, PLAIN));
    w.pass(200);
    assert_eq!((w.pair(17), w.unknown(Unknown::SeveralPeers)), (Some((P, 42)), 1));
}

#[test]
fn one_number_at_two_peers_is_not_guessed() {
    let mut w = World::new(&[rc(17, 42), rc(18, 42)]);
    w.table.observe(&out(P, 42), w.now);
    w.table.observe(&out(Q, 42), w.now);
    w.settle();
    assert_eq!((w.pair(17), w.pair(18)), (None, None));
    assert_eq!(w.unknown(Unknown::SeveralLocal), 2);
    w.pass(2_000);
    assert_eq!(w.questions, 1, "and not asked for again and again");
}

#[test]
fn the_source_port_tells_one_number_at_two_peers_apart() {
    let mut w = World::new(&[rc(17, 42), rc(18, 42)]);
    w.table.observe(&packet(Direction::Egress, P, 42, RC, port(18, 42)), w.now);
    w.table.observe(&packet(Direction::Egress, Q, 42, RC, port(17, 42)), w.now);
    w.settle();
    assert_eq!((w.pair(18), w.pair(17)), (Some((P, 42)), Some((Q, 42))));
}

#[test]
fn one_queue_pair_at_two_peers_is_not_guessed() {
    for p in [PLAIN, port(17, 42)] {
        let mut w = World::new(&[rc(17, 42)]);
        w.table.observe(&packet(Direction::Egress, P, 42, RC, p), w.now);
        w.table.observe(&packet(Direction::Egress, Q, 42, RC, p), w.now);
        w.settle();
        assert_eq!((w.pair(17), w.unknown(Unknown::SeveralPeers)), (None, 2));
    }
}

#[test]
fn two_devices_with_one_number_on_one_interface_are_not_guessed() {
    let mut w = World::new(&[rc(17, 42), rc(17, 43)]);
    w.see(&out(P, 42));
    assert_eq!((w.pair(17), w.unknown(Unknown::SeveralLocal)), (None, 1));
}

#[test]
fn an_answer_serves_no_flow_that_is_younger_than_the_question() {
    let mut w = World::new(&[]);
    w.table.observe(&out(P, 42), w.now);
    assert!(w.table.ask_kernel(w.now));
    let asked = w.now;
    w.now = Nanos(w.now.0 + MS);
    w.table.observe(&out(Q, 43), w.now);
    assert!(!w.table.ask_kernel(w.now), "one question at a time");
    w.table.tell_kernel(&KernelList::new(asked, Some(&[rc(17, 42), rc(18, 43)])), w.now);
    assert_eq!((w.pair(17), w.pair(18)), (Some((P, 42)), None));
    assert_eq!(w.unknown(Unknown::NotListed), 0);
    w.kernel = Some(vec![rc(17, 42), rc(18, 43)]);
    w.pass(200);
    assert_eq!(w.pair(18), Some((Q, 43)));
}

#[test]
fn questions_are_coalesced() {
    let qps: Vec<_> = (0..100).map(|i| rc(100 + i, 900 + i)).collect();
    let mut w = World::new(&qps);
    for i in 0..100 {
        w.see(&out(P, 900 + i));
        w.pass(2);
    }
    w.pass(200);
    assert_eq!(w.table.len(), 100);
    assert!(w.questions <= 4, "{} questions in 0.4 s", w.questions);
    w.pass(60_000);
    assert!(w.questions <= 4, "no new flow, no question");
}

#[test]
fn without_rdma_nobody_is_asked_twice_in_a_row() {
    let mut w = World::new(&[]);
    w.kernel = None;
    for i in 0..50 {
        w.see(&out(P, 900 + i));
        w.pass(100);
    }
    assert_eq!(w.questions, 1);
    // It comes later: flows that begin from then on are paired.
    w.kernel = Some(vec![rc(17, 42)]);
    w.see(&out(P, 42));
    w.pass(10_000);
    assert_eq!(w.pair(17), Some((P, 42)));
    assert!(w.unknown(Unknown::NoList) >= 1);
}

#[test]
fn what_the_kernel_does_not_list_is_left_to_acknowledgements() {
    let mut w = World::new(&[rc(17, 42)]);
    w.see(&packet(Direction::Egress, P, 900, RC, port(100, 900)));
    w.pass(200);
    assert_eq!((w.table.len(), w.unknown(Unknown::NotListed)), (0, 1));
    w.see(&Observation { first_sight: false, ..packet(Direction::Ingress, P, 100, ACK, port(100, 900)) });
    assert_eq!(w.pair(100), Some((P, 900)));
    // Nor does a later list take it back.
    w.see(&out(Q, 42));
    w.pass(200);
    assert_eq!((w.pair(100), w.pair(17)), (Some((P, 900)), Some((Q, 42))));
}

#[test]
fn no_packet_takes_away_what_the_kernel_said() {
    let mut w = World::new(&[rc(17, 42)]);
    w.see(&out(P, 42));
    // Another peer plays the part of its peer, source port and all.
    for psn in 0..20 {
        w.pass(50);
        w.see(&Observation { psn: Psn::new(psn), ..packet(Direction::Ingress, EVIL, 900, RC, port(17, 900)) });
        w.see(&Observation { psn: Psn::new(psn), ..packet(Direction::Ingress, EVIL, 17, RC, port(17, 900)) });
        w.see(&Observation { psn: Psn::new(psn), ..packet(Direction::Egress, EVIL, 900, ACK, port(17, 900)) });
    }
    assert_eq!(w.pair(17), Some((P, 42)));
    // Its peer answers what was never sent.
    for psn in 0..20 {
        w.pass(50);
        let far = Psn::new(0x40_0000 + psn);
        w.see(&Observation { psn: far, first_sight: false, ..packet(Direction::Ingress, P, 17, ACK, PLAIN) });
    }
    w.pass(500);
    assert_eq!(w.pair(17), Some((P, 42)));
}

#[test]
fn the_kernel_takes_back_what_is_gone_and_corrects_what_was_wrong() {
    let mut w = World::new(&[rc(17, 42)]);
    w.see(&out(P, 42));
    assert_eq!(w.pair(17), Some((P, 42)));
    // The queue pair is destroyed, another is connected to the same number: the flow begins anew.
    w.kernel = Some(vec![rc(18, 42)]);
    w.pass(1_000);
    w.see(&Observation { first_sight: false, restart: true, ..out(P, 42) });
    assert_eq!((w.pair(17), w.pair(18)), (None, Some((P, 42))));
    assert_eq!(w.table.kernel_stats().withdrawn, 1);
    let removed = w.table.take_changes().iter().filter(|c| matches!(c, Change::Removed(_))).count();
    assert_eq!(removed, 1);
    // What acknowledgements concluded wrongly falls too.
    w.see(&packet(Direction::Egress, P, 900, RC, port(19, 900)));
    w.pass(200);
    w.see(&Observation { first_sight: false, ..packet(Direction::Ingress, P, 19, ACK, port(19, 900)) });
    assert_eq!(w.pair(19), Some((P, 900)));
    w.kernel = Some(vec![rc(18, 42), rc(19, 777)]);
    w.see(&out(Q, 777));
    w.pass(200);
    assert_eq!(w.pair(19), Some((Q, 777)));
}

#[test]
fn cnps_without_a_pair_ask_once_more() {
    let mut w = World::new(&[]);
    w.see(&out(P, 42));
    w.kernel = Some(vec![rc(17, 42)]);
    w.pass(1_000);
    assert_eq!(w.pair(17), None);
    w.table.ask_again(w.now);
    w.settle();
    assert_eq!(w.pair(17), Some((P, 42)));
}

#[test]
fn what_waits_is_bounded_and_forgotten() {
    let mut w = World::new(&[]);
    for i in 0..20_000 {
        w.table.observe(&packet(Direction::Ingress, EVIL, 2 + i, UC, PLAIN), w.now);
        w.table.observe(&out(P, 2 + i), w.now);
    }
    let asking = &w.table.asking;
    assert!(asking.open.len() <= MOST_OPEN && asking.incoming <= MOST_INCOMING, "{}", asking.open.len());
    assert!(w.unknown(Unknown::Full) > 30_000);
    w.settle();
    w.pass(200_000);
    let asking = &w.table.asking;
    assert_eq!((asking.open.len(), asking.incoming, asking.waiting), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever passes and whatever the kernel says, the counts hold, and a pair is one that the kernel or a packet named.
    #[test]
    fn any_order_of_packets_and_answers_keeps_the_counts(
        steps in proptest::collection::vec((0u8..6, 0u32..4, 0u32..4, any::<bool>(), 0u64..300), 1..200),
    ) {
        let mut w = World::new(&[]);
        for (what, a, b, flag, ms) in steps {
            let peer = [P, Q, EVIL, L][a as usize];
            let p = if flag { port(17 + a, 42 + b) } else { PLAIN };
            match what {
                0 => w.see(&packet(Direction::Egress, peer, 42 + b, RC, p)),
                1 => w.see(&packet(Direction::Ingress, peer, 17 + b, UC, p)),
                2 => w.see(&packet(Direction::Ingress, peer, 17 + b, ACK, p)),
                3 => w.kernel = (a < 3).then(|| vec![rc(17 + a, 42 + b), uc(17 + b, 42 + a), rc(20, 42)]),
                4 => w.table.ask_again(w.now),
                _ => w.pass(ms),
            }
            let asking = &w.table.asking;
            let waiting = asking.open.values().filter(|o| !o.answered).count();
            let incoming = asking.open.keys().filter(|f| matches!(f, Flow::In(..))).count();
            prop_assert_eq!((asking.waiting, asking.incoming), (waiting, incoming));
            prop_assert!(asking.told.iter().all(|l| w.table.of_local(*l).is_some()));
            for pair in w.table.pairs() {
                prop_assert_eq!(w.table.of_remote(IF, pair.peer, pair.remote), Some(pair.local.qpn));
            }
        }
    }
}
