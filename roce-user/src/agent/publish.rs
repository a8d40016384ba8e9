//! What an agent tells those who read its events.

use std::{collections::HashMap, sync::Arc};

use roce_common::{
    abi::{Event, EventKind, FlowKey, MadEvent, PeerQp},
    flow::Flow,
    psn::Episode,
    units::{Qpn, Rate},
};

use super::{monotonic, path_mtus::PathMtu, story::Story};
use crate::{
    capture::Triggers,
    control::Command,
    events::{Log, Record, What, tap_name},
};

/// A rate that rises is told again once it has risen by this fraction of the last one told: recovery goes in steps as
/// short as 55 µs, which nobody wants to read one by one. Every fall is told.
const RISE: u64 = 8;

/// A change of what a local queue pair may send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateChange {
    /// The peer and its queue pair.
    pub key: PeerQp,
    /// The local queue pair, where it is known: it may send before its peer has answered.
    pub local: Option<Qpn>,
    /// Frame bytes per second; `None`: no longer limited.
    pub limit: Option<Rate>,
}

/// The rates that were told, on the control thread.
#[derive(Debug, Default)]
pub(super) struct RatesTold(HashMap<PeerQp, Rate>);

impl RatesTold {
    /// The change that a command makes, where it is worth telling. `start` is the rate of limiters that the egress program
    /// made; `local_of` names a local queue pair by its peer's.
    pub(super) fn change(
        &mut self,
        command: &Command,
        start: Option<Rate>,
        local_of: impl Fn(&PeerQp) -> Option<Qpn>,
    ) -> Option<RateChange> {
        let (key, limit) = match command {
            Command::SetRate { key, rate } => (*key, Some(*rate)),
            Command::Adopt { key, .. } => (*key, start),
            Command::Release { key } | Command::ClearRate { key } | Command::Forget { key } => (*key, None),
            Command::AddPair { .. } | Command::RemovePair { .. } | Command::AskKernel | Command::Notice(_) => {
                return None;
            }
        };
        let local = local_of(&key);
        let Some(rate) = limit else {
            return self.0.remove(&key).map(|_| RateChange { key, local, limit });
        };
        let told = self.0.get(&key).map(|r| r.bytes_per_sec());
        let now = rate.bytes_per_sec();
        if told.is_some_and(|told| now >= told && now - told < (told / RISE).max(1)) {
            return None;
        }
        self.0.insert(key, rate);
        Some(RateChange { key, local, limit })
    }
}

/// What a person wants to hear of at once, also who did not ask for events.
fn is_news(event: &Event) -> bool {
    matches!(
        EventKind::from_number(event.kind),
        Some(EventKind::Gap | EventKind::Nak | EventKind::RnrNak | EventKind::Discontinuity | EventKind::CnpSent)
    )
}

/// Puts what happens into the log of events. Records are handed back to be shown.
pub(super) struct Publisher {
    log: Arc<Log>,
    /// A capture is told what happens.
    capture: Option<Triggers>,
    story: Story,
    /// Events that the control thread could not pass on.
    not_shown: u64,
}

impl Publisher {
    /// Tells a log, and a capture where there is one.
    pub(super) fn new(log: Arc<Log>, capture: Option<Triggers>) -> Self {
        Self { log, capture, story: Story::default(), not_shown: 0 }
    }

    fn tell(&self, record: Record) -> Record {
        self.log.push(record.clone());
        record
    }

    /// An event of the BPF programs. Hands back what everybody should hear of at once.
    pub(super) fn packet(&mut self, event: &Event) -> Vec<Record> {
        if let Some(capture) = &self.capture {
            capture.tell(event);
        }
        let record = Record::of(event).map(|record| self.tell(record));
        let mut shown: Vec<_> = record.filter(|_| is_news(event)).into_iter().collect();
        let log = &self.log;
        self.story.event(event, |key, episode| shown.push(tell_episode(log, key, episode)));
        shown
    }

    /// A message of connection management. Hands back what the maps are to be told.
    pub(super) fn management(&mut self, message: &MadEvent) -> Vec<PathMtu> {
        self.story.management(message)
    }

    /// A second has passed: `flows` are those that there are. Hands back as above.
    pub(super) fn look(&mut self, flows: &[(FlowKey, Flow)]) -> Vec<Record> {
        let (log, mut shown) = (&self.log, Vec::new());
        self.story.tick(monotonic(), |key, episode| shown.push(tell_episode(log, key, episode)));
        self.story.keep_only(flows);
        let iface = log.iface();
        log.set_story(self.story.report(|tap| tap_name(&iface, tap)));
        shown
    }

    /// A queue pair's rate changed.
    pub(super) fn rate(&self, change: &RateChange) {
        let RateChange { key, local, limit } = *change;
        let what = What::Rate { peer: key.peer, remote: key.qpn(), local, limit };
        self.tell(Record { time: monotonic(), what });
    }

    /// Something the user should know.
    pub(super) fn notice(&self, text: String) -> Record {
        self.tell(Record::notice(text))
    }

    /// How many events the control thread could not pass on so far.
    pub(super) fn not_shown(&mut self, total: u64) {
        let more = total.saturating_sub(self.not_shown);
        if more != 0 {
            self.not_shown = total;
            self.notice(format!("{more} events came faster than they could be taken, and are missing here"));
        }
    }
}

fn tell_episode(log: &Log, flow: FlowKey, episode: Episode) -> Record {
    let record = Record { time: episode.end, what: What::Episode { flow, episode } };
    log.push(record.clone());
    record
}
