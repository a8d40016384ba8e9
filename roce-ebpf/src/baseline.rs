//! For the benchmark only: what it compares with, and the product's paths fed with a packet that goes on.
//!
//! A test run repeats one frame. `bench_*` move its PSN one on and clear its ToS first, so that what is measured is the
//! next packet of a flow that still needs its mark, not the same one over and over.

use aya_ebpf::{
    bindings::{TC_ACT_UNSPEC, xdp_action},
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use roce_common::abi::{Counter, Direction};

use crate::{
    count::Tally,
    ctx::{self, Parsed, Slot},
    egress, ingress,
};

/// Offsets in an untagged IPv4 frame without options.
const TOS: usize = 15;
const PSN: usize = 51;

/// Does nothing.
#[xdp(frags)]
pub fn baseline_empty(_ctx: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// Parses with the project's parser and counts what it found.
#[xdp(frags)]
pub fn baseline_count(ctx: XdpContext) -> u32 {
    count(&ctx::parse_xdp(&ctx, Slot::Xdp), Direction::Ingress);
    xdp_action::XDP_PASS
}

/// Does nothing.
#[classifier]
pub fn baseline_tc_empty(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// Parses with the project's parser and counts what it found.
#[classifier]
pub fn baseline_tc_count(ctx: TcContext) -> i32 {
    count(&ctx::parse_skb(&ctx, Slot::TcEgress), Direction::Egress);
    TC_ACT_UNSPEC
}

/// The next packet of its flow through `roce_xdp`.
#[xdp(frags)]
pub fn bench_xdp(ctx: XdpContext) -> u32 {
    go_on(ctx.data(), ctx.data_end());
    match ingress::xdp(&ctx) {
        ingress::Fate::Pass => xdp_action::XDP_PASS,
        ingress::Fate::Drop => xdp_action::XDP_DROP,
    }
}

/// The next packet of its flow through `roce_tc_egress`.
#[classifier]
pub fn bench_tc_egress(ctx: TcContext) -> i32 {
    go_on(ctx.data(), ctx.data_end());
    egress::tc(&ctx);
    TC_ACT_UNSPEC
}

#[inline(always)]
fn count(parsed: &Parsed, direction: Direction) {
    if let Some(tally) = Tally::of(direction) {
        tally.add(match parsed {
            Ok(_) => Counter::Rocev2,
            Err(_) => Counter::NotRoce,
        });
    }
}

#[inline(always)]
fn go_on(data: usize, end: usize) {
    if data + PSN + 3 > end {
        return;
    }
    // SAFETY: the bytes up to `PSN + 3` lie inside the linear part, as just compared.
    unsafe {
        let tos = (data + TOS) as *mut u8;
        *tos = 0;
        let psn = (data + PSN) as *mut u8;
        let next = u32::from_be_bytes([0, *psn, *psn.add(1), *psn.add(2)]) + 1;
        *psn = (next >> 16) as u8;
        *psn.add(1) = (next >> 8) as u8;
        *psn.add(2) = next as u8;
    }
}
