//! The egress tap.

use aya_ebpf::{helpers::generated::bpf_ktime_get_ns, programs::TcContext};
use roce_common::{
    abi::{Config, Counter, Direction, Flags, Role, Tap},
    wire::{Kind, Other, Packet},
};

use crate::{
    capture,
    count::Tally,
    ctx::{self, Head, Slot},
    ingress::{Fate, is_local},
    mad,
    maps::CONFIG,
    mark, np, pace, queue, track,
};

/// The whole egress tap; what becomes of the packet.
#[inline(always)]
pub(crate) fn tc(ctx: &TcContext) -> Fate {
    let Some(tally) = Tally::of(Direction::Egress) else { return Fate::Pass };
    match ctx::parse_skb(ctx, Slot::TcEgress) {
        Err(Other::NotRoce) => other(ctx, tally, Counter::NotRoce),
        Err(Other::RoceV1) => other(ctx, tally, Counter::Rocev1),
        Err(Other::Malformed(reason)) => other(ctx, tally, Counter::of_malformed(reason)),
        Ok(packet) => return well_formed(ctx, tally, packet),
    }
    Fate::Pass
}

/// Counts what is not ours, and lets it take its place in a virtual queue.
#[inline(always)]
fn other(ctx: &TcContext, tally: Tally, counter: Counter) {
    tally.add(counter);
    if let Some(cfg) = CONFIG.get(0)
        && cfg.role == Role::Cp as u32
        && cfg.flags & Flags::CP_INGRESS == 0
    {
        queue::pass_other(ctx, cfg, tally);
    }
}

#[inline(always)]
fn well_formed(ctx: &TcContext, tally: Tally, packet: &mut Packet) -> Fate {
    let Some(cfg) = CONFIG.get(0) else { return Fate::Pass };
    let tap = Tap::new(cfg.ifindex, Direction::Egress);
    if np::take_job(ctx, cfg, tally, tap, packet) {
        return Fate::Pass;
    }
    if swapping(cfg, packet) {
        tally.add(Counter::SwapDropped);
        return Fate::Drop;
    }
    tally.add(Counter::Rocev2);
    let is_cnp = packet.bth.opcode.kind() as u8 == Kind::Cnp as u8;
    if is_cnp {
        tally.add(Counter::Cnp);
    }
    write(ctx, cfg, tally, packet, is_cnp);
    // As it leaves.
    capture::skb(cfg, Direction::Egress, ctx.skb.skb, packet, Head::Data);
    mad::skb(cfg, Direction::Egress, ctx.skb.skb, packet);
    if is_cnp {
        track::cnp(tap, packet);
    } else {
        tally.add(Counter::of_ecn(packet.ecn()));
        track::observe(cfg, tally, tap, packet);
    }
    Fate::Pass
}

/// Whether the root qdisc is being replaced under a packet of this host. Meanwhile the device has the kernel's noop qdisc, which
/// refuses every packet, and rxe ends a queue pair whose packet is refused (`send_err`; Linux 6.10, seen on 6.12 and 7.3). A
/// packet that is lost is sent again.
#[inline(always)]
fn swapping(cfg: &Config, packet: &Packet) -> bool {
    cfg.swap_until_ns != 0
        && cfg.role == Role::Host as u32
        // SAFETY: the helper takes nothing.
        && unsafe { bpf_ktime_get_ns() } < cfg.swap_until_ns
        && is_local(&packet.src)
}

/// What the role may write.
#[inline(always)]
fn write(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &mut Packet, is_cnp: bool) {
    if cfg.role == Role::Host as u32 {
        if !is_local(&packet.src) {
            tally.add(Counter::Transit);
            return;
        }
        mark::class_of_service(ctx, cfg, tally, packet, is_cnp);
        if !is_cnp {
            pace::pace(ctx, cfg, tally, packet);
        }
    } else if cfg.role == Role::Cp as u32 && cfg.flags & Flags::CP_INGRESS == 0 {
        queue::pass(ctx, cfg, tally, packet, is_cnp);
    }
}
