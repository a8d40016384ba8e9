//! The lab.

pub mod progtest;
