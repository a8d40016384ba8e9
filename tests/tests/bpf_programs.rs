//! Every BPF program through BPF_PROG_TEST_RUN: packets in and out, verdicts, counters. Needs root.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use aya::programs::{TestRun as _, TestRunOptions};

use roce_common::{
    abi::{Counter, Direction, Flags, FlowKey, MarkPolicy, Pacer, PairKey, PeerQp, RateValue, Role, Space, Tap},
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, Malformed, Opcode, Reth, Verdict, emit, icrc, parse},
};
use roce_tests::progtest::{Programs, Run, config, monotonic_ns};
use roce_user::export::Counters;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_OK: i32 = 0;
const TC_ACT_SHOT: i32 = 2;

const LOCAL: Addr = Addr::v4([10, 0, 0, 1]);
const PEER: Addr = Addr::v4([10, 0, 0, 2]);
const THIRD: Addr = Addr::v4([10, 0, 0, 3]);
const LOCAL_QPN: Qpn = Qpn::new(0x21);
const PEER_QPN: Qpn = Qpn::new(0x42);

/// The programs are loaded once; every test starts with empty maps.
fn programs(role: Role) -> MutexGuard<'static, Programs> {
    static PROGRAMS: OnceLock<Mutex<Programs>> = OnceLock::new();
    let all = PROGRAMS.get_or_init(|| Mutex::new(Programs::load().expect("loading the programs needs root")));
    let mut p = all.lock().unwrap_or_else(PoisonError::into_inner);
    for (key, _) in p.maps.flows() {
        p.maps.remove_flow(&key).unwrap();
    }
    for (key, _) in p.maps.pairs() {
        p.maps.remove_pair(key).unwrap();
    }
    for (key, _) in p.maps.rates() {
        p.maps.clear_rate(key).unwrap();
    }
    p.maps.set_config(config(role)).unwrap();
    p.maps.set_local(&[LOCAL]).unwrap();
    p
}

fn path(src: Addr, dst: Addr, tos: u8) -> emit::Path {
    emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src,
        dst,
        tos,
        ttl: 64,
        ip_id: 7,
        src_port: 0xc123,
    }
}

fn build(path: &emit::Path, bth: Bth, ext: &emit::Ext, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 2048];
    let n = emit::frame(path, &bth, ext, payload, &mut out).unwrap();
    out.truncate(n);
    out
}

fn send(src: Addr, dst: Addr, tos: u8, qpn: Qpn, psn: u32) -> Vec<u8> {
    build(&path(src, dst, tos), Bth::new(Opcode::SEND_ONLY, qpn, Psn::new(psn)), &emit::Ext::default(), &[7; 256])
}

fn ack(src: Addr, dst: Addr, qpn: Qpn, psn: u32, syndrome: u8) -> Vec<u8> {
    let ext = emit::Ext { aeth: Some(Aeth { raw_syndrome: syndrome, msn: 1 }), ..emit::Ext::default() };
    build(&path(src, dst, 0), Bth::new(Opcode::ACKNOWLEDGE, qpn, Psn::new(psn)), &ext, &[])
}

fn cnp(src: Addr, dst: Addr, qpn: Qpn) -> Vec<u8> {
    let version =
        if src.as_v4().is_some() { roce_common::wire::IpVersion::V4 } else { roce_common::wire::IpVersion::V6 };
    let mut out = [0; emit::CNP_FRAME_V6];
    let n = emit::cnp(&path(src, dst, 0xc2), version, qpn, &mut out);
    out[..n].to_vec()
}

/// Counters that changed between two readings of both directions; but not whether an event found room in the ring that
/// nobody empties here.
fn changes(p: &mut Programs, act: impl FnOnce(&mut Programs) -> Run) -> (Run, Vec<(Direction, Counter, u64)>) {
    let read = |p: &Programs| [Direction::Ingress, Direction::Egress].map(|d| (d, p.maps.counters(d).unwrap()));
    let before = read(p);
    let run = act(p);
    let after = read(p);
    let mut changed = Vec::new();
    for ((direction, old), (_, new)) in before.into_iter().zip(after) {
        for &c in Counter::ALL {
            let d = new[c as usize] - old[c as usize];
            if d != 0 && !matches!(c, Counter::EventsLost | Counter::EventsLimited) {
                changed.push((direction, c, d));
            }
        }
    }
    (run, changed)
}

fn ipv4_checksum_is_right(frame: &[u8]) -> bool {
    let sum: u32 = frame[14..34].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

fn icrc_is_right(frame: &[u8]) -> bool {
    match parse(frame) {
        Verdict::Roce(p) => icrc::is_valid(frame, &p) == Some(true),
        _ => false,
    }
}

/// The kernel allows a million. Some take half as much again as this one, and loading takes seconds as it is.
const VERIFIED: u32 = 125_000;

#[test]
fn the_verifier_follows_each_program_within_its_budget() {
    let mut p = programs(Role::Observe);
    for name in ["roce_tc_egress", "roce_tc_ingress", "roce_htb"] {
        let n = p.object.tc(name).unwrap().info().unwrap().verified_instruction_count().unwrap();
        println!("{name}: {n} instructions verified");
        assert!(n < VERIFIED, "{name}: {n}");
    }
    let n = p.object.xdp("roce_xdp").unwrap().info().unwrap().verified_instruction_count().unwrap();
    println!("roce_xdp: {n} instructions verified");
    assert!(n < VERIFIED, "roce_xdp: {n}");
}

#[test]
fn xdp_counts_what_each_frame_is_and_passes_it_unchanged() {
    use Direction::Ingress;
    let mut p = programs(Role::Observe);
    let data = send(PEER, LOCAL, 0x6a, LOCAL_QPN, 100);
    let mut rocev1 = data.clone();
    rocev1[12..14].copy_from_slice(&[0x89, 0x15]);
    let mut tcp = data.clone();
    tcp[23] = 6;
    let mut unknown = data.clone();
    unknown[42] = 0x1f;
    let mut version = data.clone();
    version[43] |= 1;
    let mut short = data.clone();
    short[38..40].copy_from_slice(&[0, 20]);
    let mut fragment = data.clone();
    fragment[20] = 0x20;
    for (frame, want) in [
        (data.clone(), vec![(Ingress, Counter::Rocev2, 1), (Ingress, Counter::Ect0, 1)]),
        (send(PEER, LOCAL, 0x6b, LOCAL_QPN, 101), vec![(Ingress, Counter::Rocev2, 1), (Ingress, Counter::Ce, 1)]),
        (cnp(PEER, LOCAL, LOCAL_QPN), vec![(Ingress, Counter::Rocev2, 1), (Ingress, Counter::Cnp, 1)]),
        (rocev1, vec![(Ingress, Counter::Rocev1, 1)]),
        (tcp, vec![(Ingress, Counter::NotRoce, 1)]),
        (vec![0xff; 60], vec![(Ingress, Counter::NotRoce, 1)]),
        (unknown, vec![(Ingress, Counter::UnknownOpcode, 1)]),
        (version, vec![(Ingress, Counter::BadVersion, 1)]),
        (short, vec![(Ingress, Counter::TruncatedHeader, 1)]),
        (fragment, vec![(Ingress, Counter::UdpFragment, 1)]),
    ] {
        let (run, changed) = changes(&mut p, |p| p.xdp("roce_xdp", &frame, 1).unwrap());
        assert_eq!((run.verdict, &run.packet), (XDP_PASS, &frame), "{frame:02x?}");
        assert_eq!(changed, want, "{frame:02x?}");
    }
    let flows = p.maps.flows();
    assert_eq!(flows.len(), 1, "no flow from anything but the two data packets");
    assert_eq!(flows[0].0, FlowKey::new(Tap::new(1, Ingress), PEER, LOCAL, LOCAL_QPN, Space::Request));
    assert_eq!((flows[0].1.packets, flows[0].1.bytes, flows[0].1.lock), (2, 512, 0));
}

#[test]
fn an_empty_linear_part_changes_nothing() {
    let mut p = programs(Role::Observe);
    let frames: Vec<Vec<u8>> =
        (0..40).filter(|i| i % 7 != 3).map(|i| send(PEER, LOCAL, 0x6a, LOCAL_QPN, 100 + i)).collect();
    for frame in &frames {
        p.xdp("roce_xdp", frame, 1).unwrap();
    }
    let whole = p.maps.flows();
    drop(p);
    for linear in [0, 14, 33, 42, 60] {
        let mut p = programs(Role::Observe);
        for frame in &frames {
            let (run, changed) = changes(&mut p, |p| p.xdp_linear(frame, linear).unwrap());
            assert_eq!(run.verdict, XDP_PASS);
            assert!(changed.contains(&(Direction::Ingress, Counter::Rocev2, 1)), "{linear} linear bytes: {changed:?}");
        }
        let parts = p.maps.flows();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].1.tracker, whole[0].1.tracker, "{linear} linear bytes");
    }
}

#[test]
fn slice_parser_and_bpf_agree_on_mutated_packets() {
    let mut p = programs(Role::Observe);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let v6 = |last: u16| Addr(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).octets());
    let reth = emit::Ext { reth: Some(Reth { va: 1, rkey: 2, dma_len: 4096 }), ..emit::Ext::default() };
    let mut tagged = send(PEER, LOCAL, 0, LOCAL_QPN, 5);
    tagged.splice(12..12, [0x88, 0xa8, 0, 5, 0x81, 0, 0, 7]);
    let seeds = [
        send(PEER, LOCAL, 0x6a, LOCAL_QPN, 1),
        send(v6(2), v6(1), 0x6a, LOCAL_QPN, 1),
        ack(PEER, LOCAL, LOCAL_QPN, 1, 0x60),
        cnp(PEER, LOCAL, LOCAL_QPN),
        cnp(v6(2), v6(1), LOCAL_QPN),
        build(&path(PEER, LOCAL, 0), Bth::new(Opcode::READ_REQUEST, LOCAL_QPN, Psn::new(9)), &reth, &[]),
        tagged,
    ];
    let mut seen = std::collections::BTreeMap::new();
    for round in 0..20_000 {
        let mut frame = seeds[random(seeds.len())].clone();
        for _ in 0..random(4) {
            let at = random(frame.len().min(80));
            frame[at] = random(256) as u8;
        }
        if random(4) == 0 {
            frame.truncate(14 + random(frame.len() - 13));
        }
        let want = match parse(&frame[..]) {
            Verdict::Roce(_) => Counter::Rocev2,
            Verdict::RoceV1 => Counter::Rocev1,
            Verdict::NotRoce => Counter::NotRoce,
            Verdict::Malformed(reason) => Counter::of_malformed(reason),
        };
        let before = p.count(Direction::Ingress, want).unwrap();
        let run = p.xdp("roce_xdp", &frame, 1).unwrap();
        let after = p.count(Direction::Ingress, want).unwrap();
        assert_eq!(after - before, 1, "round {round}: the slice parser says {want:?} of {frame:02x?}");
        assert_eq!((run.verdict, run.packet), (XDP_PASS, frame), "round {round}");
        *seen.entry(want).or_insert(0u32) += 1;
    }
    println!("{seen:?}");
    for reason in Malformed::ALL {
        if reason != Malformed::TruncatedCapture {
            assert!(seen.contains_key(&Counter::of_malformed(reason)), "{reason:?} never came up: {seen:?}");
        }
    }
}

#[test]
fn the_guard_stops_malformed_packets_for_local_addresses_only() {
    let mut p = programs(Role::Host);
    let bad = |dst: Addr| {
        let mut f = send(PEER, dst, 0, LOCAL_QPN, 1);
        f[42] = 0x1f;
        f
    };
    let (run, changed) = changes(&mut p, |p| p.xdp("roce_xdp", &bad(LOCAL), 1).unwrap());
    assert_eq!(run.verdict, XDP_DROP);
    assert!(changed.contains(&(Direction::Ingress, Counter::GuardDropped, 1)), "{changed:?}");
    assert_eq!(p.xdp("roce_xdp", &bad(THIRD), 1).unwrap().verdict, XDP_PASS, "in transit");
    let mut fragment = send(PEER, LOCAL, 0, LOCAL_QPN, 1);
    fragment[21] = 1;
    assert_eq!(p.xdp("roce_xdp", &fragment, 1).unwrap().verdict, XDP_PASS, "a later fragment may be anybody's");

    let mut open = config(Role::Host);
    open.flags = 0;
    p.maps.set_config(open).unwrap();
    assert_eq!(p.xdp("roce_xdp", &bad(LOCAL), 1).unwrap().verdict, XDP_PASS, "no guard");
}

#[test]
fn a_cnp_is_consumed_for_local_qps_and_counted_for_its_pair() {
    let mut p = programs(Role::Host);
    let key = PairKey::new(PEER, LOCAL, LOCAL_QPN);
    p.maps.add_pair(key, PEER_QPN.get()).unwrap();

    let (run, changed) = changes(&mut p, |p| p.xdp("roce_xdp", &cnp(PEER, LOCAL, LOCAL_QPN), 1).unwrap());
    assert_eq!(run.verdict, XDP_DROP);
    assert!(changed.contains(&(Direction::Ingress, Counter::CnpConsumed, 1)), "{changed:?}");
    assert_eq!(p.maps.pair(key).unwrap().cnp_rx, 1);

    let (run, changed) = changes(&mut p, |p| p.xdp("roce_xdp", &cnp(THIRD, LOCAL, LOCAL_QPN), 1).unwrap());
    assert_eq!(run.verdict, XDP_DROP, "rxe must not see it either");
    assert!(changed.contains(&(Direction::Ingress, Counter::CnpUnpaired, 1)), "not the peer: {changed:?}");
    assert_eq!(p.maps.pair(key).unwrap().cnp_rx, 1);

    assert_eq!(p.xdp("roce_xdp", &cnp(PEER, THIRD, LOCAL_QPN), 1).unwrap().verdict, XDP_PASS, "in transit");
    assert!(p.maps.flows().is_empty(), "a CNP makes no flow");
}

/// A CNP that a ConnectX-4 Lx sent, from scapy's tests: source port 0, an ICRC of the NIC's.
const CNP_OF_A_NIC: &str = "e41d2dab2bc27cfe90643b32080045c2003c718c4000401191610a0011010a001201000012b7002800008100ffff\
                            40000118000000000000000000000000000000000000000082fd002a";

#[test]
fn a_damaged_cnp_slows_nobody() {
    let v6 = |last: u16| Addr(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).octets());
    let nic: Vec<u8> =
        (0..CNP_OF_A_NIC.len() / 2).map(|i| u8::from_str_radix(&CNP_OF_A_NIC[2 * i..2 * i + 2], 16).unwrap()).collect();
    let (nic_src, nic_dst, nic_qpn) = (Addr::v4([10, 0, 17, 1]), Addr::v4([10, 0, 18, 1]), Qpn::new(0x118));
    let mut p = programs(Role::Host);
    p.maps.set_local(&[LOCAL, v6(1), nic_dst]).unwrap();
    for (src, dst, qpn, frame) in [
        (PEER, LOCAL, LOCAL_QPN, cnp(PEER, LOCAL, LOCAL_QPN)),
        (v6(2), v6(1), LOCAL_QPN, cnp(v6(2), v6(1), LOCAL_QPN)),
        (nic_src, nic_dst, nic_qpn, nic),
    ] {
        let key = PairKey::new(src, dst, qpn);
        p.maps.add_pair(key, PEER_QPN.get()).unwrap();
        let bth = frame.len() - 32;
        for tc in [false, true] {
            let mut cfg = config(Role::Host);
            cfg.flags |= if tc { Flags::TC_INGRESS } else { 0 };
            p.maps.set_config(cfg).unwrap();
            // P_Key, PSN, a reserved byte, the ICRC; and the byte of FECN and BECN, which may change on the way.
            let places = [(bth + 2, false), (bth + 11, false), (bth + 20, false), (bth + 28, false), (bth + 31, false)];
            for (at, intact) in places.into_iter().chain([(bth + 4, true)]) {
                let mut changed_frame = frame.clone();
                changed_frame[at] ^= 0x40;
                let before = p.maps.pair(key).unwrap().cnp_rx;
                let (run, changed) = changes(&mut p, |p| {
                    if tc {
                        p.tc("roce_tc_ingress", &changed_frame, 0, 1).unwrap()
                    } else {
                        p.xdp("roce_xdp", &changed_frame, 1).unwrap()
                    }
                });
                let bad = changed.contains(&(Direction::Ingress, Counter::CnpBadIcrc, 1));
                assert_eq!(bad, !intact, "tc {tc}, byte {at}: {changed:?}");
                assert!(changed.contains(&(Direction::Ingress, Counter::CnpConsumed, 1)), "{changed:?}");
                assert_eq!(run.verdict, if tc { TC_ACT_SHOT } else { XDP_DROP });
                assert_eq!(p.maps.pair(key).unwrap().cnp_rx - before, u64::from(intact));
            }
        }
    }
}

#[test]
fn the_marker_follows_its_policy_and_keeps_checksums_right() {
    let v6 = |last: u16| Addr(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).octets());
    let mut p = programs(Role::Host);
    p.maps.set_local(&[LOCAL, v6(1)]).unwrap();
    // (policy, ToS in, priority in) → (ToS out, priority out)
    for (policy, tos, priority, want_tos, want_priority) in [
        (MarkPolicy::Fill, 0x00, 0, 0x6a, 3),
        (MarkPolicy::Fill, 0x01, 0, 0x69, 3),
        (MarkPolicy::Fill, 0x88, 5, 0x8a, 5),
        (MarkPolicy::Force, 0x88, 5, 0x6a, 3),
        (MarkPolicy::Force, 0x8b, 5, 0x6b, 3),
        (MarkPolicy::Keep, 0x00, 0, 0x00, 0),
    ] {
        let mut cfg = config(Role::Host);
        cfg.dscp_policy = policy as u32;
        cfg.ecn_policy = policy as u32;
        p.maps.set_config(cfg).unwrap();
        for (src, dst) in [(LOCAL, PEER), (v6(1), v6(2))] {
            let frame = send(src, dst, tos, PEER_QPN, 9);
            let run = p.tc("roce_tc_egress", &frame, priority, 1).unwrap();
            assert_eq!(run.verdict, TC_ACT_UNSPEC);
            let want = send(src, dst, want_tos, PEER_QPN, 9);
            assert_eq!(run.packet, want, "{policy:?} {tos:#04x}");
            assert_eq!(run.priority, want_priority, "{policy:?} {priority}");
            assert!(icrc_is_right(&run.packet));
        }
    }
    // An ACK is of the data class; a CNP of its own.
    p.maps.set_config(config(Role::Host)).unwrap();
    let run = p.tc("roce_tc_egress", &ack(LOCAL, PEER, PEER_QPN, 9, 0x1f), 0, 1).unwrap();
    assert_eq!((run.packet[15], run.priority), (0x6a, 3));
    let mut plain = cnp(LOCAL, PEER, PEER_QPN);
    plain[15] = 0;
    plain[24..26].copy_from_slice(&[0, 0]);
    let sum: u32 = plain[14..34].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    plain[24..26].copy_from_slice(&roce_common::wire::checksum::fold(sum).to_be_bytes());
    let run = p.tc("roce_tc_egress", &plain, 0, 1).unwrap();
    assert_eq!((run.packet[15], run.priority), (0xc2, 6));
    assert!(ipv4_checksum_is_right(&run.packet) && icrc_is_right(&run.packet));
}

#[test]
fn transit_observation_and_other_traffic_leave_byte_identical() {
    let frames = |p: &mut Programs| {
        let mut udp = send(LOCAL, PEER, 0, PEER_QPN, 9);
        udp[37] = 53;
        let mut arp = vec![0u8; 60];
        arp[12..14].copy_from_slice(&[8, 6]);
        for frame in [udp, arp] {
            let run = p.tc("roce_tc_egress", &frame, 0, 1).unwrap();
            assert_eq!((run.verdict, run.packet, run.priority), (TC_ACT_UNSPEC, frame, 0));
        }
    };
    let mut p = programs(Role::Host);
    frames(&mut p);
    let transit = send(THIRD, PEER, 0, PEER_QPN, 9);
    let (run, changed) = changes(&mut p, |p| p.tc("roce_tc_egress", &transit, 0, 1).unwrap());
    assert_eq!((run.packet, run.priority), (transit, 0));
    assert!(changed.contains(&(Direction::Egress, Counter::Transit, 1)));
    drop(p);
    let mut p = programs(Role::Observe);
    frames(&mut p);
    let local = send(LOCAL, PEER, 0, PEER_QPN, 9);
    let run = p.tc("roce_tc_egress", &local, 0, 1).unwrap();
    assert_eq!((run.packet, run.priority, run.tstamp), (local, 0, 0));
}

#[test]
fn the_congestion_point_marks_ect_by_its_virtual_queue_and_nothing_else() {
    let mut p = programs(Role::Cp);
    let mut cfg = config(Role::Cp);
    // 1 kB/s: the queue only grows during the test. Above 1,000 bytes every ECT packet is marked.
    cfg.vq_bytes_per_sec = 1_000;
    cfg.kmin_bytes = 1_000;
    cfg.kmax_bytes = 1_000;
    cfg.vq_limit_bytes = 10_000;
    p.maps.set_config(cfg).unwrap();
    let mut marked = 0;
    for psn in 0..40 {
        let frame = send(THIRD, PEER, 0x6a, PEER_QPN, psn);
        let run = p.tc("roce_tc_egress", &frame, 0, 1).unwrap();
        if run.packet != frame {
            assert_eq!(run.packet, send(THIRD, PEER, 0x6b, PEER_QPN, psn), "only the CE bits and the checksum change");
            marked += 1;
        } else {
            assert!(psn <= 4, "packet {psn} found more than 1,000 bytes and was not marked");
        }
    }
    assert!(marked >= 35, "{marked}");
    let not_ect = send(THIRD, PEER, 0x68, PEER_QPN, 50);
    let (run, changed) = changes(&mut p, |p| p.tc("roce_tc_egress", &not_ect, 0, 1).unwrap());
    assert_eq!(run.packet, not_ect, "never Not-ECT");
    assert!(changed.contains(&(Direction::Egress, Counter::CeNotEct, 1)), "{changed:?}");
    let notification = cnp(THIRD, PEER, PEER_QPN);
    assert_eq!(p.tc("roce_tc_egress", &notification, 0, 1).unwrap().packet, notification, "never a CNP");
}

#[test]
fn edt_spaces_packets_by_the_rate_and_acks_take_their_turn() {
    let mut p = programs(Role::Host);
    let mut cfg = config(Role::Host);
    cfg.pacer = Pacer::Edt as u32;
    cfg.ecn_policy = MarkPolicy::Keep as u32;
    p.maps.set_config(cfg).unwrap();
    let data = send(LOCAL, PEER, 0, PEER_QPN, 1);
    // Slow enough that booked times stay ahead of the clock: 10 ms a packet.
    let rate = data.len() as u64 * 100;
    p.maps.set_rate(PeerQp::new(PEER, PEER_QPN), RateValue { bytes_per_sec: rate, ..RateValue::default() }).unwrap();
    p.maps.beat(monotonic_ns()).unwrap();
    let first = p.tc("roce_tc_egress", &data, 0, 1).unwrap();
    let second = p.tc("roce_tc_egress", &data, 0, 1).unwrap();
    let ack = p.tc("roce_tc_egress", &ack(LOCAL, PEER, PEER_QPN, 3, 0x1f), 0, 1).unwrap();
    let third = p.tc("roce_tc_egress", &data, 0, 1).unwrap();
    assert_ne!(first.tstamp, 0, "it takes its place in the queue of fq too");
    assert_eq!(second.tstamp - first.tstamp, 10_000_000);
    assert_eq!(third.tstamp - second.tstamp, 10_000_000);
    assert_eq!(ack.tstamp, third.tstamp, "behind what waits, and it costs nothing");
    let cell = p.maps.pace(PeerQp::new(PEER, PEER_QPN)).unwrap();
    assert_eq!((cell.packets, cell.bytes), (4, 3 * data.len() as u64 + 62));
    let other = p.tc("roce_tc_egress", &send(LOCAL, PEER, 0, Qpn::new(0x43), 1), 0, 1).unwrap();
    assert_eq!(other.tstamp, 0, "another QP of the same peer is not limited");

    // A controller that has been silent for longer than the failsafe paces nobody.
    p.maps.beat(monotonic_ns() - 2_000_000_000).unwrap();
    let (late, changed) = changes(&mut p, |p| p.tc("roce_tc_egress", &data, 0, 1).unwrap());
    let later = p.tc("roce_tc_egress", &data, 0, 1).unwrap();
    assert!(changed.contains(&(Direction::Egress, Counter::PacingFailsafe, 1)), "{changed:?}");
    assert_eq!(late.tstamp, later.tstamp, "nothing is booked any more, what is booked keeps its order");
}

#[test]
fn the_htb_filter_steers_limited_qps_while_the_controller_lives() {
    let mut p = programs(Role::Host);
    let mut cfg = config(Role::Host);
    cfg.pacer = Pacer::Htb as u32;
    p.maps.set_config(cfg).unwrap();
    let limited = send(LOCAL, PEER, 0, PEER_QPN, 1);
    let rate = RateValue { bytes_per_sec: 1_000_000, classid: 0x726f_0001, ..RateValue::default() };
    p.maps.set_rate(PeerQp::new(PEER, PEER_QPN), rate).unwrap();
    p.maps.beat(monotonic_ns()).unwrap();
    let verdict = |p: &mut Programs, f: &[u8]| p.tc("roce_htb", f, 0, 1).unwrap().verdict;
    assert_eq!(verdict(&mut p, &limited), TC_ACT_OK);
    assert_eq!(verdict(&mut p, &send(LOCAL, PEER, 0, Qpn::new(9), 1)), TC_ACT_UNSPEC, "another QP");
    assert_eq!(verdict(&mut p, &send(THIRD, PEER, 0, PEER_QPN, 1)), TC_ACT_UNSPEC, "in transit");
    assert_eq!(verdict(&mut p, &cnp(LOCAL, PEER, PEER_QPN)), TC_ACT_UNSPEC, "a CNP");
    p.maps.beat(monotonic_ns() - 2_000_000_000).unwrap();
    assert_eq!(verdict(&mut p, &limited), TC_ACT_UNSPEC, "the controller is dead");
}

#[test]
fn tc_ingress_does_the_whole_work_only_where_it_is_told_to() {
    let mut p = programs(Role::Host);
    let data = send(PEER, LOCAL, 0x6a, LOCAL_QPN, 1);
    let (run, changed) = changes(&mut p, |p| p.tc("roce_tc_ingress", &data, 0, 1).unwrap());
    assert_eq!((run.verdict, changed), (TC_ACT_UNSPEC, vec![]), "XDP counts this tap");
    let mut cfg = config(Role::Host);
    cfg.flags |= Flags::TC_INGRESS;
    p.maps.set_config(cfg).unwrap();
    let (run, changed) = changes(&mut p, |p| p.tc("roce_tc_ingress", &data, 0, 1).unwrap());
    assert_eq!(run.verdict, TC_ACT_UNSPEC);
    assert!(changed.contains(&(Direction::Ingress, Counter::Rocev2, 1)), "{changed:?}");
    assert_eq!(p.maps.flows().len(), 1);
    // CE without a known sender: no CNP, counted.
    let (_, changed) =
        changes(&mut p, |p| p.tc("roce_tc_ingress", &send(PEER, LOCAL, 0x6b, LOCAL_QPN, 2), 0, 1).unwrap());
    assert!(changed.contains(&(Direction::Ingress, Counter::NpNotReady, 1)), "{changed:?}");
    cfg.flags |= Flags::EGRESS_READY;
    p.maps.set_config(cfg).unwrap();
    let (_, changed) =
        changes(&mut p, |p| p.tc("roce_tc_ingress", &send(PEER, LOCAL, 0x6b, LOCAL_QPN, 3), 0, 1).unwrap());
    assert!(changed.contains(&(Direction::Ingress, Counter::NpUnpaired, 1)), "{changed:?}");
}

#[test]
fn a_nak_explains_the_flow_it_refuses() {
    let mut p = programs(Role::Host);
    p.maps.add_pair(PairKey::new(PEER, LOCAL, LOCAL_QPN), PEER_QPN.get()).unwrap();
    for psn in 10..20 {
        p.tc("roce_tc_egress", &send(LOCAL, PEER, 0, PEER_QPN, psn), 0, 1).unwrap();
    }
    p.xdp("roce_xdp", &ack(PEER, LOCAL, LOCAL_QPN, 14, 0x60), 1).unwrap();
    for psn in 14..20 {
        p.tc("roce_tc_egress", &send(LOCAL, PEER, 0, PEER_QPN, psn), 0, 1).unwrap();
    }
    let flows = p.maps.flows();
    let (_, sent) = flows.iter().find(|(k, _)| k.space() == Space::Request).unwrap();
    let c = Counters::of(sent);
    assert_eq!((c.missing_psns, c.duplicates, c.retransmitted, c.lost_after_tap), (0, 6, 6, 1));
    let (_, answers) = flows.iter().find(|(k, _)| k.space() == Space::Response).unwrap();
    assert_eq!(Counters::of(answers).nak.psn_sequence, 1);
}

#[test]
fn a_flood_of_first_sights_is_bounded_and_counted() {
    let mut p = programs(Role::Observe);
    let mut cfg = config(Role::Observe);
    cfg.events_per_tick = 10;
    p.maps.set_config(cfg).unwrap();
    let before = p.count(Direction::Ingress, Counter::EventsLimited).unwrap();
    let mut frame = send(PEER, LOCAL, 0, LOCAL_QPN, 1);
    let full = roce_common::abi::MAX_FLOWS + 500;
    for qpn in 0..full {
        frame[47..50].copy_from_slice(&(qpn + 2).to_be_bytes()[1..]);
        p.xdp("roce_xdp", &frame, 1).unwrap();
    }
    assert!(p.count(Direction::Ingress, Counter::FlowsRefused).unwrap() >= 500);
    assert!(p.count(Direction::Ingress, Counter::EventsLimited).unwrap() - before > 100_000);
    // What is known goes on being tracked, and CNPs are served.
    drop(p);
    let mut p = programs(Role::Host);
    p.maps.add_pair(PairKey::new(PEER, LOCAL, LOCAL_QPN), PEER_QPN.get()).unwrap();
    assert_eq!(p.xdp("roce_xdp", &cnp(PEER, LOCAL, LOCAL_QPN), 1).unwrap().verdict, XDP_DROP);
    assert_eq!(p.maps.pair(PairKey::new(PEER, LOCAL, LOCAL_QPN)).unwrap().cnp_rx, 1);
}

/// Runs `roce_xdp` on each frame `EACH` times, each on a CPU of its own at the same time.
fn on_two_cpus(p: &mut Programs, frames: [&[u8]; 2]) {
    let xdp: &aya::programs::Xdp = p.object.xdp("roce_xdp").unwrap();
    std::thread::scope(|scope| {
        for (cpu, frame) in frames.into_iter().enumerate() {
            scope.spawn(move || {
                let mut set = nix::sched::CpuSet::new();
                set.set(cpu).unwrap();
                nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).expect("two CPUs are needed");
                xdp.test_run(TestRunOptions { data_in: Some(frame), repeat: EACH, ..TestRunOptions::new() }).unwrap();
            });
        }
    });
}

const EACH: u32 = 400_000;

#[test]
fn naks_keep_no_request_from_being_counted() {
    // A mirror port: both ways pass the same tap.
    let mut p = programs(Role::Observe);
    p.maps.add_pair(PairKey::new(LOCAL, PEER, PEER_QPN), LOCAL_QPN.get()).unwrap();
    let before = p.maps.counters(Direction::Ingress).unwrap();
    let request = send(PEER, LOCAL, 0x6a, LOCAL_QPN, 100);
    p.xdp("roce_xdp", &request, 1).unwrap();
    on_two_cpus(&mut p, [&request, &ack(LOCAL, PEER, PEER_QPN, 100, 0x60)]);
    let after = p.maps.counters(Direction::Ingress).unwrap();
    assert_eq!(after[Counter::Untracked as usize], before[Counter::Untracked as usize]);
    let flows = p.maps.flows();
    let flow = |space| flows.iter().find(|(k, _)| k.space() == space).unwrap().1;
    let (requests, answers) = (flow(Space::Request), flow(Space::Response));
    assert_eq!((requests.packets, answers.packets), (u64::from(EACH) + 1, u64::from(EACH)));
    // Each packet takes back what the NAKs before it named: one loss for each at most, however many NAKs there were.
    let lost = Counters::of(&requests).lost_after_tap;
    assert!((1..=u64::from(EACH) + 1).contains(&lost), "{lost}");
}

#[test]
fn two_cpus_on_one_flow_lose_no_count() {
    let mut p = programs(Role::Observe);
    let before = p.maps.counters(Direction::Ingress).unwrap();
    // Each its own PSN: what a CPU does to the other's flow state is what is tested.
    on_two_cpus(&mut p, [100, 101].map(|psn| send(PEER, LOCAL, 0x6a, LOCAL_QPN, psn)).each_ref().map(Vec::as_slice));
    let after = p.maps.counters(Direction::Ingress).unwrap();
    let grown = |c: Counter| after[c as usize] - before[c as usize];
    assert_eq!(grown(Counter::Rocev2), u64::from(2 * EACH), "per-CPU counters are exact");
    let flows = p.maps.flows();
    assert_eq!(flows.len(), 1);
    let flow = flows[0].1;
    println!("tracked {}, untracked {}", flow.packets, grown(Counter::Untracked));
    assert_eq!(flow.packets + grown(Counter::Untracked), u64::from(2 * EACH));
    assert_eq!((flow.bytes, flow.ecn[2], flow.lock), (flow.packets * 256, flow.packets, 0));
    // Two PSNs: all but the first of each are duplicates; the lower one always is when the higher came first.
    let originals = flow.packets - Counters::of(&flow).duplicates;
    assert!((1..=2).contains(&originals), "{originals}");
}
