//! Copies of packets for `roce run --capture`. While nothing is captured this costs one comparison per packet.

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::generated::bpf_ktime_get_ns,
};
use roce_common::{
    abi::{CaptureHead, Config, Counter, Direction, Flags, MAX_CAPTURE_BYTES, Tap},
    wire::Packet,
};

use crate::{
    count::Tally,
    ctx::{self, Head},
    maps::{CAPTURE, CAPTURED},
};

/// A record before it goes into the ring buffer.
#[repr(C)]
pub(crate) struct Record {
    pub(crate) head: CaptureHead,
    pub(crate) bytes: [u8; ROOM],
}

/// More than [`MAX_CAPTURE_BYTES`]: a power of two and an Ethernet header, see [`provable`].
const ROOM: usize = 16_384 + ctx::ETHERNET as usize + 2;

/// `BPF_RB_NO_WAKEUP`: user space looks by itself, every few milliseconds.
const NO_WAKEUP: u64 = 1;

/// Copies the packet of an XDP context.
#[inline(always)]
pub(crate) fn xdp(cfg: &Config, ctx: *mut xdp_md, packet: &Packet) {
    if cfg.capture_bytes != 0 {
        count(copy_xdp(cfg, ctx, packet), Direction::Ingress);
    }
}

/// Copies the packet of a tc context, as it is now.
#[inline(always)]
pub(crate) fn skb(cfg: &Config, direction: Direction, skb: *mut __sk_buff, packet: &Packet, head: Head) {
    if cfg.capture_bytes != 0 {
        let tap = Tap::new(cfg.ifindex, direction);
        count(copy_skb(cfg, tap, skb, packet, head as u32), direction);
    }
}

#[inline(always)]
fn count(copied: u32, direction: Direction) {
    if copied == 0
        && let Some(tally) = Tally::of(direction)
    {
        tally.add(Counter::CaptureLost);
    }
}

// Functions of their own for their stack frames. They return 1 or, where the packet did not get into the ring, 0.

#[inline(never)]
fn copy_xdp(cfg: &Config, ctx: *mut xdp_md, packet: &Packet) -> u32 {
    let tap = Tap::new(cfg.ifindex, Direction::Ingress);
    record(cfg, tap, packet, ctx::xdp_len(ctx), |to, bytes| ctx::copy_xdp(ctx, 0, to, bytes))
}

#[inline(never)]
fn copy_skb(cfg: &Config, tap: Tap, skb: *mut __sk_buff, packet: &Packet, head: u32) -> u32 {
    if head == Head::InFront as u32 {
        record(cfg, tap, packet, ctx::skb_len(skb) + ctx::ETHERNET, |to, bytes| ctx::copy_from_mac(skb, 0, to, bytes))
    } else {
        record(cfg, tap, packet, ctx::skb_len(skb), |to, bytes| ctx::copy_skb(skb, to, bytes))
    }
}

#[inline(always)]
fn record(cfg: &Config, tap: Tap, packet: &Packet, wire_len: u32, copy: impl FnOnce(*mut u8, u32) -> bool) -> u32 {
    let Some(record) = CAPTURED.get_ptr_mut(0) else { return 0 };
    let mut captured = wire_len;
    // Payload is somebody's data, and nobody's business who did not ask for it.
    if packet.payload_len != 0 && cfg.flags & Flags::CAPTURE_PAYLOAD == 0 {
        let headers = packet.headers_len() as u32;
        if headers < captured {
            captured = headers;
        }
    }
    if captured > cfg.capture_bytes {
        captured = cfg.capture_bytes;
    }
    if captured > MAX_CAPTURE_BYTES {
        captured = MAX_CAPTURE_BYTES;
    }
    // SAFETY: a live per-CPU map value. Programs of one CPU follow each other, and the clone that runs the egress program
    // inside tc ingress comes when ingress has handed its own record on.
    unsafe {
        (*record).head = CaptureHead {
            time_ns: bpf_ktime_get_ns(),
            tap,
            wire_len,
            captured,
            opcode: u32::from(packet.bth.opcode.get()),
            dest_qp: packet.bth.dest_qp.get(),
            psn: packet.bth.psn.get(),
        };
        let captured = provable(&raw const (*record).head.captured);
        if !copy((&raw mut (*record).bytes).cast(), captured as u32) {
            return 0;
        }
        let bytes = core::slice::from_raw_parts(record.cast::<u8>(), size_of::<CaptureHead>() + captured as usize);
        u32::from(CAPTURE.output::<[u8]>(bytes, NO_WAKEUP).is_ok())
    }
}

/// The number of bytes as the verifier understands it: at least an Ethernet header, which every RoCEv2 packet has, at most
/// [`ROOM`]. It is read anew, or the compiler, which knows all that from comparisons that the verifier does not connect,
/// would leave the mask away.
///
/// # Safety
/// `captured` may be read.
#[inline(always)]
unsafe fn provable(captured: *const u32) -> u64 {
    // SAFETY: the caller's contract.
    let captured = unsafe { captured.read_volatile() };
    (u64::from(captured).wrapping_sub(u64::from(ctx::ETHERNET)) & 0x3fff) + u64::from(ctx::ETHERNET)
}
