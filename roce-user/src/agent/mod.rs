//! The running agent of one interface: events in, commands out, reports now and then.
//!
//! | file | what |
//! |---|---|
//! | `open` | settings → attachment, pacer, controller |
//! | `congestion` | what a congestion point shows |
//! | `queue_pairs` | what the kernel tells of queue pairs: who owns them, for reports and for the pairing |
//! | `controller` | the control thread: CNPs in, rates out |
//! | `reaction` | how long that takes |
//! | `run` | the loop of everything else |
//! | `packets` | packets for a capture |
//! | `partners` | which flows and CNPs belong together |
//! | `publish` | what readers of its events are told |
//! | `story` | what events amount to: episodes and findings |
//! | `report` | what is shown: JSON lines or a table |

mod congestion;
mod controller;
mod open;
mod packets;
mod partners;
mod path_mtus;
mod publish;
mod queue_pairs;
mod reaction;
mod report;
mod run;
mod story;

pub use congestion::{CongestionLine, congestion_lines};
pub use controller::{Controller, News, Order, Progress, Running, Wait};
pub use open::{Agent, Plan, detected_link_rate};
pub use partners::Partners;
pub use publish::RateChange;
pub use queue_pairs::{Ends, Owners};
pub use reaction::Reactions;
pub use report::{FlowLine, Output, flow_lines};

pub use crate::dataplane::monotonic;
