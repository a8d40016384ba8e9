//! The lab: network namespaces, a software RC endpoint, a replayer, and the main job built from them.

pub mod endpoint;
pub mod lab;
pub mod replay;
pub mod run;
pub mod units;
