//! The lab: network namespaces, a software RC endpoint, a replayer, and the main job built from them; and the BPF
//! programs run by hand.

pub mod bench;
pub mod capture;
pub mod dialogue;
pub mod endpoint;
pub mod forge;
pub mod lab;
pub mod management;
pub mod oracle;
pub mod progtest;
pub mod replay;
pub mod rig;
pub mod run;
pub mod units;
pub mod vm;
