//! Facts of dialogues whose times and answers are known.

use roce_common::wire::Opcode;

use super::story::{QB, Story};
use crate::{export::FlowReport, facts::SpreadReport};

/// Between two frames of a story, in nanoseconds.
const STEP: u64 = 2_000;

fn flow(story: Story, space: &str) -> FlowReport {
    story.report().flows.into_iter().find(|f| f.space == space).expect("the flow")
}

fn all_equal(spread: Option<SpreadReport>, count: u64, value: u64) {
    let want = SpreadReport { count, min: value, mean: value, max: value };
    assert_eq!(spread, Some(want));
}

/// Makes the pairing certain: from then on everything is timed.
fn paired() -> Story {
    let mut story = Story::new();
    story.send(0..8);
    story.ack(7);
    story
}

#[test]
fn a_gap_its_nak_and_its_repeat_are_timed() {
    let mut story = paired();
    story.send([8, 10]);
    story.now += 30_000;
    story.answer(9, 0x60);
    story.now += 50_000;
    story.send([9, 10, 11]);
    story.ack(11);
    let facts = flow(story, "request").facts;
    let recovery = facts.recovery_ns.as_ref().expect("recovery");
    all_equal(recovery.gap_to_nak, 1, 30_000 + STEP);
    all_equal(recovery.nak_to_refill, 1, 50_000 + STEP);
    all_equal(recovery.gap_to_refill, 1, 80_000 + 2 * STEP);
    assert_eq!(recovery.rnr_wait, None);
    // 9 and 10, of 13 packets of 1,024 bytes.
    assert_eq!(facts.retransmitted_bytes, 2_048);
    assert!((facts.retransmitted_share - 2.0 / 13.0).abs() < 1e-9);
}

#[test]
fn an_rnr_nak_asks_for_a_wait_and_gets_one() {
    let mut story = paired();
    story.send([8]);
    // Code 20: 10.24 ms.
    story.answer(8, 0x34);
    story.wait_ms(12);
    story.send([8]);
    story.ack(8);
    let facts = flow(story, "request").facts;
    let recovery = facts.recovery_ns.as_ref().expect("recovery");
    all_equal(recovery.rnr_timer, 1, 10_240_000);
    all_equal(recovery.rnr_wait, 1, 12_000_000 + STEP);
    assert_eq!((facts.silences_ns, recovery.nak_to_refill), (None, None));
}

#[test]
fn round_trips_are_those_of_requests_answered_for_their_own_sake() {
    let mut story = paired();
    // 15 and 23 ask for an answer; 15 is covered by the one for 23, 31 is repeated, 39 answered at once.
    story.send(8..24);
    story.ack(23);
    story.send(24..32);
    story.send([31]);
    story.ack(31);
    story.send(32..40);
    story.now += 100_000;
    story.ack(39);
    let rtt = flow(story, "request").facts.rtt_ns.clone().expect("round trips");
    let spread = SpreadReport { count: 3, min: STEP, mean: (3 * STEP + 100_000) / 3, max: 100_000 + STEP };
    assert_eq!(rtt.spread, spread);
    assert!(rtt.p50.abs_diff(STEP) <= STEP / 16 && rtt.p99.abs_diff(102_000) <= 102_000 / 16, "{rtt:?}");
}

#[test]
fn silences_count_while_something_is_unanswered() {
    let mut story = paired();
    story.wait_ms(30);
    story.send(8..12);
    story.wait_ms(20);
    story.send(12..16);
    story.wait_ms(9);
    story.ack(15);
    let facts = flow(story, "request").facts;
    all_equal(facts.silences_ns, 1, 20_000_000 + STEP);
}

#[test]
fn acks_messages_and_ports_are_counted() {
    let mut story = Story::new();
    (story.opcode, story.payload) = (Opcode::SEND_ONLY, 100);
    story.send(0..4);
    story.port = Some(50_000);
    story.send(4..8);
    story.answer(3, 0x05);
    story.answer(7, 0x1f);
    let report = story.report();
    let of = |space: &str| report.flows.iter().find(|f| f.space == space).expect("the flow");
    let (requests, answers) = (of("request"), of("response"));
    assert_eq!((requests.dest_qp, requests.facts.messages, requests.facts.src_port), (QB, 8, 50_000));
    assert_eq!(requests.facts.opcodes.iter().map(|(c, n)| (*c, *n)).collect::<Vec<_>>(), [("send", 8)]);
    all_equal(requests.facts.message_sizes.bytes, 8, 100);
    assert_eq!(requests.facts.src_port_changes, 1);
    all_equal(answers.facts.psns_per_ack, 1, 4);
    let credits = answers.facts.credits.as_ref().expect("credits");
    // Code 5 grants six buffers.
    all_equal(credits.granted, 1, 6);
    assert_eq!(credits.without, 1);
}
