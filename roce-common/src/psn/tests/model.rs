//! The counting rules once more, written for clarity: unbounded positions in sets, one PSN at a time. Random streams must
//! give the same counters here and in the tracker.

use std::{collections::BTreeSet, vec::Vec};

use proptest::prelude::*;

use super::super::*;
use crate::wire::Opcode;

const W: i64 = WINDOW as i64;

/// A packet at an absolute position.
#[derive(Clone, Copy, Debug)]
struct Sent {
    at: i64,
    opcode: Opcode,
    payload: u16,
    dma_len: u32,
}

#[derive(Default, Clone)]
struct Run {
    cursor: i64,
    packets: u64,
    filled: u64,
    skipped: u64,
    duplicate: bool,
    asked_for: bool,
}

#[derive(Default)]
struct Model {
    next: Option<i64>,
    known_from: i64,
    holes: BTreeSet<i64>,
    newest_skipped: BTreeSet<i64>,
    run: Option<Run>,
    far: Vec<Sent>,
    nak: Option<i64>,
    rnr: Option<i64>,
    pmtu: Option<u32>,
    pending_read: Option<Sent>,
    missing: u64,
    lost: u64,
    lost_again: u64,
    reordered: u64,
    duplicates: u64,
    retransmitted: u64,
    discontinuities: u32,
    lost_after_tap: u32,
    reasked: u32,
}

fn is_read(p: &Sent) -> bool {
    p.opcode == Opcode::READ_REQUEST
}

fn packets_of(len: u32, pmtu: u32) -> i64 {
    i64::from(len.div_ceil(pmtu).max(1))
}

impl Model {
    fn span(&self, p: &Sent) -> i64 {
        if is_read(p) { packets_of(p.dma_len, self.pmtu.unwrap_or(4096)) } else { 1 }
    }

    fn close_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        if run.duplicate || run.asked_for {
            self.retransmitted += run.packets;
            self.lost += run.filled;
            if run.duplicate {
                self.lost_again += run.skipped;
            }
        } else {
            self.reordered += run.filled;
        }
    }

    /// What is further than the window below `next` is lost or forgotten.
    fn slide(&mut self) {
        let floor = self.next.unwrap() - W;
        let fallen = self.holes.iter().filter(|&&h| h < floor).count();
        self.lost += fallen as u64;
        self.holes.retain(|&h| h >= floor);
        self.newest_skipped.retain(|&h| h >= floor);
    }

    fn pass(&mut self, from: i64, to: i64) -> u64 {
        let mut filled = 0;
        for at in from.max(to - 2 * W)..to {
            filled += u64::from(self.holes.remove(&at));
            self.newest_skipped.remove(&at);
        }
        filled
    }

    fn packet(&mut self, p: &Sent) {
        let told = ([0x00, 0x01, 0x06, 0x07, 0x0d, 0x0e].contains(&p.opcode.get())
            && [256, 512, 1024, 2048, 4096].contains(&p.payload))
        .then_some(u32::from(p.payload));
        if self.next.is_none() {
            self.next = Some(p.at);
            self.known_from = p.at;
        }
        if let Some(read) = self.pending_read
            && p.at >= self.next.unwrap()
        {
            let jump = p.at - read.at;
            let fits: Vec<u32> =
                [256, 512, 1024, 2048, 4096].into_iter().filter(|&m| packets_of(read.dma_len, m) == jump).collect();
            // Its own length, or the PMTU that was learnt since the READ.
            let sure = told.or(self.pmtu);
            let by_told = sure.map(|m| packets_of(read.dma_len, m)).filter(|&n| (0..=W).contains(&(jump - n)));
            if let Some(span) = by_told.or((!fits.is_empty()).then_some(jump)) {
                if let ([pmtu], None) = (&fits[..], sure) {
                    self.pmtu = Some(*pmtu);
                }
                let end = read.at + span;
                self.pass(self.next.unwrap(), end);
                self.next = Some(end);
                self.slide();
                self.pending_read = None;
            }
        }
        let next = self.next.unwrap();
        let span = self.span(p);
        let d = p.at - next;
        let starts = d > 0 && [0x0d, 0x10, 0x12].contains(&p.opcode.get());
        if d < -W || (d > W && !starts) {
            return self.too_far(p, span);
        }
        self.far.clear();
        self.pmtu = told.or(self.pmtu);
        if d >= 0
            && let Some(run) = &mut self.run
            && run.duplicate
            && ((next - run.cursor) as u64) < run.packets
        {
            run.skipped += (next - run.cursor) as u64;
            self.newest_skipped.extend(run.cursor..next);
        }
        if d >= 0 || self.run.as_ref().is_some_and(|run| p.at < run.cursor) {
            self.close_run();
        }
        if d < 0 {
            return self.behind(p, span);
        }
        if d > 0 && !starts {
            self.missing += d as u64;
            self.holes.extend(next..p.at);
            self.newest_skipped.extend(next..p.at);
        }
        self.next = Some(p.at + span);
        self.slide();
        self.pass(p.at, p.at + span);
        self.pending_read = (is_read(p) && self.pmtu.is_none() && p.dma_len > 256).then_some(*p);
    }

    fn behind(&mut self, p: &Sent, span: i64) {
        let next = self.next.unwrap();
        if self.run.is_none() {
            self.run = Some(Run { cursor: p.at, ..Run::default() });
            self.reasked += u32::from(is_read(p));
            if self.rnr == Some(p.at) {
                self.rnr = None;
                self.run.as_mut().unwrap().asked_for = true;
            }
        }
        let mut run = self.run.clone().unwrap();
        run.skipped += (p.at - run.cursor) as u64;
        self.newest_skipped.extend(run.cursor..p.at);
        let end = (p.at + span).min(next);
        if let Some(nak) = self.nak
            && (p.at..end).contains(&nak)
        {
            run.asked_for |= self.holes.contains(&nak);
            self.nak = None;
        }
        let filled = self.pass(p.at, end);
        run.filled += filled;
        run.packets += 1;
        if filled == 0 {
            run.duplicate = true;
            self.duplicates += 1;
        }
        run.cursor = p.at + span;
        self.run = Some(run);
        if p.at + span >= next {
            self.close_run();
            if p.at + span > next {
                self.pending_read = None;
            }
            self.next = Some(p.at + span);
            self.slide();
        }
    }

    fn too_far(&mut self, p: &Sent, span: i64) {
        if let Some(last) = self.far.last() {
            // The PMTU that was known then: no packet of these streams is far and teaches it.
            let ahead = p.at - last.at - self.span(last);
            if !(0..=W).contains(&ahead) {
                self.far.clear();
            }
        }
        self.far.push(*p);
        if self.far.len() == 3 {
            self.close_run();
            self.lost += self.holes.len() as u64;
            self.holes.clear();
            self.newest_skipped.clear();
            self.discontinuities += 1;
            self.next = Some(p.at + span);
            self.known_from = self.far[0].at;
            self.far.clear();
            self.nak = None;
            self.rnr = None;
            self.pending_read = None;
        }
    }

    fn in_window(&self, at: i64) -> bool {
        self.next.is_some_and(|next| at < next && at >= next - W)
    }

    fn sequence_nak(&mut self, at: i64) {
        if !self.in_window(at) || self.nak == Some(at) {
            return;
        }
        self.nak = Some(at);
        if at >= self.known_from && !self.newest_skipped.contains(&at) {
            self.lost_after_tap += 1;
        }
    }

    fn counters(&self) -> [u64; 9] {
        let mut end = Self {
            run: self.run.clone(),
            lost: self.lost,
            lost_again: self.lost_again,
            reordered: self.reordered,
            retransmitted: self.retransmitted,
            ..Self::default()
        };
        end.close_run();
        [
            self.missing,
            end.lost,
            end.lost_again,
            self.holes.len() as u64,
            end.reordered,
            self.duplicates,
            end.retransmitted,
            u64::from(self.lost_after_tap),
            u64::from(self.reasked) << 32 | u64::from(self.discontinuities),
        ]
    }
}

fn tracker_counters(mut t: Tracker) -> [u64; 9] {
    t.finish();
    assert_eq!(t.missing_psns, t.lost + t.reordered + t.open());
    [
        t.missing_psns,
        t.lost,
        t.lost_again,
        t.open(),
        t.reordered,
        t.duplicates,
        t.retransmitted,
        u64::from(t.lost_after_tap),
        u64::from(t.reasked) << 32 | u64::from(t.discontinuities),
    ]
}

/// What happens next, relative to where the flow is.
#[derive(Clone, Debug)]
enum Step {
    /// So many packets in order.
    Go(u16),
    /// A packet so far ahead.
    Skip(u16),
    /// So many packets from so far behind on, dropping those whose bit is set.
    Back { by: u16, packets: u16, dropped: u64 },
    /// One packet elsewhere on the circle, and so many behind it.
    Away { to: i32, packets: u8 },
    /// A READ request so far behind (or, negative, ahead).
    Read { back: i16, len: u32 },
    /// A READ response or atomic answer so far ahead.
    Respond { opcode: u8, ahead: u16 },
    /// A sequence NAK of a PSN so far behind.
    SequenceNak(u16),
    /// An RNR NAK of it, and the retry.
    RnrNak(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let near = prop_oneof![8 => 0u16..8, 4 => 0u16..140, 2 => 0u16..1100];
    let read_len = prop_oneof![Just(0u32), 1u32..10_000, Just(4096), Just(65_536), Just(1 << 20), Just(1 << 31)];
    prop_oneof![
        6 => (1u16..100).prop_map(Step::Go),
        1 => (900u16..1100).prop_map(Step::Go),
        4 => near.clone().prop_map(Step::Skip),
        5 => (near.clone(), 1u16..80, prop_oneof![Just(0u64), any::<u64>().prop_map(|x| x & x >> 7 & x << 9)])
            .prop_map(|(by, packets, dropped)| Step::Back { by, packets, dropped }),
        1 => (prop_oneof![-1_100i32..1_100, -5_000i32..5_000, -8_000_000i32..8_000_000], 0u8..4)
            .prop_map(|(to, packets)| Step::Away { to, packets }),
        2 => (prop_oneof![3 => Just(0i16), 1 => -40i16..300], read_len)
            .prop_map(|(back, len)| Step::Read { back, len }),
        3 => (
            prop_oneof![Just(0x0du8), Just(0x0e), Just(0x0f), Just(0x10), Just(0x12)],
            prop_oneof![3 => Just(0u16), 1 => 0u16..3_000],
        ).prop_map(|(opcode, ahead)| Step::Respond { opcode, ahead }),
        2 => near.clone().prop_map(Step::SequenceNak),
        1 => near.prop_map(Step::RnrNak),
    ]
}

struct Pair {
    model: Model,
    tracker: Tracker,
    start: i64,
    payload: u16,
}

impl Pair {
    fn next(&self) -> i64 {
        self.model.next.unwrap_or(self.start)
    }

    fn send(&mut self, at: i64, opcode: Opcode, payload: u16, dma_len: u32) {
        let sent = Sent { at, opcode, payload, dma_len };
        self.model.packet(&sent);
        self.tracker.observe(&Observed::new(opcode, psn(at), payload, dma_len));
        assert_eq!(tracker_counters(self.tracker), self.model.counters(), "after {sent:?}");
        assert_eq!(self.tracker.next(), psn(self.next()), "after {sent:?}");
        assert_eq!(self.tracker.pmtu, self.model.pmtu.unwrap_or(0), "after {sent:?}");
    }

    fn write(&mut self, at: i64) {
        self.send(at, Opcode::WRITE_MIDDLE, self.payload, 0);
    }

    fn take(&mut self, step: &Step) {
        let next = self.next();
        match *step {
            Step::Go(packets) => {
                for i in 0..i64::from(packets) {
                    self.write(next + i);
                }
            }
            Step::Skip(ahead) => self.write(next + i64::from(ahead)),
            Step::Back { by, packets, dropped } => {
                for i in 0..i64::from(packets) {
                    if dropped >> (i & 63) & 1 == 0 {
                        self.write(next - i64::from(by) + i);
                    }
                }
            }
            Step::Away { to, packets } => {
                for i in 0..i64::from(packets) {
                    self.write(next + i64::from(to) + i);
                }
            }
            Step::Read { back, len } => {
                self.send(next - i64::from(back), Opcode::READ_REQUEST, 0, len);
            }
            Step::Respond { opcode, ahead } => {
                let opcode = Opcode::new(opcode).unwrap();
                self.send(next + i64::from(ahead), opcode, self.payload, 0);
            }
            Step::SequenceNak(back) => {
                let at = next - i64::from(back);
                self.model.sequence_nak(at);
                self.tracker.note_sequence_nak(psn(at));
            }
            Step::RnrNak(back) => {
                let at = next - i64::from(back);
                if self.model.in_window(at) {
                    self.model.rnr = Some(at);
                }
                self.tracker.note_rnr_nak(psn(at));
                self.write(at);
            }
        }
    }
}

fn psn(at: i64) -> Psn {
    Psn::new(at as u32)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tracker_counts_as_the_rules_say(
        start in prop_oneof![0i64..1 << 24, (1i64 << 24) - 200..1 << 24],
        payload in prop_oneof![Just(0u16), Just(8), Just(256), Just(1024)],
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut pair = Pair { model: Model::default(), tracker: Tracker::default(), start, payload };
        for step in &steps {
            pair.take(step);
        }
    }
}
