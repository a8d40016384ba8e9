//! Random dialogues of which the truth is known, through the tracker offline: a million packets.

use roce_common::{
    flow::{Flow, refusal},
    psn::{Cause, Explainer, Outcome, Passing, Tally},
    units::Nanos,
    wire::{self, Syndrome, Verdict},
};
use roce_tests::dialogue::{Dialogue, End, Kind, TIMEOUT, Truth, Wire, dialogue};

/// Packets of a dialogue, about.
const EACH: usize = 6_000;
/// Dialogues of each kind.
const SEEDS: u64 = 30;

/// Both flows of a connection.
fn track(d: &Dialogue, wire: &Wire) -> (Flow, Flow) {
    let (mut requests, mut answers) = (Flow::default(), Flow::default());
    for (i, passed) in d.packets.iter().enumerate() {
        let packet = wire.packet(passed);
        let now = Nanos(i as u64 * 1_000);
        match passed.from {
            End::Requester => requests.observe(&packet, now),
            End::Responder => answers.observe(&packet, now),
        };
        match refusal(&packet) {
            Some(Syndrome::PsnSequence) => {
                requests.tracker.note_sequence_nak(passed.psn);
            }
            Some(Syndrome::RnrNak(_)) => {
                requests.tracker.note_rnr_nak(passed.psn);
            }
            _ => {}
        }
    }
    (requests, answers)
}

#[test]
fn the_tracker_finds_the_truth_in_a_million_packets() {
    let (mut packets, mut sum) = (0, Truth::default());
    for kind in Kind::ALL {
        for seed in 0..SEEDS {
            let d = dialogue(kind, seed, EACH);
            let (requests, answers) = track(&d, &Wire::numbered(seed as u32));
            assert_eq!(Truth::of(&requests), d.requests, "requests of {kind:?}, seed {seed}");
            assert_eq!(Truth::of(&answers), d.answers, "answers of {kind:?}, seed {seed}");
            packets += d.packets.len();
            sum += d.requests;
            sum += d.answers;
        }
    }
    println!("{packets} packets: {sum:?}");
    assert!(packets > 1_000_000, "{packets}");
    // Nothing is equal only because nothing happened.
    for n in [sum.lost, sum.lost_again, sum.open, sum.reordered, sum.duplicates, sum.discontinuities, sum.reasked] {
        assert!(n > 20, "{sum:?}");
    }
    assert!(sum.lost_after_tap > 100 && sum.retransmitted > sum.duplicates, "{sum:?}");
}

/// Episodes of the requests by cause, as an explainer finds them that sees everything.
fn explain(d: &Dialogue, wire: &Wire) -> Tally {
    let (mut requests, mut answers) = (Flow::default(), Flow::default());
    let (mut explainer, mut tally) = (Explainer::default(), Tally::default());
    let (mut now, mut last) = (Nanos(0), Nanos(0));
    let mut silences = d.silences.iter().peekable();
    for (i, passed) in d.packets.iter().enumerate() {
        now = Nanos(now.0 + 1_000);
        while silences.next_if(|at| **at <= i).is_some() {
            now = Nanos(now.0 + TIMEOUT.0);
        }
        let (packet, psn) = (wire.packet(passed), passed.psn);
        if passed.from == End::Responder {
            let outcome = answers.observe(&packet, now).outcome();
            match refusal(&packet) {
                Some(Syndrome::PsnSequence) => {
                    let fate = requests.tracker.note_sequence_nak(psn);
                    explainer.sequence_nak(psn, fate, now);
                }
                Some(Syndrome::RnrNak(timer)) => {
                    requests.tracker.note_rnr_nak(psn);
                    explainer.rnr_nak(psn, timer, now);
                }
                _ => explainer.answer(psn, now),
            }
            if let Outcome::Gap(skipped) = outcome {
                explainer.answer_gap(psn.sub(skipped), now);
            }
            continue;
        }
        let account = requests.observe(&packet, now);
        let (opcode, silence) = (passed.opcode, now.since(last));
        let read = requests.measured.reads.place(psn);
        let passing = Passing { psn, opcode, read, silence, at: now };
        explainer.packet(account, &passing, |episode| tally.add(&episode));
        last = now;
    }
    let account = requests.finish();
    explainer.finish(account, now, |episode| tally.add(&episode));
    tally
}

#[test]
fn the_explainer_finds_why_everything_was_repeated() {
    let mut sum = [0; 4];
    for kind in [Kind::RcWrites, Kind::RcReads, Kind::RcAtomics, Kind::RcMixed, Kind::Xrc] {
        for seed in 0..SEEDS {
            let d = dialogue(kind, seed, EACH);
            let tally = explain(&d, &Wire::numbered(seed as u32));
            let sent = |cause| d.causes.iter().filter(|c| **c == cause).count() as u32;
            // A READ or atomic that the network copies is asked again, as far as anybody can tell.
            let told = [Cause::GoBackN, Cause::Timeout, Cause::RnrRepeat].map(|cause| tally.of(cause));
            let needless = tally.of(Cause::Reask) + tally.of(Cause::Spurious);
            let found = [told[0], told[1], told[2], needless];
            let want = [
                sent(Cause::GoBackN),
                sent(Cause::Timeout),
                sent(Cause::RnrRepeat),
                sent(Cause::Reask) + sent(Cause::Spurious),
            ];
            assert_eq!(found, want, "{kind:?}, seed {seed}: {:?}", tally.iter().collect::<Vec<_>>());
            for (sum, n) in sum.iter_mut().zip(found) {
                *sum += n;
            }
        }
    }
    println!("go-back-N, time-outs, RNR, asked again or copied: {sum:?}");
    assert!(sum.iter().all(|n| *n > 50), "{sum:?}");
}

#[test]
fn the_frames_of_a_dialogue_are_its_packets() {
    let mut frame = Vec::new();
    for (n, kind) in Kind::ALL.into_iter().enumerate() {
        let wire = Wire::numbered(n as u32);
        for passed in dialogue(kind, 99, 500).packets {
            wire.frame(&passed, &mut frame).expect("a frame");
            assert_eq!(wire::parse(&frame[..]), Verdict::Roce(wire.packet(&passed)), "{passed:?}");
        }
    }
}
