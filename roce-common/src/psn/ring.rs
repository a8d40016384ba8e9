//! What is known of the PSNs of a window: a ring of bits, written by ranges, a word at a time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Psn, WINDOW};

const WORDS: u32 = WINDOW / 64;

/// 64 PSNs of a window; all zero = all passed (or never heard of).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Word {
    /// Never passed.
    hole: u64,
    /// The newest event is "skipped": a hole, or passed once and skipped by a later run.
    skipped: u64,
}

/// What to make of a range of PSNs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Mark {
    /// They passed.
    Passed = 0,
    /// They were skipped and never passed.
    Hole = 1,
    /// They were skipped by a run; whether they are holes stays as it is.
    SkippedAgain = 2,
}

impl Mark {
    /// The mark of a discriminant; of any other number, [`Mark::Passed`].
    #[inline(always)]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Hole,
            2 => Self::SkippedAgain,
            _ => Self::Passed,
        }
    }
}

/// The window: one position per PSN, reused every [`WINDOW`] PSNs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Ring {
    words: [Word; WORDS as usize],
}

/// Who marks ranges of a ring: its own code, or a function that the BPF side calls it from and has checked apart.
pub trait MarkRange {
    /// [`Ring::mark_range`].
    fn mark_range(ring: &mut Ring, start: u32, count: u32, mark: Mark) -> u32;
}

/// The ring's own code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Direct;

impl MarkRange for Direct {
    #[inline(always)]
    fn mark_range(ring: &mut Ring, start: u32, count: u32, mark: Mark) -> u32 {
        ring.mark_range(start, count, mark)
    }
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

    /// Marks `count` positions from `start` (at most the whole ring); how many of them held holes.
    #[inline(always)]
    pub(super) fn mark<M: MarkRange>(&mut self, start: u32, count: u32, mark: Mark) -> u32 {
        if count == 1 && mark == Mark::Passed {
            return u32::from(self.pass_one(start));
        }
        M::mark_range(self, start, count, mark)
    }

    /// Marks `count` positions from `start` (at most the whole ring); how many of them held holes. Every word is visited with a
    /// mask computed without branches: the verifier follows them one by one, and would follow every way through each.
    #[inline]
    pub fn mark_range(&mut self, start: u32, count: u32, mark: Mark) -> u32 {
        let from = i64::from(start & (WINDOW - 1));
        let to = from + i64::from(if count > WINDOW { WINDOW } else { count });
        let hole = opaque(u64::from(mark == Mark::Hole).wrapping_neg());
        let skipped = opaque(u64::from(mark != Mark::Passed).wrapping_neg());
        let keep = opaque(u64::from(mark == Mark::SkippedAgain).wrapping_neg());
        let mut holes = 0;
        let mut base = 0;
        for word in &mut self.words {
            // The range may wrap around the end of the ring: then its rest stands at the beginning.
            let mask = below(to - base) & !below(from - base) | below(to - base - i64::from(WINDOW));
            holes += (word.hole & mask).count_ones();
            word.hole = word.hole & (!mask | keep) | mask & hole;
            word.skipped = word.skipped & !mask | mask & skipped;
            base += 64;
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

/// Keeps the optimiser from turning a mask into a branch on where it came from: BPF has no conditional move, and the
/// verifier would follow every combination of branches over all words.
#[inline(always)]
fn opaque(mask: u64) -> u64 {
    core::hint::black_box(mask)
}

/// The low `n` bits, none for a negative `n` and all for 64 and more.
#[inline(always)]
fn below(n: i64) -> u64 {
    let none = opaque(((n - 1) >> 63) as u64);
    let all = opaque(((63 - n) >> 63) as u64);
    (((1u64 << (n & 63)) - 1) | all) & !none
}

const _: () = assert!(size_of::<Ring>() == 256 && WINDOW.is_power_of_two() && (1 << 24) % WINDOW == 0);

/// 1 if the two are equal, else 0, without a branch: the verifier would follow both ways of every comparison in a loop.
#[inline(always)]
pub(super) fn equal(a: u32, b: u32) -> u32 {
    // Hidden from the optimiser, which would make a branch of it again.
    let difference = core::hint::black_box(u64::from(a ^ b));
    (difference.wrapping_sub(1) >> 63) as u32
}
