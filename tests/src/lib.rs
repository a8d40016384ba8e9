//! The lab: network namespaces, a software RC endpoint, a replayer, and the main job built from them; and the BPF
//! programs run by hand.

pub mod endpoint;
pub mod lab;
pub mod progtest;
pub mod run;
pub mod units;
