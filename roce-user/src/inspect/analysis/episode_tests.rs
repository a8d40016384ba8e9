//! What the episodes of real losses say.

use std::{collections::BTreeMap, path::Path};

use roce_common::psn::{AckTimeout, Cause, Known, Location, LostBetween, Segment, bracket};

use super::*;
use crate::inspect::link::LinkLayer;

/// A classic little-endian pcap with microseconds, as all of these are.
fn analysed(name: &str) -> Analysis {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures").join(name);
    let file = std::fs::read(&path).expect("a capture");
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(word(0), 0xa1b2_c3d4, "{name}");
    let (mut analysis, mut at, mut number) = (Analysis::default(), 24, 0);
    while at < file.len() {
        let time = u64::from(word(at)) * 1_000_000_000 + u64::from(word(at + 4)) * 1_000;
        let bytes = &file[at + 16..at + 16 + word(at + 8) as usize];
        number += 1;
        analysis.frame(&Frame {
            number,
            interface: 0,
            interface_name: "",
            tunnel: None,
            link: LinkLayer::Ethernet,
            time: Nanos(time),
            bytes,
            wire_len: word(at + 12) as usize,
        });
        at += 16 + bytes.len();
    }
    analysis.end_episodes();
    analysis
}

/// Space, cause, place and packets of each episode.
fn told(a: &Analysis) -> Vec<(Space, Cause, Location, u32)> {
    a.episodes.iter().map(|(f, e)| (a.entries[*f].key.space(), e.cause, e.location, e.packets)).collect()
}

/// How often each space, cause and place occurs.
fn summed(a: &Analysis) -> BTreeMap<(Space, Cause, Location), u32> {
    let mut sums = BTreeMap::new();
    for (space, cause, location, _) in told(a) {
        *sums.entry((space, cause, location)).or_default() += 1;
    }
    sums
}

/// The episodes hold every packet repeated and every PSN lost that the counters hold.
fn agrees_with_the_counters(a: &Analysis) {
    for (number, entry) in a.entries.iter().enumerate() {
        let of = |field: fn(&Episode) -> u32| -> u64 {
            a.episodes.iter().filter(|(f, _)| *f == number).map(|(_, e)| u64::from(field(e))).sum()
        };
        let t = &entry.flow.tracker;
        assert_eq!(of(|e| e.packets), t.retransmitted, "{:?}", entry.key);
        assert_eq!((of(|e| e.lost), of(|e| e.lost_again)), (t.lost, t.lost_again), "{:?}", entry.key);
    }
}

#[test]
fn a_switch_that_drops_requests_is_behind_one_tap_and_before_the_other() {
    use {Cause as C, Location as L, Space::Request};
    for (name, go_back_n, timeouts) in [("write", 14, 1), ("send", 13, 1)] {
        for (side, place) in [("pre", L::AfterTap), ("post", L::BeforeTap)] {
            let a = analysed(&format!("rxe-{name}-loss1-{side}.pcap"));
            // One NAK was not answered for the ACK timeout of 67 ms.
            let want = [((Request, C::GoBackN, place), go_back_n), ((Request, C::Timeout, place), timeouts)];
            assert_eq!(summed(&a), want.into(), "{name} {side}");
            let timeout = a.episodes.iter().find(|(_, e)| e.cause == C::Timeout).expect("the time-out").1;
            assert!(timeout.evidence.silence >= AckTimeout { exponent: 14, known: Known::Inferred }.duration());
            assert_eq!(timeout.evidence.timeout.map(|t| t.exponent), Some(14), "perftest's default");
            agrees_with_the_counters(&a);
        }
    }
}

#[test]
fn lost_read_answers_are_located_by_the_answer_that_is_asked_for_again() {
    use {Cause as C, Location as L};
    for (side, place) in [("pre", L::AfterTap), ("post", L::BeforeTap)] {
        let a = analysed(&format!("rxe-read-loss1-{side}.pcap"));
        let want = [((Space::Request, C::Reask, place), 5), ((Space::Response, C::Reask, place), 5)];
        let mut sums = summed(&a);
        if side == "post" {
            // An answer that was lost once more leaves a repeat of answers which fills nothing.
            assert_eq!(sums.remove(&(Space::Response, C::Reask, L::AfterTap)), Some(1));
            *sums.get_mut(&(Space::Response, C::Reask, place)).expect("the others") += 1;
        }
        assert_eq!(sums, want.into(), "{side}");
        assert!(
            a.episodes.iter().all(|(f, e)| a.entries[*f].key.space() == Space::Response || e.evidence.partial_read)
        );
        agrees_with_the_counters(&a);
    }
}

#[test]
fn published_stories_have_their_causes() {
    use {Cause as C, Location as L, Space::*};
    for (name, want) in [
        ("fact-clos-gobackn-34-missing", &[(Request, C::GoBackN, L::BeforeTap, 2)][..]),
        ("fact-rnr-nak-retry", &[(Request, C::RnrRepeat, L::Responder, 1)]),
        // Why it was asked again is not in the trace: it came 10 ms later.
        ("fact-rxe-atomic-nak", &[(Request, C::Timeout, L::Unknown, 1)]),
        ("fact-rxe-dup-read", &[(Response, C::Reask, L::AfterTap, 3), (Request, C::Reask, L::AfterTap, 2)]),
        ("fact-psn-wrap", &[]),
        ("rxe-cm-rping", &[]),
        ("rxe-write-uc", &[]),
        ("rxe-atomic-rc", &[]),
        ("rxe-send-ud", &[]),
    ] {
        assert_eq!(told(&analysed(&format!("{name}.pcap"))), want, "{name}");
    }
}

#[test]
fn connection_management_tells_pairs_path_mtu_and_timeouts() {
    for name in ["rxe-cm-rping.pcap", "rxe-cm-rping-ipv6.pcap"] {
        let a = analysed(name);
        let flows: Vec<_> = (0..a.entries.len()).filter(|&n| a.entries[n].flow.tracker.is_started()).collect();
        assert_eq!(flows.len(), 3, "{name}");
        for number in flows {
            let entry = &a.entries[number];
            assert_eq!(entry.flow.tracker.pmtu, 1024, "rping sends 512 bytes: no packet tells it");
            if entry.key.space() == Space::Request {
                // Both ends have the same number here; what tshark shows: primary local ACK timeout 0x11.
                assert_eq!(a.attribution.sender_of(number), Some(entry.key.dest_qp()), "{name}");
                let timeout = entry.explainer.as_ref().and_then(|e| e.ack_timeout());
                assert_eq!(timeout, Some(AckTimeout { exponent: 17, known: Known::Told }), "{name}");
            }
        }
    }
}

#[test]
fn two_taps_bracket_a_loss() {
    for name in ["write", "send", "read"] {
        let first = analysed(&format!("rxe-{name}-loss1-pre.pcap"));
        let second = analysed(&format!("rxe-{name}-loss1-post.pcap"));
        let mut dropped = 0;
        for entry in &first.entries {
            let key = &entry.key;
            let there = &second.entries[second.index[key]];
            let lost = LostBetween::of(&entry.flow, &there.flow);
            assert_eq!(lost.packets, lost.told, "{name} {key:?}");
            dropped += lost.packets;
        }
        // What the switch really dropped.
        assert_eq!(
            dropped,
            if name == "write" {
                30
            } else if name == "send" {
                23
            } else {
                11
            },
            "{name}"
        );
        let of = |a: &Analysis, n: FlowIndex| a.entries[n].key;
        for (n, here) in &first.episodes {
            let same: Vec<_> = second
                .episodes
                .iter()
                .filter(|(m, _)| of(&second, *m) == of(&first, *n))
                .filter_map(|(_, there)| bracket(here, there))
                .collect();
            assert_eq!(same.len(), 1, "{name} {here:?}");
            // One repeat of READ answers shows nothing lost at either tap: it was asked for again in vain.
            let expected = [Segment::Between, Segment::BehindBoth];
            assert!(expected.contains(&same[0]), "{name}: {same:?}");
        }
    }
}
