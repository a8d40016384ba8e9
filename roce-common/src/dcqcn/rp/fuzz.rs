//! Any sequence of operations on any valid set of constants: what always holds, and agreement with floating point.

use std::vec::Vec;

use proptest::prelude::*;

use super::{oracle::Oracle, *};
use crate::{
    dcqcn::{Fabric, Params, params::Boundary},
    units::Rate,
};

const YEAR: u64 = 365 * 86_400 * 1_000_000_000;

#[derive(Clone, Copy, Debug)]
enum Op {
    Cnp,
    /// CNPs one behind the other.
    Flood {
        n: u16,
        gap: u32,
    },
    /// Time passes, nothing is sent.
    Advance {
        ns: u64,
    },
    /// Time passes, and nobody counts bytes.
    Uncounted {
        ns: u64,
    },
    /// Time passes, and the flow uses this share of its rate.
    Send {
        ns: u64,
        percent: u64,
    },
    /// Any number of bytes, whatever the rate.
    Bytes {
        ns: u64,
        bytes: u64,
    },
    LongIdle {
        ns: u64,
    },
    /// The clock steps back.
    ClockBack {
        ns: u64,
        cnp: bool,
    },
}

/// The presets on links of 50 Mb/s to 100 Gb/s.
fn presets() -> impl Strategy<Value = RpParams> {
    (50u64..100_000, 300u32..4_200, 0u64..5_000, 0..3).prop_map(|(mbps, packet_bytes, us, preset)| {
        let line = Rate::from_bits_per_sec(mbps * 1_000_000);
        match preset {
            0 => Params::soft(Fabric { line, packet_bytes, feedback: Nanos::from_micros(us) }).rp,
            1 => Params::paper(line).rp,
            _ => Params::nvidia(line).rp,
        }
    })
}

/// Any other set that [`RpParams::validate`] lets pass and that recovers within hours, on a link of at least this rate.
fn any_set(least_line: u64) -> impl Strategy<Value = RpParams> {
    let rates = (least_line..=1 << 40, 1u64..=1_000, 1u64..=1_000, 1u64..=10_000, 1u64..=20);
    let weights = (1u32..=ONE / 2, 1u32..=ONE, 0u32..=ONE);
    let times = (20_000u64..50_000_000, 1_000u64..50_000_000, 0u64..10_000_000, 0u64..5_000_000_000);
    let counts = (1u32..=10, 8u32..=16, 0u32..=99, prop_oneof![Just(0), 1_000u64..1 << 30]);
    (rates, weights, times, counts, any::<[bool; 7]>()).prop_map(
        |((line, most, least, additive, hyper), (g, alpha, usage), times, (f, gd, kept, bytes), flags)| {
            let rate = Rate::from_bytes_per_sec;
            let ceiling = if flags[0] { (line * most / 1_000).max(1) } else { line };
            let min = (ceiling * least / 1_000).max(1);
            let additive = (line * additive / 10_000).max(line / 2_000).max(1);
            RpParams {
                line: rate(line),
                max_rate: rate(if flags[0] { ceiling } else { 0 }),
                min_rate: rate(min),
                g,
                initial_alpha: alpha,
                alpha_update: if flags[1] { AlphaUpdate::AtCnp } else { AlphaUpdate::EveryPeriod },
                alpha_timer: Nanos(times.1),
                gd,
                least_kept_percent: kept,
                monitor: Nanos(times.2),
                first_cnp_rate: rate(if flags[2] { min + (ceiling - min) / 2 } else { 0 }),
                clamp_target: flags[3],
                clamp_target_after_timer: flags[4],
                fast_recovery: f,
                boundary: if flags[5] { Boundary::Below } else { Boundary::UpTo },
                timer: Nanos(times.0),
                byte_period: bytes,
                additive: rate(additive),
                hyper: rate(additive * hyper),
                start_rate: rate(if flags[6] { min + (ceiling - min) / 3 } else { 0 }),
                start_additive: rate(if flags[2] { 0 } else { additive * u64::from(f) }),
                start_periods: 10 * f,
                usage,
                idle_restart: Nanos(if usage == 0 { 0 } else { times.3 }),
            }
        },
    )
}

fn params() -> impl Strategy<Value = RpParams> {
    prop_oneof![presets(), any_set(1_000)]
}

/// Sets on links so fast that rounding to whole bytes per second at every cut does not add up.
fn params_to_compare() -> impl Strategy<Value = RpParams> {
    prop_oneof![presets(), any_set(6_250_000)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Cnp),
        1 => (1u16..300, 0u32..1_000_000).prop_map(|(n, gap)| Op::Flood { n, gap }),
        2 => (0u64..40_000_000).prop_map(|ns| Op::Advance { ns }),
        2 => (0u64..40_000_000).prop_map(|ns| Op::Uncounted { ns }),
        4 => (0u64..200_000_000, 0u64..150).prop_map(|(ns, percent)| Op::Send { ns, percent }),
        2 => (0u64..200_000_000, 0u64..1 << 34).prop_map(|(ns, bytes)| Op::Bytes { ns, bytes }),
        1 => (0u64..5_000_000_000).prop_map(|ns| Op::LongIdle { ns }),
    ]
}

/// Operations that leave no loop over events an oracle could keep up with.
fn wild_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => op(),
        1 => (0..YEAR).prop_map(|ns| Op::LongIdle { ns }),
        1 => (0..YEAR).prop_map(|ns| Op::Uncounted { ns }),
        1 => (0..YEAR, any::<u64>()).prop_map(|(ns, bytes)| Op::Bytes { ns, bytes }),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(ns, cnp)| Op::ClockBack { ns, cnp }),
    ]
}

fn begin(p: RpParams, lasting: bool, now: u64) -> Rp {
    if lasting { Rp::start(p, Nanos(now)) } else { Rp::new(p, Nanos(now)) }
}

/// What always holds.
fn bounds(rp: &Rp) -> Result<(), TestCaseError> {
    let (rc, rt) = (rp.rate(), rp.target());
    prop_assert!(rp.params.min_rate <= rc, "below the minimum: {rp:?}");
    prop_assert!(rc <= rt, "above the target: {rp:?}");
    prop_assert!(rt <= rp.params.ceiling(), "above the ceiling: {rp:?}");
    prop_assert!(rp.alpha() <= ONE, "{rp:?}");
    prop_assert!(rp.released(rp.seen) || rp.next_deadline() > rp.seen, "a deadline that is over: {rp:?}");
    Ok(())
}

/// Without CNPs nothing falls, except that a flow forgotten while it idled starts anew.
fn only_rises(before: &Rp, after: &Rp) -> Result<(), TestCaseError> {
    if after.lasting && after.forgotten(after.seen) {
        prop_assert_eq!(after.rate(), Rp::start(after.params, after.seen).rate());
        return Ok(());
    }
    prop_assert!(after.rate() >= before.rate() && after.target() >= before.target(), "{before:?} {after:?}");
    Ok(())
}

fn bytes_of(rp: &Rp, ns: u64, percent: u64) -> u64 {
    rp.rate().bytes_in(Nanos(ns)) / 100 * percent
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn any_sequence_keeps_the_bounds(
        p in params(), lasting: bool, begun in 0..YEAR, ops in prop::collection::vec(wild_op(), 1..40)
    ) {
        prop_assert_eq!(p.validate(), Ok(()));
        let mut now = begun;
        let mut rp = begin(p, lasting, now);
        for op in ops {
            let before = rp;
            let mut cnp = false;
            match op {
                Op::Cnp => {
                    rp.on_cnp(Nanos(now));
                    cnp = true;
                }
                Op::Flood { n, gap } => {
                    let mut cuts = 0;
                    for i in 0..n {
                        now += if i == 0 { 0 } else { u64::from(gap) };
                        cuts += u64::from(rp.on_cnp(Nanos(now)) == Reaction::Cut);
                        bounds(&rp)?;
                    }
                    let span = u64::from(n - 1) * u64::from(gap);
                    if let Some(most) = span.checked_div(p.monitor.0) {
                        prop_assert!(cuts <= most + 1, "{cuts} cuts in {span} ns");
                    }
                    cnp = true;
                }
                Op::Advance { ns } | Op::LongIdle { ns } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(0));
                }
                Op::Uncounted { ns } => {
                    now += ns;
                    rp.advance(Nanos(now), None);
                }
                Op::Send { ns, percent } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(bytes_of(&rp, ns, percent)));
                }
                Op::Bytes { ns, bytes } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(bytes));
                }
                Op::ClockBack { ns, cnp: with_cnp } => {
                    let past = Nanos(now.saturating_sub(ns));
                    rp.advance(past, Some(0));
                    if with_cnp {
                        rp.on_cnp(past);
                        cnp = true;
                    }
                    prop_assert_eq!(rp.seen, before.seen);
                }
            }
            bounds(&rp)?;
            if !cnp {
                only_rises(&before, &rp)?;
            }
            rp.released(Nanos(now));
        }
        // Once the CNPs stop, a flow that uses its rate is back at the ceiling: at once, and deadline by deadline.
        let steps = p.line.bytes_per_sec() / p.additive.bytes_per_sec();
        let periods = steps + u64::from(p.fast_recovery) + 128;
        let mut once = rp;
        once.advance(Nanos(now + periods * p.timer.0), None);
        prop_assert_eq!(once.rate(), p.ceiling());
        for _ in 0..periods {
            if rp.rate() == p.ceiling() {
                break;
            }
            let before = rp;
            rp.advance(rp.next_deadline(), None);
            bounds(&rp)?;
            only_rises(&before, &rp)?;
        }
        prop_assert_eq!(rp.rate(), p.ceiling());
    }

    /// Stated tolerance: 10^-4 of the line rate and 64 bytes/s; α within 10^-4.
    #[test]
    fn agrees_with_floating_point(p in params_to_compare(), lasting: bool, ops in prop::collection::vec(op(), 1..40)) {
        let mut now = 1_000_000;
        let mut rp = begin(p, lasting, now);
        let mut oracle = if lasting { Oracle::start(p, now) } else { Oracle::new(p, now) };
        for op in ops {
            let sent = match op {
                Op::Uncounted { .. } => None,
                Op::Send { ns, percent } => Some(bytes_of(&rp, ns, percent)),
                Op::Bytes { bytes, .. } => Some(bytes),
                _ => Some(0),
            };
            match op {
                Op::Cnp | Op::ClockBack { .. } => {
                    oracle.on_cnp(now, rp);
                    rp.on_cnp(Nanos(now));
                }
                Op::Flood { n, gap } => {
                    for _ in 0..n {
                        oracle.on_cnp(now, rp);
                        rp.on_cnp(Nanos(now));
                        now += u64::from(gap);
                    }
                }
                Op::Advance { ns }
                | Op::LongIdle { ns }
                | Op::Uncounted { ns }
                | Op::Send { ns, .. }
                | Op::Bytes { ns, .. } => {
                    now += ns;
                    oracle.advance(now, sent, rp.average_rate(Nanos(now)));
                    rp.advance(Nanos(now), sent);
                }
            }
            bounds(&rp)?;
            let tolerance = 1e-4 * p.line.bytes_per_sec() as f64 + 64.0;
            let (rc, rt) = (rp.rate().bytes_per_sec() as f64, rp.target().bytes_per_sec() as f64);
            prop_assert!((rc - oracle.rc).abs() <= tolerance, "RC {rc} or {} after {op:?}", oracle.rc);
            prop_assert!((rt - oracle.rt).abs() <= tolerance, "RT {rt} or {} after {op:?}", oracle.rt);
            let alpha = f64::from(rp.alpha()) / f64::from(ONE);
            prop_assert!((alpha - oracle.alpha).abs() <= 1e-4, "alpha {alpha} or {} after {op:?}", oracle.alpha);
        }
    }

    #[test]
    fn one_long_step_equals_many_short_ones(
        p in presets(), cnps in 1u32..8, total in 1u64..4_000_000_000, parts in 1u64..50, load in 0u64..=100
    ) {
        // What the timer may raise depends on when the bytes went.
        let p = RpParams { usage: 0, idle_restart: Nanos(0), ..p };
        let mut one = Rp::new(p, Nanos(0));
        for i in 0..cnps {
            one.on_cnp(Nanos(u64::from(i) * p.monitor.0));
        }
        let mut many = one;
        let start = one.seen.0;
        let bytes = p.line.bytes_per_sec() / 1_000 * load / 100 * total / 1_000_000;
        one.advance(Nanos(start + total), Some(bytes));
        for i in 1..=parts {
            many.advance(Nanos(start + total * i / parts), Some(bytes * i / parts - bytes * (i - 1) / parts));
        }
        // Bytes spread differently may swap a timer and a byte increase: one step of the target.
        let counts = u64::from(one.timer_count.min(one.byte_count));
        let tolerance = 4 * p.hyper.bytes_per_sec() * (counts + 1) + p.line.bytes_per_sec() / 100;
        prop_assert!(
            one.rate().bytes_per_sec().abs_diff(many.rate().bytes_per_sec()) <= tolerance,
            "{} or {}", one.rate().bytes_per_sec(), many.rate().bytes_per_sec()
        );
        if bytes == 0 {
            prop_assert!(one.rate().bytes_per_sec().abs_diff(many.rate().bytes_per_sec()) <= 64);
            prop_assert_eq!((one.timer_at, one.timer_count), (many.timer_at, many.timer_count));
        }
    }

    #[test]
    fn survives_any_time_and_any_byte_count(
        p in params(), lasting: bool, ops in prop::collection::vec((any::<u64>(), any::<Option<u64>>(), any::<bool>()), 1..40)
    ) {
        let mut rp = begin(p, lasting, 0);
        for (now, bytes, cnp) in ops {
            if cnp {
                rp.on_cnp(Nanos(now));
            } else {
                rp.advance(Nanos(now), bytes);
            }
            let (rc, rt) = (rp.rate(), rp.target());
            prop_assert!(p.min_rate <= rc && rc <= rt && rt <= p.ceiling() && rp.alpha() <= ONE);
            rp.next_deadline();
            rp.released(Nanos(now));
        }
    }
}

#[test]
fn operations_reach_every_state() {
    use proptest::{strategy::ValueTree as _, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let mut seen: Vec<&str> = Vec::new();
    for i in 0..400 {
        let p = params().new_tree(&mut runner).expect("a set").current();
        let ops = prop::collection::vec(op(), 40).new_tree(&mut runner).expect("operations").current();
        let mut now = 0;
        let mut rp = begin(p, i % 2 == 0, now);
        for op in ops {
            match op {
                Op::Cnp | Op::ClockBack { .. } => {
                    let held = rp.on_cnp(Nanos(now)) == Reaction::HeldBack;
                    seen.push(if held { "held back" } else { "cut" });
                }
                Op::Flood { .. } => {}
                Op::Send { ns, percent } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(bytes_of(&rp, ns, percent)));
                }
                Op::Bytes { ns, bytes } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(bytes));
                }
                Op::Advance { ns } | Op::LongIdle { ns } | Op::Uncounted { ns } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(0));
                }
            }
            let (low, high) = (rp.timer_count.min(rp.byte_count), rp.timer_count.max(rp.byte_count));
            let f = p.fast_recovery;
            seen.push(match rp.rate() {
                _ if rp.lasting && rp.forgotten(rp.seen) => "forgotten",
                _ if rp.no_cnp_yet => "starting",
                _ if rp.seen < rp.start_until => "starting in spite of a CNP",
                r if r == p.ceiling() => "at the ceiling",
                _ if low > f => "hyper",
                _ if high > f => "additive",
                _ => "fast recovery",
            });
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(
        seen,
        [
            "additive",
            "at the ceiling",
            "cut",
            "fast recovery",
            "forgotten",
            "held back",
            "hyper",
            "starting",
            "starting in spite of a CNP"
        ]
    );
}
