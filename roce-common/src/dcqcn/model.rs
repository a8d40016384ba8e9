//! A packet-level model of the lab around the real algorithms: N senders with go-back-N, a window and a shaper that
//! holds packets back, one port with a short queue, a controller that reacts late. It exists to choose the constants.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    format,
    string::String,
    vec,
    vec::Vec,
};

use super::{Fabric, Params, Rp, cp, np};
use crate::units::{Nanos, Rate};

const MS: u64 = 1_000_000;

struct Setup {
    senders: usize,
    link: Rate,
    packet: u32,
    /// Packets the port holds.
    queue: usize,
    /// Most PSNs a sender leaves unacknowledged.
    window: u32,
    /// Most packets the shaper holds before the sender blocks.
    held: usize,
    /// Controller latency of a CNP or a rate change, from and to.
    latency: (u64, u64),
    duration: u64,
    /// Least time between two rate updates of one flow by time alone.
    tick: u64,
    /// ACK timeout of the senders.
    timeout: u64,
    seed: u64,
}

impl Setup {
    fn lab(senders: usize, seed: u64) -> Self {
        Self {
            senders,
            link: Rate::from_bits_per_sec(100_000_000),
            packet: 1_090,
            queue: 64,
            window: 64,
            held: 64,
            latency: (MS, 3 * MS),
            duration: 10_000 * MS,
            tick: MS,
            timeout: 67 * MS,
            seed,
        }
    }
}

#[derive(Debug)]
struct Outcome {
    drops: [u64; 2],
    /// Goodput share of the link, first and second half.
    utilisation: [f64; 2],
    jain: f64,
    p50: usize,
    p99: usize,
    cnps: u64,
    retransmitted: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// The shaper of a sender releases its head.
    Shaper(usize),
    /// The port has sent its head.
    Port,
    /// A packet reaches the receiver: (sender, PSN, CE).
    Arrive(usize, u32, bool),
    /// An ACK of everything below.
    Ack(usize, u32),
    Nak(usize, u32),
    /// The controller handles a CNP.
    Cnp(usize),
    /// The controller brings a flow to now.
    Tick(usize),
    /// The shaper obeys a new rate; 0 = none.
    Rate(usize, u64),
    Timeout(usize, u64),
}

#[derive(Default)]
struct Sender {
    una: u32,
    next: u32,
    highest: u32,
    shaper: VecDeque<u32>,
    shaper_busy: bool,
    /// Bytes per second; 0 = no limiter.
    rate: u64,
    rp: Option<Rp>,
    sent: u64,
    sent_told: u64,
    expected: u32,
    nak_sent: bool,
    last_cnp: u64,
    accepted: [u64; 2],
    progress: u64,
    obeyed_at: u64,
    tick_pending: bool,
}

struct Model {
    s: Setup,
    p: Params,
    now: u64,
    order: u64,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    senders: Vec<Sender>,
    port: VecDeque<(usize, u32, bool)>,
    cell: u64,
    random: u64,
    depths: Vec<u32>,
    drops: [u64; 2],
    cnps: u64,
    retransmitted: u64,
}

impl Model {
    fn new(s: Setup, p: Params) -> Self {
        let mut m = Self {
            senders: (0..s.senders).map(|_| Sender::default()).collect(),
            random: s.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            s,
            p,
            now: 0,
            order: 0,
            events: BinaryHeap::new(),
            port: VecDeque::new(),
            cell: 0,
            depths: vec![0; 4_096],
            drops: [0; 2],
            cnps: 0,
            retransmitted: 0,
        };
        for i in 0..m.senders.len() {
            m.pump(i);
            m.at(m.s.timeout, What::Timeout(i, 0));
        }
        m
    }

    fn at(&mut self, time: u64, what: What) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, what)));
    }

    fn rand(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn latency(&mut self) -> u64 {
        let (from, to) = self.s.latency;
        from + self.rand() % (to - from + 1)
    }

    fn half(&self) -> usize {
        usize::from(self.now >= self.s.duration / 2)
    }

    /// Sends while the window and the shaper have room.
    fn pump(&mut self, i: usize) {
        let s = &mut self.senders[i];
        while s.next.wrapping_sub(s.una) < self.s.window && s.shaper.len() < self.s.held {
            if s.next < s.highest {
                self.retransmitted += 1;
            }
            s.shaper.push_back(s.next);
            s.next += 1;
            s.highest = s.highest.max(s.next);
        }
        if !s.shaper_busy && !s.shaper.is_empty() {
            s.shaper_busy = true;
            self.at(self.now, What::Shaper(i));
        }
    }

    fn shaper(&mut self, i: usize) {
        let bytes = u64::from(self.s.packet);
        let s = &mut self.senders[i];
        let Some(psn) = s.shaper.pop_front() else {
            s.shaper_busy = false;
            return;
        };
        s.sent += bytes;
        // Unlimited: as fast as a core sends.
        let gap = if self.senders[i].rate == 0 {
            5_000 + self.rand() % 1_000
        } else {
            Rate::from_bytes_per_sec(self.senders[i].rate).time_for(bytes).0
        };
        self.at(self.now + gap, What::Shaper(i));
        self.enqueue(i, psn);
        self.pump(i);
    }

    fn enqueue(&mut self, i: usize, psn: u32) {
        let queue =
            cp::Queue { bytes_per_sec: self.s.link.bytes_per_sec(), limit_bytes: self.s.queue as u32 * self.s.packet };
        let arrival = queue.arrive(self.cell, self.now, self.s.packet);
        self.cell = arrival.empty_at_ns;
        let random = self.rand() as u32;
        let ce = cp::mark(arrival.depth_bytes, self.p.kmin, self.p.kmax, self.p.pmax, random);
        let depth = self.port.len();
        if self.half() == 1 {
            self.depths[depth] += 1;
        }
        if depth >= self.s.queue {
            let half = self.half();
            self.drops[half] += 1;
            return;
        }
        self.port.push_back((i, psn, ce));
        if depth == 0 {
            let time = self.s.link.time_for(u64::from(self.s.packet)).0;
            self.at(self.now + time, What::Port);
        }
    }

    fn port(&mut self) {
        let (i, psn, ce) = self.port.pop_front().expect("the port was busy");
        self.at(self.now + 50_000, What::Arrive(i, psn, ce));
        if !self.port.is_empty() {
            let time = self.s.link.time_for(u64::from(self.s.packet)).0;
            self.at(self.now + time, What::Port);
        }
    }

    fn arrive(&mut self, i: usize, psn: u32, ce: bool) {
        if ce && np::due(self.senders[i].last_cnp, self.now, self.p.cnp_interval.0) {
            self.senders[i].last_cnp = self.now;
            self.cnps += 1;
            let at = self.now + self.latency();
            self.at(at, What::Cnp(i));
        }
        let half = self.half();
        let now = self.now;
        let s = &mut self.senders[i];
        if psn == s.expected {
            s.expected += 1;
            s.nak_sent = false;
            s.accepted[half] += 1;
            let expected = s.expected;
            self.at(now + 100_000, What::Ack(i, expected));
        } else if psn > s.expected {
            if !s.nak_sent {
                s.nak_sent = true;
                let expected = s.expected;
                self.at(now + 100_000, What::Nak(i, expected));
            }
        } else {
            let expected = s.expected;
            self.at(now + 100_000, What::Ack(i, expected));
        }
    }

    fn acked(&mut self, i: usize, up_to: u32) {
        let s = &mut self.senders[i];
        if up_to > s.una {
            s.una = up_to;
            s.next = s.next.max(up_to);
            s.progress += 1;
            let (progress, at) = (s.progress, self.now + self.s.timeout);
            self.at(at, What::Timeout(i, progress));
        }
        self.pump(i);
    }

    fn control(&mut self, i: usize, cnp: bool) {
        let (now, params) = (Nanos(self.now), self.p.rp);
        let s = &mut self.senders[i];
        let sent = s.sent - s.sent_told;
        s.sent_told = s.sent;
        if cnp && s.rp.is_none() {
            s.rp = Some(Rp::new(params, now));
        }
        let Some(rp) = s.rp.as_mut() else { return };
        rp.advance(now, Some(sent));
        if cnp {
            rp.on_cnp(now);
        }
        let rate = if rp.released(now) { 0 } else { rp.rate().bytes_per_sec() };
        let deadline = rp.next_deadline().0.max(self.now + self.s.tick);
        if rate == 0 {
            s.rp = None;
        }
        // A later command never overtakes an earlier one.
        let at = (self.now + self.latency() / 4).max(self.senders[i].obeyed_at);
        self.senders[i].obeyed_at = at;
        self.at(at, What::Rate(i, rate));
        if rate != 0 && !self.senders[i].tick_pending {
            self.senders[i].tick_pending = true;
            self.at(deadline, What::Tick(i));
        }
    }

    fn run(mut self) -> Outcome {
        while let Some(Reverse((time, _, what))) = self.events.pop() {
            if time >= self.s.duration {
                break;
            }
            self.now = time;
            match what {
                What::Shaper(i) => self.shaper(i),
                What::Port => self.port(),
                What::Arrive(i, psn, ce) => self.arrive(i, psn, ce),
                What::Ack(i, up_to) => self.acked(i, up_to),
                What::Nak(i, psn) => {
                    self.acked(i, psn);
                    self.senders[i].next = self.senders[i].una;
                    self.pump(i);
                }
                What::Cnp(i) => self.control(i, true),
                What::Tick(i) => {
                    self.senders[i].tick_pending = false;
                    self.control(i, false);
                }
                What::Rate(i, rate) => self.senders[i].rate = rate,
                What::Timeout(i, progress) => {
                    if self.senders[i].progress == progress {
                        self.senders[i].next = self.senders[i].una;
                        let at = self.now + self.s.timeout;
                        self.at(at, What::Timeout(i, progress));
                        self.pump(i);
                    }
                }
            }
        }
        let capacity = self.s.link.bytes_per_sec() as f64 * self.s.duration as f64 / 2e9 / f64::from(self.s.packet);
        let total = |half: usize| self.senders.iter().map(|s| s.accepted[half]).sum::<u64>() as f64;
        let second: Vec<f64> = self.senders.iter().map(|s| s.accepted[1] as f64).collect();
        let squares: f64 = second.iter().map(|x| x * x).sum();
        let percentile = |q: f64| {
            let all: u64 = self.depths.iter().map(|&n| u64::from(n)).sum();
            let mut seen = 0;
            self.depths
                .iter()
                .position(|&n| {
                    seen += u64::from(n);
                    seen as f64 >= q * all as f64
                })
                .unwrap_or(0)
        };
        Outcome {
            drops: self.drops,
            utilisation: [total(0) / capacity, total(1) / capacity],
            jain: total(1) * total(1) / (second.len() as f64 * squares),
            p50: percentile(0.5),
            p99: percentile(0.99),
            cnps: self.cnps,
            retransmitted: self.retransmitted,
        }
    }
}

fn row(name: &str, n: usize, o: &Outcome) -> String {
    format!(
        "{name:6} N={n:2}  utilisation {:.3} then {:.3}  Jain {:.3}  drops {} then {}  queue {}/{}  CNPs {}  retransmitted {}",
        o.utilisation[0], o.utilisation[1], o.jain, o.drops[0], o.drops[1], o.p50, o.p99, o.cnps, o.retransmitted
    )
}

/// The soft set with feedback in 1 to 3 ms.
#[test]
fn the_soft_set_is_fair_fast_and_lossless_once_started() {
    let mut table = String::new();
    let mut failed = false;
    for window in [64, 128] {
        for n in [2, 4, 8, 16] {
            let s = Setup { window, ..Setup::lab(n, 1) };
            let p = Params::soft(Fabric::new(s.link, s.packet));
            let o = Model::new(s, p).run();
            failed |= o.drops[1] > 0 || o.utilisation[1] < 0.95 || o.jain < 0.95;
            table += &format!("window {window:3} {}\n", row("soft", n, &o));
        }
    }
    std::print!("{table}");
    assert!(!failed, "\n{table}");
}

/// The default lab, ten seconds, several seeds and controllers of different speed: the whole run, start-up included.
#[test]
fn the_default_lab_loses_little_to_its_start() {
    for (seed, latency) in [(1, (200_000, 500_000)), (2, (MS, 3 * MS)), (3, (MS, 3 * MS)), (4, (2 * MS, 5 * MS))] {
        let s = Setup { window: 128, latency, ..Setup::lab(4, seed) };
        let p = Params::soft(Fabric::new(s.link, s.packet));
        let o = Model::new(s, p).run();
        let row = row("soft", 4, &o);
        std::println!("seed {seed} {row}");
        assert!(o.drops[1] == 0 && o.jain >= 0.95, "{row}");
        assert!((o.utilisation[0] + o.utilisation[1]) / 2.0 >= 0.95, "{row}");
    }
}

/// At this rate the paper's constants cut too little and recover too fast: the queue stays full.
#[test]
fn the_paper_set_collapses_at_software_rates() {
    for n in [4, 16] {
        let s = Setup { duration: 4_000 * MS, ..Setup::lab(n, 1) };
        let p = Params::paper(s.link);
        let o = Model::new(s, p).run();
        let row = row("paper", n, &o);
        std::println!("{row}");
        assert!(o.drops[1] > 10_000 && o.p50 > 60 && o.utilisation[1] < 0.7, "{row}");
    }
}
