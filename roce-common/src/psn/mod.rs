//! Packet sequence numbers and the tracker that explains every one of them.

mod serial;
pub mod tracker;

pub use serial::Psn;
