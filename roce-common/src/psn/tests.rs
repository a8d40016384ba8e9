//! One story per counting rule, told in PSNs.

use super::*;
use crate::wire::Opcode;

mod model;
mod spans;
mod stories;
mod streams;

const WRITE: Opcode = Opcode::WRITE_MIDDLE;
const PMTU: u16 = 1024;

/// A flow of WRITE packets that pass in this order.
fn writes(psns: impl IntoIterator<Item = u32>) -> Tracker {
    let mut t = Tracker::default();
    for psn in psns {
        pass(&mut t, psn);
    }
    t
}

fn pass(t: &mut Tracker, psn: u32) -> Outcome {
    let outcome = t.observe(&Observed::new(WRITE, Psn::new(psn), PMTU, 0)).outcome();
    assert_eq!(t.missing_psns, accounted(*t), "after {psn}");
    outcome
}

fn read(t: &mut Tracker, psn: u32, len: u32) -> Outcome {
    t.observe(&Observed::new(Opcode::READ_REQUEST, Psn::new(psn), 0, len)).outcome()
}

fn respond(t: &mut Tracker, opcode: Opcode, psn: u32) -> Outcome {
    t.observe(&Observed::new(opcode, Psn::new(psn), 0, 0)).outcome()
}

/// What the missing PSNs became, if the capture ended here.
fn accounted(mut t: Tracker) -> u64 {
    t.finish();
    t.lost + t.reordered + t.open()
}

/// missing, lost, lost_again, open, reordered, duplicates, retransmitted at the end of the capture.
fn counters(mut t: Tracker) -> [u64; 7] {
    t.finish();
    [t.missing_psns, t.lost, t.lost_again, t.open(), t.reordered, t.duplicates, t.retransmitted]
}

#[test]
fn in_order_counts_nothing_and_wraps() {
    let mut t = writes(0xff_fffd..=0xff_ffff);
    assert_eq!(pass(&mut t, 0), Outcome::InOrder);
    assert_eq!(pass(&mut t, 1), Outcome::InOrder);
    assert_eq!(counters(t), [0; 7]);
    assert_eq!((t.next(), t.pmtu), (Psn::new(2), 1024));
}

#[test]
fn a_gap_at_the_end_is_open() {
    let mut t = writes([10, 11]);
    assert_eq!(pass(&mut t, 15), Outcome::Gap(3));
    assert_eq!(counters(t), [3, 0, 0, 3, 0, 0, 0]);
}

#[test]
fn a_gap_of_the_whole_window_is_a_gap_and_one_more_is_not() {
    let mut t = writes([10]);
    assert_eq!(pass(&mut t, 11 + 1024), Outcome::Gap(1024));
    // The packet itself takes the place of the oldest hole.
    assert_eq!(counters(t), [1024, 1, 0, 1023, 0, 0, 0]);
    let mut t = writes([10]);
    assert_eq!(pass(&mut t, 11 + 1025), Outcome::Far);
    assert_eq!(counters(t), [0; 7]);
}

#[test]
fn the_window_reaches_1024_psns_back() {
    let mut t = writes(0..5_000);
    assert_eq!(pass(&mut t, 5_000 - 1_025), Outcome::Far);
    assert_eq!(pass(&mut t, 5_000 - 1_024), Outcome::Duplicate);
    assert_eq!(counters(t), [0, 0, 0, 0, 0, 1, 1]);
}

#[test]
fn a_run_of_duplicates_that_ends_early_was_cut_by_losses() {
    // All of 100 … 109 again but the last two.
    let t = writes((0..110).chain(100..108).chain([110]));
    assert_eq!(counters(t), [0, 0, 2, 0, 0, 8, 8]);
    // One packet repeated skips nothing, nor does a run cut by another.
    let t = writes((0..110).chain([100, 110]));
    assert_eq!(counters(t), [0, 0, 0, 0, 0, 1, 1]);
    let t = writes((0..110).chain(100..108).chain(100..111));
    assert_eq!(counters(t), [0, 0, 0, 0, 0, 18, 18]);
}

#[test]
fn late_packets_are_reordered() {
    assert_eq!(counters(writes([1, 2, 4, 3, 5])), [1, 0, 0, 0, 1, 0, 0]);
    assert_eq!(counters(writes([1, 4, 2, 3, 5])), [2, 0, 0, 0, 2, 0, 0]);
    assert_eq!(counters(writes([1, 4, 3, 2, 5])), [2, 0, 0, 0, 2, 0, 0]);
    assert_eq!(counters(writes([1, 6, 3, 5, 7])), [4, 0, 0, 2, 2, 0, 0]);
}

#[test]
fn go_back_n_is_a_retransmission() {
    // 34 lost, 35 passed, both sent again: the published trace.
    assert_eq!(counters(writes([30, 31, 32, 33, 35, 34, 35, 36, 37])), [1, 1, 0, 0, 0, 1, 2]);
}

#[test]
fn a_retransmission_can_be_lost_again() {
    // 12 lost; in the run from 12 on, 13 is lost.
    let t = writes([10, 11, 13, 14, 15, 12, 14, 15, 16]);
    assert_eq!(counters(t), [1, 1, 1, 0, 0, 2, 3]);
    // And the next run brings 13, which had passed before.
    let t = writes([10, 11, 13, 14, 15, 12, 14, 15, 16, 13, 14, 15, 16, 17]);
    assert_eq!(counters(t), [1, 1, 1, 0, 0, 6, 7]);
}

#[test]
fn a_hole_skipped_by_a_retransmission_stays_a_hole() {
    // 12 and 14 lost; the run loses 14 again; it is filled in the end.
    let t = writes([11, 13, 15, 12, 13, 15, 16]);
    assert_eq!(counters(t), [2, 1, 1, 1, 0, 2, 3]);
    let t = writes([11, 13, 15, 12, 13, 15, 16, 14, 15, 16, 17]);
    assert_eq!(counters(t), [2, 2, 1, 0, 0, 4, 6]);
}

#[test]
fn a_backward_step_in_a_run_starts_a_new_run() {
    // Late 12 fills a hole; then the flow goes back to 11 and repeats: two runs, one late, one a retransmission.
    let t = writes([10, 11, 13, 15, 12, 11, 12, 13, 14, 15, 16]);
    assert_eq!(counters(t), [2, 1, 0, 0, 1, 4, 5]);
}

#[test]
fn a_sequence_nak_makes_a_refill_a_retransmission() {
    let mut t = writes([10, 11, 13]);
    assert_eq!(t.note_sequence_nak(Psn::new(12)), Fate::Skipped, "12 never passed here");
    for psn in [12, 14] {
        pass(&mut t, psn);
    }
    assert_eq!(counters(t), [1, 1, 0, 0, 0, 0, 1]);
    assert_eq!(t.lost_after_tap, 0);
}

#[test]
fn a_sequence_nak_of_what_passed_is_a_loss_after_the_tap_once_per_pass() {
    let mut t = writes([10, 11, 12, 13]);
    assert_eq!(t.note_sequence_nak(Psn::new(11)), Fate::Passed);
    assert_ne!(t.note_sequence_nak(Psn::new(11)), Fate::Passed);
    for psn in [11, 12, 13] {
        pass(&mut t, psn);
    }
    assert_eq!(t.note_sequence_nak(Psn::new(11)), Fate::Passed);
    assert_eq!(t.lost_after_tap, 2);
    // Not of what the tap has not seen: before the first packet, ahead, out of the window.
    for psn in [9, 14, 20, 13 + (1 << 23)] {
        assert_ne!(t.note_sequence_nak(Psn::new(psn)), Fate::Passed, "{psn}");
    }
    assert_eq!(counters(t), [0, 0, 0, 0, 0, 3, 3]);
}

#[test]
fn the_newest_event_decides_about_a_loss_after_the_tap() {
    // 13 passes, then the run from 12 skips it: the peer's NAK is about the loss before the tap.
    let mut t = writes([10, 11, 13, 14, 15, 12, 14]);
    assert_ne!(t.note_sequence_nak(Psn::new(13)), Fate::Passed);
    pass(&mut t, 13);
    assert_eq!(t.note_sequence_nak(Psn::new(13)), Fate::Passed);
    assert_eq!(t.lost_after_tap, 1);
}

#[test]
fn an_rnr_nak_makes_its_retry_a_retransmission() {
    // The refused packet had passed another tap only: here the retry fills a hole.
    let mut t = writes([10, 11, 13]);
    t.note_rnr_nak(Psn::new(12));
    for psn in [12, 14] {
        pass(&mut t, psn);
    }
    assert_eq!(counters(t), [1, 1, 0, 0, 0, 0, 1]);
    // It is used up.
    for psn in [16, 15, 17] {
        pass(&mut t, psn);
    }
    assert_eq!(counters(t), [2, 1, 0, 0, 1, 0, 1]);
}

#[test]
fn holes_that_leave_the_window_are_lost() {
    let t = writes((0..10).chain(12..10 + 1024));
    assert_eq!(counters(t), [2, 0, 0, 2, 0, 0, 0]);
    let t = writes((0..10).chain(12..12 + 1024));
    assert_eq!(counters(t), [2, 2, 0, 0, 0, 0, 0]);
}

#[test]
fn one_odd_packet_moves_nothing_and_three_in_a_row_do() {
    let far = 500_000;
    for odd in [far, 0xf0_0000] {
        let mut t = writes(100..110);
        assert_eq!(pass(&mut t, odd), Outcome::Far);
        assert_eq!(pass(&mut t, 110), Outcome::InOrder);
        assert_eq!(pass(&mut t, odd + 1), Outcome::Far);
        assert_eq!(pass(&mut t, odd + 2), Outcome::Far);
        assert_eq!(pass(&mut t, 112), Outcome::Gap(1));
        assert_eq!(counters(t), [1, 0, 0, 1, 0, 0, 0]);
        assert_eq!(pass(&mut t, odd), Outcome::Far);
        assert_eq!(pass(&mut t, odd + 1), Outcome::Far);
        assert_eq!(pass(&mut t, odd + 2), Outcome::Discontinuity);
        assert_eq!(pass(&mut t, odd + 3), Outcome::InOrder);
        assert_eq!((t.discontinuities, counters(t)), (1, [1, 1, 0, 0, 0, 0, 0]));
        // The new place has its own window.
        assert_eq!(t.note_sequence_nak(Psn::new(odd)), Fate::Passed);
        assert_ne!(t.note_sequence_nak(Psn::new(odd - 1)), Fate::Passed);
    }
}

#[test]
fn a_read_request_takes_the_psns_of_its_responses() {
    let mut t = writes([100]);
    read(&mut t, 101, 4096);
    assert_eq!(t.next(), Psn::new(105));
    read(&mut t, 105, 0);
    read(&mut t, 106, 1);
    read(&mut t, 107, 1025);
    assert_eq!(pass(&mut t, 109), Outcome::InOrder);
    assert_eq!(counters(t), [0; 7]);
    read(&mut t, 110, 1 << 31);
    assert_eq!(t.next(), Psn::new(110 + (1 << 21)));
    assert_eq!(pass(&mut t, 110 + (1 << 21)), Outcome::InOrder);
}

#[test]
fn a_jump_that_a_read_span_explains_teaches_the_pmtu() {
    for (pmtu, span) in [(256, 48), (512, 24), (1024, 12), (2048, 6), (4096, 3)] {
        let mut t = Tracker::default();
        read(&mut t, 20, 12_288);
        assert_eq!(pass_short(&mut t, 20 + span), Outcome::InOrder, "{pmtu}");
        assert_eq!((t.pmtu, counters(t)), (pmtu, [0; 7]));
    }
    // Far more than the window.
    let mut t = Tracker::default();
    read(&mut t, 20, 1 << 20);
    read(&mut t, 20 + 4096, 1 << 20);
    assert_eq!((t.pmtu, t.next()), (256, Psn::new(20 + 8192)));
    // No PMTU explains it: a gap.
    let mut t = Tracker::default();
    read(&mut t, 20, 12_288);
    assert_eq!(pass_short(&mut t, 20 + 49), Outcome::Gap(46));
    // A packet that is as long as the PMTU tells the span, and so how much is missing.
    let mut t = Tracker::default();
    read(&mut t, 20, 12_288);
    assert_eq!(pass(&mut t, 20 + 12 + 3), Outcome::Gap(3));
    assert_eq!((t.pmtu, counters(t)), (1024, [3, 0, 0, 3, 0, 0, 0]));
    // Several do: no loss, and nothing learnt.
    let mut t = Tracker::default();
    read(&mut t, 20, 300);
    assert_eq!(pass_short(&mut t, 21), Outcome::InOrder);
    assert_eq!(t.pmtu, 0);
}

fn pass_short(t: &mut Tracker, psn: u32) -> Outcome {
    t.observe(&Observed::new(Opcode::WRITE_ONLY, Psn::new(psn), 8, 0)).outcome()
}

#[test]
fn a_repeated_read_is_reasked_once_per_run() {
    let mut t = writes([100]);
    for psn in [101, 105, 109] {
        read(&mut t, psn, 4096);
    }
    // Mid-range, then the ones behind it.
    assert_eq!(read(&mut t, 103, 2048), Outcome::Duplicate);
    assert_eq!(read(&mut t, 105, 4096), Outcome::Duplicate);
    assert_eq!(read(&mut t, 109, 4096), Outcome::Duplicate);
    assert_eq!(read(&mut t, 113, 4096), Outcome::InOrder);
    assert_eq!((t.reasked, counters(t)), (1, [0, 0, 0, 0, 0, 3, 3]));
    read(&mut t, 113, 4096);
    read(&mut t, 113, 4096);
    assert_eq!((t.reasked, counters(t)), (3, [0, 0, 0, 0, 0, 5, 5]));
    // A write that steps back is not.
    pass(&mut t, 100);
    assert_eq!(t.reasked, 3);
}

#[test]
fn a_lost_read_request_is_as_many_holes_as_it_takes_psns() {
    let mut t = writes([100]);
    read(&mut t, 105, 4096);
    assert_eq!(counters(t), [4, 0, 0, 4, 0, 0, 0]);
    assert_eq!(read(&mut t, 101, 4096), Outcome::Filled(4));
    read(&mut t, 105, 4096);
    assert_eq!(counters(t), [4, 4, 0, 0, 0, 1, 2]);
}

#[test]
fn responses_may_start_anywhere_ahead_but_not_go_on_there() {
    use Opcode as O;
    for (opcode, starts) in [
        (O::READ_RESPONSE_FIRST, true),
        (O::READ_RESPONSE_ONLY, true),
        (O::ATOMIC_ACKNOWLEDGE, true),
        (O::READ_RESPONSE_MIDDLE, false),
        (O::READ_RESPONSE_LAST, false),
    ] {
        for ahead in [1, 500, 1024, 5_000] {
            let mut t = Tracker::default();
            respond(&mut t, O::READ_RESPONSE_ONLY, 50);
            let outcome = respond(&mut t, opcode, 51 + ahead);
            let want = match (starts, ahead) {
                (true, _) => Outcome::InOrder,
                (false, 0..=1024) => Outcome::Gap(ahead),
                _ => Outcome::Far,
            };
            assert_eq!(outcome, want, "{opcode:?} {ahead}");
        }
    }
    // Nor may requests.
    let mut t = writes([50]);
    assert_eq!(t.observe(&Observed::new(O::WRITE_ONLY, Psn::new(53), 8, 0)).outcome(), Outcome::Gap(2));
}

#[test]
fn acks_and_datagrams_are_not_tracked() {
    let mut t = Tracker::default();
    for opcode in [0x11, 0xb1, 0x64, 0x65, 0x44, 0x4d, 0x81] {
        let opcode = Opcode::new(opcode).unwrap();
        assert_eq!(t.observe(&Observed::new(opcode, Psn::new(7), 0, 0)).outcome(), Outcome::NotTracked, "{opcode:?}");
    }
    assert_eq!(t, Tracker::default());
}

#[test]
fn an_odd_packet_teaches_nothing() {
    let mut t = Tracker::default();
    read(&mut t, 20, 12_288);
    assert_eq!(pass(&mut t, 500_000), Outcome::Far);
    assert_eq!(t.pmtu, 0);
    assert_eq!(pass_short(&mut t, 20 + 48), Outcome::InOrder);
    assert_eq!(pass(&mut t, 500_000), Outcome::Far);
    assert_eq!((t.pmtu, counters(t)), (256, [0; 7]));
}

#[test]
fn no_pmtu_but_the_five_is_learnt() {
    let mut t = Tracker::default();
    for (len, want) in [(1000, 0), (256, 256), (4096, 4096), (8192, 4096), (0, 4096), (128, 4096), (512, 512)] {
        let next = t.next().get();
        t.observe(&Observed::new(WRITE, Psn::new(next), len, 0));
        assert_eq!(t.pmtu, want);
    }
}
