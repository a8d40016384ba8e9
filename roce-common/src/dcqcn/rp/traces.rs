//! What the reaction point does, event by event, as tables to read: `traces/*.txt` beside this file.
//!
//! Each table is what the state machine said, and every row of it is checked against the floating-point oracle. When a rule
//! changes, run the tests with `UPDATE_TRACES=1` and review the difference.

use std::{env, format, fs, path::PathBuf, string::String};

use super::{oracle::Oracle, *};
use crate::{
    dcqcn::{Fabric, Params},
    units::Rate,
};

/// Nanoseconds in a microsecond.
const US: u64 = 1_000;

/// A run of one reaction point beside its oracle, and the table of it.
struct Trace {
    rp: Rp,
    oracle: Oracle,
    now: u64,
    table: String,
}

impl Trace {
    fn new(title: &str, p: RpParams, lasting: bool) -> Self {
        assert_eq!(p.validate(), Ok(()));
        let (rp, oracle) = if lasting {
            (Rp::start(p, Nanos(0)), Oracle::start(p, 0))
        } else {
            (Rp::new(p, Nanos(0)), Oracle::new(p, 0))
        };
        let table = format!(
            "{title}\nRC and RT in Mb/s, T and BC: increases by the timer and by bytes since the last cut\n\n{:>10}  {:<34}{:>12}{:>12}{:>10}{:>6}{:>6}\n",
            "time µs", "event", "RC", "RT", "alpha", "T", "BC"
        );
        let mut trace = Self { rp, oracle, now: 0, table };
        trace.row("first packet or first CNP");
        trace
    }

    /// A line of prose between rows.
    fn note(&mut self, text: &str) {
        self.table += &format!("\n{text}\n");
    }

    fn row(&mut self, event: &str) {
        let mbps = |rate: f64| rate * 8.0 / 1e6;
        let (rc, rt) = (self.rp.rate().bytes_per_sec() as f64, self.rp.target().bytes_per_sec() as f64);
        let alpha = self.rp.alpha as f64 / ALPHA_ONE as f64;
        let line = self.rp.params.line.bytes_per_sec() as f64;
        for (is, of) in
            [(rc / line, self.oracle.rc / line), (rt / line, self.oracle.rt / line), (alpha, self.oracle.alpha)]
        {
            assert!((is - of).abs() < 1e-6, "at {} ns, {event}: {is}, in floating point {of}", self.now);
        }
        let shown = [format!("{:.3}", mbps(rc)), format!("{:.3}", mbps(rt)), format!("{alpha:.5}")];
        self.table += &format!(
            "{:>10.1}  {event:<34}{:>12}{:>12}{:>10}{:>6}{:>6}\n",
            self.now as f64 / US as f64,
            shown[0],
            shown[1],
            shown[2],
            self.rp.timer_count,
            self.rp.byte_count
        );
    }

    fn cnp(&mut self, us: u64) {
        self.now += us * US;
        self.oracle.on_cnp(self.now, self.rp);
        let event = match self.rp.on_cnp(Nanos(self.now)) {
            Reaction::Cut => "CNP",
            Reaction::HeldBack => "CNP, within the monitor period",
        };
        self.row(event);
    }

    fn pass(&mut self, us: u64, sent: Option<u64>, event: &str) {
        self.now += us * US;
        self.oracle.advance(self.now, sent, self.rp.average_rate(Nanos(self.now)));
        self.rp.advance(Nanos(self.now), sent);
        self.row(event);
    }

    /// `n` times `us`, in which the flow sends at its rate.
    fn busy(&mut self, n: usize, us: u64, event: &str) {
        for _ in 0..n {
            // Rounded up: what it sent fills the time.
            let bytes = self.rp.rate().bytes_in(Nanos(us * US)) + 1;
            self.pass(us, Some(bytes), event);
        }
    }

    fn compare(&self, name: &str) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/dcqcn/rp/traces").join(name);
        if env::var_os("UPDATE_TRACES").is_some() {
            fs::write(&path, &self.table).expect("the trace is written");
        }
        let reviewed = fs::read_to_string(&path).unwrap_or_default();
        assert!(reviewed == self.table, "{} is another trace now:\n{}", path.display(), self.table);
    }
}

#[test]
fn the_paper_set() {
    let p = Params::paper(Rate::from_bits_per_sec(40_000_000_000)).rp;
    let mut t = Trace::new("Preset paper on 40 Gb/s", p, false);
    t.note("A burst of CNPs: the first halves the rate, since alpha is 1");
    t.cnp(0);
    for _ in 0..3 {
        t.cnp(50);
    }
    t.cnp(10);
    t.note("Silence, nothing sent: alpha decays, five increases of fast recovery, then additive ones");
    for _ in 0..7 {
        t.pass(45, Some(0), "45 µs without a CNP");
    }
    t.pass(55 * 10, Some(0), "ten periods at once");
    t.note("10 MB more each time: additive until both counters are above 6, then hyper");
    for _ in 0..8 {
        t.pass(0, Some(10_000_000), "10 MB sent");
    }
    t.note("A CNP in the middle of that: the target is where the rate was");
    t.cnp(55 * 20);
    t.note("Back at the link rate for longer than a timer period: the next CNP is a first one");
    t.pass(200_000, Some(0), "200 ms without a CNP");
    t.cnp(0);
    t.compare("paper.txt");
}

#[test]
fn the_nvidia_set() {
    let p = Params::nvidia(Rate::from_bits_per_sec(25_000_000_000)).rp;
    let mut t = Trace::new("Preset nvidia on 25 Gb/s", p, false);
    t.note("A burst of CNPs: no increase between them, so the target stays");
    t.cnp(0);
    t.cnp(2);
    for _ in 0..3 {
        t.cnp(50);
    }
    t.note("Silence: alpha decays every microsecond; one increase of fast recovery, one additive, then hyper");
    for _ in 0..5 {
        t.pass(300, Some(1_000_000), "300 µs without a CNP");
    }
    t.note("A CNP behind increases by the timer: the target follows");
    t.cnp(100);
    t.cnp(50);
    t.note("Recovery by time alone, whatever is sent");
    t.pass(300 * 10, Some(0), "ten periods at once");
    t.pass(300 * 100, Some(0), "a hundred");
    t.pass(300 * 400, Some(0), "four hundred");
    t.compare("nvidia.txt");
}

#[test]
fn a_first_rate_and_other_limits() {
    let p = RpParams {
        first_cnp_rate: Rate::from_bits_per_sec(10_000_000_000),
        max_rate: Rate::from_bits_per_sec(20_000_000_000),
        gd: 10,
        least_kept_percent: 30,
        min_rate: Rate::from_bits_per_sec(1_000_000_000),
        ..Params::nvidia(Rate::from_bits_per_sec(25_000_000_000)).rp
    };
    let mut t = Trace::new(
        "nvidia on 25 Gb/s with rpg_max_rate 20g, rate_to_set_on_first_cnp 10g, rpg_gd 10, rpg_min_dec_fac 30, rpg_min_rate 1g",
        p,
        false,
    );
    t.note("The first CNP sets both rates; the next would take alpha of the rate, and takes 70 %; then the minimum");
    for us in [0, 4, 4, 4] {
        t.cnp(us);
    }
    t.note("The ceiling is rpg_max_rate");
    for periods in [1, 1, 1, 100, 300, 40] {
        t.pass(300 * periods, Some(0), &format!("periods of 300 µs: {periods}"));
    }
    t.compare("limits.txt");
}

/// The rules of the soft set, with round numbers of this test's own.
#[test]
fn a_start_rate_and_idling() {
    let ms = Nanos::from_millis;
    let line = Rate::from_bits_per_sec(100_000_000);
    let p = RpParams {
        min_rate: Rate::from_bits_per_sec(1_000_000),
        g: ONE / 16,
        fast_recovery: 5,
        timer: ms(5),
        alpha_timer: ms(5),
        monitor: ms(2),
        byte_period: 10_000_000,
        additive: Rate::from_bits_per_sec(200_000),
        hyper: Rate::from_bits_per_sec(1_000_000),
        start_rate: Rate::from_bits_per_sec(4_000_000),
        start_additive: Rate::from_bits_per_sec(3_500_000),
        start_periods: 8,
        usage: ONE / 2,
        idle_restart: ms(1_000),
        ..Params::soft(Fabric::new(line, 1_000)).rp
    };
    let mut t = Trace::new(
        "The soft rules on 100 Mb/s: timers 5 ms, start rate 4 Mb/s, start of 40 ms at least with steps of 3.5 Mb/s at most behind a CNP, R_AI 200 kb/s, \
         usage 1/2, idle_restart 1 s",
        p,
        true,
    );
    t.note("From the first packet on, used fully: every increase adds half to the target, however much");
    t.busy(4, 5_000, "5 ms at its rate");
    t.note("The first CNP cuts by half; within the first 40 ms it does not end the start, whose steps are 3.5 Mb/s at most from then on");
    t.cnp(1_000);
    t.cnp(1_000);
    t.cnp(6_000);
    t.note("An increase needs what is sent: a quarter of the rate is not enough, a half is. From 40 ms on it is fast recovery");
    let quarter = t.rp.rate().bytes_in(ms(5)) / 4;
    t.pass(5_000, Some(quarter), "5 ms at a quarter of its rate");
    t.pass(5_000, Some(2 * quarter + 4), "5 ms at half of its rate");
    t.busy(5, 5_000, "5 ms at its rate");
    t.note("A shaper that took in 30 ms worth of packets keeps the flow busy for as long");
    let booked = t.rp.rate().bytes_in(ms(30)) + 10;
    t.pass(5_000, Some(booked), "5 ms, 30 ms worth booked");
    t.pass(20_000, Some(0), "20 ms, nothing more");
    t.note("An ACK timeout's silence changes nothing but alpha");
    t.pass(500_000, Some(0), "500 ms idle");
    t.note(
        "A second's silence does: the flow starts anew, for another 40 ms at least, and the next CNP is a first one",
    );
    t.pass(600_000, Some(0), "600 ms more");
    t.busy(3, 5_000, "5 ms at its rate");
    t.cnp(1_000);
    t.compare("soft.txt");
}
