//! Packet sequence numbers and the tracker that explains every one of them.

mod ring;
mod serial;
pub mod tracker;

#[cfg(test)]
mod tests;

pub use serial::Psn;
pub use tracker::{Observed, Outcome, Tracker, WINDOW};
