//! What an [`Explainer`](super::Explainer) tells: causes, places and the evidence for them.

use super::{Fate, Psn};
use crate::units::Nanos;

/// Why packets were repeated or PSNs missing. Names in tables and JSON are those of [`Cause::name`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Cause {
    /// A sequence NAK, then everything from its PSN on again.
    GoBackN = 0,
    /// A sequence NAK, then only what was missing.
    SelectiveRepeat = 1,
    /// The requester heard nothing for its ACK timeout and started over at its oldest unanswered PSN.
    Timeout = 2,
    /// The receiver was not ready (RNR NAK) and the requester tried again: no loss.
    RnrRepeat = 3,
    /// Packets changed places, the peer took that for a loss and sent a NAK: no loss.
    ReorderingNaked = 4,
    /// The requester asked again for READ or atomic answers it saw missing (implied NAK), or these answers came again.
    Reask = 5,
    /// Repeated although nothing was seen missing, refused, or late.
    Spurious = 6,
    /// An unreliable connection lost it for good: nobody repeats it.
    UcLoss = 7,
    /// PSNs that never passed, and neither a repeat nor a NAK that says why.
    Unknown = 8,
}

impl Cause {
    /// Every cause, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::GoBackN,
        Self::SelectiveRepeat,
        Self::Timeout,
        Self::RnrRepeat,
        Self::ReorderingNaked,
        Self::Reask,
        Self::Spurious,
        Self::UcLoss,
        Self::Unknown,
    ];

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GoBackN => "go_back_n",
            Self::SelectiveRepeat => "selective_repeat",
            Self::Timeout => "timeout",
            Self::RnrRepeat => "rnr_repeat",
            Self::ReorderingNaked => "reordering_naked",
            Self::Reask => "reask",
            Self::Spurious => "spurious",
            Self::UcLoss => "uc_loss",
            Self::Unknown => "unknown",
        }
    }
}

/// Where what an episode tells of happened, seen from the tap in the direction the packets travel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Location {
    /// Between the sender and this tap.
    BeforeTap = 0,
    /// Beyond this tap: on the way to the peer, or on the answer's way back.
    AfterTap = 1,
    /// In the responder, which was not ready.
    Responder = 2,
    /// What was seen does not tell.
    Unknown = 3,
}

impl Location {
    /// Every place, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::BeforeTap, Self::AfterTap, Self::Responder, Self::Unknown];

    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BeforeTap => "before_tap",
            Self::AfterTap => "after_tap",
            Self::Responder => "responder",
            Self::Unknown => "unknown",
        }
    }
}

/// A PSN and when the tap saw something of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Which.
    pub psn: Psn,
    /// When.
    pub at: Nanos,
}

/// A sequence NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nak {
    /// The PSN the peer expects, and when the NAK passed.
    pub seen: Seen,
    /// What had become of that PSN at this tap.
    pub fate: Fate,
}

/// An RNR NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rnr {
    /// The PSN refused, and when.
    pub seen: Seen,
    /// The timer code, 0 … 31: how long the requester is told to wait.
    pub timer: u8,
}

/// How a value was found.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Known {
    /// Told when the connection was made, or by the host.
    Told = 0,
    /// Inferred from what the requester did.
    Inferred = 1,
}

impl Known {
    /// The name used in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::Inferred => "inferred",
        }
    }
}

/// A local ACK timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckTimeout {
    /// It is 4.096 µs · 2^exponent; 1 … 31.
    pub exponent: u8,
    /// How it is known.
    pub known: Known,
}

impl AckTimeout {
    /// The time a requester waits.
    pub const fn duration(self) -> Nanos {
        Nanos(4_096 << (self.exponent & 31))
    }

    /// The longest timeout of at most `wait`, inferred; `None` below the shortest there is, 8.192 µs.
    pub(super) const fn within(wait: Nanos) -> Option<Self> {
        let units = wait.0 / 4_096;
        if units < 2 {
            return None;
        }
        let exponent = units.ilog2();
        Some(Self { exponent: if exponent > 31 { 31 } else { exponent as u8 }, known: Known::Inferred })
    }
}

/// What speaks for an episode's cause and place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evidence {
    /// The first PSN of the gap that was noticed first, and when.
    pub gap: Option<Seen>,
    /// The sequence NAK that was answered.
    pub nak: Option<Nak>,
    /// The RNR NAK that was answered.
    pub rnr: Option<Rnr>,
    /// When the first packet of the repeat passed.
    pub refill: Option<Nanos>,
    /// For how long the sender had been silent before that.
    pub silence: Nanos,
    /// The sender's ACK timeout.
    pub timeout: Option<AckTimeout>,
    /// An answer that had covered the repeat's first PSN before it was repeated: the answer was lost behind this tap, or
    /// the repeat was needless.
    pub answered: Option<Seen>,
    /// A gap in the READ answers to this flow, where it made the requester ask again.
    pub answer_gap: Option<Seen>,
    /// The repeat starts inside a READ that had been asked for before, not at its start.
    pub partial_read: bool,
}

/// One disturbance of a flow, from its first sign to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Episode {
    /// Why.
    pub cause: Cause,
    /// Where.
    pub location: Location,
    /// The first PSN of the repeat, or of what is missing where nothing was repeated.
    pub first: Psn,
    /// Packets repeated; these are among the tracker's `retransmitted`.
    pub packets: u32,
    /// PSNs that the repeat brought for the first time, or that never came: among the tracker's `lost`.
    pub lost: u32,
    /// PSNs that the repeat skipped: among the tracker's `lost_again`.
    pub lost_again: u32,
    /// Its first sign: the gap, the NAK, or the repeat.
    pub start: Nanos,
    /// Its end: the packet that ended the repeat, or with which what is missing was given up.
    pub end: Nanos,
    /// What speaks for it.
    pub evidence: Evidence,
}

impl Episode {
    /// Whether packets were lost, as far as this tap can tell; not where the receiver was not ready, packets changed
    /// places or were repeated needlessly.
    pub const fn is_loss(&self) -> bool {
        match self.cause {
            Cause::RnrRepeat => self.lost > 0,
            Cause::ReorderingNaked | Cause::Spurious => false,
            Cause::GoBackN
            | Cause::SelectiveRepeat
            | Cause::Timeout
            | Cause::Reask
            | Cause::UcLoss
            | Cause::Unknown => true,
        }
    }
}

/// How many episodes a flow had, by cause and place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally([[u32; Location::ALL.len()]; Cause::ALL.len()]);

impl Tally {
    /// Counts one.
    pub fn add(&mut self, episode: &Episode) {
        let n = &mut self.0[episode.cause as usize][episode.location as usize];
        *n = n.saturating_add(1);
    }

    /// Episodes of this cause at this place.
    pub const fn get(&self, cause: Cause, location: Location) -> u32 {
        self.0[cause as usize][location as usize]
    }

    /// Episodes of this cause at any place.
    pub fn of(&self, cause: Cause) -> u32 {
        self.0[cause as usize].iter().fold(0, |sum, &n| sum.saturating_add(n))
    }

    /// Every cause and place that occurred, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (Cause, Location, u32)> {
        let counts = self.0;
        Cause::ALL
            .into_iter()
            .flat_map(move |cause| {
                Location::ALL
                    .into_iter()
                    .map(move |location| (cause, location, counts[cause as usize][location as usize]))
            })
            .filter(|&(_, _, n)| n != 0)
    }
}
