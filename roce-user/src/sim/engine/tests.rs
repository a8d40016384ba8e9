//! The simulator against what can be known without it: conservation, serialisation times, fixed rates.

use roce_common::{
    dcqcn::{Fabric, Params},
    units::{Nanos, Rate},
};

use super::{events::Event, run::Simulation, *};

const GIGABIT: Rate = Rate::from_bits_per_sec(1_000_000_000);
/// 1000 bytes at 1 Gb/s.
const PACKET_NS: f64 = 8_000.0;

/// Two flows at 1 Gb/s without a loop, window or pause, for 20 ms.
fn base() -> Scenario {
    Scenario {
        link: GIGABIT,
        host_link: GIGABIT,
        flows: 2,
        hosts: 2,
        packet: 1_000,
        params: None,
        queue_bytes: 64_000,
        window: 0,
        ack_every: 1,
        delay: Nanos::from_micros(20),
        jitter: Nanos(0),
        tick: Nanos(0),
        timeout: Nanos::from_millis(67),
        pfc: None,
        marking: Marking::Virtual,
        shaper: Shaper::Immediate,
        workload: Workload::Incast,
        message: 100_000,
        load: 0.5,
        stagger: Nanos(0),
        join: None,
        time: Nanos::from_millis(20),
        warmup: Nanos::from_millis(10),
        seed: 1,
    }
}

fn soft() -> Option<Params> {
    Some(Params::soft(Fabric { line: GIGABIT, packet_bytes: 1_000, feedback: Nanos::from_micros(70) }))
}

/// Every packet that was sent has arrived, was dropped, waits, or is on a wire.
#[track_caller]
fn conserves(s: &Scenario) -> (u64, u64) {
    s.check().unwrap();
    let mut sim = Simulation::new(s);
    sim.run();
    let sent: u64 = sim.flows.iter().map(|f| f.sent_ever).sum();
    let arrived: u64 = sim.flows.iter().map(|f| f.arrived_ever).sum();
    let dropped: u64 = sim.drops.iter().sum();
    let waiting: usize = sim.net.ports.iter().map(|p| p.queue.len() + usize::from(p.sending.is_some())).sum();
    let flying = sim.events.pending().filter(|e| matches!(e, Event::Arrive(_))).count();
    assert_eq!(sent, arrived + dropped + waiting as u64 + flying as u64, "{s:?}");
    // In order, once, and no more than was sent.
    for f in &sim.flows {
        assert!(f.una <= f.expected && u64::from(f.expected) <= f.sent_ever);
    }
    (sent, dropped)
}

#[test]
fn no_packet_is_lost_or_made() {
    let windowed = Scenario { window: 64, ..base() };
    let pfc = Some(Pfc { xoff: 16_000, xon: 8_000 });
    for workload in [Workload::Incast, Workload::ParkingLot, Workload::Ring, Workload::Rpc] {
        for pfc in [None, pfc] {
            for params in [None, soft()] {
                let s = Scenario { workload, pfc, params, flows: 6, hosts: 6, load: 0.9, ..windowed.clone() };
                let (sent, dropped) = conserves(&s);
                assert!(sent > 500, "{sent} {s:?}");
                assert!(pfc.is_none() || dropped == 0, "PFC never drops: {dropped} {s:?}");
            }
        }
    }
    let (_, dropped) = conserves(&Scenario { flows: 8, hosts: 8, ..base() });
    assert!(dropped > 1_000, "eight line rates into one: {dropped}");
    conserves(&Scenario { flows: 8, hosts: 2, shaper: Shaper::Stamped, params: soft(), ..windowed });
}

#[test]
fn one_flow_fills_the_link_and_a_window_of_one_waits() {
    let one = Scenario { flows: 1, hosts: 1, ..base() };
    let o = run(&one).unwrap();
    // The next packet comes at the moment at which the port is free.
    assert!((o.utilisation - 1.0).abs() < 0.002 && o.queue.p99 == 0, "{} {:?}", o.utilisation, o.queue);
    // Out of the host, out of the port, two links there and two back.
    let rtt = 2.0 * PACKET_NS + 20_000.0;
    let o = run(&Scenario { window: 1, ..one.clone() }).unwrap();
    assert!((o.utilisation - PACKET_NS / rtt).abs() < 0.002, "{}", o.utilisation);
    let o = run(&Scenario { window: 3, ..one }).unwrap();
    assert!((o.utilisation - 3.0 * PACKET_NS / rtt).abs() < 0.004, "{}", o.utilisation);
}

#[test]
fn two_slow_hosts_get_what_they_send_and_queue_nothing() {
    let s = Scenario { host_link: Rate::from_bits_per_sec(300_000_000), ..base() };
    let o = run(&s).unwrap();
    for rate in &o.rates_bps {
        assert!((rate - 3e8).abs() < 1e6, "{rate}");
    }
    assert!((o.utilisation - 0.6).abs() < 0.002 && o.jain > 0.9999 && o.drops == [0, 0]);
    assert!(o.queue.peak <= 1_000, "at most one waits for the other: {}", o.queue.peak);
}

#[test]
fn a_constant_overload_fills_the_queue_and_shares_by_arrival() {
    // 1.2 times the link, no loss recovery to disturb: the queue is full, and a sixth of the packets is lost.
    let s = Scenario { host_link: Rate::from_bits_per_sec(600_000_000), time: Nanos::from_millis(40), ..base() };
    let mut sim = Simulation::new(&s);
    sim.run();
    let port = sim.net.ports[0].stats.as_ref().unwrap().depth();
    assert!(port.p50 >= 62_000, "{port:?}");
    let sent = sim.flows.iter().map(|f| f.counts.sent).sum::<u64>();
    assert!((sim.drops[1] as f64 / sent as f64 - 1.0 / 6.0).abs() < 0.01);
}

#[test]
fn pause_holds_back_instead_of_dropping() {
    let pfc = Some(Pfc { xoff: 20_000, xon: 10_000 });
    let o = run(&Scenario { pfc, flows: 4, hosts: 4, ..base() }).unwrap();
    assert_eq!(o.drops, [0, 0]);
    assert!(o.utilisation > 0.995 && o.jain > 0.99, "{} {}", o.utilisation, o.jain);
    // Each of four links may use a quarter: paused for three quarters of 10 ms, in sum 30 ms.
    assert!((25_000_000..32_000_000).contains(&o.pause_ns), "{}", o.pause_ns);
    let lot = run(&Scenario { workload: Workload::ParkingLot, pfc, flows: 4, hosts: 4, ..base() }).unwrap();
    assert!(lot.drops == [0, 0] && lot.pause_ns > 0);
}

#[test]
fn messages_take_at_least_their_serialisation() {
    // 25 and 400 packets: a quarter of the mean and four times the mean. Alone on the link, one at a time nearly always.
    let rpc = Scenario {
        workload: Workload::Rpc,
        flows: 4,
        hosts: 4,
        load: 0.02,
        time: Nanos::from_millis(4_000),
        warmup: Nanos::from_millis(1),
        ..base()
    };
    let o = run(&rpc).unwrap();
    assert!((50..200).contains(&o.completions_ns.len()), "about a hundred: {}", o.completions_ns.len());
    let alone = |packets: f64| (packets + 1.0) * PACKET_NS + 10_000.0;
    assert!((o.completions_ns[0] as f64 - alone(25.0)).abs() < 10.0, "{}", o.completions_ns[0]);
    assert!((percentile(&o.completions_ns, 0.9) as f64) > alone(400.0) - 10.0);
    // A ring of two: a step is one message, there and back again, over a trunk of half the rate.
    let ring = Scenario { workload: Workload::Ring, ..base() };
    let o = run(&ring).unwrap();
    assert!((o.completions_ns[0] as f64) > 100.0 * 2.0 * PACKET_NS && o.jain > 0.99, "{:?}", o.completions_ns.first());
}

#[test]
fn a_lost_packet_is_repeated_and_the_last_one_timed_out() {
    let s = Scenario { window: 64, ack_every: 16, queue_bytes: 10_000, timeout: Nanos::from_millis(2), ..base() };
    let o = run(&Scenario { flows: 4, hosts: 4, ..s }).unwrap();
    assert!(o.retransmitted > 0 && o.drops[1] > 0 && o.timeouts > 0, "{o:?}");
    assert!(o.utilisation <= o.busy, "what is sent twice counts once");
}

#[test]
fn a_seed_decides_everything() {
    let s = Scenario {
        params: soft(),
        window: 64,
        ack_every: 16,
        jitter: Nanos::from_micros(50),
        flows: 4,
        hosts: 4,
        ..base()
    };
    let outcome = |s: &Scenario| {
        let o = run(s).unwrap();
        (o.events, o.rates_bps, o.queue, o.drops, o.curve)
    };
    assert_eq!(outcome(&s), outcome(&s));
    assert_ne!(outcome(&s).1, outcome(&Scenario { seed: 2, ..s.clone() }).1);
}

#[test]
fn cnps_keep_their_interval() {
    let params = Params::paper(GIGABIT);
    let s = Scenario { params: Some(params), marking: Marking::Departure, queue_bytes: 1 << 22, ..base() };
    let o = run(&s).unwrap();
    assert!(o.ce_share > 0.1, "{}", o.ce_share);
    assert!(o.cnp_per_flow_per_s <= 20_000.0 && o.cnp_per_flow_per_s > 1_000.0, "{}", o.cnp_per_flow_per_s);
}

#[test]
fn nonsense_is_refused() {
    for (s, what) in [
        (Scenario { flows: 0, ..base() }, "flows"),
        (Scenario { hosts: 3, ..base() }, "hosts"),
        (Scenario { packet: 0, ..base() }, "packet"),
        (Scenario { queue_bytes: 1_000, ..base() }, "two packets"),
        (Scenario { warmup: Nanos::SECOND, ..base() }, "warmup"),
        (Scenario { window: 4, ack_every: 5, ..base() }, "ack_every"),
        (Scenario { shaper: Shaper::Stamped, ..base() }, "window"),
        (Scenario { load: f64::NAN, ..base() }, "load"),
        (Scenario { workload: Workload::ParkingLot, ..base() }, "parking lot"),
        (Scenario { pfc: Some(Pfc { xoff: 1, xon: 2 }), ..base() }, "XON"),
        (Scenario { link: Rate::from_bytes_per_sec(0), ..base() }, "link rate"),
    ] {
        assert!(run(&s).unwrap_err().contains(what), "{what}");
    }
}

#[test]
fn jain_is_one_for_equal_and_one_nth_for_one_winner() {
    assert_eq!(jain([3.0, 3.0, 3.0].into_iter()), 1.0);
    assert_eq!(jain([8.0, 0.0, 0.0, 0.0].into_iter()), 0.25);
}
