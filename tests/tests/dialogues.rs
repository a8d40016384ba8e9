//! Random dialogues of which the truth is known, through the tracker offline: a million packets.

use roce_common::{
    flow::{Flow, refusal},
    units::Nanos,
    wire::{self, Syndrome, Verdict},
};
use roce_tests::dialogue::{Dialogue, End, Kind, Truth, Wire, dialogue};

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
