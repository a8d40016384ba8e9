//! The endpoints on veth pairs: they load a path exactly as rxe would, and lose nothing of their own. Needs root.

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use roce_common::{
    units::{Addr, Nanos, Qpn},
    wire,
};
use roce_tests::{
    endpoint::{
        Clock, Connection, Host, HostStats, Message, Op, QpHandle, Rnr, SLOT, Traffic, ack_timeout, connect, loss,
    },
    lab::{Bottleneck, HostPort, LEAF, Pair, QueueReader, Sampler, Star, Watch, mtu_for, shape, transit},
    needs_root,
    replay::{self, Macs, Pace},
};
use roce_user::sim::engine::jain;

/// Time every transfer gets; far more than any needs.
const PATIENCE: Duration = Duration::from_secs(20);

fn assert_clean(hosts: &[HostStats]) {
    for h in hosts {
        assert_eq!(*h, HostStats::default(), "no ICRC error, stray packet or overrun");
    }
}

fn assert_no_repeats(qps: &[&QpHandle]) {
    for qp in qps {
        let s = qp.stats();
        assert_eq!(
            (s.retransmitted, s.reasked, s.naks, s.timeouts, s.duplicates, s.out_of_sequence, s.transmit_failures),
            (0, 0, 0, 0, 0, 0, 0),
            "{s:?}"
        );
    }
}

/// Runs one connection between two hosts and checks that it ends clean.
fn transfer(a: &HostPort, b: &HostPort, connection: &Connection, at_a: u64, at_b: u64) {
    let clock = Clock::start();
    let (mut ha, mut hb) = (Host::start(&a.port, clock).unwrap(), Host::start(&b.port, clock).unwrap());
    let (qa, qb) = connect((&mut ha, a), (&mut hb, b), connection).unwrap();
    assert!(qa.wait_done(PATIENCE) && qb.wait_done(PATIENCE), "{:?} {:?}", qa.stats(), qb.stats());

    assert_clean(&[ha.stats(), hb.stats()]);
    assert_no_repeats(&[&qa, &qb]);
    assert_eq!((qa.stats().accepted_bytes, qb.stats().accepted_bytes), (at_a, at_b));
}

#[test]
fn every_operation_over_both_ip_versions_and_several_mtus() {
    needs_root!();
    for pmtu in [256, 1024, 4096] {
        let pair = Pair::new(mtu_for(pmtu)).unwrap();
        for ipv6 in [false, true] {
            let messages =
                vec![Message::new(Op::Write, 50_000), Message::new(Op::Read, 30_001), Message::new(Op::Send, 0)];
            let connection = Connection {
                pmtu,
                ipv6,
                timeout: ack_timeout(19),
                traffic_a: Traffic { messages, rounds: Some(20) },
                traffic_b: Traffic::times(Message::new(Op::Send, 10_000), 20),
                ..Connection::default()
            };
            transfer(&pair.a, &pair.b, &connection, 20 * 30_001 + 20 * 10_000, 20 * 50_000);
        }
    }
}

#[test]
fn a_router_in_between_changes_nothing() {
    needs_root!();
    let star = transit(1500).unwrap();
    for ipv6 in [false, true] {
        let connection = Connection {
            ipv6,
            timeout: ack_timeout(19),
            traffic_a: Traffic::times(Message::new(Op::Write, 100_000), 20),
            ..Connection::default()
        };
        transfer(&star.senders[0], &star.receiver, &connection, 0, 2_000_000);
    }
}

#[test]
fn a_shaper_on_the_senders_interface_holds_the_sender_and_loses_nothing() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    shape(&pair.a.port, Bottleneck { bits_per_sec: 20_000_000, queue: 1000 }).unwrap();
    let clock = Clock::start();
    let mut ha = Host::start(&pair.a.port, clock).unwrap();
    let mut hb = Host::start(&pair.b.port, clock).unwrap();
    let sampler = Sampler::start(&pair.a.port.ns, pair.a.port.index, LEAF).unwrap();
    let begin = Instant::now();
    let connection = Connection {
        timeout: ack_timeout(19),
        traffic_a: Traffic::endless(Message::new(Op::Write, 65_536)),
        ..Connection::default()
    };
    let (qa, qb) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap();
    thread::sleep(Duration::from_millis(2_550));
    let now = clock.now();
    let first = Nanos(5 * SLOT.0);
    let last = Nanos(25 * SLOT.0);
    assert!(now >= last);
    let rate = qb.stats().accepted.sum(first, last) as f64 * 8.0 / 2.0;
    // 1,024 bytes of payload in a frame of 1,082 (the FIRST of each message: 1,098).
    let ideal = 20e6 * 65_536.0 / (64.0 * 1082.0 + 16.0);
    let queue = sampler.summary(begin, Instant::now());
    println!("{rate:.0} of {ideal:.0} b/s; queue p50 {} B, p99 {} B", queue.p50, queue.p99);
    assert!((rate / ideal - 1.0).abs() < 0.03, "{rate} of {ideal}");
    assert_eq!(queue.drops, 0);
    // The socket's 64 frames, give or take the one being sent and the slab rounding.
    assert!((32 * 1082..=80 * 1098).contains(&queue.p99), "{queue:?}");
    assert_no_repeats(&[&qa, &qb]);
}

#[test]
fn an_incast_overflows_a_short_queue_and_everything_arrives_in_the_end() {
    needs_root!();
    let bottleneck = Bottleneck { bits_per_sec: 100_000_000, queue: 64 };
    let star = Star::new(4, 1500, Some(bottleneck)).unwrap();
    let clock = Clock::start();
    let mut receiver = Host::start(&star.receiver.port, clock).unwrap();
    let mut hosts = Vec::new();
    let mut qps = Vec::new();
    for (i, port) in (0u32..).zip(&star.senders) {
        let mut host = Host::start(&port.port, clock).unwrap();
        let connection = Connection {
            qpn_a: 0x11,
            qpn_b: 0x40 + i,
            traffic_a: Traffic::times(Message::new(Op::Write, 65_536), 8),
            ..Connection::default()
        };
        qps.push(connect((&mut host, port), (&mut receiver, &star.receiver), &connection).unwrap());
        hosts.push(host);
    }
    for (sender, at_receiver) in &qps {
        assert!(sender.wait_done(PATIENCE), "{:?}", sender.stats());
        assert_eq!(at_receiver.stats().accepted_bytes, 8 * 65_536);
    }
    let retransmitted: u64 = qps.iter().map(|(s, _)| s.stats().retransmitted).sum();
    let port = &star.receiver_port;
    let drops = port.ns.run(|| QueueReader::open(port.index, LEAF)?.read()).unwrap().drops;
    println!("{drops} drops, {retransmitted} retransmitted");
    assert!(drops > 0 && retransmitted > 0, "{drops} drops, {retransmitted} retransmitted");
}

/// What the loop has to reach: senders held just below their share lose nothing in the queue that overflows otherwise.
#[test]
fn senders_held_to_their_share_lose_nothing_at_the_switch() {
    needs_root!();
    // The queue lasts 5.5 ms: a port whose CPU the machine takes away for about as long drops, whatever the senders do.
    const LONGEST: Duration = Duration::from_millis(2);
    const TRIES: u32 = 5;
    for left in (0..TRIES).rev() {
        let watch = Watch::every_cpu();
        let drops = hold_senders_to_their_share();
        let pause = watch.longest_pause();
        match drops {
            Ok(()) => return,
            Err(lost) if left > 0 && pause > LONGEST => eprintln!("again: {lost}, with a CPU away for {pause:?}"),
            Err(lost) => panic!("{lost}, and no CPU was away for longer than {pause:?}"),
        }
    }
}

/// Checks all but the drops; tells of those.
fn hold_senders_to_their_share() -> Result<(), String> {
    let star = Star::new(4, 1500, Some(Bottleneck { bits_per_sec: 100_000_000, queue: 64 })).unwrap();
    for sender in &star.senders {
        shape(&sender.port, Bottleneck { bits_per_sec: 24_000_000, queue: 1000 }).unwrap();
    }
    let clock = Clock::start();
    let mut receiver = Host::start(&star.receiver.port, clock).unwrap();
    let mut hosts = Vec::new();
    let mut handles = Vec::new();
    let begin = Instant::now();
    for (i, port) in (0u32..).zip(&star.senders) {
        let mut host = Host::start(&port.port, clock).unwrap();
        let connection = Connection {
            qpn_b: 0x80 + i,
            timeout: ack_timeout(16),
            traffic_a: Traffic::endless(Message::new(Op::Write, 65_536)),
            ..Connection::default()
        };
        handles.push(connect((&mut host, port), (&mut receiver, &star.receiver), &connection).unwrap());
        hosts.push(host);
    }
    thread::sleep(Duration::from_secs(3));
    let seconds = begin.elapsed().as_secs_f64();
    let rates: Vec<f64> = handles.iter().map(|(_, b)| b.stats().accepted_bytes as f64 * 8.0 / seconds).collect();
    let port = &star.receiver_port;
    let drops = port.ns.run(|| QueueReader::open(port.index, LEAF)?.read()).unwrap().drops;
    println!("{rates:.0?}, Jain {:.5}", jain(rates.iter().copied()));
    if drops != 0 {
        return Err(format!("the switch dropped {drops} packets"));
    }
    for (a, b) in &handles {
        assert_no_repeats(&[a, b]);
    }
    assert!(rates.iter().sum::<f64>() > 0.94 * 96e6 * 1024.0 / 1082.25, "{rates:?}");
    assert!(jain(rates.iter().copied()) > 0.999);
    Ok(())
}

#[test]
fn one_percent_loss_and_rnr_cost_repeats_but_no_data() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let clock = Clock::start();
    let mut ha = Host::start_lossy(&pair.a.port, clock, Box::new(loss(0.01, 7))).unwrap();
    let mut hb = Host::start_lossy(&pair.b.port, clock, Box::new(loss(0.01, 11))).unwrap();
    let messages = vec![Message::new(Op::Write, 20_000), Message::new(Op::Read, 20_000), Message::new(Op::Send, 5_000)];
    let connection = Connection {
        timeout: ack_timeout(12),
        rnr_b: Some(Rnr { every: 10, code: 12 }),
        traffic_a: Traffic { messages, rounds: Some(50) },
        ..Connection::default()
    };
    let (qa, qb) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap();
    assert!(qa.wait_done(PATIENCE), "{:?}", qa.stats());
    let (sa, sb) = (qa.stats(), qb.stats());
    println!("requester {sa:?}\nresponder {sb:?}");
    assert_eq!((sa.completed, sa.accepted_bytes, sb.accepted_bytes), (150, 50 * 20_000, 50 * 25_000));
    assert!(sa.retransmitted > 0 && sa.reasked > 0 && sa.naks > 0 && sa.rnrs > 0, "{sa:?}");
    assert!(ha.stats().injected_losses > 0 && hb.stats().injected_losses > 0);
}

#[test]
fn several_queue_pairs_in_lockstep_stay_apart() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let clock = Clock::start();
    let mut ha = Host::start(&pair.a.port, clock).unwrap();
    let mut hb = Host::start(&pair.b.port, clock).unwrap();
    let handles: Vec<_> = (0..8)
        .map(|i| {
            let connection = Connection {
                qpn_a: 0x11 + i,
                qpn_b: 0x80 + 3 * i,
                psn_a: 0,
                psn_b: 0,
                timeout: ack_timeout(19),
                traffic_a: Traffic::times(Message::new(Op::Write, 10_000), 20),
                ..Connection::default()
            };
            connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap()
        })
        .collect();
    for (a, b) in &handles {
        assert!(a.wait_done(PATIENCE), "{:?}", a.stats());
        assert_eq!(b.stats().accepted_bytes, 200_000);
        assert_no_repeats(&[a, b]);
    }
    assert_clean(&[ha.stats(), hb.stats()]);
}

/// Sending threads and the shaper's timer run on different CPUs; a veth alone lets frames overtake each other then.
#[test]
fn behind_a_fast_shaper_nothing_is_reordered() {
    needs_root!();
    let star = Star::new(2, 1500, None).unwrap();
    for sender in &star.senders {
        shape(&sender.port, Bottleneck { bits_per_sec: 200_000_000, queue: 1000 }).unwrap();
    }
    let clock = Clock::start();
    let mut receiver = Host::start(&star.receiver.port, clock).unwrap();
    let mut hosts = Vec::new();
    let mut handles = Vec::new();
    for (i, port) in (0u32..).zip(&star.senders) {
        let mut host = Host::start(&port.port, clock).unwrap();
        for q in 0..2 {
            let connection = Connection {
                qpn_a: 0x11 + q,
                qpn_b: 0x80 + 2 * i + q,
                timeout: ack_timeout(19),
                traffic_a: Traffic::endless(Message::new(Op::Write, 65_536)),
                ..Connection::default()
            };
            handles.push(connect((&mut host, port), (&mut receiver, &star.receiver), &connection).unwrap());
        }
        hosts.push(host);
    }
    thread::sleep(Duration::from_secs(3));
    let accepted: u64 = handles.iter().map(|(_, b)| b.stats().accepted_bytes).sum();
    println!("{:.0} Mb/s of payload", accepted as f64 * 8.0 / 3e6);
    for (a, b) in &handles {
        assert_no_repeats(&[a, b]);
    }
}

#[test]
fn a_capture_is_replayed_frame_by_frame() {
    needs_root!();
    let pair = Pair::new(1500).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.pcap");
    let mut writer = pcap_file::pcap::PcapWriter::new(std::fs::File::create(&file).unwrap()).unwrap();
    // A CNP to a queue pair nobody has, ten times, 20 ms apart.
    let path = wire::emit::Path {
        src_mac: [2, 0, 0, 0, 0, 1],
        dst_mac: [2, 0, 0, 0, 0, 2],
        src: Addr::from(pair.a.address(false)),
        dst: Addr::from(pair.b.address(false)),
        tos: 0xc2,
        ttl: 64,
        ip_id: 1,
        src_port: 0xc000,
    };
    let mut frame = [0; wire::emit::CNP_FRAME_V6];
    let len = wire::emit::cnp(&path, wire::IpVersion::V4, Qpn::new(5), &mut frame);
    let frame = &frame[..len];
    for i in 0..10u64 {
        let at = Duration::from_millis(1_000_000 + 20 * i);
        let packet = pcap_file::pcap::PcapPacket::new(at, frame.len() as u32, frame);
        writer.write_packet(&packet).unwrap();
    }
    drop(writer);
    let frames = replay::read(&file).unwrap();
    let host = Host::start(&pair.b.port, Clock::start()).unwrap();
    let macs = Macs { src: Some(pair.a.port.mac), dst: Some(pair.b.port.mac) };
    let begin = Instant::now();
    let done = replay::replay(&pair.a.port, &frames, Pace::Original, macs).unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(180), "original timing");
    assert_eq!((done.sent, done.refused), (10, 0));
    replay::replay(&pair.a.port, &frames, Pace::Flat, macs).unwrap();
    // With the capture's own MAC addresses the frames are another host's.
    replay::replay(&pair.a.port, &frames, Pace::Flat, Macs::default()).unwrap();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(host.stats(), HostStats { cnps: 20, ..HostStats::default() });
}

#[test]
fn roce_lab_alone_ends_in_time_with_one_json_object() {
    needs_root!();
    let begin = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_roce-lab"))
        .args(["run", "--roce", "none", "--time", "2", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(begin.elapsed() < Duration::from_secs(10));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let json: serde_json::Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((json["schema"].as_u64(), json["bottleneck_bps"].as_u64()), (Some(1), Some(100_000_000)));
    let side = &json["without"];
    assert!(side["switch_drops"].as_u64() > Some(0) && side["retransmitted"].as_u64() > Some(0), "{side}");
    assert_eq!(side["flows"].as_array().map(Vec::len), Some(4));
}

#[test]
fn bad_options_are_one_line_and_exit_code_2() {
    for args in [["--senders", "0"], ["--link", "0"], ["--queue", "-1"], ["--time", "0"], ["--roce", "/nonexistent"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_roce-lab"));
        command.arg("run");
        if args[0] != "--roce" {
            command.args(["--roce", "none"]);
        }
        let output = command.args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert_eq!(stderr.trim().lines().count(), 1, "{args:?}: {stderr}");
        assert!(stderr.contains(args[0]) && stderr.contains(args[1]), "{args:?}: {stderr}");
    }
}
