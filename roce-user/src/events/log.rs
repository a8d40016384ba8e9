//! The newest records of every kind, bounded: a flood of one kind hides no other, and a reader that is too slow learns how
//! many it has missed.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use roce_common::{
    abi::{Event, EventKind, FlowKey},
    psn::Episode,
    units::{Addr, Nanos, Qpn, Rate},
};

use super::Kind;
use crate::{agent::monotonic, export::story::StoryReport};

/// Records kept of each kind.
pub const HISTORY: usize = 2_048;

/// Something that happened.
#[derive(Clone, PartialEq, Debug)]
pub struct Record {
    /// When, CLOCK_MONOTONIC.
    pub time: Nanos,
    /// What.
    pub what: What,
}

/// See [`Record`].
#[derive(Clone, PartialEq, Debug)]
pub enum What {
    /// The BPF programs reported a packet.
    Packet(Kind, Event),
    /// The controller changed what a local queue pair may send.
    Rate {
        /// Its peer.
        peer: Addr,
        /// The peer's queue pair.
        remote: Qpn,
        /// The local queue pair, where it is known.
        local: Option<Qpn>,
        /// Frame bytes per second; `None`: no longer limited.
        limit: Option<Rate>,
    },
    /// Packets were lost or repeated, and why.
    Episode {
        /// The flow.
        flow: FlowKey,
        /// What happened to it.
        episode: Episode,
    },
    /// A capture wrote a file.
    Capture {
        /// The file.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// Something the user should know.
    Notice(String),
}

impl Record {
    /// The record of an event of the BPF programs; `None` for what is not told one by one.
    pub fn of(event: &Event) -> Option<Self> {
        let kind = match EventKind::from_number(event.kind)? {
            EventKind::Sample
            | EventKind::RunStarted
            | EventKind::RunEnded
            | EventKind::Expired
            | EventKind::Started
            | EventKind::Management => return None,
            EventKind::Cnp => Kind::Cnp,
            EventKind::FirstSight => Kind::FirstSight,
            EventKind::Gap => Kind::Gap,
            EventKind::Nak => Kind::Nak,
            EventKind::RnrNak => Kind::RnrNak,
            EventKind::Discontinuity => Kind::Discontinuity,
            EventKind::CnpSent => Kind::CnpSent,
            EventKind::Silence => Kind::Silence,
            EventKind::CnpUnpaired => Kind::CnpUnpaired,
        };
        Some(Self { time: Nanos(event.time_ns), what: What::Packet(kind, *event) })
    }

    /// A notice, now.
    pub fn notice(text: impl Into<String>) -> Self {
        Self { time: monotonic(), what: What::Notice(text.into()) }
    }

    /// A file that a capture wrote, now.
    pub fn capture(file: PathBuf, why: String) -> Self {
        Self { time: monotonic(), what: What::Capture { file, why } }
    }

    /// Its kind.
    pub const fn kind(&self) -> Kind {
        match self.what {
            What::Packet(kind, _) => kind,
            What::Rate { .. } => Kind::Rate,
            What::Episode { .. } => Kind::Episode,
            What::Capture { .. } => Kind::Capture,
            What::Notice(_) => Kind::Notice,
        }
    }
}

/// Where a reader stands: records of each kind that it has had or missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cursor([u64; Kind::ALL.len()]);

/// What a reader gets at once.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Batch {
    /// Records that were gone before they could be read.
    pub lost: u64,
    /// Sequence number and record, in the order of the log.
    pub records: Vec<(u64, Record)>,
    /// Nothing will follow.
    pub closed: bool,
    /// The interface's name now.
    pub iface: String,
}

#[derive(Debug, Default)]
struct Kept {
    /// Records of this kind so far.
    pushed: u64,
    records: VecDeque<(u64, Record)>,
}

#[derive(Debug)]
struct Inner {
    iface: String,
    /// Records so far.
    next: u64,
    kept: [Kept; Kind::ALL.len()],
    story: Option<StoryReport>,
    closed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Log(Mutex<Inner>);

impl Log {
    /// An empty log of an interface.
    pub fn new(iface: impl Into<String>) -> Self {
        Self(Mutex::new(Inner { iface: iface.into(), next: 0, kept: Default::default(), story: None, closed: false }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a record; the oldest of its kind goes where there are [`HISTORY`] of them.
    pub fn push(&self, record: Record) {
        let mut inner = self.inner();
        let seq = inner.next;
        inner.next += 1;
        let kept = &mut inner.kept[record.kind() as usize];
        if kept.records.len() == HISTORY {
            kept.records.pop_front();
        }
        kept.pushed += 1;
        kept.records.push_back((seq, record));
    }

    /// The interface's name.
    pub fn iface(&self) -> String {
        self.inner().iface.clone()
    }

    /// The interface has another name now.
    pub fn rename(&self, iface: &str) {
        iface.clone_into(&mut self.inner().iface);
    }

    /// What the events amount to so far; `None` before the first look.
    pub fn story(&self) -> Option<StoryReport> {
        self.inner().story.clone()
    }

    /// The events amount to this.
    pub fn set_story(&self, story: StoryReport) {
        self.inner().story = Some(story);
    }

    /// Nothing will be added any more.
    pub fn close(&self) {
        self.inner().closed = true;
    }

    /// The next records of `kinds` behind a cursor, at most `most`; the cursor moves behind them.
    pub fn read(&self, cursor: &mut Cursor, kinds: &[Kind], most: usize) -> Batch {
        let inner = self.inner();
        let mut batch = Batch { closed: inner.closed, iface: inner.iface.clone(), ..Batch::default() };
        for &kind in kinds {
            let kept = &inner.kept[kind as usize];
            let at = &mut cursor.0[kind as usize];
            let oldest = kept.pushed - kept.records.len() as u64;
            batch.lost += oldest.saturating_sub(*at);
            *at = (*at).max(oldest);
        }
        while batch.records.len() < most {
            let next = kinds.iter().filter_map(|&kind| {
                let kept = &inner.kept[kind as usize];
                let index = cursor.0[kind as usize] - (kept.pushed - kept.records.len() as u64);
                Some((kept.records.get(index as usize)?, kind))
            });
            let Some((entry, kind)) = next.min_by_key(|((seq, _), _)| *seq) else { break };
            batch.records.push(entry.clone());
            cursor.0[kind as usize] += 1;
        }
        // More of them are there: not the end yet.
        batch.closed &= batch.records.len() < most;
        batch
    }

    /// A cursor behind which the whole history lies, with nothing lost.
    pub fn start(&self) -> Cursor {
        let inner = self.inner();
        Cursor(std::array::from_fn(|i| inner.kept[i].pushed - inner.kept[i].records.len() as u64))
    }
}

/// CLOCK_MONOTONIC as wall-clock time, by the distance between the two clocks now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wall(i128);

impl Wall {
    /// The distance now.
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i128);
        Self(wall - i128::from(monotonic().0))
    }

    /// Nanoseconds since 1970 of a monotonic time.
    pub fn unix_ns(self, time: Nanos) -> u64 {
        (i128::from(time.0) + self.0).clamp(0, i128::from(u64::MAX)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(n: u32) -> Record {
        let what =
            What::Rate { peer: Addr::v4([10, 0, 0, 1]), remote: Qpn::new(n), local: Some(Qpn::new(1)), limit: None };
        Record { time: Nanos(u64::from(n)), what }
    }

    #[test]
    fn records_come_in_order_and_only_once() {
        let log = Log::new("eth0");
        log.push(rate(1));
        log.push(Record::notice("between"));
        log.push(rate(2));
        let mut cursor = log.start();
        let first = log.read(&mut cursor, Kind::ALL, 2);
        assert_eq!(
            first.records.iter().map(|(s, r)| (*s, r.kind())).collect::<Vec<_>>(),
            [(0, Kind::Rate), (1, Kind::Notice)]
        );
        assert_eq!(log.read(&mut cursor, Kind::ALL, 9).records, [(2, rate(2))]);
        assert_eq!(log.read(&mut cursor, Kind::ALL, 9).records, []);
        let mut other = log.start();
        assert_eq!(log.read(&mut other, &[Kind::Notice], 9).records.len(), 1, "a filter leaves the others");
    }

    #[test]
    fn a_flood_of_one_kind_is_counted_and_hides_no_other() {
        let log = Log::new("eth0");
        log.push(Record::notice("early"));
        let mut slow = log.start();
        for n in 0..3 * HISTORY as u32 {
            log.push(rate(n));
        }
        let batch = log.read(&mut slow, Kind::ALL, usize::MAX);
        assert_eq!(batch.lost, 2 * HISTORY as u64);
        assert_eq!(batch.records.len(), HISTORY + 1);
        assert_eq!(batch.records[0].1.kind(), Kind::Notice);
        assert_eq!(batch.records[1].1, rate(2 * HISTORY as u32));
        // Who comes later has missed nothing: he had not asked.
        let mut late = log.start();
        assert_eq!(log.read(&mut late, Kind::ALL, usize::MAX).lost, 0);
    }

    #[test]
    fn the_end_is_told_behind_the_last_record() {
        let log = Log::new("eth0");
        (0..3).for_each(|n| log.push(rate(n)));
        log.close();
        let mut cursor = log.start();
        assert!(!log.read(&mut cursor, Kind::ALL, 2).closed);
        assert!(log.read(&mut cursor, Kind::ALL, 2).closed);
    }
}
