//! The PSN tracker: what became of every PSN of one flow, judged by the order of packets alone.
//!
//! A [`Tracker`] lives in a BPF map value, updated in place under a lock, and in the offline inspector; both run this
//! code, so both give the same numbers. It keeps `next`, one past the serially highest PSN that passed (READ spans
//! included), and the holes in the [`WINDOW`] PSNs below it. A packet is
//!
//! * at `next`: in order;
//! * ahead of it: the PSNs in between become holes;
//! * behind it: part of a *run*, which is a retransmission or a batch of late packets, known when the run ends;
//! * further away than the window: believed only when following packets confirm it.
//!
//! BPF sets the style: no panics, no bounds checks that survive optimisation, loops over at most 16 words.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Account, Direct, Fate, Mark, MarkRange, Observed, Outcome, Psn, Refusals, Ring, ring::equal};
use crate::wire::Packet;

/// How many PSNs below `next` are remembered, and how far ahead a packet may be and still tell a gap.
pub const WINDOW: u32 = 1_024;
/// Packets in a row at a far place that make it the flow's place.
const CONFIRM: u32 = 3;
/// The path MTUs of InfiniBand are 256 … 4096 bytes: 1 shifted by this …
const LEAST_SHIFT: u32 = 8;
/// … to this.
const MOST_SHIFT: u32 = 12;

const STARTED: u32 = 1 << 0;
/// A run is going on.
const RUN: u32 = 1 << 1;
/// The run held a duplicate.
const RUN_DUPLICATE: u32 = 1 << 2;
/// A sequence NAK had named a hole the run filled, or an RNR NAK its start.
const RUN_ASKED_FOR: u32 = 1 << 3;
/// The newest packet is a READ request whose span is not known, for want of the PMTU.
const READ_PENDING: u32 = 1 << 4;
/// Packets far from `next` are waiting for confirmation.
const FAR: u32 = 1 << 5;

/// `nak_psn` holds a sequence NAK's PSN that has not passed since.
const NAK_NOTED: u32 = 1 << 0;
/// `rnr_psn` holds an RNR NAK's PSN that no run has started at.
const RNR_NOTED: u32 = 1 << 1;

/// The state of one flow, that is, one (tap, source, destination, destination QPN, space). All zero = nothing seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tracker {
    /// PSNs skipped: `lost + reordered + open` once [`Tracker::finish`] has closed the last run.
    pub missing_psns: u64,
    /// Holes that a retransmission filled or that fell out of the window.
    pub lost: u64,
    /// PSNs that a retransmission with a duplicate skipped.
    pub lost_again: u64,
    /// Holes that late packets filled.
    pub reordered: u64,
    /// Packets behind `next` that filled no hole.
    pub duplicates: u64,
    /// Packets of runs that were retransmissions.
    pub retransmitted: u64,
    /// Confirmed jumps beyond the window.
    pub discontinuities: u32,
    /// Sequence NAKs, once per NAK and pass, for a PSN that had passed here.
    pub lost_after_tap: u32,
    /// Runs that a READ request started.
    pub reasked: u32,
    /// Path MTU in bytes; 0 = not known.
    pub pmtu: u32,
    ring: Ring,
    pmtu_shift: u32,
    next: u32,
    /// PSNs below `next` of which it is known whether they passed, up to the window.
    known: u32,
    state: u32,
    run_cursor: u32,
    run_packets: u32,
    run_filled: u32,
    run_skipped: u32,
    far_first: u32,
    far_next: u32,
    far_packets: u32,
    read_psn: u32,
    read_len: u32,
    notes: u32,
    nak_psn: u32,
    rnr_psn: u32,
}

const _: () = assert!(size_of::<Tracker>() == 384 && core::mem::offset_of!(Tracker, ring) == 64);

impl Tracker {
    /// Takes a packet of the flow, in the order of the tap.
    #[inline(always)]
    pub fn observe(&mut self, p: &Observed) -> Account {
        self.observe_by::<Direct>(p)
    }

    /// [`Tracker::observe`] with ranges of the ring marked by `M`.
    #[inline(always)]
    pub fn observe_by<M: MarkRange>(&mut self, p: &Observed) -> Account {
        if !p.has(Observed::COUNTED) {
            return Account::of(Outcome::NotTracked);
        }
        if p.psn == self.next && self.state == STARTED && !p.has(Observed::READ) {
            let mut account = Account::of(Outcome::InOrder).and(self.learn_pmtu(p));
            if self.ring.pass_one(p.psn) {
                self.lost += 1;
                account = account.and(Account::expiring(1));
            }
            self.next = (p.psn + 1) & 0xff_ffff;
            if self.known < WINDOW {
                self.known += 1;
            }
            return account;
        }
        self.observe_other::<M>(p)
    }

    /// Everything but the next packet of an undisturbed flow.
    #[inline(always)]
    fn observe_other<M: MarkRange>(&mut self, p: &Observed) -> Account {
        let psn = Psn::new(p.psn);
        let first = self.state & STARTED == 0;
        if first {
            self.state = STARTED;
            self.next = psn.get();
        }
        let pmtu = self.pmtu;
        let mut expired = 0;
        if self.state & READ_PENDING != 0 {
            expired += self.explain_by_read::<M>(p);
        }
        let span = self.span(p);
        let d = psn.diff(self.next());
        let starts = d > 0 && p.has(Observed::STARTS_ANYWHERE);
        if d < -(WINDOW as i32) || d > WINDOW as i32 && !starts {
            return self.far::<M>(psn, span).and(Account::expiring(expired));
        }
        self.state &= !FAR;
        self.learn_pmtu(p);
        let mut account = Account::default();
        if self.pmtu != pmtu {
            account = Account::learning_pmtu();
        }
        if self.state & RUN != 0 {
            account = account.and(self.go_on_or_end_run::<M>(psn, d));
        }
        if d < 0 {
            return self.behind::<M>(p, span, -d as u32, expired).and(account);
        }
        self.state &= !READ_PENDING;
        if d > 0 {
            expired += self.advance::<M>(d as u32, if starts { Mark::Passed } else { Mark::Hole });
        }
        expired += self.advance::<M>(span, Mark::Passed);
        self.note_pending_read(p);
        account = account.and(Account::expiring(expired));
        let outcome = if first {
            Outcome::First
        } else if d == 0 || starts {
            Outcome::InOrder
        } else {
            self.missing_psns += d as u64;
            Outcome::Gap(d as u32)
        };
        account.and(Account::of(outcome))
    }

    /// A packet `back` PSNs behind `next`, in the window: it starts a run or goes on with the current one.
    #[inline(always)]
    fn behind<M: MarkRange>(&mut self, p: &Observed, span: u32, back: u32, mut expired: u32) -> Account {
        let mut account = Account::default();
        let starts = self.state & RUN == 0;
        if starts {
            account = Account::starting();
            self.state |= RUN;
            self.run_cursor = p.psn;
            if p.has(Observed::READ) {
                self.reasked += 1;
            }
            if self.notes & RNR_NOTED != 0 && self.rnr_psn == p.psn {
                self.notes &= !RNR_NOTED;
                self.state |= RUN_ASKED_FOR;
            }
        }
        let inside = if span < back { span } else { back };
        if self.notes & NAK_NOTED != 0 && self.nak_psn.wrapping_sub(p.psn) & 0xff_ffff < inside {
            self.notes &= !NAK_NOTED;
            if self.ring.is_hole(Psn::new(self.nak_psn)) {
                self.state |= RUN_ASKED_FOR;
            }
        }
        let filled = self.ring.mark::<M>(p.psn, inside, Mark::Passed);
        self.run_packets += 1;
        self.run_filled += filled;
        if filled == 0 {
            self.duplicates += 1;
            self.state |= RUN_DUPLICATE;
        }
        self.run_cursor = p.psn.wrapping_add(span) & 0xff_ffff;
        if span >= back {
            let ended = self.end_run();
            account = account.and(if starts { Account::own(ended) } else { ended });
            if span > back {
                self.state &= !READ_PENDING;
                expired += self.advance::<M>(span - back, Mark::Passed);
            }
        }
        let outcome = if filled == 0 { Outcome::Duplicate } else { Outcome::Filled(filled) };
        account.and(Account::of(outcome)).and(Account::expiring(expired))
    }

    /// A packet at `d` from `next` during a run: inside it, or its end.
    #[inline(always)]
    fn go_on_or_end_run<M: MarkRange>(&mut self, psn: Psn, d: i32) -> Account {
        let cursor = Psn::new(self.run_cursor);
        let ahead = psn.diff(cursor);
        let goes_on = d < 0 && ahead >= 0;
        let mut skipped = 0;
        if goes_on {
            skipped = ahead as u32;
        } else if d >= 0 && self.state & RUN_DUPLICATE != 0 {
            // Beyond: a go-back-N sends everything again, so what is left was dropped with the run's last packets.
            // A packet or two that were repeated alone skip nothing: more is left than the run had.
            let left = self.next.wrapping_sub(self.run_cursor) & 0xff_ffff;
            if left < self.run_packets {
                skipped = left;
            }
        }
        if skipped != 0 {
            self.run_skipped += skipped;
            self.ring.mark::<M>(self.run_cursor, skipped, Mark::SkippedAgain);
        }
        if goes_on { Account::default() } else { self.end_run() }
    }

    /// The run is over: what was it?
    #[inline(always)]
    fn end_run(&mut self) -> Account {
        if self.state & RUN == 0 {
            return Account::default();
        }
        let account = Account::ending(
            self.run_packets,
            self.run_filled,
            self.run_skipped,
            u32::from(self.state & RUN_DUPLICATE != 0),
            u32::from(self.state & RUN_ASKED_FOR != 0),
        );
        if self.state & (RUN_DUPLICATE | RUN_ASKED_FOR) == 0 {
            self.reordered += u64::from(self.run_filled);
        } else {
            self.retransmitted += u64::from(self.run_packets);
            self.lost += u64::from(self.run_filled);
            if self.state & RUN_DUPLICATE != 0 {
                self.lost_again += u64::from(self.run_skipped);
            }
        }
        self.state &= !(RUN | RUN_DUPLICATE | RUN_ASKED_FOR);
        self.run_packets = 0;
        self.run_filled = 0;
        self.run_skipped = 0;
        account
    }

    /// A packet beyond the window. One moves nothing: it may be forged, or damaged where no ICRC is checked.
    #[inline(always)]
    fn far<M: MarkRange>(&mut self, psn: Psn, span: u32) -> Account {
        let ahead = psn.diff(Psn::new(self.far_next));
        if self.state & FAR != 0 && ahead >= 0 && ahead <= WINDOW as i32 {
            self.far_packets += 1;
        } else {
            self.state |= FAR;
            self.far_first = psn.get();
            self.far_packets = 1;
        }
        self.far_next = psn.add(span).get();
        if self.far_packets < CONFIRM {
            return Account::of(Outcome::Far);
        }
        let ended = self.end_run();
        // The old place's holes are out of the window now.
        let holes = self.ring.mark::<M>(0, WINDOW, Mark::Passed);
        self.lost += u64::from(holes);
        self.discontinuities += 1;
        self.state = STARTED;
        self.notes = 0;
        self.next = self.far_next;
        let known = self.far_next.wrapping_sub(self.far_first) & 0xff_ffff;
        self.known = if known < WINDOW { known } else { WINDOW };
        Account::of(Outcome::Discontinuity).and(ended).and(Account::expiring(holes))
    }

    /// Moves `next` by `count` (at least 1) PSNs, which passed or are holes. Holes that leave the window are lost;
    /// returns how many.
    #[inline(always)]
    fn advance<M: MarkRange>(&mut self, count: u32, mark: Mark) -> u32 {
        let holes = self.ring.mark::<M>(self.next, count, mark);
        self.lost += u64::from(holes);
        self.next = self.next.wrapping_add(count) & 0xff_ffff;
        let room = WINDOW.saturating_sub(self.known);
        self.known = if count < room { self.known + count } else { WINDOW };
        holes
    }

    /// How many PSNs the packet takes; the least it can be when it is a READ under an unknown PMTU.
    #[inline(always)]
    fn span(&self, p: &Observed) -> u32 {
        if !p.has(Observed::READ) {
            return 1;
        }
        let shift = if self.pmtu_shift == 0 { MOST_SHIFT } else { self.pmtu_shift };
        (p.dma_len.saturating_sub(1) >> (shift & 31)) + 1
    }

    /// FIRST and MIDDLE packets are as long as the path MTU.
    #[inline(always)]
    fn learn_pmtu(&mut self, p: &Observed) -> Account {
        let full = p.full_payload();
        if full == 0 || full == self.pmtu {
            return Account::default();
        }
        let mut found = 0;
        let mut shift = LEAST_SHIFT;
        while shift <= MOST_SHIFT {
            found |= shift & equal(full, 1 << shift).wrapping_neg();
            shift += 1;
        }
        if found == 0 {
            return Account::default();
        }
        self.pmtu = full;
        self.pmtu_shift = found;
        Account::learning_pmtu()
    }

    /// Remembers a READ request that is now the newest packet, when its span is not known.
    #[inline(always)]
    fn note_pending_read(&mut self, p: &Observed) {
        if p.has(Observed::READ) && self.pmtu_shift == 0 && p.dma_len > 1 << LEAST_SHIFT {
            self.state |= READ_PENDING;
            self.read_psn = p.psn;
            self.read_len = p.dma_len;
        }
    }

    /// A packet after a READ of unknown span. If it is as long as the PMTU, the span is known; or else where it stands is
    /// explained if the READ would end just there under some PMTU, and teaches it if there is only one. Returns the holes
    /// that left the window.
    #[inline(always)]
    fn explain_by_read<M: MarkRange>(&mut self, p: &Observed) -> u32 {
        if Psn::new(p.psn).diff(self.next()) < 0 {
            return 0;
        }
        let jump = p.psn.wrapping_sub(self.read_psn) & 0xff_ffff;
        let (mut matches, mut found, mut told) = (0, 0, 0);
        // Its own length, or what was learnt elsewhere since the READ.
        let full = if p.full_payload() == 0 { self.pmtu } else { p.full_payload() };
        let mut shift = LEAST_SHIFT;
        while shift <= MOST_SHIFT {
            let span = (self.read_len.saturating_sub(1) >> shift) + 1;
            let fits = equal(span, jump);
            matches += fits;
            found |= shift & fits.wrapping_neg();
            told |= span & equal(full, 1 << shift).wrapping_neg();
            shift += 1;
        }
        let span = if told != 0 && told <= jump && jump - told <= WINDOW {
            told
        } else if matches != 0 {
            jump
        } else {
            return 0;
        };
        if told == 0 && matches == 1 {
            self.pmtu_shift = found;
            self.pmtu = 1 << (found & 31);
        }
        self.state &= !READ_PENDING;
        let rest = self.read_psn.wrapping_add(span).wrapping_sub(self.next) & 0xff_ffff;
        if rest == 0 { 0 } else { self.advance::<M>(rest, Mark::Passed) }
    }

    /// A sequence NAK of the opposite direction names `psn` of this flow; what had become of it at this tap.
    #[inline(always)]
    pub fn note_sequence_nak(&mut self, psn: Psn) -> Fate {
        if !self.in_window(psn) {
            return Fate::Unknown;
        }
        let none = Refusals::default();
        let fate = self.nak_fate(psn, none);
        self.hear(none.and_nak(psn, fate));
        fate
    }

    /// An RNR NAK of the opposite direction refuses `psn` of this flow: a run that starts there is its retry. Whether
    /// the PSN is one this tap has seen.
    #[inline(always)]
    pub fn note_rnr_nak(&mut self, psn: Psn) -> bool {
        let known = self.in_window(psn);
        if known {
            self.hear(Refusals::default().and_rnr(psn));
        }
        known
    }

    /// What had become of `psn`, one of the window, when a sequence NAK names it; the flow is yet to hear of `pending`.
    #[inline(always)]
    pub fn nak_fate(&self, psn: Psn, pending: Refusals) -> Fate {
        let told = match pending.nak() {
            Some(nak) => nak.get() == psn.get(),
            None => self.notes & NAK_NOTED != 0 && self.nak_psn == psn.get(),
        };
        if told { Fate::Told } else { self.fate(psn) }
    }

    /// The opposite direction has refused PSNs of this flow since its newest packet.
    #[inline(always)]
    pub fn hear(&mut self, refusals: Refusals) {
        if let Some(nak) = refusals.nak() {
            self.notes |= NAK_NOTED;
            self.nak_psn = nak.get();
        }
        if let Some(rnr) = refusals.rnr() {
            self.notes |= RNR_NOTED;
            self.rnr_psn = rnr.get();
        }
        self.lost_after_tap += refusals.lost_after_tap();
    }

    /// The newest that happened to `psn` here: [`Fate::Passed`], [`Fate::Skipped`] or, outside what is remembered,
    /// [`Fate::Unknown`].
    #[inline(always)]
    pub fn fate(&self, psn: Psn) -> Fate {
        let back = self.next.wrapping_sub(psn.get()) & 0xff_ffff;
        if !self.in_window(psn) || back > self.known {
            Fate::Unknown
        } else if self.ring.is_skipped(psn) {
            Fate::Skipped
        } else {
            Fate::Passed
        }
    }

    /// Whether a path MTU that is known elsewhere would help with the next packet: it is a READ request, or behind one of unknown
    /// span.
    #[inline(always)]
    pub const fn needs_pmtu(&self, is_read: bool) -> bool {
        self.pmtu == 0 && (is_read || self.state & READ_PENDING != 0)
    }

    /// The path MTU in bytes is known from elsewhere: the connection's management, or the other flows of the queue pair.
    /// What this flow has shown itself stands.
    #[inline(always)]
    pub fn teach_pmtu(&mut self, bytes: u32) {
        let shift = bytes.trailing_zeros();
        if self.pmtu == 0 && bytes.is_power_of_two() && (LEAST_SHIFT..=MOST_SHIFT).contains(&shift) {
            self.pmtu = bytes;
            self.pmtu_shift = shift;
        }
    }

    /// How many PSNs `packet` takes by what is known now; `None` for a READ request under an unknown path MTU.
    pub fn psns_of(&self, packet: &Packet) -> Option<u32> {
        let p = Observed::from(packet);
        let unknown = p.has(Observed::READ) && self.pmtu_shift == 0 && p.dma_len > 1 << LEAST_SHIFT;
        (!unknown).then(|| self.span(&p))
    }

    /// One past the serially highest PSN that passed.
    #[inline(always)]
    pub const fn next(&self) -> Psn {
        Psn::new(self.next)
    }

    /// Whether a packet has been counted at all.
    #[inline(always)]
    pub const fn is_started(&self) -> bool {
        self.state & STARTED != 0
    }

    /// Whether `psn` is one of the [`WINDOW`] PSNs below `next`.
    #[inline(always)]
    pub const fn in_window(&self, psn: Psn) -> bool {
        let d = psn.diff(self.next());
        self.is_started() && d < 0 && d >= -(WINDOW as i32)
    }

    /// Closes the run that is going on: call it at the end of a capture, or on a copy for a report.
    pub fn finish(&mut self) -> Account {
        self.end_run()
    }

    /// Holes in the window: PSNs that were skipped and are neither explained nor given up.
    pub fn open(&self) -> u64 {
        u64::from(self.ring.holes())
    }
}
