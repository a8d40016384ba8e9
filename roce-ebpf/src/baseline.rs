//! For the benchmark only: what it compares with, and the product's paths fed with a packet that goes on.
//!
//! A test run repeats one frame. `bench_*` first make it the next packet that a host would see: they clear its ToS, and
//! take turns over as many flows as the payload says, each going on by one PSN. So what is measured is the next packet
//! of some flow that still needs its mark, not the same one over and over.

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
const QPN: usize = 47;
const PSN: usize = 51;
/// In the payload: packets made so far (u64) and the number of flows (u32), in the machine's byte order.
const MADE: usize = 54;
const FLOWS: usize = 62;
/// QPN of the first flow.
const FIRST_QPN: u64 = 0x1_0000;

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
    if data + FLOWS + 4 > end {
        return;
    }
    // SAFETY: the bytes up to `FLOWS + 4` lie inside the linear part, as just compared; the accesses are unaligned.
    unsafe {
        *((data + TOS) as *mut u8) = 0;
        let made = (data + MADE) as *mut u64;
        let n = made.read_unaligned();
        made.write_unaligned(n + 1);
        let flows = u64::from(((data + FLOWS) as *const u32).read_unaligned());
        let (psn, flow) = if flows > 1 { (n / flows, n % flows) } else { (n, 0) };
        put24((data + PSN) as *mut u8, psn);
        put24((data + QPN) as *mut u8, FIRST_QPN + flow);
    }
}

/// Writes the low 24 bits of `value`, big-endian.
///
/// # Safety
/// Three bytes at `at` may be written.
#[inline(always)]
unsafe fn put24(at: *mut u8, value: u64) {
    // SAFETY: the caller's contract.
    unsafe {
        *at = (value >> 16) as u8;
        *at.add(1) = (value >> 8) as u8;
        *at.add(2) = value as u8;
    }
}
