//! Queue pairs that are limited from their first data packet on, and what leaves while the root qdisc is replaced, through
//! BPF_PROG_TEST_RUN. Needs root.

use roce_common::{
    abi::{Config, Counter, Direction, Pacer, PeerQp, Role},
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, Deth, Opcode, emit},
};
use roce_tests::progtest::{Programs, config, monotonic_ns};

const LOCAL: Addr = Addr::v4([10, 0, 0, 1]);
const PEER: Addr = Addr::v4([10, 0, 0, 2]);
const THIRD: Addr = Addr::v4([10, 0, 0, 3]);
const START: u64 = 100_000;
const CLASS: u32 = 0x726f_0007;

fn programs(pacer: Pacer, change: fn(&mut Config)) -> Programs {
    let mut p = Programs::load().expect("loading the programs needs root");
    let mut cfg = config(Role::Host);
    cfg.pacer = pacer as u32;
    cfg.start_bytes_per_sec = START;
    change(&mut cfg);
    p.maps.set_config(cfg).unwrap();
    p.maps.set_local(&[LOCAL]).unwrap();
    p.maps.beat(monotonic_ns()).unwrap();
    p
}

fn frame(src: Addr, opcode: Opcode, qpn: u32, payload: &[u8]) -> Vec<u8> {
    let path = emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src,
        dst: PEER,
        tos: 2,
        ttl: 64,
        ip_id: 7,
        src_port: 0xc123,
    };
    let ext = emit::Ext {
        aeth: (opcode == Opcode::ACKNOWLEDGE).then_some(Aeth { raw_syndrome: 0x1f, msn: 1 }),
        deth: (opcode == Opcode::UD_SEND_ONLY).then_some(Deth { qkey: 1, src_qp: Qpn::new(9) }),
        ..emit::Ext::default()
    };
    let mut out = vec![0; 2_048];
    let n = emit::frame(&path, &Bth::new(opcode, Qpn::new(qpn), Psn::new(1)), &ext, payload, &mut out).unwrap();
    out.truncate(n);
    out
}

fn data(qpn: u32) -> Vec<u8> {
    frame(LOCAL, Opcode::SEND_MIDDLE, qpn, &[0; 1_024])
}

fn count(p: &Programs, counter: Counter) -> u64 {
    p.count(Direction::Egress, counter).unwrap()
}

#[test]
fn the_first_data_packet_of_a_queue_pair_limits_it() {
    let mut p = programs(Pacer::Edt, |_| {});
    let now = monotonic_ns();
    let stamps: Vec<u64> = (0..3).map(|_| p.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap().tstamp).collect();
    let cost = data(0x42).len() as u64 * 1_000_000_000 / START;
    assert!(stamps[0] >= now && stamps[0] < now + 1_000_000_000, "{stamps:?} {now}");
    assert_eq!((stamps[1] - stamps[0], stamps[2] - stamps[1]), (cost, cost), "the start rate from the first packet on");
    let rate = p.maps.rate(PeerQp::new(PEER, Qpn::new(0x42))).unwrap();
    assert_eq!((rate.bytes_per_sec, rate.classid, rate.cause_ns), (START, 0, 0));
    // Two queue pairs of one peer have one each.
    p.tc("roce_tc_egress", &data(0x43), 0, 1).unwrap();
    assert_eq!((p.maps.rates().len(), count(&p, Counter::StartLimited)), (2, 2));
}

#[test]
fn what_cannot_congest_or_is_not_ours_is_not_limited() {
    let mut p = programs(Pacer::Edt, |_| {});
    for packet in [
        frame(LOCAL, Opcode::ACKNOWLEDGE, 0x42, &[]),
        frame(LOCAL, Opcode::UD_SEND_ONLY, 0x42, &[0; 64]),
        frame(LOCAL, Opcode::SEND_ONLY, 1, &[0; 256]),
        frame(THIRD, Opcode::SEND_MIDDLE, 0x42, &[0; 1_024]),
    ] {
        p.tc("roce_tc_egress", &packet, 0, 1).unwrap();
    }
    assert_eq!((p.maps.rates().len(), count(&p, Counter::StartLimited)), (0, 0));

    let mut off = programs(Pacer::Off, |_| {});
    off.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    let mut without = programs(Pacer::Edt, |cfg| cfg.start_bytes_per_sec = 0);
    without.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    assert_eq!((off.maps.rates().len(), without.maps.rates().len()), (0, 0));
}

#[test]
fn a_dead_controller_limits_nobody() {
    let mut p = programs(Pacer::Edt, |_| {});
    p.maps.beat(monotonic_ns() - 2_000_000_000).unwrap();
    let run = p.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    assert_eq!((run.tstamp, p.maps.rates().len()), (0, 0));
}

#[test]
fn with_htb_a_queue_pair_takes_a_class_that_waits_or_starts_without() {
    let mut p = programs(Pacer::Htb, |_| {});
    p.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    assert_eq!((p.maps.rates().len(), count(&p, Counter::StartUnlimited)), (0, 1), "there is none");
    p.maps.offer_start_class(CLASS).unwrap();
    p.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    assert_eq!(p.maps.rate(PeerQp::new(PEER, Qpn::new(0x42))).unwrap().classid, CLASS);
    assert_eq!(p.tc("roce_htb", &data(0x42), 0, 1).unwrap().verdict, 0, "and its packets are steered there");
    // It keeps it; the next one finds none.
    p.tc("roce_tc_egress", &data(0x42), 0, 1).unwrap();
    p.tc("roce_tc_egress", &data(0x43), 0, 1).unwrap();
    assert_eq!((count(&p, Counter::StartLimited), count(&p, Counter::StartUnlimited)), (1, 2));
}

#[test]
fn what_leaves_while_the_root_qdisc_is_replaced_is_dropped_quietly() {
    /// The kernel drops what is redirected to an interface that is not there, and tells the sender that it was sent.
    const TC_ACT_REDIRECT: i32 = 7;
    const TC_ACT_UNSPEC: i32 = -1;
    for (ahead, src, verdict, dropped) in [
        (1_000_000_000, LOCAL, TC_ACT_REDIRECT, 1),
        (1_000_000_000, THIRD, TC_ACT_UNSPEC, 0),
        (0, LOCAL, TC_ACT_UNSPEC, 0),
    ] {
        let mut p = programs(Pacer::Off, |_| {});
        let mut cfg = p.maps.config().unwrap();
        cfg.swap_until_ns = monotonic_ns() + ahead;
        p.maps.set_config(cfg).unwrap();
        let out = p.tc("roce_tc_egress", &frame(src, Opcode::SEND_MIDDLE, 0x42, &[0; 1_024]), 0, 1).unwrap();
        assert_eq!((out.verdict, count(&p, Counter::SwapDropped)), (verdict, dropped), "{ahead} {src:?}");
        assert_eq!(p.maps.flows().is_empty(), dropped == 1, "what is dropped was not on the wire");
    }
    let mut p = programs(Pacer::Off, |_| {});
    let within = p.maps.while_dropping(|maps| Ok(maps.config()?.swap_until_ns > monotonic_ns())).unwrap();
    assert_eq!((within, p.maps.config().unwrap().swap_until_ns), (true, 0));
}
