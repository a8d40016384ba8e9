//! One story per cause: what passes the tap, and what the explainer must make of it.

use std::vec::Vec;

use super::super::*;
use crate::{units::Nanos, wire::Opcode};

const MS: u64 = 1_000_000;
/// A link of which a packet takes 10 µs.
const STEP: u64 = 10_000;

/// A flow with its tracker, its explainer and a clock.
#[derive(Default)]
struct Story {
    tracker: Tracker,
    reads: Reads,
    explainer: Explainer,
    now: u64,
    last: u64,
    told: Vec<Episode>,
}

impl Story {
    fn wait(&mut self, ns: u64) -> &mut Self {
        self.now += ns;
        self
    }

    fn packet(&mut self, opcode: Opcode, psn: u32, payload: u16, len: u32) -> &mut Self {
        self.now += STEP;
        let account = self.tracker.observe(&Observed::new(opcode, Psn::new(psn), payload, len));
        let (silence, read) = (Nanos(self.now - self.last), self.reads.place(Psn::new(psn)));
        if opcode.is_read_request() {
            self.reads.packet(Psn::new(psn), account);
        }
        let passing = Passing { psn: Psn::new(psn), opcode, read, silence, at: Nanos(self.now) };
        self.explainer.packet(account, &passing, |e| self.told.push(e));
        self.last = self.now;
        self
    }

    fn writes(&mut self, psns: impl IntoIterator<Item = u32>) -> &mut Self {
        for psn in psns {
            self.packet(Opcode::WRITE_MIDDLE, psn, 1024, 0);
        }
        self
    }

    fn read(&mut self, psn: u32, packets: u32) -> &mut Self {
        self.packet(Opcode::READ_REQUEST, psn, 0, packets * 1024)
    }

    fn ack(&mut self, psn: u32) -> &mut Self {
        self.now += STEP;
        self.explainer.answer(Psn::new(psn), Nanos(self.now));
        self
    }

    fn nak(&mut self, psn: u32) -> &mut Self {
        self.now += STEP;
        let fate = self.tracker.note_sequence_nak(Psn::new(psn));
        self.explainer.sequence_nak(Psn::new(psn), fate, Nanos(self.now));
        self
    }

    fn rnr(&mut self, psn: u32) -> &mut Self {
        self.now += STEP;
        self.tracker.note_rnr_nak(Psn::new(psn));
        self.explainer.rnr_nak(Psn::new(psn), 14, Nanos(self.now));
        self
    }

    /// The one episode there is, at the end of the capture.
    fn only(&mut self) -> Episode {
        let end = self.tracker.finish();
        self.explainer.finish(end, Nanos(self.now), |e| self.told.push(e));
        assert_eq!(self.told.len(), 1, "{:#?}", self.told);
        self.told[0]
    }
}

fn verdict(e: &Episode) -> (Cause, Location) {
    (e.cause, e.location)
}

#[test]
fn go_back_n_before_the_tap() {
    let mut s = Story::default();
    let e = s.writes([10, 11, 13, 14]).nak(12).writes([12, 13, 14, 15]).only();
    assert_eq!(verdict(&e), (Cause::GoBackN, Location::BeforeTap));
    assert_eq!((e.first, e.packets, e.lost, e.lost_again), (Psn::new(12), 3, 1, 0));
    let nak = e.evidence.nak.expect("the NAK");
    assert_eq!((nak.seen.psn, nak.fate), (Psn::new(12), Fate::Skipped));
    assert_eq!(e.evidence.gap, Some(Seen { psn: Psn::new(12), at: Nanos(3 * STEP) }));
    assert_eq!((e.start, e.evidence.refill), (Nanos(3 * STEP), Some(Nanos(6 * STEP))));
    assert!(e.is_loss());
}

#[test]
fn go_back_n_after_the_tap() {
    let mut s = Story::default();
    let e = s.writes(10..15).nak(12).writes([12, 13, 14, 15]).only();
    assert_eq!(verdict(&e), (Cause::GoBackN, Location::AfterTap));
    assert_eq!((e.packets, e.lost, e.evidence.gap), (3, 0, None));
    assert_eq!(e.evidence.nak.map(|n| n.fate), Some(Fate::Passed));
}

#[test]
fn selective_repeat() {
    // Lost before the tap, and lost behind it.
    let mut s = Story::default();
    let e = s.writes([10, 11, 13, 14, 15]).nak(12).writes([12, 16, 17]).only();
    assert_eq!(verdict(&e), (Cause::SelectiveRepeat, Location::BeforeTap));
    let mut s = Story::default();
    let e = s.writes(10..16).nak(12).writes([12, 16, 17]).only();
    assert_eq!(verdict(&e), (Cause::SelectiveRepeat, Location::AfterTap));
}

#[test]
fn a_timeout_is_told_by_the_silence() {
    // Inferred: 40 ms are at least 4.096 µs · 2^13 = 33.6 ms.
    let mut s = Story::default();
    let e = s.writes(10..13).ack(10).wait(40 * MS).writes([11, 12, 13]).only();
    assert_eq!(verdict(&e), (Cause::Timeout, Location::AfterTap));
    assert_eq!(e.evidence.timeout, Some(AckTimeout { exponent: 13, known: Known::Inferred }));
    assert!(e.evidence.silence.0 >= 40 * MS);
    // A silence shorter than the timeout that was told is none.
    let mut s = Story::default();
    s.explainer.set_ack_timeout(14);
    let e = s.writes(10..13).ack(10).wait(40 * MS).writes([11, 12, 13]).only();
    assert_eq!(e.cause, Cause::Spurious);
    let mut s = Story::default();
    s.explainer.set_ack_timeout(14);
    let e = s.writes(10..13).wait(68 * MS).writes([10, 11, 12, 13]).only();
    assert_eq!(verdict(&e), (Cause::Timeout, Location::Unknown), "whether answers pass here is not known");
    assert_eq!(e.evidence.timeout.map(|t| t.known), Some(Known::Told));
    // Nothing came for that long, but answers did: not silent.
    let mut s = Story::default();
    let e = s.writes(10..13).ack(12).wait(40 * MS).ack(12).writes([11, 12, 13]).only();
    assert_eq!(verdict(&e), (Cause::Spurious, Location::AfterTap));
    assert_eq!(e.evidence.answered.map(|a| a.psn), Some(Psn::new(12)));
}

#[test]
fn the_tail_that_was_lost_before_the_tap_comes_after_a_timeout() {
    let mut s = Story::default();
    let e = s.writes([10, 11, 14]).wait(70 * MS).writes([12, 13, 14, 15]).only();
    assert_eq!(verdict(&e), (Cause::Timeout, Location::BeforeTap));
    assert_eq!((e.lost, e.packets), (2, 3));
}

#[test]
fn a_nak_that_does_not_reach_the_requester_leaves_a_timeout() {
    let mut s = Story::default();
    s.explainer.set_ack_timeout(14);
    let e = s.writes(10..15).nak(12).wait(70 * MS).writes(12..16).only();
    assert_eq!(verdict(&e), (Cause::Timeout, Location::AfterTap));
    assert!(e.evidence.nak.is_some());
}

#[test]
fn receiver_not_ready() {
    let mut s = Story::default();
    let e = s.writes(10..13).rnr(11).wait(2 * MS).writes([11, 12, 13]).only();
    assert_eq!(verdict(&e), (Cause::RnrRepeat, Location::Responder));
    assert_eq!(e.evidence.rnr.map(|r| (r.seen.psn, r.timer)), Some((Psn::new(11), 14)));
    assert!(!e.is_loss());
}

#[test]
fn reordering_that_the_peer_took_for_loss() {
    let mut s = Story::default();
    let e = s.writes([10, 12, 13, 11, 14]).nak(11).writes([11, 12, 13, 14, 15]).only();
    assert_eq!(verdict(&e), (Cause::ReorderingNaked, Location::BeforeTap));
    assert!(!e.is_loss());
    assert_eq!((s.tracker.reordered, s.tracker.lost), (1, 0));
    // Without a NAK it is nothing to tell.
    let mut s = Story::default();
    s.writes([10, 12, 13, 11, 14, 15]);
    assert!(s.told.is_empty());
}

#[test]
fn a_read_asked_again() {
    let mut s = Story::default();
    s.writes([9]);
    let e = s.read(10, 4).read(14, 4).ack(15).read(10, 4).read(14, 4).read(18, 4).only();
    assert_eq!(verdict(&e), (Cause::Reask, Location::AfterTap));
    assert!(!e.evidence.partial_read);
    // Mid-range, because an answer was lost before it came here.
    let mut s = Story::default();
    s.writes([9]).read(10, 4).ack(11);
    s.explainer.answer_gap(Psn::new(12), Nanos(s.now));
    let e = s.ack(13).read(12, 2).read(14, 4).only();
    assert_eq!(verdict(&e), (Cause::Reask, Location::BeforeTap));
    assert!(e.evidence.partial_read);
    assert_eq!(e.evidence.answer_gap.map(|g| g.psn), Some(Psn::new(12)));
    // Atomics are asked again as READs are.
    let mut s = Story::default();
    let e = s.packet(Opcode::FETCH_ADD, 5, 0, 0).packet(Opcode::FETCH_ADD, 5, 0, 0).only();
    assert_eq!(e.cause, Cause::Reask);
}

#[test]
fn answers_that_come_again() {
    use Opcode as O;
    let mut s = Story::default();
    for (opcode, psn) in [
        (O::READ_RESPONSE_FIRST, 10),
        (O::READ_RESPONSE_MIDDLE, 12),
        (O::READ_RESPONSE_LAST, 13),
        (O::READ_RESPONSE_FIRST, 11),
        (O::READ_RESPONSE_MIDDLE, 12),
        (O::READ_RESPONSE_LAST, 13),
        (O::READ_RESPONSE_FIRST, 14),
    ] {
        s.packet(opcode, psn, 1024, 0);
    }
    let e = s.only();
    assert_eq!((verdict(&e), e.lost), ((Cause::Reask, Location::BeforeTap), 1));
}

#[test]
fn what_uc_loses_is_lost() {
    let mut s = Story::default();
    let uc = Opcode::new(0x27).unwrap();
    for psn in [10, 11, 13, 14] {
        s.packet(uc, psn, 1024, 0);
    }
    assert!(s.told.is_empty(), "it may be late");
    s.wait(11 * MS).packet(uc, 15, 1024, 0);
    let e = s.told[0];
    assert_eq!(verdict(&e), (Cause::UcLoss, Location::BeforeTap));
    assert_eq!((e.first, e.lost), (Psn::new(12), 1));
    // And told once.
    for psn in 16..3_000 {
        s.packet(uc, psn, 1024, 0);
    }
    assert_eq!((s.only().cause, s.tracker.lost), (Cause::UcLoss, 1));
    // At the end of a capture what is open is told too.
    let mut s = Story::default();
    for psn in [10, 13, 14] {
        s.packet(uc, psn, 1024, 0);
    }
    assert_eq!(s.only().lost, 2);
}

#[test]
fn holes_that_nobody_fills_are_unknown() {
    let mut s = Story::default();
    let e = s.writes((10..20).chain(25..1_100)).only();
    assert_eq!((verdict(&e), e.first, e.lost), ((Cause::Unknown, Location::Unknown), Psn::new(20), 5));
    // Nor is a NAK that nobody answered forgotten.
    let mut s = Story::default();
    let e = s.writes(10..15).nak(12).only();
    assert_eq!((verdict(&e), e.packets), ((Cause::Unknown, Location::AfterTap), 0));
    // A refill that no NAK asked for, and no time-out: lost before the tap, why it came is not known.
    let mut s = Story::default();
    let e = s.writes([10, 12, 13, 11, 12, 13, 14]).only();
    assert_eq!(verdict(&e), (Cause::Unknown, Location::BeforeTap));
}

#[test]
fn losses_of_one_flight_are_told_apart() {
    let mut s = Story::default();
    s.writes([10, 12, 14, 15]).nak(11).writes([11, 12, 14, 15]).nak(13).writes([13, 14, 15, 16]);
    let verdicts: Vec<_> = s.told.iter().map(|e| (verdict(e), e.lost, e.lost_again)).collect();
    let gbn = (Cause::GoBackN, Location::BeforeTap);
    assert_eq!(verdicts, [(gbn, 1, 1), (gbn, 1, 0)]);
}

#[test]
fn a_new_place_forgets_the_old_one() {
    let mut s = Story::default();
    s.writes([10, 11, 13]).nak(12).writes(500_000..500_010);
    assert_eq!(s.only().cause, Cause::Unknown, "the hole was given up");
    let mut fresh = Story::default();
    fresh.writes(10..20).nak(12).writes(500_000..500_010).only();
}

#[test]
fn events_that_were_not_delivered_leave_no_wrong_story() {
    // Only the end of a run is heard of.
    let mut e = Explainer::default();
    let run = Account::ending(3, 1, 0, 1, 0);
    let (psn, opcode) = (Psn::new(20), Opcode::WRITE_MIDDLE);
    let p = Passing { psn, opcode, read: ReadPlace::Unknown, silence: Nanos(0), at: Nanos(5) };
    let mut told = Vec::new();
    e.packet(run.and(Account::of(Outcome::InOrder)), &p, |e| told.push(e));
    assert_eq!((told.len(), told[0].first, told[0].location), (1, Psn::new(17), Location::BeforeTap));
}

#[test]
fn any_account_of_any_packet_is_taken() {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut e = Explainer::default();
    let mut told = 0;
    for _ in 0..200_000 {
        let Some(opcode) = Opcode::new(random() as u8) else { continue };
        let at = Nanos(random());
        let psn = Psn::new(random() as u32);
        match random() % 8 {
            0 => e.sequence_nak(psn, Fate::from_number(random() as u32 % 4).unwrap(), at),
            1 => e.rnr_nak(psn, random() as u8, at),
            2 => e.answer(psn, at),
            3 => e.set_ack_timeout(random() as u8),
            _ => {}
        }
        let account = Account::from_bits(random() & random());
        e.packet(account, &Passing { psn, opcode, read: ReadPlace::Unknown, silence: Nanos(random()), at }, |_| {
            told += 1;
        });
    }
    assert!(told > 1_000);
    e.finish(Account::default(), Nanos(u64::MAX), |_| {});
}
