//! Deep reordering, requests of one PSN, and READs under a path MTU that comes from elsewhere.

use std::vec::Vec;

use super::*;

/// Deep reordering is no loss: the packets of a sprayed flow, moved within windows up to the one that is remembered.
#[test]
fn ten_thousand_sprayed_packets_end_with_nothing_lost() {
    for (seed, depth) in [(1u64, 4), (2, 16), (3, 128), (4, 500), (5, 1_000)] {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |n: u64| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
        };
        // A packet is overtaken by those that leave less than `depth` behind it.
        let mut order: Vec<(u64, u32)> = (1..10_000).map(|i| (u64::from(i) + below(depth), i)).collect();
        order.sort_unstable();
        let mut highest = 0;
        let mut is_overtaken = |i: u32| {
            let overtaken = i < highest;
            highest = highest.max(i);
            overtaken
        };
        let late = order.iter().filter(|&&(_, i)| is_overtaken(i)).count() as u64;
        let start = 0xff_f000;
        let mut t = writes([start].into_iter().chain(order.iter().map(|(_, i)| (start + i) & 0xff_ffff)));
        t.finish();
        assert_eq!(
            [t.missing_psns, t.reordered, t.lost, t.lost_again, t.open(), t.duplicates, t.retransmitted],
            [late, late, 0, 0, 0, 0, 0],
            "within {depth}"
        );
        assert_eq!((t.discontinuities, late > 1_000), (0, true));
    }
}

#[test]
fn what_takes_one_psn_takes_one() {
    // Zero-length SEND and WRITE, atomics, FLUSH and ATOMIC_WRITE; in XRC likewise.
    let ops = [0x04, 0x0a, 0x0b, 0x13, 0x14, 0x17, 0x1c, 0x1d, 0xa4, 0xaa, 0xb3, 0xb4];
    let mut t = Tracker::default();
    for (psn, op) in (0xff_fffa..).zip(ops) {
        let opcode = Opcode::new(op).expect("an opcode");
        t.observe(&Observed::new(opcode, Psn::new(psn), 0, 1 << 20));
    }
    assert_eq!((t.next(), counters(t)), (Psn::new(6), [0; 7]), "the length in a RETH is no span but a READ's");
    // FLUSH and ATOMIC_WRITE are answered by an empty READ_RESPONSE_ONLY each, wherever the answer before stood.
    let mut t = Tracker::default();
    for psn in [5, 6, 9, 40] {
        assert!(matches!(respond(&mut t, Opcode::READ_RESPONSE_ONLY, psn), Outcome::First | Outcome::InOrder));
    }
    assert_eq!(counters(t), [0; 7]);
    // A zero-length READ takes one as well.
    let mut t = Tracker::default();
    read(&mut t, 7, 0);
    assert_eq!(t.next(), Psn::new(8));
}

#[test]
fn a_taught_path_mtu_explains_reads_and_never_overrules_what_was_seen() {
    let mut t = Tracker::default();
    t.teach_pmtu(1024);
    read(&mut t, 20, 12_288);
    assert_eq!(t.next(), Psn::new(32));
    // Taught between a READ and what follows it: 24 more would fit a PMTU of 512, but are missing.
    let mut t = Tracker::default();
    read(&mut t, 20, 12_288);
    t.teach_pmtu(1024);
    assert_eq!(pass_short(&mut t, 20 + 24), Outcome::Gap(12));
    for bytes in [0, 1, 128, 1_000, 8192, u32::MAX] {
        let mut t = Tracker::default();
        t.teach_pmtu(bytes);
        assert_eq!(t.pmtu, 0, "{bytes}");
    }
    let mut t = writes([1]);
    t.teach_pmtu(4096);
    assert_eq!(t.pmtu, u32::from(PMTU));
}

/// READ 20 of 12,288 bytes, WRITE 23, both again, 24 and 25: what a wrong path MTU makes of it.
#[test]
fn too_small_a_path_mtu_calls_first_packets_duplicates() {
    for (told, duplicates) in [(4096, 2), (2048, 5), (1024, 5), (512, 5), (256, 5)] {
        let mut t = Tracker::default();
        t.teach_pmtu(told);
        read(&mut t, 20, 12_288);
        pass_short(&mut t, 23);
        read(&mut t, 20, 12_288);
        for psn in [23, 24, 25] {
            pass_short(&mut t, psn);
        }
        assert_eq!((t.duplicates, t.missing_psns, t.reasked), (duplicates, 0, 1), "{told}");
    }
}
