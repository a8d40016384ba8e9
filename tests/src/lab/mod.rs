//! Hosts, links and queues in network namespaces. Nothing of it has a name outside this process, and everything ends
//! with it: also after a panic, Ctrl-C or `kill -9`.

mod frames;
mod link;
mod netns;
mod order;
mod qdisc;
pub mod signals;
mod tap;
mod topology;
mod traces;
mod watch;

pub use frames::Route;
pub use link::{Port, connect, format_mac, interface_index, offloads_off, wait_up};
pub use netns::{Netns, privileged};
pub use order::steer;
pub use qdisc::{QueueReader, QueueStats, QueueSummary, Sampler};
pub use tap::{Place, Tap};
pub use topology::{Bottleneck, HostPort, LEAF, Pair, Star, mtu_for, shape, transit};
pub use traces::{Traces, json, roce, run_roce};
pub use watch::{CpuByProgram, CpuTime, Watch};
