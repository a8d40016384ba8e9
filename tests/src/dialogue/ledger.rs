//! What passed the tap, PSN by PSN: the truth.

use std::{collections::HashSet, ops::AddAssign};

use roce_common::flow::Flow;

/// How far below the newest PSN a hole is still open (DESIGN of schema 1: 1,024 PSNs).
const REMEMBERED: u64 = 1_024;

/// The counters of one flow, as they must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Truth {
    /// PSNs overtaken at the tap.
    pub missing: u64,
    /// Of these, repeated later or given up.
    pub lost: u64,
    /// Repeats that the link dropped before the tap.
    pub lost_again: u64,
    /// Of the PSNs overtaken, still out at the end.
    pub open: u64,
    /// Of the PSNs overtaken, late.
    pub reordered: u64,
    /// Packets that brought nothing new.
    pub duplicates: u64,
    /// Repeats and copies that passed.
    pub retransmitted: u64,
    /// New places in the sequence.
    pub discontinuities: u64,
    /// NAKs that passed, of a PSN whose newest copy had passed.
    pub lost_after_tap: u64,
    /// Repeats that a READ began.
    pub reasked: u64,
}

impl Truth {
    /// What the tracker says.
    pub fn of(flow: &Flow) -> Self {
        let mut t = flow.tracker;
        t.finish();
        Self {
            missing: t.missing_psns,
            lost: t.lost,
            lost_again: t.lost_again,
            open: t.open(),
            reordered: t.reordered,
            duplicates: t.duplicates,
            retransmitted: t.retransmitted,
            discontinuities: t.discontinuities.into(),
            lost_after_tap: t.lost_after_tap.into(),
            reasked: t.reasked.into(),
        }
    }
}

impl AddAssign for Truth {
    fn add_assign(&mut self, other: Self) {
        self.missing += other.missing;
        self.lost += other.lost;
        self.lost_again += other.lost_again;
        self.open += other.open;
        self.reordered += other.reordered;
        self.duplicates += other.duplicates;
        self.retransmitted += other.retransmitted;
        self.discontinuities += other.discontinuities;
        self.lost_after_tap += other.lost_after_tap;
        self.reasked += other.reasked;
    }
}

/// How a packet came to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    /// For the first time.
    New,
    /// Once more, as part of this repeat.
    Repeat(u64),
    /// The network made a second one.
    Copy,
}

/// One flow at the tap. PSNs are positions on an unbounded line here.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) truth: Truth,
    passed: HashSet<u64>,
    /// PSNs overtaken and not passed.
    out: HashSet<u64>,
    /// One past the highest position passed; `None` before the first packet.
    end: Option<u64>,
    /// The newest packet of a position did not get to the tap.
    dropped: HashSet<u64>,
    /// The repeat that last passed behind the end.
    repeat: Option<u64>,
    /// The repeat of which last a packet passed that brought nothing new.
    repeated: Option<u64>,
    /// Repeats, in the order in which they began to pass behind the end; and copies, as `None`.
    begun: Vec<Option<u64>>,
}

impl Ledger {
    /// One past the newest position that passed.
    pub(super) fn end(&self) -> Option<u64> {
        self.end
    }

    /// See the field.
    pub(super) fn begun(&self) -> &[Option<u64>] {
        &self.begun
    }

    /// Whether this repeat has brought something that had passed before.
    pub(super) fn has_repeated_in(&self, repeat: u64) -> bool {
        self.repeated == Some(repeat)
    }

    /// A packet passes. `skips` says that what it leaves out may be missing; not so where an answer starts.
    pub(super) fn pass(&mut self, at: u64, span: u64, why: Why, skips: bool, read: bool) {
        let end = self.end.unwrap_or(at);
        if at >= end {
            if skips {
                self.out.extend(end..at);
                self.truth.missing += at - end;
            }
        } else {
            let fresh = (at..(at + span).min(end)).filter(|p| self.out.remove(p)).count() as u64;
            self.truth.duplicates += u64::from(fresh == 0);
            match why {
                Why::New => self.truth.reordered += fresh,
                Why::Repeat(_) | Why::Copy => {
                    self.truth.lost += fresh;
                    self.truth.retransmitted += 1;
                }
            }
            if fresh == 0
                && let Why::Repeat(n) = why
            {
                self.repeated = Some(n);
            }
            let begins = match why {
                Why::Repeat(n) => self.repeat.replace(n) != Some(n),
                Why::New | Why::Copy => true,
            };
            self.truth.reasked += u64::from(begins && read);
            match why {
                Why::Repeat(n) if begins => self.begun.push(Some(n)),
                Why::Copy => self.begun.push(None),
                Why::Repeat(_) | Why::New => {}
            }
        }
        for p in at..at + span {
            self.passed.insert(p);
            self.dropped.remove(&p);
        }
        self.end = Some(end.max(at + span));
    }

    /// A packet is dropped before the tap.
    pub(super) fn drop(&mut self, at: u64, span: u64, why: Why) {
        self.dropped.extend(at..at + span);
        let behind = self.end.is_some_and(|end| at < end);
        if behind && matches!(why, Why::Repeat(_)) {
            self.truth.lost_again += span;
        }
    }

    /// A sequence NAK of this position passes.
    pub(super) fn nak(&mut self, at: u64) {
        self.truth.lost_after_tap += u64::from(!self.dropped.contains(&at));
    }

    /// The sequence goes on elsewhere: what is out stays out.
    pub(super) fn forget(&mut self) {
        self.truth.lost += self.out.len() as u64;
        self.out.clear();
        self.passed.clear();
        self.dropped.clear();
        self.end = None;
    }

    /// The end of the capture.
    pub(super) fn close(&mut self) -> Truth {
        let end = self.end.unwrap_or(0);
        let given_up = self.out.iter().filter(|&&p| p + REMEMBERED < end).count() as u64;
        self.truth.lost += given_up;
        self.truth.open += self.out.len() as u64 - given_up;
        self.truth
    }
}
