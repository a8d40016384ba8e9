//! What crosses the boundary between the BPF programs and user space: map keys and values, events, configuration and
//! counters. Every type is `repr(C)`, free of padding and checked for size and offsets when it is compiled; QPNs in keys
//! are big-endian bytes, addresses are [`Addr`].

mod capture;
mod config;
mod counters;
mod event;
mod keys;

pub use capture::{CAPTURE_RING_BYTES, CAPTURE_RING_UNUSED, CaptureHead, MAX_CAPTURE_BYTES};
pub use config::{Config, Flags, IngressMode, MarkPolicy, Pacer, Role};
pub use counters::{Counter, Counters};
pub use event::{Answered, Event, EventKind, MadEvent};
pub use keys::{
    CnpCount, CnpJob, CpClass, CpStats, Direction, EventBudget, FlowKey, PaceCell, PairKey, PairValue, PeerQp,
    RateValue, Space, Tap, VirtualQueue,
};

use crate::units::Addr;

/// Version of everything in this module; it names the pin directory, so that a program never reads another version's maps.
pub const ABI_VERSION: u32 = 2;

/// Most flows a [`FlowKey`] map holds; further ones are counted as refused.
pub const MAX_FLOWS: u32 = 131_072;
/// Most flows whose round trips are kept, about 1 kB each; those of further ones are not measured.
pub const MAX_ROUND_TRIPS: u32 = 32_768;
/// Most queue pairs whose CNPs are counted one by one at the taps of an interface.
pub const MAX_CNPS: u32 = 16_384;
/// Most limited queue pairs.
pub const MAX_RATES: u32 = 131_072;
/// Most entries of PAIRS: two for each pair of queue pairs.
pub const MAX_PAIRS: u32 = 262_144;
/// Most entries of PATH_MTUS: two for each connection whose management was seen.
pub const MAX_PATH_MTUS: u32 = 32_768;
/// Most local addresses of one interface's host.
pub const MAX_LOCAL_ADDRS: u32 = 1_024;
/// Classes of a congestion point, the port itself among them.
pub const CP_CLASSES: u32 = 8;
/// Most HTB classes that wait for queue pairs to start.
pub const START_CLASSES: u32 = 256;
/// Bytes of the CNP ring buffer, which nothing else may fill.
pub const CNP_RING_BYTES: u32 = 1 << 19;
/// Bytes of the telemetry ring buffer.
pub const TELEMETRY_RING_BYTES: u32 = 1 << 20;

const _: () = assert!(size_of::<Addr>() == 16);
