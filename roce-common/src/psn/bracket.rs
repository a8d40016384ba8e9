//! Two taps on one path: what one saw pass and the other did not was lost between them.

use super::{Episode, Location};
use crate::flow::Flow;

/// Where something was lost on a path with two taps, in the direction the packets travel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Segment {
    /// Between the sender and the first tap.
    BeforeBoth = 0,
    /// Between the two taps.
    Between = 1,
    /// Behind the second tap.
    BehindBoth = 2,
    /// The two do not tell, or contradict each other: the order of the taps is wrong, or one of them missed packets.
    Unknown = 3,
}

impl Segment {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BeforeBoth => "before_both",
            Self::Between => "between",
            Self::BehindBoth => "behind_both",
            Self::Unknown => "unknown",
        }
    }
}

/// Where the disturbance lies that both episodes tell of: `first` at the tap that the packets pass first, `second` at the
/// other, both of the flow with the same source, destination, destination QPN and space. `None` where they are about
/// different disturbances. No clock is compared, since two captures seldom share one.
pub fn bracket(first: &Episode, second: &Episode) -> Option<Segment> {
    if !is_same(first, second) {
        return None;
    }
    Some(match (first.location, second.location) {
        (Location::BeforeTap, Location::BeforeTap) => Segment::BeforeBoth,
        (Location::AfterTap, Location::BeforeTap) => Segment::Between,
        (Location::AfterTap, Location::AfterTap) | (Location::Responder, Location::Responder) => Segment::BehindBoth,
        _ => Segment::Unknown,
    })
}

/// They answer the same NAK, or, where no NAK was seen, start at the same PSN.
fn is_same(a: &Episode, b: &Episode) -> bool {
    match (a.evidence.nak, b.evidence.nak) {
        (Some(one), Some(other)) => one.seen.psn == other.seen.psn,
        _ => a.first == b.first,
    }
}

/// Packets of a flow that passed the first tap and not the second, where both saw all of the flow: the difference of what
/// they counted, and what the second one's tracker makes of it. They are equal unless losses left no trace (the last
/// packets of a flow, or a repeat's first).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LostBetween {
    /// Packets the first counted and the second did not; negative where the second saw more.
    pub packets: i64,
    /// `lost + lost_again` at the second tap beyond those at the first.
    pub told: i64,
}

impl LostBetween {
    /// What was lost of a flow between its first tap and its second.
    pub const fn of(first: &Flow, second: &Flow) -> Self {
        Self { packets: first.packets as i64 - second.packets as i64, told: lost_of(second) - lost_of(first) }
    }
}

const fn lost_of(flow: &Flow) -> i64 {
    flow.tracker.lost as i64 + flow.tracker.lost_again as i64
}
