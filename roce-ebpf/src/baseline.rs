//! What the benchmark compares with: a program that does nothing, and one that parses and counts.

use aya_ebpf::{bindings::xdp_action, macros::xdp, programs::XdpContext};
use roce_common::abi::{Counter, Direction};

use crate::{
    count::Tally,
    ctx::{self, Slot},
};

/// Does nothing.
#[xdp(frags)]
pub fn baseline_empty(_ctx: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// Parses with the project's parser and counts what it found.
#[xdp(frags)]
pub fn baseline_count(ctx: XdpContext) -> u32 {
    if let Some(tally) = Tally::of(Direction::Ingress) {
        tally.add(match ctx::parse_xdp(&ctx, Slot::Xdp) {
            Ok(_) => Counter::Rocev2,
            Err(_) => Counter::NotRoce,
        });
    }
    xdp_action::XDP_PASS
}
