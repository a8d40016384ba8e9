//! What is known of the PSNs of a window: a ring of bits, written by ranges, a word at a time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Psn, WINDOW};

const WORDS: u32 = WINDOW / 64;
/// A range that starts inside a word touches that word twice when it is as long as the ring.
const MOST_WORDS: u32 = WORDS + 1;

/// 64 PSNs of a window; all zero = all passed (or never heard of).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Word {
    /// Never passed.
    hole: u64,
    /// The newest event is "skipped": a hole, or passed once and skipped by a later run.
    skipped: u64,
}

/// What to make of a range of PSNs.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    /// The hole bits kept as they are.
    keep_holes: u64,
    /// The hole bits set.
    hole: u64,
    /// The skipped bits set; the others are cleared.
    skipped: u64,
}

impl Mark {
    /// They passed.
    pub(super) const PASSED: Self = Self { keep_holes: 0, hole: 0, skipped: 0 };
    /// They were skipped and never passed.
    pub(super) const HOLE: Self = Self { keep_holes: 0, hole: !0, skipped: !0 };
    /// They were skipped by a run; whether they are holes stays as it is.
    pub(super) const SKIPPED_AGAIN: Self = Self { keep_holes: !0, hole: 0, skipped: !0 };
}

/// The window: one position per PSN, reused every [`WINDOW`] PSNs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Ring {
    words: [Word; WORDS as usize],
}

impl Ring {
    /// Marks one PSN as passed; whether its position held a hole.
    #[inline(always)]
    pub(super) fn pass_one(&mut self, psn: u32) -> bool {
        let word = &mut self.words[(psn >> 6 & (WORDS - 1)) as usize];
        let bit = 1u64 << (psn & 63);
        let was = word.hole & bit != 0;
        word.hole &= !bit;
        word.skipped &= !bit;
        was
    }

    /// Marks `count` positions from `start` (at most the whole ring, at least one); how many of them held holes.
    #[inline(always)]
    pub(super) fn mark(&mut self, start: u32, count: u32, mark: Mark) -> u32 {
        let first = start & 63;
        let end = first + (if count > WINDOW { WINDOW } else { count }).wrapping_sub(1);
        let last = end >> 6;
        let mut holes = 0;
        let mut i = 0;
        while i < MOST_WORDS && i <= last {
            let mut mask = !0u64;
            if i == 0 {
                mask <<= first;
            }
            if i == last {
                mask &= !0u64 >> (63 - (end & 63));
            }
            let word = &mut self.words[((start >> 6).wrapping_add(i) & (WORDS - 1)) as usize];
            let held = word.hole & mask;
            if held != 0 {
                holes += held.count_ones();
            }
            word.hole = word.hole & (!mask | mark.keep_holes) | mask & mark.hole;
            word.skipped = word.skipped & !mask | mask & mark.skipped;
            i += 1;
        }
        holes
    }

    /// Whether the PSN at this position never passed.
    #[inline(always)]
    pub(super) fn is_hole(&self, psn: Psn) -> bool {
        self.words[(psn.get() >> 6 & (WORDS - 1)) as usize].hole >> (psn.get() & 63) & 1 != 0
    }

    /// Whether the newest event of the PSN at this position is "skipped".
    #[inline(always)]
    pub(super) fn is_skipped(&self, psn: Psn) -> bool {
        self.words[(psn.get() >> 6 & (WORDS - 1)) as usize].skipped >> (psn.get() & 63) & 1 != 0
    }

    /// How many holes there are.
    pub(super) fn holes(&self) -> u32 {
        self.words.iter().map(|w| w.hole.count_ones()).sum()
    }
}

const _: () = assert!(size_of::<Ring>() == 256 && WINDOW.is_power_of_two() && (1 << 24) % WINDOW == 0);
