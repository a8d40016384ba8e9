//! Findings: what a capture or a running attachment shows that somebody should know, with the evidence.
//!
//! [`Findings`] collects; it is fed while packets pass (evidence with frame numbers) and at the end (rules that look at
//! whole flows and hosts, in [`rules`]). It knows neither files nor the kernel. Memory is bounded: of every code the
//! count is exact, and the first [`MOST_EXAMPLES`] packets and [`MOST_SUBJECTS`] flows are kept.

mod code;
pub mod episodes;
pub mod rules;

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
};

use roce_common::{
    abi::{FlowKey, Tap},
    psn::Psn,
    units::{Addr, Nanos},
};
use serde::Serialize;

pub use code::{Code, Severity};

/// Packets kept as examples of each code.
pub const MOST_EXAMPLES: usize = 16;
/// Flows or hosts kept of each code; the report lists the [`MOST_LISTED`] most concerned.
pub const MOST_SUBJECTS: usize = 4_096;
/// Flows or hosts listed with each finding.
pub const MOST_LISTED: usize = 16;

/// What a finding is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Subject {
    /// One flow.
    Flow(FlowKey),
    /// All flows from one address to another at a tap.
    Path(Tap, Addr, Addr),
    /// All flows from an address at a tap.
    Host(Tap, Addr),
    /// The capture itself.
    Capture,
}

impl From<FlowKey> for Subject {
    fn from(key: FlowKey) -> Self {
        Self::Flow(key)
    }
}

/// A packet that shows what was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Evidence {
    /// Number of the frame, counted from 1 through the capture; `None` live.
    pub frame: Option<u64>,
    /// When it passed: since 1970 in a capture, CLOCK_MONOTONIC live.
    pub time: Nanos,
    /// Its PSN, or the one it tells about.
    pub psn: Option<Psn>,
    /// What it shows, as a phrase.
    pub what: &'static str,
}

/// An [`Evidence`] and what it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Example {
    /// What was found.
    pub code: Code,
    /// About whom.
    pub subject: Subject,
    /// The packet.
    pub evidence: Evidence,
}

/// What is known of one code.
#[derive(Default)]
struct Found {
    count: u64,
    examples: usize,
    subjects: HashMap<Subject, u64>,
    /// Occurrences whose subject found no room.
    others: u64,
}

/// The collector.
pub struct Findings {
    by_code: Vec<Found>,
    log: Vec<Example>,
}

impl Default for Findings {
    fn default() -> Self {
        Self { by_code: Code::ALL.iter().map(|_| Found::default()).collect(), log: Vec::new() }
    }
}

impl Findings {
    /// One occurrence of `code` and the packet that shows it. True if the packet was kept as an example.
    pub fn note(&mut self, code: Code, subject: impl Into<Subject>, evidence: Evidence) -> bool {
        let subject = subject.into();
        self.add(code, subject, 1);
        self.show(code, subject, evidence)
    }

    /// `count` occurrences of `code`, without a packet.
    pub fn add(&mut self, code: Code, subject: impl Into<Subject>, count: u64) {
        if count == 0 {
            return;
        }
        let found = &mut self.by_code[code as usize];
        found.count += count;
        let room = found.subjects.len() < MOST_SUBJECTS;
        match found.subjects.entry(subject.into()) {
            Entry::Occupied(mut entry) => *entry.get_mut() += count,
            Entry::Vacant(entry) if room => {
                entry.insert(count);
            }
            Entry::Vacant(_) => found.others += count,
        }
    }

    /// A packet that shows `code`, while there is room; true if it was kept. It does not count as an occurrence.
    pub fn show(&mut self, code: Code, subject: impl Into<Subject>, evidence: Evidence) -> bool {
        let found = &mut self.by_code[code as usize];
        if found.examples >= MOST_EXAMPLES {
            return false;
        }
        found.examples += 1;
        self.log.push(Example { code, subject: subject.into(), evidence });
        true
    }

    /// Takes back everything noted of `code` about `subject`: something else explains it.
    pub fn retract(&mut self, code: Code, subject: impl Into<Subject>) {
        let subject = subject.into();
        let found = &mut self.by_code[code as usize];
        let Some(count) = found.subjects.remove(&subject) else { return };
        found.count -= count;
        let before = self.log.len();
        self.log.retain(|e| e.code != code || e.subject != subject);
        found.examples -= before - self.log.len();
    }

    /// Forgets what is about others than those who are `wanted`. Occurrences whose subject found no room go with them.
    pub fn keep_only(&mut self, wanted: impl Fn(Subject) -> bool) {
        for found in &mut self.by_code {
            found.subjects.retain(|subject, _| wanted(*subject));
            found.count = found.subjects.values().sum();
            found.others = 0;
        }
        self.log.retain(|e| wanted(e.subject));
    }

    /// How often `code` was found.
    pub fn count(&self, code: Code) -> u64 {
        self.by_code[code as usize].count
    }

    /// The packets kept so far, in the order in which they were noted: who wants to act on new ones remembers the length.
    pub fn log(&self) -> &[Example] {
        &self.log
    }

    /// The gravest severity found.
    pub fn worst(&self) -> Option<Severity> {
        Code::ALL.iter().filter(|&&c| self.count(c) > 0).map(|c| c.severity()).max()
    }

    /// What was found, the gravest first; `tap_name` gives taps their names.
    pub fn report(&self, tap_name: impl Fn(Tap) -> String) -> Vec<FindingReport> {
        let mut found: Vec<_> =
            Code::ALL.iter().filter(|&&c| self.count(c) > 0).map(|&c| self.report_of(c, &tap_name)).collect();
        found.sort_by_key(|f| std::cmp::Reverse(f.severity));
        found
    }

    fn report_of(&self, code: Code, tap_name: &impl Fn(Tap) -> String) -> FindingReport {
        let found = &self.by_code[code as usize];
        let mut subjects: Vec<_> = found.subjects.iter().map(|(&s, &n)| (s, n)).collect();
        subjects.sort_by_key(|&(subject, n)| (std::cmp::Reverse(n), subject));
        let evidence = self.log.iter().filter(|e| e.code == code).map(|e| EvidenceReport {
            frame: e.evidence.frame,
            time_ns: e.evidence.time.0,
            psn: e.evidence.psn.map(Psn::get),
            what: e.evidence.what,
            at: SubjectReport::new(e.subject, None, tap_name),
        });
        FindingReport {
            code: code.name(),
            severity: code.severity(),
            count: found.count,
            seen: code.seen(found.count),
            check: code.check(),
            subjects: subjects.len() as u64,
            more_subjects: found.others > 0,
            flows: subjects.iter().take(MOST_LISTED).map(|&(s, n)| SubjectReport::new(s, Some(n), tap_name)).collect(),
            evidence: evidence.collect(),
        }
    }
}

/// A finding in JSON and tables.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FindingReport {
    /// [`Code::name`].
    pub code: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// Occurrences.
    pub count: u64,
    /// What was seen, a sentence.
    pub seen: String,
    /// What to check.
    pub check: &'static str,
    /// Different flows or hosts concerned, at most [`MOST_SUBJECTS`].
    pub subjects: u64,
    /// There were more of them.
    pub more_subjects: bool,
    /// The most concerned of them, at most [`MOST_LISTED`].
    pub flows: Vec<SubjectReport>,
    /// The first packets that show it, at most [`MOST_EXAMPLES`].
    pub evidence: Vec<EvidenceReport>,
}

/// Whom a finding is about: only the fields that apply are there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SubjectReport {
    /// Tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Source address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub src: Option<IpAddr>,
    /// Destination address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dst: Option<IpAddr>,
    /// Destination QPN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dest_qp: Option<u32>,
    /// `request` or `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<&'static str>,
    /// Occurrences that concern it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl SubjectReport {
    fn new(subject: Subject, count: Option<u64>, tap_name: &impl Fn(Tap) -> String) -> Self {
        let (tap, src, dst, flow) = match subject {
            Subject::Flow(key) => (Some(key.tap), Some(key.src), Some(key.dst), Some(key)),
            Subject::Path(tap, src, dst) => (Some(tap), Some(src), Some(dst), None),
            Subject::Host(tap, src) => (Some(tap), Some(src), None, None),
            Subject::Capture => (None, None, None, None),
        };
        Self {
            tap: tap.map(tap_name),
            src: src.map(Into::into),
            dst: dst.map(Into::into),
            dest_qp: flow.map(|key| key.dest_qp().get()),
            space: flow.map(|key| key.space().name()),
            count,
        }
    }
}

/// A packet that shows a finding.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct EvidenceReport {
    /// Number of the frame, from 1 as in Wireshark; absent live.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frame: Option<u64>,
    /// When it passed, in nanoseconds: since 1970 in a capture, CLOCK_MONOTONIC live.
    pub time_ns: u64,
    /// Its PSN, or the one it tells about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psn: Option<u32>,
    /// What it shows.
    pub what: &'static str,
    /// Where.
    #[serde(flatten)]
    pub at: SubjectReport,
}

/// The frames of all evidence, each once, in order.
pub fn frames(findings: &[FindingReport]) -> BTreeSet<u64> {
    findings.iter().flat_map(|f| &f.evidence).filter_map(|e| e.frame).collect()
}

#[cfg(test)]
mod tests {
    use roce_common::{
        abi::{Direction, Space},
        units::Qpn,
    };

    use super::*;

    fn key(qp: u32) -> FlowKey {
        let addr = |n| Addr::v4([10, 0, 0, n]);
        FlowKey::new(Tap::new(0, Direction::Ingress), addr(1), addr(2), Qpn::new(qp), Space::Request)
    }

    fn at(frame: u64) -> Evidence {
        Evidence { frame: Some(frame), time: Nanos(frame), psn: Some(Psn::new(7)), what: "gap" }
    }

    #[test]
    fn counts_are_exact_and_examples_bounded() {
        let mut found = Findings::default();
        for i in 0..10_000 {
            found.note(Code::LossBeforeTap, key(i), at(u64::from(i)));
        }
        found.add(Code::LossBeforeTap, key(77), 5);
        assert_eq!((found.count(Code::LossBeforeTap), found.log().len()), (10_005, MOST_EXAMPLES));
        let report = found.report(|_| "0".to_owned());
        let [one] = &report[..] else { panic!("{report:?}") };
        assert_eq!((one.subjects, one.more_subjects, one.flows.len()), (4_096, true, MOST_LISTED));
        assert_eq!((one.flows[0].dest_qp, one.flows[0].count), (Some(77), Some(6)));
        assert_eq!(one.seen, "10005 PSNs lost before this tap");
        assert_eq!(frames(&report).into_iter().collect::<Vec<_>>(), (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn the_gravest_finding_comes_first_and_is_the_worst() {
        let mut found = Findings::default();
        assert_eq!(found.worst(), None);
        found.add(Code::NotEct, Subject::Capture, 1);
        assert_eq!(found.worst(), Some(Severity::Info));
        found.add(Code::LossAfterTap, Subject::Capture, 1);
        found.add(Code::BadIcrc, Subject::Capture, 0);
        assert_eq!(found.worst(), Some(Severity::Warning));
        let codes: Vec<_> = found.report(|_| String::new()).iter().map(|f| f.code).collect();
        assert_eq!(codes, ["loss-after-tap", "not-ect"]);
    }

    #[test]
    fn what_is_taken_back_leaves_no_trace() {
        let mut found = Findings::default();
        found.note(Code::SpuriousRetransmit, key(1), at(3));
        found.note(Code::SpuriousRetransmit, key(2), at(4));
        found.retract(Code::SpuriousRetransmit, key(1));
        found.retract(Code::SpuriousRetransmit, key(3));
        assert_eq!((found.count(Code::SpuriousRetransmit), found.log().len()), (1, 1));
        found.retract(Code::SpuriousRetransmit, key(2));
        assert_eq!((found.worst(), found.report(|_| String::new()).len()), (None, 0));
    }
}
