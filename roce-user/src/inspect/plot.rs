//! `--plot`: PSN over time of the flows that have most to tell, with what happened to them.
//!
//! Memory is bounded: so many flows are followed, and of each so many points. Where there are more, every second point is
//! dropped and from then on only every second taken; counts in the legend are exact.

use std::collections::{HashMap, hash_map::Entry};

use roce_common::{
    abi::Tap,
    flow::refusal,
    psn::{Outcome, Psn},
    units::{Addr, Ecn, Nanos, Qpn},
    wire::{Kind, Packet, Syndrome},
};

use super::{
    attribution::FlowIndex,
    capture::Frame,
    filter::Flows,
    seen::{Seen, SeenPacket},
};
use crate::{
    export::{CaptureReport, FlowReport},
    plot::{Axis, Panel, Series, Style},
};

/// Flows that are followed: the first ones.
const MOST_FLOWS: usize = 256;
/// Flows that are drawn of each capture: those with most events, then those with most packets.
const MOST_PANELS: usize = 8;
/// Points kept of a curve, and of each kind of event.
const MOST_POINTS: usize = 2_048;
/// Missing PSNs drawn of one gap.
const MOST_OF_GAP: u32 = 32;

/// Events that are drawn, in the order of their colours. The curve itself stands before them.
#[derive(Clone, Copy)]
enum Event {
    Missing,
    Duplicate,
    Filled,
    Ce,
    Cnp,
    Nak,
    Rnr,
}

impl Event {
    const ALL: [(Self, &'static str, Style); 7] = [
        (Self::Missing, "missing", Style::Crosses),
        (Self::Duplicate, "sent again", Style::Dots),
        (Self::Filled, "fills a gap", Style::Dots),
        (Self::Ce, "CE", Style::Dots),
        (Self::Cnp, "CNP", Style::Crosses),
        (Self::Nak, "sequence NAK", Style::Crosses),
        (Self::Rnr, "RNR NAK", Style::Crosses),
    ];
}

/// Points over time, thinned out where there are too many.
#[derive(Default)]
struct Points {
    kept: Vec<(Nanos, i64)>,
    /// Only every so many are kept: 2 to this power.
    thinned: u32,
    seen: u64,
}

impl Points {
    fn add(&mut self, time: Nanos, psn: i64) {
        if self.seen.trailing_zeros() >= self.thinned {
            if self.kept.len() >= MOST_POINTS {
                let mut odd = false;
                self.kept.retain(|_| {
                    odd = !odd;
                    odd
                });
                self.thinned += 1;
            }
            self.kept.push((time, psn));
        }
        self.seen += 1;
    }
}

/// A flow that is followed.
#[derive(Default)]
struct Trace {
    first: Option<Psn>,
    /// The serially highest PSN, and where it stands when the counting goes on through wraps.
    highest: Psn,
    place: i64,
    curve: Points,
    events: [Points; Event::ALL.len()],
}

impl Trace {
    /// Where `psn` stands, counted from the flow's first PSN.
    fn place_of(&self, psn: Psn) -> i64 {
        self.place + i64::from(psn.diff(self.highest))
    }

    fn event(&mut self, event: Event, time: Nanos, place: i64) {
        self.events[event as usize].add(time, place);
    }

    fn packet(&mut self, time: Nanos, seen: &SeenPacket) {
        let psn = seen.packet.bth.psn;
        if self.first.is_none() {
            self.first = Some(psn);
            self.highest = psn;
        }
        if seen.outcome == Outcome::Discontinuity {
            // Drawn as if it went on where it was: millions of PSNs in between would leave nothing to see.
            self.highest = psn;
            self.place += 1;
        }
        let place = self.place_of(psn);
        match seen.outcome {
            Outcome::Far => return,
            Outcome::Gap(missing) => {
                for back in (1..=missing.min(MOST_OF_GAP)).rev() {
                    self.event(Event::Missing, time, place - i64::from(back));
                }
            }
            Outcome::Filled(_) => self.event(Event::Filled, time, place),
            Outcome::Duplicate => self.event(Event::Duplicate, time, place),
            Outcome::NotTracked | Outcome::First | Outcome::InOrder | Outcome::Discontinuity => {}
        }
        if seen.packet.ecn() == Ecn::Ce {
            self.event(Event::Ce, time, place);
        }
        // Acknowledgements are not numbered themselves: their curve would repeat that of the requests.
        if place >= self.place && !seen.packet.bth.opcode.is_acknowledge() {
            self.place = place;
            self.highest = psn;
            self.curve.add(time, place);
        }
    }

    /// Where the flow was at `time`.
    fn place_at(&self, time: Nanos) -> i64 {
        let behind = self.curve.kept.partition_point(|p| p.0 <= time);
        self.curve.kept.get(behind.saturating_sub(1)).map_or(0, |p| p.1)
    }

    /// How much there is to tell.
    fn events(&self) -> u64 {
        self.events.iter().map(|e| e.seen).sum()
    }
}

/// Follows the flows of one capture.
#[derive(Default)]
pub(super) struct Recorder {
    traces: Vec<Trace>,
    /// CNPs by the queue pair they name, with one of them.
    cnps: HashMap<(Tap, Addr, Addr, Qpn), (Packet, Points)>,
}

impl Recorder {
    /// Takes a frame and what it was; `start` is the time of the first frame.
    pub(super) fn frame(&mut self, frame: &Frame<'_>, seen: &Seen, start: Nanos) {
        let Seen::Packet(seen) = seen else { return };
        let time = frame.time.since(start);
        let packet = &seen.packet;
        if packet.bth.opcode.kind() == Kind::Cnp {
            let room = self.cnps.len() < MOST_FLOWS;
            match self.cnps.entry((seen.tap, packet.src, packet.dst, packet.bth.dest_qp)) {
                Entry::Occupied(mut entry) => entry.get_mut().1.add(time, 0),
                Entry::Vacant(entry) if room => entry.insert((*packet, Points::default())).1.add(time, 0),
                Entry::Vacant(_) => {}
            }
        }
        if let Some(trace) = seen.flow.and_then(|flow| self.trace(flow)) {
            trace.packet(time, seen);
        }
        if let Some(trace) = seen.refused.and_then(|flow| self.trace(flow)) {
            let event = if refusal(packet) == Some(Syndrome::PsnSequence) { Event::Nak } else { Event::Rnr };
            let place = trace.place_of(packet.bth.psn);
            trace.event(event, time, place);
        }
    }

    fn trace(&mut self, flow: FlowIndex) -> Option<&mut Trace> {
        if flow >= MOST_FLOWS {
            return None;
        }
        if self.traces.len() <= flow {
            self.traces.resize_with(flow + 1, Trace::default);
        }
        self.traces.get_mut(flow)
    }

    /// At the end of the capture: whose the CNPs are.
    pub(super) fn name_cnps(&mut self, flow_of: impl Fn(Tap, &Packet) -> Option<FlowIndex>) {
        for ((tap, ..), (packet, times)) in std::mem::take(&mut self.cnps) {
            let Some(trace) = flow_of(tap, &packet).and_then(|flow| self.trace(flow)) else { continue };
            let points: Vec<_> = times.kept.iter().map(|&(time, _)| (time, trace.place_at(time))).collect();
            let cnps = &mut trace.events[Event::Cnp as usize];
            cnps.seen += times.seen;
            cnps.kept.extend(points);
        }
    }

    /// The diagrams, one per flow; `report` must hold all flows, in the order of their first packets.
    pub(super) fn panels(&self, report: &CaptureReport, flows: Flows<'_>) -> Vec<Panel> {
        let all = &report.flows;
        let mut chosen: Vec<_> = self
            .traces
            .iter()
            .zip(all)
            .filter(|(trace, flow)| flows.report(flow) && (trace.curve.seen > 1 || trace.events() > 0))
            .collect();
        let asked = chosen.len();
        chosen.sort_by_key(|(trace, flow)| std::cmp::Reverse((trace.events(), flow.packets)));
        chosen.truncate(MOST_PANELS);
        if asked > chosen.len() || all.len() > MOST_FLOWS {
            log::warn!(
                "{}: the plot shows {} flows of {}, those with most events; --flow chooses others",
                report.file,
                chosen.len(),
                all.len()
            );
        }
        let everything =
            |trace: &Trace| trace.events.iter().chain([&trace.curve]).flat_map(|p| p.kept.last()).map(|p| p.0).max();
        let longest = chosen.iter().filter_map(|(trace, _)| everything(trace)).max().unwrap_or_default();
        chosen.into_iter().map(|(trace, flow)| panel(report, flow, trace, longest)).collect()
    }
}

fn panel(report: &CaptureReport, flow: &FlowReport, trace: &Trace, longest: Nanos) -> Panel {
    let (unit, nanos) = match longest.0 {
        0..10_000_000 => ("µs", 1e3),
        10_000_000..10_000_000_000 => ("ms", 1e6),
        _ => ("s", 1e9),
    };
    let points = |points: &Points| points.kept.iter().map(|&(time, psn)| (time.0 as f64 / nanos, psn as f64)).collect();
    let mut series = vec![Series::new(format!("PSN ({} packets)", flow.packets), Style::Line, points(&trace.curve))];
    for (event, name, style) in Event::ALL {
        let of = &trace.events[event as usize];
        // Empty series keep the colours the same in all panels.
        let name = if of.seen == 0 { String::new() } else { format!("{name} ({})", of.seen) };
        series.push(Series::new(name, style, points(of)));
    }
    Panel {
        title: format!(
            "{}: {} > {} QP {} {} at {}",
            report.file, flow.src, flow.dst, flow.dest_qp, flow.space, flow.tap
        ),
        x: Axis {
            range: Some((0.0, longest.0 as f64 / nanos)),
            ..Axis::linear(format!("time since the first frame, {unit}"))
        },
        y: Axis::linear(format!("PSN − {}", flow.first_psn)),
        series,
        levels: Vec::new(),
    }
}
