//! Packet sequence numbers and the tracker that explains every one of them.
//!
//! [`Tracker`] counts, [`Account`] is what it says of one packet, and [`Explainer`] makes [`Episode`]s of accounts:
//! what was lost or repeated, why, and on which side of the tap.

mod account;
mod bracket;
mod episode;
mod explain;
mod gaps;
mod observed;
mod reads;
mod refusals;
mod ring;
mod serial;
pub mod tracker;

#[cfg(test)]
mod tests;

pub use account::{Account, Run};
pub use bracket::{LostBetween, Segment, bracket};
pub use episode::{AckTimeout, Cause, Episode, Evidence, Known, Location, Nak, Rnr, Seen, Tally};
pub use explain::{Explainer, NAK_ANSWERED_WITHIN, Passing, SHORTEST_TIMEOUT, UC_REORDER_TIME};
pub use observed::{Fate, Observed, Outcome};
pub use reads::{ReadPlace, Reads};
pub use refusals::Refusals;
pub use ring::{Direct, Mark, MarkRange, Ring};
pub use serial::Psn;
pub use tracker::{Tracker, WINDOW};
