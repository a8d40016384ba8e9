use super::*;
use crate::{
    dcqcn::{Fabric, Params},
    units::Rate,
};

const LINE: Rate = Rate::from_bits_per_sec(100_000_000);

#[test]
fn the_first_cnp_halves_and_recovery_is_monotone_to_line() {
    let p = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let mut rp = Rp::new(p, Nanos(0));
    assert_eq!(rp.on_cnp(Nanos(1)), Reaction::Cut);
    assert_eq!(rp.rate().bits_per_sec(), 50_000_000);
    assert_eq!(rp.target(), LINE);
    assert_eq!(rp.alpha(), ONE);
    let (mut last, mut now) = (rp.rate(), 1);
    while !rp.released(Nanos(now)) {
        now = rp.next_deadline().0;
        rp.advance(Nanos(now), None);
        assert!(rp.rate() >= last);
        last = rp.rate();
        assert!(now < Nanos::SECOND.0, "back within a second");
    }
    assert_eq!(rp.rate(), LINE);
}

#[test]
fn additive_then_hyper_increase() {
    let soft = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let hyper = Rate::from_bytes_per_sec(5 * soft.additive.bytes_per_sec());
    let p = RpParams { byte_period: 1_000, fast_recovery: 5, hyper, ..soft };
    let mut rp = Rp::new(p, Nanos(0));
    for i in 0..6 {
        rp.on_cnp(Nanos(i * p.monitor.0));
    }
    let base = rp.target().bytes_per_sec();
    let start = rp.seen.0;
    let t = |k: u64| Nanos(start + k * p.timer.0);
    rp.advance(t(4), None);
    assert_eq!(rp.target().bytes_per_sec(), base, "four increases: fast recovery");
    rp.advance(t(5), None);
    assert_eq!(rp.target().bytes_per_sec(), base + p.additive.bytes_per_sec(), "the fifth is additive");
    rp.advance(t(6), None);
    rp.advance(t(6), Some(5_000));
    assert_eq!(rp.target().bytes_per_sec(), base + 7 * p.additive.bytes_per_sec(), "min(T, BC) = F is additive still");
    rp.advance(t(6), Some(1_000));
    assert_eq!(rp.target().bytes_per_sec(), base + 7 * p.additive.bytes_per_sec() + p.hyper.bytes_per_sec());
}

#[test]
fn a_flood_cuts_once_per_monitor_period_and_stops_at_the_minimum() {
    let p = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let mut rp = Rp::new(p, Nanos(0));
    let (mut cuts, span) = (0u64, Nanos::SECOND.0);
    for now in (0..span).step_by(10_000) {
        cuts += u64::from(rp.on_cnp(Nanos(now)) == Reaction::Cut);
        assert!(rp.rate() >= p.min_rate);
    }
    assert!(cuts <= span / p.monitor.0 + 1, "{cuts}");
    assert_eq!(rp.rate(), p.min_rate);
    // A minimum of its own, as the ACK timeout demands.
    let own = RpParams { min_rate: Rate::from_bits_per_sec(16_800_000), ..p };
    let mut rp = Rp::new(own, Nanos(0));
    for i in 0..100 {
        rp.on_cnp(Nanos(i * p.monitor.0));
    }
    assert_eq!(rp.rate(), own.min_rate);
}

#[test]
fn a_year_passes_in_one_step() {
    const YEAR: u64 = 365 * 86_400 * 1_000_000_000;
    for p in [Params::soft(Fabric::new(LINE, 1_100)).rp, Params::paper(Rate::from_bits_per_sec(40_000_000_000)).rp] {
        let mut rp = Rp::new(p, Nanos(0));
        for i in 0..20 {
            rp.on_cnp(Nanos(i * p.monitor.0));
        }
        let begun = std::time::Instant::now();
        rp.advance(Nanos(YEAR), Some(YEAR));
        assert!(begun.elapsed().as_millis() < 50);
        assert_eq!((rp.rate(), rp.alpha()), (p.line, 0));
        assert!(rp.released(Nanos(YEAR)));
        assert_eq!(rp.on_cnp(Nanos(2 * YEAR)), Reaction::Cut);
    }
}

#[test]
fn a_hundred_thousand_flows_need_no_ticks() {
    // 55 µs timers: ticking each for a second would be 1.8 billion steps.
    let p =
        RpParams { additive: Rate::from_bytes_per_sec(1), ..Params::paper(Rate::from_bits_per_sec(40_000_000_000)).rp };
    let begun = std::time::Instant::now();
    for i in 0..100_000u64 {
        let mut rp = Rp::new(p, Nanos(i));
        for k in 0..5 {
            rp.on_cnp(Nanos(i + k * p.monitor.0));
        }
        rp.advance(Nanos(1_000_000_000 + i), Some(0));
        assert!(rp.rate() < p.line);
    }
    std::println!(
        "{:?} for 100,000 flows of {} bytes, of which {} are constants",
        begun.elapsed(),
        size_of::<Rp>(),
        size_of::<RpParams>()
    );
    assert!(begun.elapsed().as_secs() < 5);
    assert!(size_of::<Rp>() <= 288, "100,000 of them fit 29 MB");
}

#[test]
fn an_idle_flow_is_looked_at_ever_less_often() {
    let p = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let mut rp = Rp::start(p, Nanos(0));
    let mut looks = 0u64;
    let hour = 3_600 * Nanos::SECOND.0;
    while rp.next_deadline().0 < hour {
        let at = rp.next_deadline();
        assert!(at > rp.seen);
        rp.advance(at, Some(0));
        looks += 1;
    }
    assert!(looks < hour / (IDLE_LOOK * p.timer.0) + 20, "{looks}");
    assert_eq!(rp.rate(), p.start_rate);
    // What it sends then counts at the next look, however late.
    let since = rp.seen.0;
    let busy = rp.rate().bytes_in(Nanos(3 * p.timer.0)) + 1;
    rp.advance(Nanos(since + p.idle_restart.0 / 2), Some(busy));
    let grown = rp.target().bytes_per_sec() as f64 / p.start_rate.bytes_per_sec() as f64;
    assert!((grown - 1.5f64.powi(3)).abs() < 0.001, "{grown}");
}

#[test]
fn timers_alone_do_not_raise_an_idle_flow() {
    let soft = Params::soft(Fabric::new(LINE, 1_100)).rp;
    for (p, raised) in [(soft, false), (RpParams { usage: 0, idle_restart: Nanos(0), ..soft }, true)] {
        let mut rp = Rp::new(p, Nanos(0));
        rp.on_cnp(Nanos(0));
        rp.advance(Nanos(p.timer.0), Some(0));
        let cut = rp.rate();
        rp.advance(Nanos(20 * p.timer.0), Some(0));
        assert_eq!(rp.rate() > cut, raised);
    }
}

/// A flow that is cut again and again between two looks: what it sent before a cut went at the rate before it.
#[test]
fn cuts_do_not_make_an_idle_flow_busy() {
    let p = RpParams { fast_recovery: 1, monitor: Nanos(0), ..Params::soft(Fabric::new(LINE, 1_100)).rp };
    let quarter = p.timer.0 / 4;
    for (percent, raised) in [(30, false), (90, true)] {
        let mut rp = Rp::new(p, Nanos(0));
        let (mut now, mut rises) = (0, 0);
        for _ in 0..50 {
            // Two CNPs in a period, and a look behind it.
            let mut bytes = 0;
            for _ in 0..2 {
                now += quarter;
                bytes += rp.rate().bytes_in(Nanos(quarter)) * percent / 100;
                rp.on_cnp(Nanos(now));
            }
            now += p.timer.0;
            bytes += rp.rate().bytes_in(p.timer) * percent / 100;
            let before = rp.rate();
            rp.advance(Nanos(now), Some(bytes));
            rises += u32::from(rp.rate() > before);
        }
        assert_eq!(rises > 40, raised, "{rises} rises at {percent} %");
        assert_eq!(rises == 0, !raised, "{rises} rises at {percent} %");
        assert!(rp.busy_until <= rp.seen, "{rp:?}");
    }
}

#[test]
fn a_clock_that_steps_back_changes_nothing() {
    let p = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let mut rp = Rp::new(p, Nanos(1_000_000));
    rp.on_cnp(Nanos(2_000_000));
    rp.advance(Nanos(2_000_000), Some(0));
    let before = rp;
    rp.advance(Nanos(500_000), Some(0));
    assert_eq!(rp, before);
    assert_eq!(rp.on_cnp(Nanos(0)), Reaction::HeldBack);
}
