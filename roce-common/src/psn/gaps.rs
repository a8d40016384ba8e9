//! The gaps of a flow that are not explained yet.

use super::{Psn, Seen};
use crate::units::Nanos;

/// How many are told apart; where there are more, the two oldest become one.
const GAPS: usize = 8;

/// PSNs that were skipped at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Gap {
    pub(super) first: Psn,
    /// PSNs from the first to the last.
    psns: u32,
    /// Of them, holes still.
    left: u32,
    /// Of them, given up.
    pub(super) gone: u32,
    /// When it was noticed.
    pub(super) at: Nanos,
}

impl Gap {
    pub(super) const fn new(first: Psn, psns: u32, at: Nanos) -> Self {
        Self { first, psns, left: psns, gone: 0, at }
    }

    pub(super) const fn seen(&self) -> Seen {
        Seen { psn: self.first, at: self.at }
    }

    pub(super) const fn holds(&self, psn: Psn) -> bool {
        let d = psn.diff(self.first);
        d >= 0 && (d as u32) < self.psns
    }

    fn meets(&self, first: Psn, psns: u32) -> bool {
        let d = self.first.diff(first);
        if d >= 0 { (d as u32) < psns } else { d.unsigned_abs() < self.psns }
    }

    /// One gap from the start of this to the end of `newer`.
    fn with(self, newer: &Self) -> Self {
        let end = newer.first.add(newer.psns).diff(self.first).max(0) as u32;
        Self {
            psns: self.psns.max(end),
            left: self.left.saturating_add(newer.left),
            gone: self.gone.saturating_add(newer.gone),
            ..self
        }
    }
}

/// The gaps, oldest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Gaps {
    gaps: [Gap; GAPS],
    len: usize,
    /// Holes of gaps taken before they left the window: they will leave it first.
    taken: u32,
}

impl Gaps {
    pub(super) fn push(&mut self, gap: Gap) {
        if self.len == GAPS {
            self.gaps[1] = self.gaps[0].with(&self.gaps[1]);
            self.remove(0);
        }
        if let Some(free) = self.gaps.get_mut(self.len) {
            *free = gap;
            self.len += 1;
        }
    }

    fn remove(&mut self, at: usize) {
        self.gaps.copy_within(at + 1.., at);
        self.len -= 1;
    }

    fn iter(&self) -> impl Iterator<Item = &Gap> {
        self.gaps.iter().take(self.len)
    }

    /// The gap that `psn` is in.
    pub(super) fn of(&self, psn: Psn) -> Option<Gap> {
        self.iter().find(|gap| gap.holds(psn)).copied()
    }

    /// Packets from `first` on, over this many PSNs, filled `holes`; the first gap they met.
    pub(super) fn fill(&mut self, first: Psn, psns: u32, holes: u32) -> Option<Gap> {
        let (mut met, mut holes, mut at) = (None, holes, 0);
        while at < self.len && holes > 0 {
            let gap = &mut self.gaps[at];
            if gap.meets(first, psns) {
                let _first = met.get_or_insert(*gap);
                let filled = gap.left.min(holes);
                gap.left -= filled;
                holes -= filled;
            }
            if self.gaps[at].left == 0 && self.gaps[at].gone == 0 {
                self.remove(at);
            } else {
                at += 1;
            }
        }
        self.taken = self.taken.saturating_sub(holes);
        met
    }

    /// So many holes left the window, about at `psn`, the oldest first; what is given up with that, once the last of a
    /// gap is gone.
    pub(super) fn expire(&mut self, holes: u32, psn: Psn, at: Nanos) -> Option<Gap> {
        let known = holes.min(self.taken);
        self.taken -= known;
        let (mut lost, mut holes): (Option<Gap>, u32) = (None, holes - known);
        let mut add = |gap: &Gap| lost = Some(lost.map_or(*gap, |sum| sum.with(gap)));
        while holes > 0 && self.len > 0 {
            let gap = &mut self.gaps[0];
            let gone = gap.left.min(holes);
            gap.left -= gone;
            gap.gone += gone;
            holes -= gone;
            if gap.left > 0 {
                break;
            }
            if gap.gone > 0 {
                add(&self.gaps[0]);
            }
            self.remove(0);
        }
        if holes > 0 {
            // Holes of a gap that was not heard of.
            add(&Gap { gone: holes, ..Gap::new(psn, holes, at) });
        }
        lost
    }

    /// Takes the oldest gap if it was noticed before `time`: nobody will fill it.
    pub(super) fn take_older_than(&mut self, time: Nanos) -> Option<Gap> {
        if self.len == 0 || self.gaps[0].at.0 >= time.0 { None } else { self.take_oldest() }
    }

    fn take_oldest(&mut self) -> Option<Gap> {
        let gap = *self.gaps.first().filter(|_| self.len > 0)?;
        self.remove(0);
        self.taken = self.taken.saturating_add(gap.left);
        Some(Gap { gone: gap.left + gap.gone, left: 0, ..gap })
    }

    /// Takes all of them as one.
    pub(super) fn take_lost(&mut self) -> Option<Gap> {
        let mut lost: Option<Gap> = None;
        while let Some(gap) = self.take_oldest() {
            lost = Some(lost.map_or(gap, |sum| sum.with(&gap)));
        }
        lost
    }
}
