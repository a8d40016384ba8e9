use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::dcqcn::{Fabric, Params};

/// The same equations in floating point, one event at a time. Times are exact; how long bytes keep a flow busy is
/// reckoned at the rate under test, so that both see the same periods.
struct Oracle {
    p: RpParams,
    rc: f64,
    rt: f64,
    alpha: f64,
    t: u64,
    bc: u64,
    bytes: u64,
    last_cut: Option<u64>,
    cnp_in_period: bool,
    starting: bool,
    lasting: bool,
    seen: u64,
    busy_until: u64,
    alpha_at: u64,
    timer_at: u64,
    at_ceiling_since: Option<u64>,
}

impl Oracle {
    fn new(p: RpParams, now: u64) -> Self {
        let most = p.ceiling().bytes_per_sec() as f64;
        Self {
            p,
            rc: most,
            rt: most,
            alpha: f64::from(p.initial_alpha) / 65_536.0,
            t: 0,
            bc: 0,
            bytes: 0,
            last_cut: None,
            cnp_in_period: false,
            starting: false,
            lasting: false,
            seen: now,
            busy_until: now,
            alpha_at: now + p.alpha_timer.0,
            timer_at: now + p.timer.0,
            at_ceiling_since: Some(now),
        }
    }

    fn start(p: RpParams, now: u64) -> Self {
        let start = p.start_rate.bytes_per_sec() as f64;
        Self { rc: start, rt: start, starting: true, lasting: true, at_ceiling_since: None, ..Self::new(p, now) }
    }

    fn g(&self) -> f64 {
        f64::from(self.p.g) / 65_536.0
    }

    fn most(&self) -> f64 {
        self.p.ceiling().bytes_per_sec() as f64
    }

    /// `under_test`: the integer state machine before this call; whether it counts as recovered hangs on the last byte per
    /// second, which rounding decides.
    fn on_cnp(&mut self, now: u64, mut under_test: Rp) {
        self.advance(now, Some(0), under_test.rate().bytes_per_sec());
        under_test.advance(Nanos(now), Some(0));
        self.busy_until = self.busy_until.max(now);
        if self.last_cut.is_some_and(|c| now - c < self.p.monitor.0) {
            self.cnp_in_period = true;
            return;
        }
        if under_test.recovered(Nanos(now)) {
            assert!(self.rc >= self.most() * 0.999);
            self.last_cut = None;
            self.alpha = f64::from(self.p.initial_alpha) / 65_536.0;
        }
        let first = self.last_cut.is_none();
        let raised = self.bc > 0 || (self.p.clamp_target_after_timer && self.t > 0);
        if first || self.p.clamp_target || raised {
            self.rt = self.rc;
        }
        let least = self.p.min_rate.bytes_per_sec() as f64;
        if first && self.p.first_cnp_rate.bytes_per_sec() > 0 {
            self.rc = self.rc.min(self.p.first_cnp_rate.bytes_per_sec() as f64).max(least);
            self.rt = self.rc;
        } else {
            let cut = self.alpha * 1_024.0 / f64::from(1u32 << self.p.gd);
            let kept = f64::from(self.p.least_kept_percent) / 100.0;
            self.rc = (self.rc * (1.0 - cut).max(kept)).max(least);
            self.rt = self.rt.max(self.rc);
        }
        let by_period = self.p.alpha_update == AlphaUpdate::EveryPeriod;
        if by_period {
            self.cnp_in_period = !first;
        } else {
            self.alpha = (1.0 - self.g()) * self.alpha + self.g();
        }
        (self.t, self.bc, self.bytes) = (0, 0, 0);
        self.starting = false;
        self.at_ceiling_since = None;
        self.last_cut = Some(now);
        if first || !by_period {
            self.alpha_at = now + self.p.alpha_timer.0;
        }
        self.timer_at = now + self.p.timer.0;
    }

    /// `rate`: the integer rate under test before this call.
    fn advance(&mut self, now: u64, sent: Option<u64>, rate: u64) {
        let from = self.seen;
        self.seen = now;
        while self.last_cut.is_some() && self.alpha_at <= now {
            self.alpha *= 1.0 - self.g();
            if self.p.alpha_update == AlphaUpdate::EveryPeriod && self.cnp_in_period {
                self.alpha += self.g();
            }
            self.cnp_in_period = false;
            self.alpha_at += self.p.alpha_timer.0;
        }
        let bytes = sent.unwrap_or(0);
        let gated = self.p.usage > 0;
        if gated && sent.is_none() {
            self.busy_until = self.busy_until.max(now);
        }
        if gated && bytes > 0 {
            let time = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
            let until = u128::from(self.busy_until.max(from)) + time;
            let most = now + self.p.idle_restart.0.max(self.p.timer.0);
            self.busy_until = u64::try_from(until).unwrap().min(most);
        }
        let idle_part = u128::from(65_536 - self.p.usage);
        let busy = self.busy_until + ((u128::from(self.p.timer.0) * idle_part) >> 16) as u64;

        let mut events: Vec<(u64, bool)> = Vec::new();
        if let Some(n) = (self.bytes + bytes).checked_div(self.p.byte_period) {
            self.bytes += bytes;
            let carried = self.bytes - bytes;
            self.bytes %= self.p.byte_period;
            let time = |i| {
                from + share(now - from, self.p.byte_period - carried, bytes)
                    + i * share(now - from, self.p.byte_period, bytes)
            };
            events.extend((0..n).map(|i| (time(i), true)));
        }
        while self.timer_at <= now {
            if !gated || sent.is_none() || self.timer_at <= busy {
                events.push((self.timer_at, false));
            }
            self.timer_at += self.p.timer.0;
        }
        events.sort_unstable();
        for (at, by_bytes) in events {
            if by_bytes {
                self.bc += 1;
            } else {
                self.t += 1;
            }
            if self.at_ceiling_since.is_none() {
                self.increase();
                if self.rc > self.most() - 1.0 {
                    self.at_ceiling_since = Some(at);
                }
            }
        }
        let idle = self.p.idle_restart.0;
        if gated && self.lasting && idle > 0 && now.saturating_sub(self.busy_until) >= idle {
            *self = Self { busy_until: self.busy_until, ..Self::start(self.p, now) };
        }
    }

    fn increase(&mut self) {
        let f = u64::from(self.p.fast_recovery) + u64::from(self.p.boundary == Boundary::UpTo);
        let (low, high) = (self.t.min(self.bc), self.t.max(self.bc));
        let (additive, hyper) = (self.p.additive.bytes_per_sec() as f64, self.p.hyper.bytes_per_sec() as f64);
        if self.starting {
            self.rt *= 2.0;
        } else if self.p.byte_period == 0 {
            self.rt += match self.t.cmp(&f) {
                std::cmp::Ordering::Less => 0.0,
                std::cmp::Ordering::Equal => additive,
                std::cmp::Ordering::Greater => hyper,
            };
        } else if low > f {
            self.rt += (low - f) as f64 * hyper;
        } else if high >= f {
            self.rt += additive;
        }
        self.rt = self.rt.min(self.most());
        self.rc = (self.rt + self.rc) / 2.0;
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Cnp,
    Wait { ns: u64 },
    Send { ns: u64, bytes: u64 },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => Just(Operation::Cnp),
        3 => (0u64..40_000_000).prop_map(|ns| Operation::Wait { ns }),
        1 => (0u64..3_000_000_000).prop_map(|ns| Operation::Wait { ns }),
        3 => (0u64..200_000_000, 0u64..30_000_000).prop_map(|(ns, bytes)| Operation::Send { ns, bytes }),
    ]
}

fn params() -> impl Strategy<Value = RpParams> {
    prop_oneof![
        (50u64..25_000, 300u32..4_200).prop_map(|(mbps, packet)| Params::soft(Fabric::new(
            Rate::from_bits_per_sec(mbps * 1_000_000),
            packet
        ))
        .rp),
        (1_000u64..100_000).prop_map(|mbps| Params::paper(Rate::from_bits_per_sec(mbps * 1_000_000)).rp),
        (1_000u64..100_000).prop_map(|mbps| Params::nvidia(Rate::from_bits_per_sec(mbps * 1_000_000)).rp),
    ]
}

fn check(rp: &Rp) -> Result<(), TestCaseError> {
    let (rc, rt) = (rp.rate(), rp.target());
    prop_assert!(rp.params.min_rate <= rc, "{rp:?}");
    prop_assert!(rc <= rt && rt <= rp.params.line, "{rp:?}");
    prop_assert!(rp.alpha() <= ONE);
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_floating_point(p in params(), start_capped: bool, operations in prop::collection::vec(operation(), 1..60)) {
        let start = 1_000_000;
        let (mut rp, mut oracle, mut now) = (Rp::new(p, Nanos(start)), Oracle::new(p, start), start);
        if start_capped && p.start_rate.bytes_per_sec() > 0 {
            (rp, oracle) = (Rp::start(p, Nanos(start)), Oracle::start(p, start));
        }
        for op in operations {
            let rate = rp.rate().bytes_per_sec();
            match op {
                Operation::Cnp => {
                    oracle.on_cnp(now, rp);
                    rp.on_cnp(Nanos(now));
                }
                Operation::Wait { ns } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(0));
                    oracle.advance(now, Some(0), rate);
                }
                Operation::Send { ns, bytes } => {
                    now += ns;
                    rp.advance(Nanos(now), Some(bytes));
                    oracle.advance(now, Some(bytes), rate);
                }
            }
            check(&rp)?;
            // Stated tolerance: 10^-4 of the line rate and 64 bytes/s; α within 10^-4.
            let tolerance = 1e-4 * p.line.bytes_per_sec() as f64 + 64.0;
            let (rc, rt) = (rp.rate().bytes_per_sec() as f64, rp.target().bytes_per_sec() as f64);
            prop_assert!((rc - oracle.rc).abs() <= tolerance, "RC {rc} or {} after {op:?}", oracle.rc);
            prop_assert!((rt - oracle.rt).abs() <= tolerance, "RT {rt} or {} after {op:?}", oracle.rt);
            prop_assert!((f64::from(rp.alpha()) / 65_536.0 - oracle.alpha).abs() <= 1e-4, "alpha");
        }
    }

    #[test]
    fn one_long_step_equals_many_short_ones(
        p in params(), cnps in 1u32..8, total in 1u64..4_000_000_000, parts in 1u64..50, load in 0u64..=100
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
    fn survives_any_time_and_any_byte_count(p in params(), operations in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 1..40)) {
        let mut rp = Rp::new(p, Nanos(0));
        for (now, bytes, cnp) in operations {
            if cnp {
                rp.on_cnp(Nanos(now));
            } else {
                rp.advance(Nanos(now), Some(bytes));
            }
            check(&rp)?;
            rp.next_deadline();
            rp.released(Nanos(now));
        }
    }
}

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
    let p = RpParams { byte_period: 1_000, ..Params::soft(Fabric::new(LINE, 1_100)).rp };
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
fn ten_thousand_flows_need_no_ticks() {
    // 55 µs timers: ticking each for a second would be 180 million steps.
    let p =
        RpParams { additive: Rate::from_bytes_per_sec(1), ..Params::paper(Rate::from_bits_per_sec(40_000_000_000)).rp };
    let begun = std::time::Instant::now();
    for i in 0..10_000u64 {
        let mut rp = Rp::new(p, Nanos(i));
        for k in 0..5 {
            rp.on_cnp(Nanos(i + k * p.monitor.0));
        }
        rp.advance(Nanos(1_000_000_000 + i), Some(0));
        assert!(rp.rate() < p.line);
    }
    assert!(begun.elapsed().as_secs() < 5);
}

#[test]
fn a_clock_that_steps_back_changes_nothing() {
    let p = Params::soft(Fabric::new(LINE, 1_100)).rp;
    let mut rp = Rp::new(p, Nanos(1_000_000));
    rp.on_cnp(Nanos(2_000_000));
    let before = rp;
    rp.advance(Nanos(500_000), Some(0));
    assert_eq!(rp, before);
    assert_eq!(rp.on_cnp(Nanos(0)), Reaction::HeldBack);
}
