//! What a network may do to an agent: floods, forgeries, malformed packets, full rings. Needs root, BTF and bpffs.

use std::{
    collections::BTreeMap,
    fs,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use roce_common::{
    abi::{Counter, Direction, MAX_FLOWS, PairKey, PeerQp},
    dcqcn::{Fabric, Params},
    units::{Addr, Qpn, Rate},
    wire::{self, Opcode, Verdict},
};
use roce_tests::{
    capture::Capture,
    endpoint::{Clock, Connection, Host, Message, Op, QpHandle, Traffic, ack_timeout, connect},
    forge::{Forger, altered, malformed, mutated, tagged},
    lab::{Bottleneck, Pair, Star},
    needs_root, rig,
    run::{AgentProcess, AgentRole},
};
use roce_user::{agent::monotonic, dataplane::Maps};
use serde_json::Value;

/// Time every transfer gets; far more than any needs.
const PATIENCE: Duration = Duration::from_secs(20);
/// The victim's link, as its agent is told.
const LINK: Rate = Rate::from_bits_per_sec(40_000_000);

/// A sender with an agent whose queue pair transfers without end over 40 Mb/s, and an attacker where its peer is.
struct Victim {
    agent: AgentProcess,
    maps: Maps,
    /// The limiter of its queue pair.
    limiter: PeerQp,
    /// Its queue pair.
    qpn: u32,
    at_peer: QpHandle,
    attacker: Forger,
    _hosts: [Host; 2],
    _star: Star,
}

impl Victim {
    /// One that repeats nothing while a test lasts: its ACK timeout is 17 s.
    fn new() -> Self {
        Self::with_timeout(22)
    }

    /// One with an ACK timeout of 4.096 µs × 2^`exponent`. A flood comes over the link of the peer's ACKs and may take
    /// some with it, the last of a window too: with 16 the transfer goes on after 268 ms.
    fn with_timeout(exponent: u32) -> Self {
        let star = Star::new(1, 1500, Some(Bottleneck { bits_per_sec: LINK.bits_per_sec(), queue: 1_000 })).unwrap();
        let (host, peer) = (&star.senders[0], &star.receiver);
        let agent = rig::agent(&host.port, AgentRole::Host, &["--link-rate", "40m", "--pacer", "htb"]).unwrap();
        let clock = Clock::start();
        let mut hosts = [&host.port, &peer.port].map(|p| Host::start(p, clock).unwrap());
        let connection = Connection {
            timeout: ack_timeout(exponent),
            traffic_a: Traffic::endless(Message::new(Op::Write, 65_536)),
            ..Connection::default()
        };
        let [ha, hb] = &mut hosts;
        let (_, at_peer) = connect((ha, host), (hb, peer), &connection).unwrap();
        let (own, other) = (Addr::from(host.address(false)), Addr::from(peer.address(false)));
        let maps = rig::maps(&host.port).unwrap();
        let pair = PairKey::new(other, own, Qpn::new(connection.qpn_a));
        rig::wait_paired(&maps, pair).unwrap();
        let attacker = Forger::new(peer, host.address(false)).unwrap();
        let limiter = PeerQp::new(other, Qpn::new(connection.qpn_b));
        Self { agent, maps, limiter, qpn: connection.qpn_a, at_peer, attacker, _hosts: hosts, _star: star }
    }

    fn limit(&self) -> Option<u64> {
        self.maps.rate(self.limiter).map(|r| r.bytes_per_sec)
    }

    fn received(&self) -> u64 {
        self.at_peer.stats().accepted_bytes
    }
}

/// Sends `count` frames at about `rate` a second.
fn flood(forger: &Forger, count: u32, rate: u32, mut frame: impl FnMut(u32) -> Vec<u8>) {
    let begin = Instant::now();
    for i in 0..count {
        forger.send(&frame(i));
        let due = Duration::from_secs(1) * i / rate;
        if i % 64 == 0 {
            thread::sleep(due.saturating_sub(begin.elapsed()));
        }
    }
}

fn ignored(summary: &Value, reason: &str) -> u64 {
    summary["control"]["rp_ignored_by_reason"][reason].as_u64().unwrap()
}

#[test]
fn a_cnp_flood_from_the_peer_cuts_once_a_period_and_is_overcome() {
    needs_root!();
    const CNPS: u32 = 60_000;
    let victim = Victim::with_timeout(16);
    let params = Params::soft(Fabric::new(LINK, 1_098)).rp;
    let begin = Instant::now();
    let (mut least, mut most) = (u64::MAX, 0);
    thread::scope(|s| {
        let flood = s.spawn(|| {
            let cnp = victim.attacker.cnp(victim.qpn);
            flood(&victim.attacker, CNPS, 100_000, |_| cnp.clone());
        });
        while !flood.is_finished() {
            if let Some(limit) = victim.limit() {
                (least, most) = (least.min(limit), most.max(limit));
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let flooded = begin.elapsed();
    let after = victim.received();
    thread::sleep(Duration::from_millis(3_500));
    let recovered = victim.limit().unwrap_or(LINK.bytes_per_sec());
    let moved = victim.received() - after;
    let summary = rig::finish(victim.agent).unwrap();
    let control = |name| rig::control(&summary, name);
    println!(
        "{CNPS} CNPs in {flooded:?}: {}, ring full {}; limit {least} … {most} B/s, after 3.5 s {recovered}; {moved} bytes",
        summary["control"],
        rig::counter(&summary, "ingress", "cnp_ring_full")
    );
    // A veth's backlog may drop some of a flood before any program sees them, on a busy machine many.
    let seen = rig::counter(&summary, "ingress", "cnp");
    assert!(seen >= u64::from(CNPS) / 2, "{seen}");
    assert_eq!(control("rp_handled"), seen);
    // The ring's CNPs may be worked off a little later than they came, and what the ring lost is one more sign or two.
    let periods = (flooded + Duration::from_millis(100)).as_nanos() as u64 / params.monitor.0;
    assert!((10..=periods + 3).contains(&control("cuts")), "{} cuts in {periods} periods", control("cuts"));
    assert_eq!(control("cuts") + control("held_back"), seen);
    assert!(least >= params.min_rate.bytes_per_sec(), "{least}");
    assert!(recovered > 100 * params.min_rate.bytes_per_sec() && moved > 200_000, "{recovered} {moved}");
}

#[test]
fn cnps_that_name_nobody_cut_nothing() {
    needs_root!();
    let mut victim = Victim::new();
    let peer = victim.attacker.path.src;
    // Another host's address, our own, and the peer's with queue pairs it is not connected to.
    for (src, qpn) in [
        (Addr::v4([10, 66, 200, 77]), victim.qpn),
        (victim.attacker.path.dst, victim.qpn),
        (peer, victim.qpn + 1),
        (peer, victim.limiter.qpn().get()),
    ] {
        victim.attacker.path.src = src;
        let cnp = victim.attacker.cnp(qpn);
        flood(&victim.attacker, 500, 20_000, |_| cnp.clone());
    }
    thread::sleep(Duration::from_millis(100));
    // What holds it back is its own start, and no CNP.
    let start = Params::soft(Fabric::new(LINK, 1_098)).rp.start_rate.bytes_per_sec();
    let rates = victim.maps.rates();
    assert!(rates.iter().all(|(_, r)| r.cause_ns == 0 && r.bytes_per_sec >= start), "{rates:?}");
    // One from the right peer without BECN counts as such, and as a CNP.
    victim.attacker.path.src = peer;
    let plain = victim.attacker.cnp(victim.qpn);
    victim.attacker.send(&altered(&plain, |f| f[46] = 0));
    thread::sleep(Duration::from_millis(200));
    let summary = rig::finish(victim.agent).unwrap();
    println!("{} {}", summary["control"], summary["counters"]["ingress"]);
    let control = |name| rig::control(&summary, name);
    assert_eq!((control("cnp_received"), control("rp_ignored"), ignored(&summary, "unpaired")), (2_001, 2_000, 2_000));
    assert_eq!((control("rp_handled"), control("cuts")), (1, 1));
    assert_eq!(rig::counter(&summary, "ingress", "cnp_unpaired"), 2_000);
    assert_eq!(rig::counter(&summary, "ingress", "cnp_without_becn"), 1);
}

fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// CPU time the main thread of a process has used.
fn cpu_time(pid: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_flood_of_first_sights_fills_a_table_and_starves_nobody() {
    needs_root!();
    let victim = Victim::with_timeout(16);
    let flows = MAX_FLOWS + 9_000;
    let before = (resident_kib(victim.agent.id()), victim.received());
    let beats = rig::heartbeat(&victim._star.senders[0].port).unwrap();
    let cnps = Forger::new(&victim._star.receiver, IpAddr::from([10, 66, 1, 1])).unwrap();
    let refused = || victim.maps.counters(Direction::Ingress).unwrap()[Counter::FlowsRefused as usize];
    let (mut silent, mut busy) = (Duration::ZERO, Duration::ZERO);
    thread::scope(|s| {
        let flood = s.spawn(|| {
            // Every QPN once, in an order that looks random: an odd factor permutes 2^24. A busy machine loses some.
            let mut number = 0u32;
            flood(&victim.attacker, flows, 100_000, |_| {
                number += 1;
                victim.attacker.write(number.wrapping_mul(0x2_4e6d) & 0xff_ffff, 1, &[0; 4])
            });
            while refused() < 2_000 && number < 4 * flows {
                flood(&victim.attacker, 5_000, 50_000, |_| {
                    number += 1;
                    victim.attacker.write(number.wrapping_mul(0x2_4e6d) & 0xff_ffff, 1, &[0; 4])
                });
            }
        });
        let end = Instant::now() + Duration::from_secs(6);
        let mut next = Instant::now();
        let mut last = (0, cpu_time(victim.agent.id()));
        while Instant::now() < end || !flood.is_finished() {
            // What the controller is busy with, it does not say between two beats.
            let beat = beats.get(&0, 0).unwrap();
            if beat != last.0 {
                let cpu = cpu_time(victim.agent.id());
                busy = busy.max(cpu - last.1);
                last = (beat, cpu);
            }
            silent = silent.max(Duration::from_nanos(monotonic().0.saturating_sub(beat)));
            if Instant::now() > next {
                next += Duration::from_millis(100);
                cnps.send(&cnps.cnp(victim.qpn));
            }
            thread::sleep(Duration::from_millis(2));
        }
    });
    thread::sleep(Duration::from_millis(200));
    let after = (resident_kib(victim.agent.id()), victim.received());
    let qpn = victim.limiter.qpn().get();
    let summary = rig::finish(victim.agent).unwrap();
    println!(
        "refused {}, events lost {}; {busy:?} of work and {silent:?} between two beats at the most; {} → {} KiB; {} bytes moved; {}",
        rig::counter(&summary, "ingress", "flows_refused"),
        rig::counter(&summary, "ingress", "events_lost"),
        before.0,
        after.0,
        after.1 - before.1,
        summary["control"],
    );
    assert!(rig::counter(&summary, "ingress", "flows_refused") > 1_000, "{}", summary["counters"]);
    assert!(after.0 < before.0 + 128 * 1_024, "{} → {} KiB", before.0, after.0);
    // By its own work, since others may be at work on this machine; walking the table took 700 ms and more.
    assert!(busy < Duration::from_millis(250), "{busy:?}");
    let (received, handled) = (rig::control(&summary, "cnp_received"), rig::control(&summary, "rp_handled"));
    assert!(received >= 30 && handled == received, "{}", summary["control"]);
    assert!(after.1 - before.1 > 500_000, "{before:?} {after:?}");
    let flows = summary["flows"].as_array().unwrap();
    let real = flows.iter().find(|f| f["dest_qp"] == qpn && f["tap"] == "s1/egress").expect("the real flow");
    assert_eq!(real["missing_psns"], 0, "{real}");
}

#[test]
fn malformed_packets_are_counted_by_reason_and_make_no_flow() {
    needs_root!();
    const MUTATED: u32 = 20_000;
    for ingress in ["tc", "xdp"] {
        let pair = Pair::new(1500).unwrap();
        let args = ["--link-rate", "100m", "--ingress", ingress];
        let agent = rig::agent(&pair.a.port, AgentRole::Host, &args).unwrap();
        let maps = rig::maps(&pair.a.port).unwrap();
        let forger = Forger::new(&pair.b, pair.a.address(false)).unwrap();
        let mut want: BTreeMap<String, u64> = BTreeMap::new();
        for (name, frame) in malformed(&forger) {
            flood(&forger, 10, 100_000, |_| frame.clone());
            want.insert(name.to_owned(), 10);
        }
        let names: Vec<&str> = want.keys().map(String::as_str).collect();
        let counts = |names: &[&str]| -> BTreeMap<String, u64> {
            let counters = maps.counters(Direction::Ingress).unwrap();
            let all = Counter::ALL.iter().map(|c| (c.name().to_owned(), counters[*c as usize]));
            all.filter(|(name, _)| names.contains(&name.as_str())).collect()
        };
        assert!(rig::eventually(Duration::from_secs(1), || counts(&names) == want), "{:?}", counts(&names));
        assert_eq!(maps.flows(), [], "{ingress}: a malformed packet made a flow");

        // What both parsers make of the same mutated packets is the same.
        let v6 = Forger::new(&pair.b, pair.a.address(true)).unwrap();
        let base: Vec<Vec<u8>> = [&forger, &v6]
            .iter()
            .flat_map(|f| {
                let read = f.packet(Opcode::READ_REQUEST, 0x11, 9, 4_096, &[]);
                [f.write(0x11, 7, &[7; 61]), read, f.cnp(0x11)]
            })
            .collect();
        for i in 0..MUTATED {
            let reason = match wire::parse(&mutated(&base, i)[..]) {
                Verdict::Roce(_) => "rocev2".to_owned(),
                Verdict::Malformed(reason) => reason.name().to_owned(),
                Verdict::RoceV1 | Verdict::NotRoce => continue,
            };
            *want.entry(reason).or_insert(0) += 1;
        }
        flood(&forger, MUTATED, 100_000, |i| mutated(&base, i));
        let names: Vec<&str> = want.keys().map(String::as_str).collect();
        assert!(
            rig::eventually(Duration::from_secs(2), || counts(&names) == want),
            "{ingress}: counted {:?}, sent {want:?}",
            counts(&names)
        );
        println!("{ingress}: {want:?}");
        rig::finish(agent).unwrap();
    }
}

#[test]
fn jumbo_frames_and_tags_pass_native_xdp() {
    needs_root!();
    for ingress in ["xdp", "tc"] {
        let pair = Pair::new(9000).unwrap();
        let args = ["--link-rate", "1g", "--ingress", ingress];
        let agent = rig::agent(&pair.a.port, AgentRole::Host, &args).unwrap();
        let clock = Clock::start();
        let (mut ha, mut hb) = (Host::start(&pair.a.port, clock).unwrap(), Host::start(&pair.b.port, clock).unwrap());
        let connection = Connection {
            pmtu: 4096,
            timeout: ack_timeout(19),
            traffic_b: Traffic::times(Message::new(Op::Write, 100_000), 60),
            ..Connection::default()
        };
        let (_, qb) = connect((&mut ha, &pair.a), (&mut hb, &pair.b), &connection).unwrap();
        assert!(qb.wait_done(PATIENCE), "{:?}", qb.stats());
        let (a, b) = (Addr::from(pair.a.address(false)), Addr::from(pair.b.address(false)));
        rig::wait_paired(&rig::maps(&pair.a.port).unwrap(), PairKey::new(b, a, Qpn::new(connection.qpn_a))).unwrap();

        // A repetition, marked; and the same with a tag an interval later.
        let mut forger = Forger::new(&pair.b, pair.a.address(false)).unwrap();
        forger.path.tos = 3;
        let repeated = forger.write(connection.qpn_a, (connection.psn_b + 1_400) & 0xff_ffff, &[1; 4_096]);
        let capture = Capture::start(&pair.b.port).unwrap();
        for frame in [repeated.clone(), tagged(&repeated, 77)] {
            forger.send(&frame);
            thread::sleep(Duration::from_millis(20));
        }
        let seen = capture.finish().unwrap();
        let cnps = seen.iter().filter(|s| s.is_cnp() && s.packet.bth.dest_qp.get() == connection.qpn_b).count();
        let summary = rig::finish(agent).unwrap();
        let ingress_count = |name| rig::counter(&summary, "ingress", name);
        let flows = summary["flows"].as_array().unwrap();
        let flow = flows.iter().find(|f| f["tap"] == "a/ingress" && f["space"] == "request").unwrap();
        println!(
            "{ingress}: {} packets, {} bytes, {cnps} CNPs, ce {}",
            flow["packets"],
            flow["bytes"],
            ingress_count("ce")
        );
        // 25 packets for each message, two repetitions.
        assert_eq!((&flow["packets"], &flow["bytes"]), (&1_502.into(), &(6_000_000 + 2 * 4_096).into()), "{flow}");
        assert_eq!((&flow["missing_psns"], &flow["duplicates"]), (&0.into(), &2.into()), "{flow}");
        assert_eq!((ingress_count("np_ce"), ingress_count("ce"), cnps), (2, 2, 2), "{}", summary["counters"]);
    }
}

#[test]
fn cnps_that_a_stopped_agents_ring_lost_are_still_known() {
    needs_root!();
    const CNPS: u32 = 8_000;
    let victim = Victim::new();
    victim.agent.signal(Signal::SIGSTOP).unwrap();
    let cnp = victim.attacker.cnp(victim.qpn);
    flood(&victim.attacker, CNPS, 50_000, |_| cnp.clone());
    thread::sleep(Duration::from_millis(50));
    victim.agent.signal(Signal::SIGCONT).unwrap();
    assert!(rig::eventually(Duration::from_secs(1), || victim.limit().is_some()), "nothing was cut");
    thread::sleep(Duration::from_millis(3_200));
    let summary = rig::finish(victim.agent).unwrap();
    let full = rig::counter(&summary, "ingress", "cnp_ring_full");
    println!("ring full for {full} of {CNPS}: {}", summary["control"]);
    assert!(full > 1_000, "{}", summary["counters"]);
    assert_eq!(rig::control(&summary, "recovered"), full);
    assert_eq!(rig::control(&summary, "rp_handled"), rig::counter(&summary, "ingress", "cnp"));
}
