//! Packet sequence numbers and the tracker that explains every one of them.

mod observed;
mod ring;
mod serial;
pub mod tracker;

#[cfg(test)]
mod tests;

pub use observed::{Observed, Outcome};
pub use serial::Psn;
pub use tracker::{Tracker, WINDOW};
