//! The congestion point: a virtual queue of the configured rate, RED on its depth.

use aya_ebpf::{
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::TcContext,
};
use roce_common::{
    abi::{Config, Counter},
    dcqcn::cp::{Queue, mark},
    units::Ecn,
    wire::Packet,
};

use crate::{atomic, count::Tally, maps::VQUEUE, mark::set_tos};

/// Tries to join the queue this often; then the packet passes unmarked and uncounted by the queue.
const JOIN_TRIES: u32 = 16;

/// One packet joins the virtual queue; an ECT packet may leave it as CE. A CNP takes its place in the queue, but is
/// never marked: nobody answers it.
#[inline(always)]
pub(crate) fn pass(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &mut Packet, is_cnp: bool) {
    if cfg.vq_bytes_per_sec == 0 {
        return;
    }
    let Some(depth) = join(cfg, ctx.len()) else {
        tally.add(Counter::VqContended);
        return;
    };
    // SAFETY: the helper has no arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    if is_cnp || !mark(depth, cfg.kmin_bytes, cfg.kmax_bytes, cfg.pmax, random) {
        return;
    }
    match packet.ecn() {
        Ecn::NotEct => tally.add(Counter::CeNotEct),
        Ecn::Ce => {}
        Ecn::Ect0 | Ecn::Ect1 => {
            let tos = packet.tos | Ecn::Ce as u8;
            if set_tos(ctx, packet, tos) {
                tally.add(Counter::CeMarked);
            } else {
                tally.add(Counter::MarkFailed);
            }
        }
    }
}

/// Bytes in the virtual queue before this packet.
#[inline(always)]
fn join(cfg: &Config, bytes: u32) -> Option<u64> {
    let queue = Queue { bytes_per_sec: cfg.vq_bytes_per_sec, limit_bytes: cfg.vq_limit_bytes };
    let cell = VQUEUE.get_ptr_mut(0)?;
    // SAFETY: the helper has no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    for _ in 0..JOIN_TRIES {
        // SAFETY: an aligned u64 of a live map value.
        let old = unsafe { (&raw const (*cell).empty_at_ns).read_volatile() };
        let arrival = queue.arrive(old, now, bytes);
        // SAFETY: as above.
        if unsafe { atomic::replace_u64(&raw mut (*cell).empty_at_ns, old, arrival.empty_at_ns) } {
            return Some(arrival.depth_bytes);
        }
    }
    None
}
