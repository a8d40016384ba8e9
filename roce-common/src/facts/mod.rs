//! What a flow's packets say about it besides the fate of its PSNs: fixed in size, without a clock and without allocation,
//! so that each part can be kept in a BPF map value, be fed by events, or be filled offline.
//!
//! | part | wants | bytes |
//! |---|---|---|
//! | [`Mix`] | every packet; made for the BPF side: two increments | 72 |
//! | [`Messages`] | every packet, in order | 184 |
//! | [`Acks`] | every response | 80 |
//! | [`Repeats`] | every packet and what the tracker said of it | 16 |
//! | [`Recovery`] | finished episodes | 160 |
//! | [`Probes`] | every request, and the answers to it | 264 |
//! | [`Histogram`] | samples | 816 |

mod acks;
mod histogram;
mod messages;
mod mix;
mod probes;
mod recovery;
mod repeats;
mod spread;

pub use acks::Acks;
pub use histogram::Histogram;
pub use messages::{Messages, SIZE_BUCKETS};
pub use mix::{Class, Mix};
pub use probes::Probes;
pub use recovery::Recovery;
pub use repeats::Repeats;
pub use spread::Spread;

const _: () = {
    assert!(size_of::<Mix>() == 72 && size_of::<Messages>() == 184 && size_of::<Acks>() == 80);
    assert!(size_of::<Repeats>() == 16 && size_of::<Recovery>() == 160);
    assert!(size_of::<Probes>() == 264 && size_of::<Histogram>() == 816);
};
