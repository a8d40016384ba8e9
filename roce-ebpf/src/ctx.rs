//! Packet access. All `unsafe` reading of packet memory is here.
//!
//! Invariant of [`Linear`]: `data` and `end` come from one context within one program run, and no helper that moves
//! packet data was called since. A read is made only after `data + offset + N <= end` was compared, on the very pointer
//! that is read, which is also what the verifier asks for.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, xdp_md},
    helpers::generated::{
        bpf_skb_change_head, bpf_skb_load_bytes, bpf_skb_load_bytes_relative, bpf_skb_store_bytes,
        bpf_xdp_get_buff_len, bpf_xdp_load_bytes,
    },
    programs::{TcContext, XdpContext},
};
use network_types::eth::EthHdr;
use roce_common::{
    units::Addr,
    wire::{Bytes, Link, Malformed, Other, Packet, destination, is_surely_not_roce, parse_into},
};

use crate::maps::{HEADER_BYTES, HEADERS, PACKET};

/// `BPF_HDR_START_MAC`: offsets count from the Ethernet header.
const FROM_MAC: u32 = 0;

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET: u32 = EthHdr::LEN as u32;

/// Where the Ethernet header of a tc context's packet is.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Head {
    /// Where the data begins, as it should be.
    Data = 0,
    /// In front of the data: see [`parse_headless_skb`].
    InFront = 1,
}

/// The linear part of a packet.
struct Linear {
    data: usize,
    end: usize,
}

impl Linear {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let start = self.data + offset;
        if start + N > self.end {
            return None;
        }
        // SAFETY: `start .. start + N` lies inside the linear part, see the module's invariant; a byte array has no
        // alignment.
        Some(unsafe { *(start as *const [u8; N]) })
    }
}

struct XdpFrame {
    linear: Linear,
    ctx: *mut xdp_md,
}

impl Bytes for XdpFrame {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.linear.get(offset)
    }

    #[inline(always)]
    fn wire_len(&self) -> usize {
        // SAFETY: the context of this program run.
        unsafe { bpf_xdp_get_buff_len(self.ctx) as usize }
    }
}

struct SkbFrame {
    linear: Linear,
    skb: *mut __sk_buff,
}

impl Bytes for SkbFrame {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.linear.get(offset)
    }

    #[inline(always)]
    fn wire_len(&self) -> usize {
        // SAFETY: the context of this program run.
        unsafe { (*self.skb).len as usize }
    }
}

/// Headers copied into a per-CPU map value.
struct Copied {
    bytes: *const [u8; HEADER_BYTES],
    have: usize,
    wire_len: usize,
}

impl Bytes for Copied {
    #[inline(always)]
    fn get<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        if offset > HEADER_BYTES - N || offset + N > self.have {
            return None;
        }
        // SAFETY: the map value is live for this program run and `offset + N` lies inside it.
        Some(unsafe { *(self.bytes.cast::<u8>().add(offset).cast::<[u8; N]>()) })
    }

    #[inline(always)]
    fn wire_len(&self) -> usize {
        self.wire_len
    }
}

/// A parsed packet, in the program's own scratch entry.
pub(crate) type Parsed = Result<&'static mut Packet, Other>;

/// The scratch entry a program parses into.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum Slot {
    Xdp = 0,
    TcIngress = 1,
    TcEgress = 2,
    Htb = 3,
}

/// What the packet of an XDP context is. Most packets of most hosts are not ours: they are told here.
#[inline(always)]
pub(crate) fn parse_xdp(ctx: &XdpContext, slot: Slot) -> Parsed {
    if is_surely_not_roce(&XdpFrame { linear: Linear { data: ctx.data(), end: ctx.data_end() }, ctx: ctx.ctx }) {
        return Err(Other::NotRoce);
    }
    parse_or_copy(
        slot,
        |out| parse_xdp_linear(ctx.ctx, out),
        // SAFETY: the context of this program run.
        || unsafe { bpf_xdp_get_buff_len(ctx.ctx) as usize },
        // SAFETY: `bytes` is a map value of HEADER_BYTES, `have` is at most that.
        |bytes, have| unsafe { bpf_xdp_load_bytes(ctx.ctx, 0, bytes.cast(), have) == 0 },
    )
}

/// What the packet of a tc context is, likewise.
#[inline(always)]
pub(crate) fn parse_skb(ctx: &TcContext, slot: Slot) -> Parsed {
    if is_surely_not_roce(&SkbFrame { linear: Linear { data: ctx.data(), end: ctx.data_end() }, skb: ctx.skb.skb }) {
        return Err(Other::NotRoce);
    }
    parse_or_copy(
        slot,
        |out| parse_skb_linear(ctx.skb.skb, out),
        || ctx.len() as usize,
        // SAFETY: `bytes` is a map value of HEADER_BYTES, `have` is at most that.
        |bytes, have| unsafe { bpf_skb_load_bytes(ctx.as_ptr(), 0, bytes.cast(), have) == 0 },
    )
}

/// What the packet of a tc context is whose data begins at the IP header: since Linux 6.9 generic XDP copies a packet and
/// forgets `skb->mac_len`, and tc ingress steps back by that much to the Ethernet header. `None` where the data begins
/// with that header, as it should.
#[inline(always)]
pub(crate) fn parse_headless_skb(ctx: &TcContext, slot: Slot) -> Option<Parsed> {
    // Two bytes: the compiler turns the check for one into a comparison from which the verifier learns nothing.
    let first: [u8; 2] = Linear { data: ctx.data(), end: ctx.data_end() }.get(0)?;
    // An Ethernet address may begin so, too, but not often.
    if !matches!(first[0] >> 4, 4 | 6) || load::<12>(ctx, 0)? == load_from_mac::<12>(ctx)? {
        return None;
    }
    Some(parse_or_copy(
        slot,
        |_| Malformed::TruncatedCapture as u32,
        || ctx.len() as usize + EthHdr::LEN,
        // SAFETY: `bytes` is a map value of HEADER_BYTES, `have` is 1 … HEADER_BYTES.
        |bytes, have| unsafe { bpf_skb_load_bytes_relative(ctx.as_ptr(), 0, bytes.cast(), have, FROM_MAC) == 0 },
    ))
}

/// Gives such a packet its Ethernet header back; says whether it could.
#[inline(always)]
pub(crate) fn restore_head(ctx: &TcContext) -> bool {
    let Some(header) = load_from_mac::<{ EthHdr::LEN }>(ctx) else { return false };
    // SAFETY: the context of this program run.
    let moved = unsafe { bpf_skb_change_head(ctx.skb.skb, EthHdr::LEN as u32, 0) } == 0;
    moved && store(ctx, 0, &header, 0)
}

/// Copies `N` bytes from the Ethernet header on, wherever the data begins.
#[inline(always)]
fn load_from_mac<const N: usize>(ctx: &TcContext) -> Option<[u8; N]> {
    let mut out = [0u8; N];
    // SAFETY: `out` holds N bytes.
    let failed = unsafe { bpf_skb_load_bytes_relative(ctx.as_ptr(), 0, out.as_mut_ptr().cast(), N as u32, FROM_MAC) };
    if failed == 0 { Some(out) } else { None }
}

/// Parses the linear part; where it does not hold the headers (some drivers leave it empty, fragments may start early),
/// `copy`s them out and parses the copy.
#[inline(always)]
fn parse_or_copy(
    slot: Slot,
    parse_linear: impl FnOnce(*mut Packet) -> u32,
    wire_len: impl FnOnce() -> usize,
    copy: impl FnOnce(*mut [u8; HEADER_BYTES], u32) -> bool,
) -> Parsed {
    let Some(out) = PACKET.get_ptr_mut(slot as u32) else { return Err(Other::NotRoce) };
    let mut code = parse_linear(out);
    if code == Malformed::TruncatedCapture as u32 {
        let Some(bytes) = HEADERS.get_ptr_mut(0) else { return Err(Other::NotRoce) };
        let wire_len = wire_len();
        let have = if wire_len < HEADER_BYTES { wire_len } else { HEADER_BYTES };
        // No shorter frame gets here. A comparison, because before Linux 6.8 the verifier learns no lower bound from `!= 0`,
        // and a copy of perhaps no bytes is refused.
        if have >= EthHdr::LEN && copy(bytes, have as u32) {
            code = parse_copied(bytes, have, wire_len, out);
        }
    }
    match code {
        // SAFETY: a live per-CPU map value that was just filled; the slot is this program's own.
        USABLE => Ok(unsafe { &mut *out }),
        NOT_ROCE => Err(Other::NotRoce),
        ROCE_V1 => Err(Other::RoceV1),
        reason => Err(Other::Malformed(Malformed::ALL[(reason & 7) as usize])),
    }
}

// What the parsing functions return, or the number of a `Malformed`. They are functions of their own, because no
// program's stack frame has room for them beside the rest.
const USABLE: u32 = 0x100;
const NOT_ROCE: u32 = 0x101;
const ROCE_V1: u32 = 0x102;

#[inline(never)]
fn parse_xdp_linear(ctx: *mut xdp_md, out: *mut Packet) -> u32 {
    // SAFETY: the context of this program run.
    let linear = unsafe { Linear { data: (*ctx).data as usize, end: (*ctx).data_end as usize } };
    parse_code(&XdpFrame { linear, ctx }, out)
}

#[inline(never)]
fn parse_skb_linear(skb: *mut __sk_buff, out: *mut Packet) -> u32 {
    // SAFETY: the context of this program run.
    let linear = unsafe { Linear { data: (*skb).data as usize, end: (*skb).data_end as usize } };
    parse_code(&SkbFrame { linear, skb }, out)
}

#[inline(never)]
fn parse_copied(bytes: *const [u8; HEADER_BYTES], have: usize, wire_len: usize, out: *mut Packet) -> u32 {
    parse_code(&Copied { bytes, have, wire_len }, out)
}

#[inline(always)]
fn parse_code<B: Bytes>(frame: &B, out: *mut Packet) -> u32 {
    // SAFETY: the caller's per-CPU map value, to which nobody holds a reference. It holds a packet or, at first, zeroes:
    // an opcode, a version, `None`s and `false`s.
    match parse_into(frame, Link::Ethernet, unsafe { &mut *out }) {
        Ok(()) => USABLE,
        Err(Other::NotRoce) => NOT_ROCE,
        Err(Other::RoceV1) => ROCE_V1,
        Err(Other::Malformed(reason)) => reason as u32,
    }
}

/// The destination address of the packet of an XDP context, where the linear part tells it.
#[inline(always)]
pub(crate) fn xdp_destination(ctx: &XdpContext) -> Option<Addr> {
    destination(&XdpFrame { linear: Linear { data: ctx.data(), end: ctx.data_end() }, ctx: ctx.ctx })
}

/// The destination address of the packet of a tc context, where the linear part tells it.
#[inline(always)]
pub(crate) fn skb_destination(ctx: &TcContext) -> Option<Addr> {
    destination(&SkbFrame { linear: Linear { data: ctx.data(), end: ctx.data_end() }, skb: ctx.skb.skb })
}

// Whole packets are copied by these: `to` is a map value with room for `bytes` bytes, of which there are some.

/// Bytes of the packet of an XDP context.
#[inline(always)]
pub(crate) fn xdp_len(ctx: *mut xdp_md) -> u32 {
    // SAFETY: the context of this program run.
    unsafe { bpf_xdp_get_buff_len(ctx) as u32 }
}

/// Bytes of the packet of a tc context.
#[inline(always)]
pub(crate) fn skb_len(skb: *mut __sk_buff) -> u32 {
    // SAFETY: the context of this program run.
    unsafe { (*skb).len }
}

/// Copies bytes of the packet of an XDP context; says whether it could.
#[inline(always)]
pub(crate) fn copy_xdp(ctx: *mut xdp_md, offset: u32, to: *mut u8, bytes: u32) -> bool {
    // SAFETY: the context of this program run; `to` has room.
    unsafe { bpf_xdp_load_bytes(ctx, offset, to.cast(), bytes) == 0 }
}

/// Copies the first bytes of the packet of a tc context; says whether it could.
#[inline(always)]
pub(crate) fn copy_skb(skb: *mut __sk_buff, to: *mut u8, bytes: u32) -> bool {
    // SAFETY: the context of this program run; `to` has room.
    unsafe { bpf_skb_load_bytes(skb.cast(), 0, to.cast(), bytes) == 0 }
}

/// Copies bytes of the packet of a tc context, counted from the Ethernet header on, wherever the data begins.
#[inline(always)]
pub(crate) fn copy_from_mac(skb: *mut __sk_buff, offset: u32, to: *mut u8, bytes: u32) -> bool {
    // SAFETY: the context of this program run; `to` has room.
    unsafe { bpf_skb_load_bytes_relative(skb.cast(), offset, to.cast(), bytes, FROM_MAC) == 0 }
}

/// Copies `N` bytes of the packet at `offset`, from the linear part where they are there and `offset` is below 64.
#[inline(always)]
pub(crate) fn load<const N: usize>(ctx: &TcContext, offset: u16) -> Option<[u8; N]> {
    if offset < 64
        && let Some(bytes) = (Linear { data: ctx.data(), end: ctx.data_end() }).get(usize::from(offset & 63))
    {
        return Some(bytes);
    }
    let mut out = [0u8; N];
    // SAFETY: `out` holds N bytes.
    let failed = unsafe { bpf_skb_load_bytes(ctx.as_ptr(), u32::from(offset), out.as_mut_ptr().cast(), N as u32) };
    if failed == 0 { Some(out) } else { None }
}

/// Overwrites `N` bytes of the packet at `offset`; says whether it could.
///
/// By the helper and never in place: a tc program that writes to packets gets a prologue that copies the header of every
/// cloned packet, that is, of all TCP, and drops the packet where it cannot (`bpf_unclone_prologue` in `net/core/filter.c`).
#[inline(always)]
pub(crate) fn store<const N: usize>(ctx: &TcContext, offset: u16, bytes: &[u8; N], flags: u64) -> bool {
    // SAFETY: `bytes` holds N bytes.
    unsafe { bpf_skb_store_bytes(ctx.skb.skb, u32::from(offset), bytes.as_ptr().cast(), N as u32, flags) == 0 }
}

/// `skb->priority`.
#[inline(always)]
pub(crate) fn priority(ctx: &TcContext) -> u32 {
    // SAFETY: the context of this program run.
    unsafe { (*ctx.skb.skb).priority }
}

/// Sets `skb->priority`.
#[inline(always)]
pub(crate) fn set_priority(ctx: &TcContext, priority: u32) {
    // SAFETY: the context of this program run.
    unsafe { (*ctx.skb.skb).priority = priority };
}

/// Sets the class that a filter of a classful qdisc chooses.
#[inline(always)]
pub(crate) fn set_classid(ctx: &TcContext, classid: u32) {
    // SAFETY: the context of this program run.
    unsafe { (*ctx.skb.skb).tc_classid = classid };
}
