//! The library of the `roce` program: loader, controller, pacer and inspector.

pub mod agent;
pub mod capture;
pub mod cli;
pub mod config;
mod connections;
pub mod control;
pub mod dataplane;
pub mod events;
pub mod export;
pub mod facts;
pub mod findings;
pub mod inspect;
pub mod netlink;
pub mod pacer;
pub mod pcapng;
pub mod plot;
pub mod rdma;
pub mod sim;
pub mod tui;
