//! What a flow's packets say about it besides the fate of its PSNs: fixed in size, without a clock and without allocation,
//! so that each part can be kept in a BPF map value, be fed by events, or be filled offline.
//!
//! | part | wants | bytes |
//! |---|---|---|
//! | [`Mix`] | every packet; made for the BPF side: two increments | 72 |
//! | [`Measured`]: [`Messages`], [`Acks`], [`Repeats`] and [`Reads`](crate::psn::Reads) | every packet that is not the next one in the middle of a message | 352 |
//! | [`Recovery`] | finished episodes | 160 |
//! | [`Probes`] | every request, and the answers to it | 264 |
//! | [`Probe`] | one request at a time, and the answers to it | 8 |
//! | [`RoundTrips`] | samples | 848 |

mod acks;
mod histogram;
mod measured;
mod messages;
mod mix;
mod probe;
mod probes;
mod recovery;
mod repeats;
mod spread;

pub use acks::Acks;
pub use histogram::Histogram;
pub use measured::Measured;
pub use messages::{Messages, SIZE_BUCKETS};
pub use mix::{Class, Mix};
pub use probe::{Answer, Probe, RoundTrips, is_timed};
pub use probes::Probes;
pub use recovery::Recovery;
pub use repeats::Repeats;
pub use spread::Spread;

use crate::units::Nanos;

/// A silence that is counted where something is unanswered: a hundred round trips of a busy network.
pub const SILENCE: Nanos = Nanos::from_millis(10);

const _: () = {
    assert!(size_of::<Mix>() == 72 && size_of::<Messages>() == 184 && size_of::<Acks>() == 80);
    assert!(size_of::<Repeats>() == 16 && size_of::<Recovery>() == 160);
    assert!(size_of::<Probes>() == 264 && size_of::<RoundTrips>() == 848);
};
