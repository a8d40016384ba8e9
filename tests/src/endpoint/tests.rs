//! The protocol against itself, in memory.

use std::time::Duration;

use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Opcode, Syndrome},
};

use super::memory::{Side, converse};
use super::*;

fn pair(traffic: Traffic, start: u32, rnr: Option<Rnr>) -> (Qp, Qp) {
    let a = QpConfig {
        local_qpn: Qpn::new(0x11),
        remote_qpn: Qpn::new(0x23),
        local: Addr::v4([10, 0, 0, 1]),
        remote: Addr::v4([10, 0, 0, 2]),
        local_mac: [2, 0, 0, 0, 0, 1],
        next_hop_mac: [2, 0, 0, 0, 0, 2],
        pmtu: 256,
        tos: 0,
        src_port: None,
        send_psn: Psn::new(start),
        recv_psn: Psn::new(7),
        timeout: Duration::from_millis(67),
        rnr: None,
        traffic,
    };
    let b = QpConfig {
        local_qpn: a.remote_qpn,
        remote_qpn: a.local_qpn,
        local: a.remote,
        remote: a.local,
        local_mac: a.next_hop_mac,
        next_hop_mac: a.local_mac,
        send_psn: a.recv_psn,
        recv_psn: a.send_psn,
        rnr,
        traffic: Traffic::none(),
        ..a.clone()
    };
    (Qp::new(a), Qp::new(b))
}

const MIXED: [Message; 5] = [
    Message::new(Op::Write, 5_000),
    Message::new(Op::Read, 3_001),
    Message::new(Op::Send, 700),
    Message::new(Op::Read, 256),
    Message::new(Op::Send, 0),
];

fn mixed(rounds: u64) -> Traffic {
    Traffic { messages: MIXED.to_vec(), rounds: Some(rounds) }
}

/// Payload bytes of one round that arrive at A (READ) and at B.
const AT_A: u64 = 3_257;
const AT_B: u64 = 5_700;

#[test]
fn without_loss_nothing_is_repeated() {
    let (mut a, mut b) = pair(mixed(100), 0xff_fff0, None);
    assert!(converse(&mut a, &mut b, 100_000, |_, _, _| true));
    let (sa, sb) = (a.stats(), b.stats());
    assert_eq!((sa.completed, sa.accepted_bytes, sb.accepted_bytes), (500, 100 * AT_A, 100 * AT_B));
    for s in [sa, sb] {
        assert_eq!(
            (s.retransmitted, s.reasked, s.naks, s.timeouts, s.duplicates, s.out_of_sequence),
            (0, 0, 0, 0, 0, 0)
        );
    }
}

#[test]
fn one_lost_packet_costs_one_nak_and_a_go_back_n() {
    let (mut a, mut b) = pair(Traffic::times(Message::new(Op::Write, 256 * 40), 1), 100, None);
    let (mut lost, mut naks) = (false, Vec::new());
    assert!(converse(&mut a, &mut b, 1_000, |side, _, p| {
        if let Some(Syndrome::PsnSequence) = p.aeth.map(Aeth::syndrome) {
            naks.push(p.bth.psn.get());
        }
        let drop = side == Side::A && p.bth.psn.get() == 110 && !lost;
        lost |= drop;
        !drop
    }));
    assert_eq!(naks, [110], "one NAK that names the first missing PSN");
    let s = a.stats();
    assert_eq!((s.naks, s.timeouts, s.completed), (1, 0, 1));
    assert!(s.retransmitted >= 2, "{s:?}");
    assert_eq!(b.stats().accepted_bytes, 256 * 40);
}

#[test]
fn a_lost_nak_costs_a_timeout() {
    let (mut a, mut b) = pair(Traffic::times(Message::new(Op::Write, 256 * 40), 1), 100, None);
    let (mut lost, mut lost_nak) = (false, false);
    assert!(converse(&mut a, &mut b, 1_000, |side, _, p| {
        let data = side == Side::A && p.bth.psn.get() == 110 && !lost;
        let nak = side == Side::B && !lost_nak;
        lost |= data;
        lost_nak |= nak;
        !(data || nak)
    }));
    assert_eq!((a.stats().naks, a.stats().timeouts), (0, 1));
    assert_eq!(b.stats().accepted_bytes, 256 * 40);
}

#[test]
fn a_lost_read_response_is_asked_again_from_the_middle() {
    let (mut a, mut b) = pair(Traffic::times(Message::new(Op::Read, 256 * 20), 1), 100, None);
    let mut requests = Vec::new();
    let mut restart = None;
    let mut lost = false;
    assert!(converse(&mut a, &mut b, 1_000, |side, _, p| {
        if side == Side::A {
            requests.push((p.bth.psn.get(), p.reth.map(|r| r.dma_len)));
        } else if requests.len() == 2 && p.bth.psn.get() == 105 {
            restart = Some(p.bth.opcode);
        }
        let drop = side == Side::B && p.bth.psn.get() == 105 && !lost;
        lost |= drop;
        !drop
    }));
    assert_eq!(requests, [(100, Some(256 * 20)), (105, Some(256 * 15))]);
    assert_eq!(restart, Some(Opcode::READ_RESPONSE_FIRST));
    assert_eq!((a.stats().reasked, a.stats().naks, a.stats().timeouts), (1, 0, 0));
    assert_eq!(a.stats().accepted_bytes, 256 * 20);
}

#[test]
fn receiver_not_ready_waits_and_goes_on() {
    let (mut a, mut b) = pair(mixed(10), 0, Some(Rnr { every: 3, code: 14 }));
    assert!(converse(&mut a, &mut b, 10_000, |_, _, _| true));
    // 20 SENDs: the 3rd, 6th … 18th are refused once.
    assert_eq!((a.stats().rnrs, b.stats().rnrs_sent), (6, 6));
    assert_eq!((a.stats().naks, a.stats().timeouts), (0, 0));
    assert_eq!((a.stats().completed, b.stats().accepted_bytes), (50, 10 * AT_B));
}

#[test]
fn random_loss_both_ways_loses_no_byte() {
    for seed in 1..=20u64 {
        let (mut a, mut b) = pair(mixed(20), 0xff_ff00, Some(Rnr { every: 4, code: 1 }));
        let mut lossy = loss(0.03, seed);
        assert!(converse(&mut a, &mut b, 200_000, |_, _, p| !lossy(p)), "seed {seed}");
        assert_eq!((a.stats().fatal, b.stats().fatal), (None, None), "seed {seed}");
        assert_eq!(a.stats().completed, 100, "seed {seed}");
        assert_eq!((a.stats().accepted_bytes, b.stats().accepted_bytes), (20 * AT_A, 20 * AT_B), "seed {seed}");
    }
}

#[test]
fn ack_is_asked_at_the_end_and_after_65_packets() {
    let (mut a, mut b) = pair(Traffic::times(Message::new(Op::Write, 256 * 150), 1), 0, None);
    let mut asked = Vec::new();
    assert!(converse(&mut a, &mut b, 1_000, |side, _, p| {
        if side == Side::A && p.bth.ack_req {
            asked.push(p.bth.psn.get());
        }
        true
    }));
    // `noack_pkts++ > 64`: the 66th packet since the last one that asked.
    assert_eq!(asked, [65, 131, 149]);
}
