//! Connection management: its messages go to user space whole, which reads them by `roce_common::wire::cm`.

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::generated::bpf_ktime_get_ns,
};
use roce_common::{
    abi::{Config, Counter, Direction, EventKind, MadEvent, Tap},
    wire::{
        Packet,
        cm::{self, MAD_BYTES},
    },
};

use crate::{count::Tally, ctx, event, maps::TELEMETRY};

/// Reports the packet of an XDP context, if it may hold a message.
#[inline(always)]
pub(crate) fn xdp(cfg: &Config, ctx: *mut xdp_md, packet: &Packet) {
    if cm::may_be(packet) {
        count(copy_xdp(cfg, ctx, packet), Direction::Ingress);
    }
}

/// Reports the packet of a tc context, likewise.
#[inline(always)]
pub(crate) fn skb(cfg: &Config, direction: Direction, skb: *mut __sk_buff, packet: &Packet) {
    if cm::may_be(packet) {
        count(copy_skb(cfg, Tap::new(cfg.ifindex, direction), skb, packet), direction);
    }
}

/// What became of a message.
const SENT: u32 = 0;
const LIMITED: u32 = 1;
const LOST: u32 = 2;

#[inline(always)]
fn count(what: u32, direction: Direction) {
    if what != SENT
        && let Some(tally) = Tally::of(direction)
    {
        tally.add(if what == LIMITED { Counter::EventsLimited } else { Counter::EventsLost });
    }
}

// Functions of their own for their stack frames.

#[inline(never)]
fn copy_xdp(cfg: &Config, ctx: *mut xdp_md, packet: &Packet) -> u32 {
    let tap = Tap::new(cfg.ifindex, Direction::Ingress);
    report(cfg, tap, packet, |offset, to| ctx::copy_xdp(ctx, offset, to, MAD_BYTES as u32))
}

#[inline(never)]
fn copy_skb(cfg: &Config, tap: Tap, skb: *mut __sk_buff, packet: &Packet) -> u32 {
    report(cfg, tap, packet, |offset, to| ctx::copy_from_mac(skb, offset, to, MAD_BYTES as u32))
}

#[inline(always)]
fn report(cfg: &Config, tap: Tap, packet: &Packet, copy: impl FnOnce(u32, *mut u8) -> bool) -> u32 {
    // SAFETY: the helper has no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    if !event::within_budget(cfg, now) {
        return LIMITED;
    }
    let Some(mut entry) = TELEMETRY.reserve::<MadEvent>(0) else { return LOST };
    let record = entry.as_mut_ptr();
    // SAFETY: the ring's own memory, as large as a record, of which every field is written before it is handed on.
    let copied = unsafe {
        (&raw mut (*record).event).write(event::of(EventKind::Management, tap, packet, now));
        copy(packet.payload_offset() as u32, (&raw mut (*record).mad).cast())
    };
    if !copied {
        entry.discard(0);
        return LOST;
    }
    entry.submit(0);
    SENT
}
