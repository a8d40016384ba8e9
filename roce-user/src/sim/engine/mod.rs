//! A packet-level discrete-event network around the reaction, notification and congestion points of `roce-common`.
//!
//! Nothing here knows the algorithms: a port asks [`cp::mark`](roce_common::dcqcn::cp::mark), a responder
//! [`np::answer`](roce_common::dcqcn::np::answer), a controller drives [`Rp`](roce_common::dcqcn::Rp), exactly as the programs of
//! the dataplane do. The same scenario gives the same outcome on every machine. `docs/sim.md` says what is modelled.

mod ends;
mod events;
mod flow;
mod network;
mod outcome;
pub(super) mod random;
mod run;
mod scenario;
mod stats;
#[cfg(test)]
mod tests;

pub use outcome::{JOIN_SHARE, JOIN_WINDOW, Outcome, Point};
pub use run::run;
pub use scenario::{MAX_FLOWS, Marking, Pfc, Scenario, Shaper, Workload};
pub use stats::{Depth, jain, percentile};
