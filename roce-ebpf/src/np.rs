//! The notification point: a CE mark on a packet with payload becomes a CNP to the queue pair that sent it.
//!
//! tc ingress writes a job into this CPU's slot and clones the packet to the same device's egress. The clone runs the
//! egress program at once, on this CPU, with softirqs off; it finds the job, becomes the CNP and leaves.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_clone_redirect, bpf_ktime_get_ns, bpf_skb_change_tail},
    programs::TcContext,
};
use aya_log_ebpf::warn;
use network_types::eth::EthHdr;
use roce_common::{
    abi::{CnpJob, Config, Counter, Direction, EventKind, Flags, PairKey, Tap},
    dcqcn::np::due,
    psn::Psn,
    units::{Ecn, Qpn},
    wire::{IpVersion, Opcode, Packet, emit, source_port},
};

use crate::{
    atomic, capture,
    count::Tally,
    ctx::{self, Head},
    event,
    maps::{CNP_FRAME, JOB, PAIRS},
    track,
};

/// TTL and hop limit of a CNP, as rxe's default.
const CNP_TTL: u8 = 64;
/// `BPF_F_INVALIDATE_HASH`: the clone is no longer the flow its hash names.
const INVALIDATE_HASH: u64 = 2;

/// Answers a CE packet for a local queue pair, at most once per queue pair and interval.
#[inline(always)]
pub(crate) fn answer(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &Packet) {
    tally.add(Counter::NpCe);
    if cfg.flags & Flags::EGRESS_READY == 0 {
        tally.add(Counter::NpNotReady);
        return;
    }
    let Some(pair) = PAIRS.get_ptr_mut(&PairKey::new(packet.src, packet.dst, packet.bth.dest_qp)) else {
        tally.add(Counter::NpUnpaired);
        return;
    };
    // SAFETY: the helper has no arguments; `pair` is a live map value.
    let (now, last, sender) = unsafe { (bpf_ktime_get_ns(), (*pair).last_cnp_ns, (*pair).sender_qpn) };
    if !due(last, now, cfg.cnp_interval_ns) {
        tally.add(Counter::NpHeldBack);
        return;
    }
    // SAFETY: an aligned u64 of a live map value.
    if !unsafe { atomic::replace_u64(&raw mut (*pair).last_cnp_ns, last, now) } {
        // Another CPU answers for this queue pair right now.
        tally.add(Counter::NpHeldBack);
        return;
    }
    let Some(job) = JOB.get_ptr_mut(0) else { return };
    let sender = Qpn::new(sender);
    // SAFETY: a live per-CPU map value.
    unsafe {
        (*job).dest_qp = sender.get();
        (*job).local_qp = packet.bth.dest_qp.get();
        (*job).src_port = u32::from(source_port(packet.bth.dest_qp, sender));
        (*job).psn = packet.bth.psn.get();
        (*job).active = 1;
    }
    // SAFETY: the context of this program run.
    let failed = unsafe { bpf_clone_redirect(ctx.skb.skb, cfg.ifindex, 0) } != 0;
    // SAFETY: a live per-CPU map value. A job still active was not taken: the clone never reached our egress program.
    let left = unsafe { core::mem::replace(&mut (*job).active, 0) };
    if failed || left != 0 {
        tally.add(Counter::NpFailed);
        warn!(ctx, "no CNP for QP {}: redirect {}, job left {}", sender.get(), u32::from(failed), left);
    }
}

/// Turns the clone of a CE packet into its CNP. Says whether the packet was such a clone.
#[inline(always)]
pub(crate) fn take_job(ctx: &TcContext, cfg: &Config, tally: Tally, tap: Tap, packet: &mut Packet) -> bool {
    let Some(job) = JOB.get_ptr_mut(0) else { return false };
    // SAFETY: a live per-CPU map value.
    let job = unsafe { &mut *job };
    if job.active == 0 || job.psn != packet.bth.psn.get() || job.local_qp != packet.bth.dest_qp.get() {
        return false;
    }
    job.active = 0;
    let dest_qp = Qpn::new(job.dest_qp);
    if become_cnp(ctx.skb.skb, cfg, packet, job) {
        tally.add(Counter::Rocev2);
        tally.add(Counter::Cnp);
        tally.add(Counter::NpCnpSent);
        core::mem::swap(&mut packet.src, &mut packet.dst);
        packet.bth.dest_qp = dest_qp;
        event::telemetry(cfg, tally, tap, packet, &event::What::plain(EventKind::CnpSent, job.local_qp));
        packet.bth.opcode = Opcode::CNP;
        packet.bth.psn = Psn::new(0);
        packet.bth.becn = true;
        packet.payload_len = 0;
        packet.tos = cnp_tos(cfg);
        track::cnp(tap, packet);
        capture::skb(cfg, Direction::Egress, ctx.skb.skb, packet, Head::Data);
    } else {
        tally.add(Counter::NpFailed);
    }
    true
}

/// ECT(0) as ConnectX sends it: a switch that would mark it must not drop it.
#[inline(always)]
const fn cnp_tos(cfg: &Config) -> u8 {
    (cfg.cnp_dscp as u8 & 0x3f) << 2 | Ecn::Ect0 as u8
}

/// Makes the packet the CNP of `job`; a function of its own for its stack frame.
#[inline(never)]
fn become_cnp(skb: *mut __sk_buff, cfg: &Config, packet: &Packet, job: &CnpJob) -> bool {
    let ctx = &TcContext::new(skb);
    let dest_qp = Qpn::new(job.dest_qp);
    // A tag that the kernel has not lifted out of the frame: the CNP's layout would be another.
    if usize::from(packet.l3_offset) != EthHdr::LEN {
        return false;
    }
    let Some(macs) = ctx::load::<12>(ctx, 0) else { return false };
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5] = macs;
    let path = emit::Path {
        src_mac: [d0, d1, d2, d3, d4, d5],
        dst_mac: [s0, s1, s2, s3, s4, s5],
        src: packet.dst,
        dst: packet.src,
        tos: cnp_tos(cfg),
        ttl: CNP_TTL,
        ip_id: 0,
        src_port: job.src_port as u16,
    };
    ctx::set_priority(ctx, cfg.cnp_priority);
    let Some(frame) = CNP_FRAME.get_ptr_mut(0) else { return false };
    // SAFETY: a live per-CPU map value that only this program uses.
    let frame = unsafe { &mut *frame };
    emit::cnp(&path, packet.ip, dest_qp, frame);
    match packet.ip {
        IpVersion::V4 => replace::<{ emit::CNP_FRAME_V4 }>(ctx, frame),
        IpVersion::V6 => replace::<{ emit::CNP_FRAME_V6 }>(ctx, frame),
    }
}

/// Makes the first `N` bytes of `frame` the whole packet.
#[inline(always)]
fn replace<const N: usize>(ctx: &TcContext, frame: &[u8; emit::CNP_FRAME_V6]) -> bool {
    let Some(frame) = frame.first_chunk::<N>() else { return false };
    // SAFETY: the context of this program run.
    let resized = unsafe { bpf_skb_change_tail(ctx.skb.skb, N as u32, 0) } == 0;
    resized && ctx::store(ctx, 0, frame, INVALIDATE_HASH)
}
