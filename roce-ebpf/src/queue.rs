//! The congestion point: virtual queues of the configured rates, RED on their depths.

use aya_ebpf::{
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::TcContext,
};
use roce_common::{
    abi::{Config, Counter, CpClass},
    dcqcn::cp::{Queue, mark},
    units::Ecn,
    wire::Packet,
};

use crate::{
    count::Tally,
    ctx,
    maps::{CP_CLASSES, CP_DSCP, CP_STATS, VQUEUE},
    mark::set_tos,
    turn,
};

/// A second of the peak is 2^30 ns.
const SECOND_SHIFT: u64 = 30;
/// Offset of the network header of an untagged frame, and where its EtherType stands.
const L3: u16 = 14;
const ETHER_TYPE: u16 = 12;

/// One RoCE packet joins its virtual queue; an ECT packet may leave it as CE. A CNP takes its place in the queue, but is
/// never marked: nobody answers it.
#[inline(always)]
pub(crate) fn pass(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &mut Packet, is_cnp: bool) {
    if cfg.vq_bytes_per_sec == 0 {
        return;
    }
    let (index, class) = class_of(cfg, packet.tos);
    let Some(depth) = join(cfg, index, &class, ctx.len()) else {
        tally.add(Counter::VqContended);
        return;
    };
    // SAFETY: the helper has no arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    if is_cnp || !mark(depth, class.kmin_bytes, class.kmax_bytes, class.pmax, random) {
        return;
    }
    match packet.ecn() {
        Ecn::NotEct => tally.add(Counter::CeNotEct),
        Ecn::Ce => {}
        Ecn::Ect0 | Ecn::Ect1 => {
            let tos = packet.tos | Ecn::Ce as u8;
            if set_tos(ctx, packet, tos) {
                tally.add(Counter::CeMarked);
                if let Some(stats) = CP_STATS.get_ptr_mut(index) {
                    // SAFETY: a live per-CPU map value.
                    unsafe { (*stats).marked += 1 };
                }
            } else {
                tally.add(Counter::MarkFailed);
            }
        }
    }
}

/// Anything else takes its place in the queue, as it does in the real one, and is not touched.
#[inline(always)]
pub(crate) fn pass_other(ctx: &TcContext, cfg: &Config, tally: Tally) {
    if cfg.vq_bytes_per_sec == 0 {
        return;
    }
    let tos = match (ctx::load::<2>(ctx, ETHER_TYPE), ctx::load::<2>(ctx, L3)) {
        (Some([0x08, 0x00]), Some([_, tos])) => tos,
        (Some([0x86, 0xdd]), Some([high, low])) => high << 4 | low >> 4,
        _ => 0,
    };
    let (index, class) = class_of(cfg, tos);
    if join(cfg, index, &class, ctx.len()).is_none() {
        tally.add(Counter::VqContended);
    }
}

/// The class of a packet and its number. The port's own is number 0.
#[inline(always)]
fn class_of(cfg: &Config, tos: u8) -> (u32, CpClass) {
    let index = CP_DSCP.get(u32::from(tos >> 2)).copied().unwrap_or(0);
    match CP_CLASSES.get(index) {
        Some(class) if index != 0 => (index, *class),
        _ => {
            let (kmin_bytes, kmax_bytes, pmax) = (cfg.kmin_bytes, cfg.kmax_bytes, cfg.pmax);
            (0, CpClass { bytes_per_sec: 0, limit_bytes: 0, kmin_bytes, kmax_bytes, pmax })
        }
    }
}

/// Bytes in the class's virtual queue before this packet; `None` where others were always faster: then it passes unmarked, and the
/// queue does not count it.
#[inline(always)]
fn join(cfg: &Config, index: u32, class: &CpClass, bytes: u32) -> Option<u64> {
    let own = class.bytes_per_sec != 0;
    let queue = if own {
        Queue { bytes_per_sec: class.bytes_per_sec, limit_bytes: class.limit_bytes }
    } else {
        Queue { bytes_per_sec: cfg.vq_bytes_per_sec, limit_bytes: cfg.vq_limit_bytes }
    };
    let cell = VQUEUE.get_ptr_mut(if own { index } else { 0 })?;
    // SAFETY: the helper has no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let place = queue.place(bytes);
    // SAFETY: an aligned u64 of a live map value.
    let start = unsafe { turn::take(&raw mut (*cell).empty_at_ns, now, place.cost_ns, place.horizon_ns) }?;
    let depth = queue.depth_bytes(start.wrapping_sub(now));
    note(index, now, bytes, depth);
    Some(depth)
}

/// Keeps the statistics of a class.
#[inline(always)]
fn note(index: u32, now: u64, bytes: u32, depth: u64) {
    let Some(stats) = CP_STATS.get_ptr_mut(index) else { return };
    // SAFETY: a live per-CPU map value.
    let stats = unsafe { &mut *stats };
    stats.packets += 1;
    stats.bytes += u64::from(bytes);
    stats.depth_sum += depth;
    let second = now >> SECOND_SHIFT;
    if stats.second != second {
        stats.second = second;
        stats.peak_bytes = 0;
    }
    if depth > stats.peak_bytes {
        stats.peak_bytes = depth;
    }
}
