//! Which packets belong to which recording. Packets, triggers and the time go in, recordings come out.

use std::{collections::VecDeque, fmt, mem};

use roce_common::{
    abi::{CaptureHead, Event, EventKind},
    units::Nanos,
    wire::Opcode,
};

/// A storm: this many CNPs within [`STORM_SPAN`], 1,000 a second. Queue pairs that share a link in balance hear some ten CNPs a second
/// each; a queue pair that nobody slows down hears up to 20,000.
pub const CNP_STORM: u32 = 100;
/// See [`CNP_STORM`].
pub const STORM_SPAN: Nanos = Nanos::from_millis(100);
/// A recording ends after this long, though fewer packets came than it waits for.
const AFTER: Nanos = Nanos::from_millis(2_000);
/// A trigger within this time of the last recording's end starts no new one: lasting trouble would fill the folder with
/// itself and push out how it began.
const PAUSE: Nanos = Nanos::from_millis(1_000);
/// Packets kept besides those before a trigger: it is told of a moment after it happened.
const LATE: usize = 16_384;
/// Most bytes kept in memory before something happens.
const KEPT_BYTES: usize = 32 << 20;
/// Further triggers of one recording that are named in it; the others are counted.
const NAMED: usize = 64;

/// A packet as the BPF programs copied it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Captured {
    /// When, where, what.
    pub head: CaptureHead,
    /// Its first bytes.
    pub bytes: Box<[u8]>,
    /// Packets that did not fit the ring buffer since the one before.
    pub lost_before: u64,
}

/// Why there is a recording.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reason {
    /// PSNs were skipped.
    Gap,
    /// A NAK passed.
    Nak,
    /// An RNR NAK passed.
    RnrNak,
    /// CNPs, many and fast.
    CnpStorm,
}

impl Reason {
    /// The name used in file names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Nak => "nak",
            Self::RnrNak => "rnr-nak",
            Self::CnpStorm => "cnp-storm",
        }
    }
}

/// Something happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trigger {
    /// What.
    pub reason: Reason,
    /// When, CLOCK_MONOTONIC.
    pub time: Nanos,
    /// The packet that shows it; the kind of it is that of the reason.
    pub packet: Option<Event>,
}

impl Trigger {
    /// The trigger that an event is, if it is one.
    pub fn of(event: &Event) -> Option<Self> {
        let reason = match EventKind::from_number(event.kind)? {
            EventKind::Gap => Reason::Gap,
            EventKind::Nak => Reason::Nak,
            EventKind::RnrNak => Reason::RnrNak,
            _ => return None,
        };
        Some(Self { reason, time: Nanos(event.time_ns), packet: Some(*event) })
    }

    /// Whether it is this packet that shows it.
    pub fn is_shown_by(&self, head: &CaptureHead) -> bool {
        self.packet.is_some_and(|e| {
            (e.tap, e.dest_qp, e.psn, u32::from(e.opcode)) == (head.tap, head.dest_qp, head.psn, head.opcode)
        })
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(e) = self.packet else {
            return write!(f, "CNP storm: {CNP_STORM} CNPs within {} ms", STORM_SPAN.0 / 1_000_000);
        };
        match self.reason {
            Reason::Gap => write!(f, "gap: {} PSNs missing before PSN {}", e.value, e.psn)?,
            Reason::Nak => write!(f, "NAK: syndrome {:#04x} at PSN {}", e.value, e.psn)?,
            Reason::RnrNak => write!(f, "RNR NAK: syndrome {:#04x} at PSN {}", e.value, e.psn)?,
            Reason::CnpStorm => write!(f, "CNP storm")?,
        }
        let (src, dst): (std::net::IpAddr, std::net::IpAddr) = (e.src.into(), e.dst.into());
        write!(f, ", {src} > {dst} QP {}", e.dest_qp)
    }
}

/// What goes into one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recording {
    /// Why.
    pub trigger: Trigger,
    /// Packets in the order in which they were copied.
    pub packets: Vec<Captured>,
    /// How many of them are from before the trigger, the packet that shows it included.
    pub before: usize,
    /// What else happened meanwhile.
    pub further: Vec<Trigger>,
    /// And how often beyond those named.
    pub further_unnamed: u64,
    /// Triggers since the recording before that started none.
    pub passed_over: u64,
}

impl Recording {
    /// Packets that did not fit the ring buffer while it lasted.
    pub fn lost(&self) -> u64 {
        self.packets.iter().map(|p| p.lost_before).sum()
    }
}

#[derive(Debug)]
struct Open {
    recording: Recording,
    /// Packets still waited for.
    left: usize,
    until: Nanos,
}

/// See the module.
#[derive(Debug)]
pub struct Window {
    before: usize,
    after: usize,
    kept: VecDeque<Captured>,
    kept_bytes: usize,
    open: Option<Open>,
    /// No recording starts before this time.
    quiet_until: Nanos,
    passed_over: u64,
    storm: (Nanos, u32),
}

impl Window {
    /// A window of at most `before` packets before and `after` packets behind a trigger.
    pub const fn new(before: usize, after: usize) -> Self {
        Self {
            before,
            after,
            kept: VecDeque::new(),
            kept_bytes: 0,
            open: None,
            quiet_until: Nanos(0),
            passed_over: 0,
            storm: (Nanos(0), 0),
        }
    }

    /// A packet, in the order of the ring buffer.
    pub fn packet(&mut self, packet: Captured) -> Option<Recording> {
        let storm = self.is_storm(&packet.head);
        let time = Nanos(packet.head.time_ns);
        let mut done = None;
        if let Some(open) = &mut self.open {
            open.recording.packets.push(packet.clone());
            open.left -= 1;
            if open.left == 0 {
                done = self.close(time);
            }
        }
        self.kept_bytes += packet.bytes.len();
        self.kept.push_back(packet);
        while self.kept.len() > self.before + LATE || self.kept_bytes > KEPT_BYTES {
            let Some(gone) = self.kept.pop_front() else { break };
            self.kept_bytes -= gone.bytes.len();
        }
        if storm {
            let started = self.trigger(Trigger { reason: Reason::CnpStorm, time, packet: None });
            debug_assert!(started.is_none() || done.is_none(), "a recording that just ended is followed by a pause");
            done = done.or(started);
        }
        done
    }

    /// Whether this packet makes it a storm; once per storm.
    fn is_storm(&mut self, head: &CaptureHead) -> bool {
        if head.opcode != u32::from(Opcode::CNP.get()) {
            return false;
        }
        let now = Nanos(head.time_ns);
        let (since, count) = &mut self.storm;
        if now.since(*since) >= STORM_SPAN {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count == CNP_STORM
    }

    /// Something happened. All packets up to then are in already; some behind it may be.
    pub fn trigger(&mut self, trigger: Trigger) -> Option<Recording> {
        if let Some(open) = &mut self.open {
            if open.recording.further.len() < NAMED {
                open.recording.further.push(trigger);
            } else {
                open.recording.further_unnamed += 1;
            }
            return None;
        }
        if trigger.time < self.quiet_until {
            self.passed_over += 1;
            return None;
        }
        let upto = self.kept.iter().rposition(|p| p.head.time_ns <= trigger.time.0).map_or(0, |i| i + 1);
        let from = upto.saturating_sub(self.before);
        let packets: Vec<_> = self.kept.iter().skip(from).take(upto - from + self.after).cloned().collect();
        let left = self.after - (packets.len() - (upto - from));
        let recording = Recording {
            trigger,
            packets,
            before: upto - from,
            further: Vec::new(),
            further_unnamed: 0,
            passed_over: mem::take(&mut self.passed_over),
        };
        self.open = Some(Open { recording, left, until: Nanos(trigger.time.0 + AFTER.0) });
        if left == 0 { self.close(trigger.time) } else { None }
    }

    /// Time has passed.
    pub fn advance(&mut self, now: Nanos) -> Option<Recording> {
        if self.open.as_ref().is_some_and(|open| now >= open.until) { self.close(now) } else { None }
    }

    /// Ends a recording as it is.
    pub fn close(&mut self, now: Nanos) -> Option<Recording> {
        let open = self.open.take()?;
        self.quiet_until = Nanos(now.0 + PAUSE.0);
        Some(open.recording)
    }
}

#[cfg(test)]
mod tests {
    use roce_common::abi::{Direction, Tap};

    use super::*;

    fn packet(psn: u32, ms: u64, opcode: Opcode) -> Captured {
        let head = CaptureHead {
            time_ns: ms * 1_000_000,
            tap: Tap::new(7, Direction::Ingress),
            wire_len: 1_082,
            captured: 4,
            opcode: u32::from(opcode.get()),
            dest_qp: 17,
            psn,
        };
        Captured { head, bytes: psn.to_be_bytes().into(), lost_before: 0 }
    }

    fn data(psn: u32) -> Captured {
        packet(psn, u64::from(psn), Opcode::WRITE_ONLY)
    }

    fn gap(psn: u32) -> Trigger {
        Trigger { reason: Reason::Gap, time: Nanos(u64::from(psn) * 1_000_000), packet: None }
    }

    fn psns(recording: &Recording) -> Vec<u32> {
        recording.packets.iter().map(|p| p.head.psn).collect()
    }

    #[test]
    fn packets_before_and_after_a_late_trigger_are_taken() {
        let mut window = Window::new(3, 4);
        // The trigger was packet 10, and is told of behind packet 12.
        assert!((0..=12).all(|psn| window.packet(data(psn)).is_none()));
        assert_eq!(window.trigger(gap(10)), None);
        assert_eq!(window.packet(data(13)), None);
        assert_eq!(window.trigger(gap(13)), None);
        let recording = window.packet(data(14)).expect("enough");
        assert_eq!((psns(&recording), recording.before), ((8..=14).collect(), 3));
        assert_eq!((recording.trigger, recording.further), (gap(10), vec![gap(13)]));
        // All there already; but first comes a pause, and what happens in it is counted.
        assert_eq!(window.trigger(gap(15)), None);
        assert!((15..=1_100).all(|psn| window.packet(data(psn)).is_none()));
        let recording = window.trigger(gap(1_050)).expect("enough");
        assert_eq!((psns(&recording), recording.passed_over), ((1_048..=1_054).collect(), 1));
    }

    #[test]
    fn a_recording_ends_by_itself_and_with_the_agent() {
        let mut window = Window::new(8, 8);
        assert_eq!(window.packet(data(1)), None);
        assert_eq!(window.trigger(gap(1)), None);
        assert_eq!(window.packet(data(2)), None);
        assert_eq!(window.advance(Nanos::from_millis(2_000)), None);
        assert_eq!(psns(&window.advance(Nanos::from_millis(2_001)).expect("time is up")), [1, 2]);
        assert_eq!(window.trigger(gap(5_000)), None);
        assert_eq!(psns(&window.close(Nanos::from_millis(5_001)).expect("open")), [1, 2]);
        assert_eq!(window.close(Nanos::from_millis(5_002)), None);
    }

    #[test]
    fn a_storm_of_cnps_is_one_trigger() {
        let mut window = Window::new(8, 300);
        // Ten a second are no storm.
        assert!((0..200).all(|n| window.packet(packet(0, 100 * n, Opcode::CNP)).is_none()));
        assert!((0..200).all(|_| window.packet(packet(0, 30_000, Opcode::CNP)).is_none()));
        let recording = window.close(Nanos::from_millis(30_001)).expect("a storm");
        assert_eq!((recording.trigger.reason, recording.before), (Reason::CnpStorm, 8));
        assert_eq!((recording.packets.len(), recording.further.len()), (108, 0));
    }

    #[test]
    fn memory_is_bounded() {
        let mut window = Window::new(2, 2);
        let large = |psn| Captured { bytes: vec![0; 9_216].into(), ..data(psn) };
        (0..50_000).for_each(|psn| assert_eq!(window.packet(if psn < 25_000 { large(psn) } else { data(psn) }), None));
        assert!(window.kept.len() <= 2 + LATE && window.kept_bytes <= KEPT_BYTES, "{}", window.kept_bytes);
        assert_eq!(window.kept_bytes, window.kept.iter().map(|p| p.bytes.len()).sum::<usize>());
    }
}
