//! Why packets were repeated: the tracker's accounts of a flow, and what its peer answered, made into episodes.
//!
//! An [`Explainer`] stands beside a [`Tracker`](super::Tracker). The tracker counts by the order of packets alone; the
//! explainer takes its accounts and adds what needs a clock or the other direction. Nothing it finds changes a counter.
//! Offline it hears every packet; live it hears the events of the BPF programs, which are the notable accounts and the
//! NAKs and what the kernel found of the answers where a repeat begins; it misses ACKs in between.

use super::{
    Account, AckTimeout, Cause, Episode, Evidence, Fate, Known, Location, Nak, Outcome, Psn, ReadPlace, Rnr, Run, Seen,
    WINDOW,
    gaps::{Gap, Gaps},
};
use crate::{
    units::Nanos,
    wire::{Kind, Opcode, Service},
};

/// A sender that repeats without being asked, after a silence of at least this, is taken to have timed out where its ACK
/// timeout is not known: many round trips of any one network, and less than the timeouts that are in use (from 4 ms on).
pub const SHORTEST_TIMEOUT: Nanos = Nanos::from_millis(1);
/// A repeat this long after its NAK is a time-out: the NAK did not reach the requester, or it was busy with another. Far
/// more than a requester needs to turn back, also one in software.
pub const NAK_ANSWERED_WITHIN: Nanos = Nanos::from_millis(10);
/// A UC packet that has been missing for this long is lost: longer than packets of one flow are apart on different ways
/// through a network, and longer than the steps of the clock of the BPF programs.
pub const UC_REORDER_TIME: Nanos = Nanos::from_millis(10);
/// Late batches that are remembered, to tell NAKs of reordering from NAKs of loss.
const LATE: usize = 4;

/// A packet, as far as the explainer wants to know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Passing {
    /// Its PSN.
    pub psn: Psn,
    /// Its opcode.
    pub opcode: Opcode,
    /// Of a READ request: what [`Reads`](super::Reads) knew of its PSN before it.
    pub read: ReadPlace,
    /// For how long no packet of the flow had passed before it.
    pub silence: Nanos,
    /// When it passed.
    pub at: Nanos,
}

/// The run that is going on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct OpenRun {
    first: Psn,
    opcode: Opcode,
    evidence: Evidence,
}

/// PSNs that came late.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Late {
    first: Psn,
    psns: u32,
}

/// What is remembered of one flow to explain it. The default has seen nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Explainer {
    gaps: Gaps,
    late: [Option<Late>; LATE],
    late_at: u32,
    run: Option<OpenRun>,
    nak: Option<Nak>,
    rnr: Option<Rnr>,
    answered: Option<Seen>,
    /// When the peer last said anything.
    heard: Option<Nanos>,
    answer_gap: Option<Seen>,
    timeout: Option<AckTimeout>,
    service: Option<Service>,
}

impl Explainer {
    /// Takes what the tracker said of a packet, and tells the episodes that it ends.
    #[inline]
    pub fn packet(&mut self, account: Account, p: &Passing, mut tell: impl FnMut(Episode)) {
        if account.is_notable() {
            self.notable(account, p, &mut tell);
        }
        if self.service == Some(Service::Uc) {
            self.give_up_old_gaps(p.at, &mut tell);
        }
    }

    fn notable(&mut self, account: Account, p: &Passing, tell: &mut impl FnMut(Episode)) {
        self.service = Some(p.opcode.service());
        let outcome = account.outcome();
        if let Some(run) = account.ended() {
            self.end_run(&run, account, p, tell);
        }
        match outcome {
            Outcome::Discontinuity => {
                self.expire(account.expired(), p, tell);
                self.unanswered_nak(p.at, tell);
                *self = Self { timeout: self.timeout, service: self.service, ..Self::default() };
                return;
            }
            Outcome::Gap(count) => self.gaps.push(Gap::new(p.psn.sub(count), count, p.at)),
            _ => {}
        }
        if account.run_started() {
            self.run = Some(self.open_run(p));
        }
        if let Some(run) = account.own_run() {
            self.end_run(&run, account, p, tell);
        }
        self.expire(account.expired(), p, tell);
    }

    /// A sequence NAK names `psn` of this flow, of which the tracker says `fate`.
    pub fn sequence_nak(&mut self, psn: Psn, fate: Fate, at: Nanos) {
        // Named again, it is the same NAK.
        if fate == Fate::Told && self.nak.is_some_and(|nak| nak.seen.psn == psn) {
            return;
        }
        self.nak = Some(Nak { seen: Seen { psn, at }, fate });
        // It acknowledges everything before.
        self.answer(psn.sub(1), at);
    }

    /// An RNR NAK with this timer code refuses `psn` of this flow.
    pub fn rnr_nak(&mut self, psn: Psn, timer: u8, at: Nanos) {
        self.rnr = Some(Rnr { seen: Seen { psn, at }, timer: timer & 0x1f });
        self.answer(psn.sub(1), at);
    }

    /// An ACK, a READ response or an atomic answer for `psn` of this flow passed.
    pub fn answer(&mut self, psn: Psn, at: Nanos) {
        self.heard = Some(at);
        if self.answered.is_none_or(|a| psn.diff(a.psn) > 0) {
            self.answered = Some(Seen { psn, at });
        }
    }

    /// READ responses for `psn` and what follows were skipped at this tap.
    pub fn answer_gap(&mut self, psn: Psn, at: Nanos) {
        self.answer_gap = Some(Seen { psn, at });
    }

    /// A READ is about to ask for `psn` again, the answer to which had this fate at the tap. One that starts inside an
    /// earlier READ names the answer that the requester misses, whatever gaps there were; a whole READ may miss any.
    pub fn answer_fate(&mut self, psn: Psn, place: ReadPlace, fate: Fate, at: Nanos) {
        match fate {
            Fate::Skipped if self.answer_gap.is_none_or(|gap| gap.psn != psn) => self.answer_gap(psn, at),
            Fate::Passed if place != ReadPlace::Start => self.answer_gap = None,
            _ => {}
        }
    }

    /// The sender's ACK timeout is 4.096 µs · 2^`exponent`; 0 means that it never times out and teaches nothing.
    pub fn set_ack_timeout(&mut self, exponent: u8) {
        if (1..=31).contains(&exponent) {
            self.timeout = Some(AckTimeout { exponent, known: Known::Told });
        }
    }

    /// The sender's ACK timeout, as far as it is known.
    pub const fn ack_timeout(&self) -> Option<AckTimeout> {
        self.timeout
    }

    /// Time has passed and no packet came: what UC lost is given up.
    pub fn tick(&mut self, now: Nanos, mut tell: impl FnMut(Episode)) {
        if self.service == Some(Service::Uc) {
            self.give_up_old_gaps(now, &mut tell);
        }
    }

    /// Nothing more will come; `account` is what [`Tracker::finish`](super::Tracker::finish) said.
    pub fn finish(&mut self, account: Account, at: Nanos, mut tell: impl FnMut(Episode)) {
        if let (Some(run), Some(open)) = (account.ended(), self.run) {
            let (psn, opcode) = (open.first, open.opcode);
            let last = Passing { psn, opcode, read: ReadPlace::Unknown, silence: Nanos(0), at };
            self.end_run(&run, account, &last, &mut tell);
        }
        self.unanswered_nak(at, &mut tell);
        if self.service == Some(Service::Uc)
            && let Some(gap) = self.gaps.take_lost()
        {
            tell(self.given_up(&gap, at));
        }
    }

    /// A NAK that no repeat has followed, when none can follow any more.
    fn unanswered_nak(&mut self, at: Nanos, tell: &mut impl FnMut(Episode)) {
        let Some(nak) = self.nak.take() else { return };
        let gap = self.gaps.of(nak.seen.psn);
        tell(Episode {
            cause: Cause::Unknown,
            location: place_of(nak.fate),
            first: nak.seen.psn,
            packets: 0,
            lost: 0,
            lost_again: 0,
            start: gap.map_or(nak.seen.at, |g| g.at),
            end: at,
            evidence: Evidence { gap: gap.map(|g| g.seen()), nak: Some(nak), ..self.evidence() },
        });
    }

    fn evidence(&self) -> Evidence {
        Evidence { timeout: self.timeout, ..Evidence::default() }
    }

    fn open_run(&self, p: &Passing) -> OpenRun {
        let covers = |seen: &Seen| (0..=WINDOW as i32).contains(&seen.psn.diff(p.psn));
        let in_run = |seen: &Seen| (0..WINDOW as i32).contains(&seen.psn.diff(p.psn));
        let evidence = Evidence {
            nak: self.nak.filter(|nak| in_run(&nak.seen)),
            rnr: self.rnr.filter(|rnr| rnr.seen.psn == p.psn),
            refill: Some(p.at),
            silence: self.silence(p),
            answered: self.answered.filter(covers),
            answer_gap: self.answer_gap.filter(in_run),
            partial_read: p.opcode.is_read_request() && p.read == ReadPlace::Inside,
            ..self.evidence()
        };
        OpenRun { first: p.psn, opcode: p.opcode, evidence }
    }

    /// How long neither the sender nor, as far as it was heard, its peer said anything.
    fn silence(&self, p: &Passing) -> Nanos {
        match self.heard {
            Some(heard) if p.at.since(heard).0 < p.silence.0 => p.at.since(heard),
            _ => p.silence,
        }
    }

    /// The end of a run, with the packet `p`, which `account` speaks of.
    fn end_run(&mut self, run: &Run, account: Account, p: &Passing, tell: &mut impl FnMut(Episode)) {
        let psns = run.packets + run.skipped;
        let open = self.run.take().unwrap_or_else(|| {
            // Its start was not heard of, as an event may be lost: it ended about here.
            let first = p.psn.sub(psns);
            OpenRun { first, opcode: p.opcode, evidence: self.evidence() }
        });
        let gap = self.gaps.fill(open.first, psns, run.filled);
        if !run.is_retransmission() {
            self.late[self.late_at as usize % LATE] = Some(Late { first: open.first, psns });
            self.late_at = self.late_at.wrapping_add(1);
            return;
        }
        let mut evidence = Evidence { gap: gap.map(|g| g.seen()), ..open.evidence };
        let reads = open.opcode.is_read_request() || open.opcode.kind() == Kind::Response;
        if !reads {
            evidence.nak = evidence.nak.filter(|nak| nak.seen.psn.diff(open.first) < psns as i32);
        }
        // The packet that ended it came from beyond: did the run reach that place?
        let beyond = match account.outcome() {
            Outcome::InOrder => Some(p.psn),
            Outcome::Gap(count) => Some(p.psn.sub(count)),
            _ => None,
        };
        let selective = !reads && beyond.is_some_and(|next| next.diff(open.first.add(psns)) > 0);
        let cause = self.cause(run, &open, &evidence, selective);
        if cause == Cause::Timeout && evidence.timeout.is_none_or(|t| t.duration().0 > evidence.silence.0) {
            self.timeout = AckTimeout::within(evidence.silence);
            evidence.timeout = self.timeout;
        }
        let signs = [evidence.gap, evidence.nak.map(|n| n.seen), evidence.rnr.map(|r| r.seen)];
        let repeat = evidence.refill.unwrap_or(p.at);
        let start = signs.iter().flatten().map(|s| s.at).fold(repeat, |a, b| if b.0 < a.0 { b } else { a });
        tell(Episode {
            cause,
            location: self.location(cause, run, &open, &evidence),
            first: open.first,
            packets: run.packets,
            lost: run.filled,
            lost_again: if run.duplicate { run.skipped } else { 0 },
            start,
            end: p.at,
            evidence,
        });
        // What was asked for has come.
        let done = |seen: &Seen| (0..WINDOW as i32).contains(&seen.psn.diff(open.first)) && seen.at.0 <= repeat.0;
        self.nak = self.nak.filter(|nak| !done(&nak.seen));
        self.rnr = self.rnr.filter(|rnr| !done(&rnr.seen));
        self.answer_gap = self.answer_gap.filter(|gap| !done(gap));
    }

    fn cause(&self, run: &Run, open: &OpenRun, evidence: &Evidence, selective: bool) -> Cause {
        let asks = open.opcode.is_read_request() || open.opcode.is_atomic_request();
        if evidence.rnr.is_some() {
            Cause::RnrRepeat
        } else if open.opcode.kind() == Kind::Response {
            Cause::Reask
        } else if let Some(nak) = evidence.nak {
            let told = self.timeout.is_some_and(|t| t.known == Known::Told);
            if (told || evidence.silence.0 >= NAK_ANSWERED_WITHIN.0) && self.timed_out(evidence) {
                Cause::Timeout
            } else if nak.fate == Fate::Passed && self.came_late(nak.seen.psn) {
                Cause::ReorderingNaked
            } else if selective {
                Cause::SelectiveRepeat
            } else {
                Cause::GoBackN
            }
        } else if self.timed_out(evidence) {
            Cause::Timeout
        } else if asks {
            Cause::Reask
        } else if run.filled == 0 {
            Cause::Spurious
        } else {
            Cause::Unknown
        }
    }

    fn came_late(&self, psn: Psn) -> bool {
        self.late.iter().flatten().any(|late| (0..late.psns as i32).contains(&psn.diff(late.first)))
    }

    fn timed_out(&self, evidence: &Evidence) -> bool {
        match self.timeout {
            // An eighth less: the clock of the BPF programs goes in steps.
            Some(AckTimeout { known: Known::Told, exponent }) => {
                evidence.silence.0 >= AckTimeout { exponent, known: Known::Told }.duration().0 / 8 * 7
            }
            _ => evidence.silence.0 >= SHORTEST_TIMEOUT.0,
        }
    }

    fn location(&self, cause: Cause, run: &Run, open: &OpenRun, evidence: &Evidence) -> Location {
        if cause == Cause::RnrRepeat {
            Location::Responder
        } else if run.filled > 0 || cause == Cause::ReorderingNaked || evidence.answer_gap.is_some() {
            Location::BeforeTap
        } else if let Some(nak) = evidence.nak {
            place_of(nak.fate)
        } else if self.answered.is_some() || open.opcode.kind() == Kind::Response {
            // It had passed here, and where answers can be seen the last word is missing on the sender's side.
            Location::AfterTap
        } else {
            Location::Unknown
        }
    }

    /// Holes fell out of the window.
    fn expire(&mut self, holes: u32, p: &Passing, tell: &mut impl FnMut(Episode)) {
        if holes == 0 {
            return;
        }
        if let Some(gap) = self.gaps.expire(holes, p.psn.sub(WINDOW), p.at) {
            tell(self.given_up(&gap, p.at));
        }
    }

    fn give_up_old_gaps(&mut self, now: Nanos, tell: &mut impl FnMut(Episode)) {
        if let Some(gap) = self.gaps.take_older_than(Nanos(now.0.saturating_sub(UC_REORDER_TIME.0))) {
            tell(self.given_up(&gap, now));
        }
    }

    fn given_up(&mut self, gap: &Gap, at: Nanos) -> Episode {
        let nak = self.nak.take_if(|nak| gap.holds(nak.seen.psn));
        let uc = self.service == Some(Service::Uc);
        Episode {
            cause: if uc { Cause::UcLoss } else { Cause::Unknown },
            // A hole that nobody asks for may never have been sent.
            location: if uc || nak.is_some() { Location::BeforeTap } else { Location::Unknown },
            first: gap.first,
            packets: 0,
            lost: gap.gone,
            lost_again: 0,
            start: gap.at,
            end: at,
            evidence: Evidence { gap: Some(gap.seen()), nak, ..self.evidence() },
        }
    }
}

const fn place_of(fate: Fate) -> Location {
    match fate {
        Fate::Passed | Fate::Told => Location::AfterTap,
        Fate::Skipped => Location::BeforeTap,
        Fate::Unknown => Location::Unknown,
    }
}

const _: () = assert!(size_of::<Explainer>() <= 1_024);
