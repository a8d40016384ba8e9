//! The ingress tap, from XDP or tc.

use aya_ebpf::{
    helpers::generated::bpf_ktime_get_ns,
    programs::{TcContext, XdpContext},
};
use network_types::ip::Ipv4Hdr;
use roce_common::{
    abi::{Config, Counter, Direction, EventKind, Flags, PairKey, Role, Tap},
    units::{Addr, Ecn},
    wire::{IpVersion, Kind, Malformed, Other, Packet, icrc},
};

use crate::{
    atomic, capture,
    count::Tally,
    ctx::{self, Head, Parsed, Slot},
    event, mad,
    maps::{CONFIG, HEADERS, LOCAL, PAIRS},
    np, queue, track,
};

/// What becomes of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It goes on, unchanged.
    Pass,
    /// It must not reach rxe.
    Drop,
}

/// Whether `addr` is one of this host's.
#[inline(always)]
pub(crate) fn is_local(addr: &Addr) -> bool {
    LOCAL.get_ptr(addr).is_some()
}

/// XDP: the whole ingress tap.
#[inline(always)]
pub(crate) fn xdp(ctx: &XdpContext) -> Fate {
    let verdict = ctx::parse_xdp(ctx, Slot::Xdp);
    // Before it is judged: what it triggers comes after it, and what is consumed is captured too.
    if let Ok(packet) = &verdict
        && let Some(cfg) = CONFIG.get(0)
    {
        if cfg.capture_bytes != 0 {
            capture::xdp(cfg, ctx.ctx, packet);
        }
        mad::xdp(cfg, ctx.ctx, packet);
    }
    let copy = |offset: u16, to: *mut u8, bytes: u32| ctx::copy_xdp(ctx.ctx, u32::from(offset), to, bytes);
    handle(&verdict, || ctx::xdp_destination(ctx), copy)
}

/// tc: the NP, and the whole ingress tap where XDP is not attached.
#[inline(always)]
pub(crate) fn tc(ctx: &TcContext) -> Fate {
    let mut found = Found::of(ctx::parse_skb(ctx, Slot::TcIngress));
    let mut headless = false;
    if found.packet.is_null()
        && matches!(found.other, Other::NotRoce)
        && let Some(parsed) = ctx::parse_headless_skb(ctx, Slot::TcIngress)
    {
        found = Found::of(parsed);
        headless = true;
    }
    let verdict = found.verdict();
    let Some(cfg) = CONFIG.get(0) else { return Fate::Pass };
    let mut fate = Fate::Pass;
    if cfg.flags & Flags::TC_INGRESS != 0 {
        if let Ok(packet) = &verdict {
            let head = if headless { Head::InFront } else { Head::Data };
            capture::skb(cfg, Direction::Ingress, ctx.skb.skb, packet, head);
            mad::skb(cfg, Direction::Ingress, ctx.skb.skb, packet);
        }
        let copy = |offset: u16, to: *mut u8, bytes: u32| ctx::copy_from_mac(ctx.skb.skb, u32::from(offset), to, bytes);
        fate = handle(&verdict, || ctx::skb_destination(ctx), copy);
    }
    if cfg.role == Role::Cp as u32 && cfg.flags & Flags::CP_INGRESS != 0 && !headless {
        congest(ctx, cfg, verdict);
        return fate;
    }
    if let Ok(packet) = &verdict
        && packet.ecn() as u8 == Ecn::Ce as u8
        && packet.payload_len > 0
        && cfg.role == Role::Host as u32
        && is_local(&packet.dst)
        && let Some(tally) = Tally::of(Direction::Ingress)
    {
        if headless && !ctx::restore_head(ctx) {
            tally.add(Counter::NpFailed);
        } else {
            np::answer(ctx, cfg, tally, packet);
        }
    }
    fate
}

/// A verdict all of whose parts are always set. The compiler may spill what is not set of a `Result`, and the verifier refuses
/// to see it read.
struct Found {
    packet: *mut Packet,
    other: Other,
}

impl Found {
    #[inline(always)]
    fn of(parsed: Parsed) -> Self {
        match parsed {
            Ok(packet) => Self { packet, other: Other::NotRoce },
            Err(other) => Self { packet: core::ptr::null_mut(), other },
        }
    }

    #[inline(always)]
    fn verdict(self) -> Parsed {
        // SAFETY: null, or a live map value that nobody else refers to: `of` took the only reference.
        unsafe { self.packet.as_mut() }.ok_or(self.other)
    }
}

/// A congestion point where packets enter.
#[inline(always)]
fn congest(ctx: &TcContext, cfg: &Config, verdict: Parsed) {
    let Some(tally) = Tally::of(Direction::Ingress) else { return };
    match verdict {
        Ok(packet) => {
            let is_cnp = packet.bth.opcode.kind() as u8 == Kind::Cnp as u8;
            queue::pass(ctx, cfg, tally, packet, is_cnp);
        }
        Err(_) => queue::pass_other(ctx, cfg, tally),
    }
}

/// `copy` copies bytes of the frame, from an offset behind its Ethernet header's first byte.
#[inline(always)]
fn handle(
    verdict: &Parsed,
    destination: impl FnOnce() -> Option<Addr>,
    copy: impl FnOnce(u16, *mut u8, u32) -> bool,
) -> Fate {
    let Some(tally) = Tally::of(Direction::Ingress) else { return Fate::Pass };
    match verdict {
        Err(Other::NotRoce) => {
            tally.add(Counter::NotRoce);
            Fate::Pass
        }
        Err(Other::RoceV1) => {
            tally.add(Counter::Rocev1);
            Fate::Pass
        }
        Err(Other::Malformed(reason)) => malformed(tally, *reason, destination),
        Ok(packet) => well_formed(tally, packet, copy),
    }
}

/// Malformed packets can panic rxe, so the guard stops those for a local address. A later fragment has no port, so it
/// may be anybody's; a packet whose headers could not be read is not known to be malformed.
#[inline(always)]
fn malformed(tally: Tally, reason: Malformed, destination: impl FnOnce() -> Option<Addr>) -> Fate {
    tally.add(Counter::of_malformed(reason));
    let Some(cfg) = CONFIG.get(0) else { return Fate::Pass };
    if cfg.role != Role::Host as u32
        || cfg.flags & Flags::GUARD == 0
        || matches!(reason, Malformed::UdpFragment | Malformed::TruncatedCapture)
    {
        return Fate::Pass;
    }
    match destination() {
        Some(addr) if is_local(&addr) => {
            tally.add(Counter::GuardDropped);
            Fate::Drop
        }
        _ => Fate::Pass,
    }
}

#[inline(always)]
fn well_formed(tally: Tally, packet: &Packet, copy: impl FnOnce(u16, *mut u8, u32) -> bool) -> Fate {
    tally.add(Counter::Rocev2);
    let Some(cfg) = CONFIG.get(0) else { return Fate::Pass };
    let tap = Tap::new(cfg.ifindex, Direction::Ingress);
    if packet.bth.opcode.kind() as u8 == Kind::Cnp as u8 {
        return cnp(cfg, tally, tap, packet, copy);
    }
    tally.add(Counter::of_ecn(packet.ecn()));
    track::observe(cfg, tally, tap, packet);
    Fate::Pass
}

/// A CNP for one of our queue pairs goes to the controller; rxe never sees it.
#[inline(always)]
fn cnp(cfg: &Config, tally: Tally, tap: Tap, packet: &Packet, copy: impl FnOnce(u16, *mut u8, u32) -> bool) -> Fate {
    tally.add(Counter::Cnp);
    let before = track::cnp(tap, packet);
    if !packet.bth.becn {
        tally.add(Counter::CnpWithoutBecn);
    }
    if cfg.role != Role::Host as u32 || !is_local(&packet.dst) {
        return Fate::Pass;
    }
    match PAIRS.get_ptr_mut(&PairKey::new(packet.src, packet.dst, packet.bth.dest_qp)) {
        Some(_) if !is_intact(packet, copy) => tally.add(Counter::CnpBadIcrc),
        Some(pair) => {
            // SAFETY: a live map value; `cnp_rx` is an aligned u64 of it.
            unsafe { atomic::add_u64(&raw mut (*pair).cnp_rx, 1) };
            // SAFETY: the helper has no arguments.
            event::cnp(tally, tap, packet, unsafe { bpf_ktime_get_ns() });
        }
        // Nobody to slow down, and hardly anything a flood of forged CNPs could fill: the more name one queue pair, the fewer
        // are told.
        None => {
            tally.add(Counter::CnpUnpaired);
            if before & before.wrapping_add(1) == 0 {
                let what = event::What::plain(EventKind::CnpUnpaired, u32::from(packet.tos));
                event::telemetry(cfg, tally, tap, packet, &what);
            }
        }
    }
    if cfg.flags & Flags::CONSUME_CNP == 0 {
        return Fate::Pass;
    }
    tally.add(Counter::CnpConsumed);
    Fate::Drop
}

/// Whether a CNP arrived as it was sent: what looks like one and was damaged may name the wrong queue pair.
#[inline(always)]
fn is_intact(packet: &Packet, copy: impl FnOnce(u16, *mut u8, u32) -> bool) -> bool {
    let Some(datagram) = HEADERS.get_ptr_mut(0) else { return false };
    let (bytes, v6) = match packet.ip {
        // With options it is longer, and what its ICRC covers is disputed.
        IpVersion::V4 if packet.l4_offset - packet.l3_offset != Ipv4Hdr::LEN as u16 => return false,
        IpVersion::V4 => (icrc::CNP_LEN_V4, 0),
        IpVersion::V6 => (icrc::CNP_LEN_V6, 1),
    };
    copy(packet.l3_offset, datagram.cast(), bytes as u32) && cnp_icrc_is_right(datagram.cast(), v6) != 0
}

/// A function of its own, for the verifier to follow once.
#[inline(never)]
fn cnp_icrc_is_right(datagram: *const [u8; icrc::CNP_LEN_V6], v6: u32) -> u32 {
    let version = if v6 == 0 { IpVersion::V4 } else { IpVersion::V6 };
    // SAFETY: the front of a live per-CPU map value, larger than this.
    u32::from(icrc::is_intact_cnp(unsafe { &*datagram }, version))
}
