//! Random streams of which the truth is known, and hostile ones of which only consistency can be asked.

use std::{collections::VecDeque, vec, vec::Vec};

use super::super::*;
use crate::wire::Opcode;

/// xorshift64*: seeded, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }

    /// True in `n` of 10,000 cases.
    fn chance(&mut self, n: u64) -> bool {
        self.below(10_000) < n
    }
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    start: u32,
    packets: u32,
    /// In flight at most.
    window: u32,
    /// Steps from a NAK to the requester's turning back.
    delay: usize,
    /// Losses before and behind the tap, in 1/10,000.
    before: u64,
    behind: u64,
    /// Every so many packets is a READ of several PSNs; 0 = none.
    reads: u32,
}

/// What really happened.
#[derive(Debug, Default, PartialEq)]
struct Truth {
    dropped_before: u64,
    retransmissions_seen: u64,
    duplicates: u64,
    naks: u64,
    naks_of_passed: u64,
    /// Drops that no order of packets tells of: the first packets of a retransmission; the last ones, where too few came
    /// before them to show what it was; and what the requester sent last before it turned back.
    hidden: u64,
}

/// A requester and a responder with a tap between them; go-back-N on the responder's NAKs and on time-outs.
struct World {
    setup: Setup,
    random: Random,
    tracker: Tracker,
    truth: Truth,
    /// Start and span of every request.
    requests: Vec<(u32, u32)>,
    /// What the tap saw of each request: ever, and whether newest.
    seen: Vec<bool>,
    newest_seen: Vec<bool>,
    /// One past the highest request the tap saw, and one past the newest it saw.
    high: usize,
    last: usize,
    /// Drops since then.
    dropped: Vec<usize>,
    /// Packets and duplicates of the retransmission that is going on.
    run: (u64, u64),
}

const PMTU: u32 = 1024;

impl World {
    fn new(setup: Setup, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut requests = Vec::new();
        let mut at = 0;
        for i in 0..setup.packets {
            let span = if setup.reads > 0 && i % setup.reads == 3 { 1 + random.below(16) as u32 } else { 1 };
            requests.push((at, span));
            at += span;
        }
        let count = requests.len();
        Self {
            setup,
            random,
            tracker: Tracker::default(),
            truth: Truth::default(),
            requests,
            seen: vec![false; count],
            newest_seen: vec![false; count],
            high: 0,
            last: 0,
            dropped: Vec::new(),
            run: (0, 0),
        }
    }

    fn psn(&self, request: usize) -> Psn {
        Psn::new(self.setup.start).add(self.requests[request].0)
    }

    /// The request passes the tap or is dropped before it; whether it arrives behind it.
    fn transmit(&mut self, request: usize, safe: bool) -> bool {
        if !safe && self.random.chance(self.setup.before) {
            self.truth.dropped_before += u64::from(self.requests[request].1);
            self.newest_seen[request] = false;
            self.dropped.push(request);
            return false;
        }
        let (opcode, len) = match self.requests[request].1 {
            1 => (Opcode::WRITE_MIDDLE, 0),
            span => (Opcode::READ_REQUEST, span * PMTU - self.random.below(PMTU.into()) as u32),
        };
        let span = |requests: &[(u32, u32)]| u64::from(requests.iter().map(|r| r.1).sum::<u32>());
        let left = if self.last < self.high { span(&self.requests[self.last..self.high]) } else { 0 };
        let shown = self.run.1 > 0 && left < self.run.0;
        let drops = std::mem::take(&mut self.dropped);
        for (i, &dropped) in drops.iter().enumerate() {
            let turned_back = dropped >= request || dropped < self.last || request < self.last;
            let at_the_end = dropped < self.high && request >= self.high;
            if turned_back || at_the_end && !shown || drops[i + 1..].contains(&dropped) {
                self.truth.hidden += span(&self.requests[dropped..=dropped]);
            }
        }
        if request >= self.high {
            self.high = request + 1;
            self.run = (0, 0);
        } else {
            if request < self.last {
                self.run = (0, 0);
            }
            self.run.0 += 1;
            self.run.1 += u64::from(self.seen[request]);
            self.truth.retransmissions_seen += 1;
            self.truth.duplicates += u64::from(self.seen[request]);
        }
        self.last = request + 1;
        self.seen[request] = true;
        self.newest_seen[request] = true;
        let psn = self.psn(request);
        self.tracker.observe(&Observed::new(opcode, psn, PMTU as u16, len));
        safe || !self.random.chance(self.setup.behind)
    }

    fn run(&mut self) {
        let count = self.requests.len();
        let (mut send, mut expected, mut nak_sent) = (0, 0, false);
        // NAKs on their way: when they arrive, and what they name.
        let mut naks: VecDeque<(usize, usize)> = VecDeque::new();
        let mut step = 0;
        while expected < count {
            step += 1;
            if let Some(&(at, request)) = naks.front()
                && at <= step
            {
                naks.pop_front();
                send = request;
            }
            // The last requests are safe, so that the end of the stream is in order.
            if send < count && send < expected + self.setup.window as usize {
                let safe = send == 0 || send + 300 > count;
                if self.transmit(send, safe) {
                    if send == expected {
                        expected += 1;
                        nak_sent = false;
                    } else if send > expected && !nak_sent {
                        nak_sent = true;
                        self.truth.naks += 1;
                        self.truth.naks_of_passed += u64::from(self.newest_seen[expected]);
                        self.tracker.note_sequence_nak(self.psn(expected));
                        naks.push_back((step + self.setup.delay, expected));
                    }
                }
                send += 1;
            } else if naks.is_empty() {
                // Nothing to send, nothing to hear: time out.
                send = expected;
            }
        }
    }
}

fn setups() -> impl Iterator<Item = Setup> {
    let base = Setup { start: 5_000, packets: 3_000, window: 128, delay: 40, before: 100, behind: 0, reads: 0 };
    [
        base,
        Setup { before: 0, ..base },
        Setup { before: 0, behind: 100, ..base },
        Setup { before: 100, behind: 100, ..base },
        Setup { before: 500, behind: 300, window: 64, delay: 10, ..base },
        Setup { before: 1_500, behind: 0, delay: 3, ..base },
        Setup { start: 0xff_fb00, before: 200, behind: 100, ..base },
        Setup { reads: 7, before: 100, window: 60, ..base },
        Setup { reads: 5, before: 200, behind: 100, window: 50, start: 0xff_ff00, ..base },
        Setup { before: 30, window: 900, delay: 600, packets: 20_000, ..base },
    ]
    .into_iter()
}

#[test]
fn losses_of_go_back_n_streams_are_the_packets_dropped() {
    for setup in setups() {
        for seed in 0..12 {
            let mut world = World::new(setup, seed);
            world.run();
            let (truth, mut t) = (world.truth, world.tracker);
            t.finish();
            let context = std::format!("{setup:?} seed {seed}\n{truth:?}\n{t:?}");
            assert_eq!((t.open(), t.reordered, t.discontinuities), (0, 0, 0), "{context}");
            assert_eq!(t.missing_psns, t.lost, "{context}");
            assert_eq!(t.duplicates, truth.duplicates, "{context}");
            // A NAK of a drop that nothing tells of looks like a loss behind the tap.
            let after = u64::from(t.lost_after_tap);
            assert!(after >= truth.naks_of_passed && after <= truth.naks_of_passed + truth.hidden, "{context}");
            let found = t.lost + t.lost_again;
            assert_eq!(found + truth.hidden, truth.dropped_before, "{context}");
            assert!(t.retransmitted <= truth.retransmissions_seen, "{context}");
            if setup.before == 0 {
                assert_eq!(t.retransmitted, truth.retransmissions_seen, "{context}");
                assert_eq!(t.missing_psns + t.lost_again, 0, "{context}");
            }
        }
    }
}

#[test]
fn late_packets_are_counted_one_by_one() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let start = if seed % 3 == 0 { 0xff_ff80 } else { random.next() as u32 };
        // Some packets are held back and come later, each alone, in the order they were sent or not.
        let (mut order, mut held, mut late) = (Vec::new(), VecDeque::new(), 0);
        for i in 0..2_000u32 {
            if i > 0 && i < 1_900 && random.chance(300) {
                held.push_back(i);
                late += 1;
                continue;
            }
            order.push(i);
            if !held.is_empty() && random.chance(2_000) {
                let at = random.below(held.len() as u64) as usize;
                order.extend(held.remove(at));
            }
        }
        let rest = order.len() - 50;
        order.splice(rest..rest, held);
        let mut t = Tracker::default();
        for i in order {
            t.observe(&Observed::new(Opcode::WRITE_MIDDLE, Psn::new(start).add(i), 256, 0));
        }
        t.finish();
        assert_eq!(
            [t.missing_psns, t.reordered, t.lost, t.lost_again, t.duplicates, t.retransmitted, t.open()],
            [late, late, 0, 0, 0, 0, 0],
            "seed {seed}"
        );
    }
}

#[test]
fn repeated_packets_are_duplicates_and_nothing_is_missing() {
    for seed in 0..50 {
        let mut random = Random::new(seed);
        let (mut t, mut twice) = (Tracker::default(), 0);
        for i in 0..3_000 {
            let p = Observed::new(Opcode::SEND_ONLY, Psn::new(0xff_f000).add(i), 8, 0);
            t.observe(&p);
            if random.chance(500) {
                t.observe(&p);
                twice += 1;
            }
        }
        t.finish();
        assert_eq!([t.missing_psns, t.duplicates, t.retransmitted, t.lost_again], [0, twice, twice, 0]);
    }
}

#[test]
fn receiver_not_ready_is_no_loss() {
    for seed in 0..50 {
        let mut random = Random::new(seed);
        let (mut t, mut refused) = (Tracker::default(), 0);
        let mut i = 0;
        while i < 3_000 {
            let psn = Psn::new(0xff_f800).add(i);
            t.observe(&Observed::new(Opcode::SEND_MIDDLE, psn, 1024, 0));
            if random.chance(100) {
                // Refused together with everything in flight behind it, and sent again.
                t.note_rnr_nak(psn);
                let behind = random.below(60) as u32;
                for k in 1..=behind {
                    t.observe(&Observed::new(Opcode::SEND_MIDDLE, psn.add(k), 1024, 0));
                }
                for k in 0..=behind {
                    t.observe(&Observed::new(Opcode::SEND_MIDDLE, psn.add(k), 1024, 0));
                }
                refused += u64::from(behind) + 1;
                i += behind;
            }
            i += 1;
        }
        t.finish();
        assert_eq!([t.missing_psns, t.lost, t.duplicates, t.retransmitted], [0, 0, refused, refused], "seed {seed}");
    }
}

#[test]
fn hostile_streams_keep_the_numbers_consistent() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let mut t = Tracker::default();
        let (mut centre, mut sent) = (random.next() as u32, 0u64);
        for _ in 0..2_000 {
            if random.chance(20) {
                centre = random.next() as u32;
            }
            let reach = [2, 20, 200, 1_100, 3_000, 1 << 24][random.below(6) as usize];
            let psn = Psn::new(centre.wrapping_add(random.below(reach) as u32).wrapping_sub(reach as u32 / 2));
            match random.below(12) {
                0 => {
                    t.note_sequence_nak(psn);
                }
                1 => {
                    t.note_rnr_nak(psn);
                }
                _ => {
                    let Some(opcode) = Opcode::new(random.next() as u8) else { continue };
                    let payload = [0, 1, 256, 1024, 4096, u16::MAX][random.below(6) as usize];
                    let len = [0, 1, 256, 257, 4096, 1 << 20, 1 << 31, u32::MAX][random.below(8) as usize];
                    sent += 1;
                    if !matches!(t.observe(&Observed::new(opcode, psn, payload, len)).outcome(), Outcome::NotTracked) {
                        centre = t.next().get();
                    }
                }
            }
            let mut end = t;
            end.finish();
            assert_eq!(end.missing_psns, end.lost + end.reordered + end.open(), "seed {seed}");
            assert!(end.open() <= u64::from(WINDOW));
            assert!(end.duplicates <= end.retransmitted && end.retransmitted <= sent, "seed {seed}");
            assert!(t.next().get() < 1 << 24);
        }
    }
}
