//! Pacing: a limited queue pair's packets get a departure time (EDT, for fq) or a class (HTB).

use aya_ebpf::{
    helpers::generated::{bpf_ktime_get_ns, bpf_skb_set_tstamp},
    programs::TcContext,
};
use roce_common::{
    abi::{Config, Counter, Direction, EventKind, PaceCell, Pacer, PeerQp, RateValue, Role, Tap},
    units::{Qpn, Rate},
    wire::{Kind, Packet, Service},
};

use crate::{
    atomic,
    count::Tally,
    ctx::{self, Slot},
    event,
    ingress::is_local,
    maps::{CONFIG, HEARTBEAT, PACE, RATES, START_CLASSES},
    turn,
};

/// No packet is put off further than this; fq's own horizon is 10 s.
const HORIZON_NS: u64 = 5_000_000_000;
/// A limited packet departs no earlier than this from now. On Linux 6.12 packets that were due when fq took them were seen
/// to pass by those of their own flow that still waited for its timer, and the receiver took that for loss; only what is
/// not due yet is sure to be queued.
const LEAD_NS: u64 = 50_000;
/// `BPF_NOEXIST` of linux/bpf.h: add, and replace nothing.
const NOEXIST: u64 = 1;
/// `BPF_SKB_TSTAMP_DELIVERY_MONO`: the departure time is on CLOCK_MONOTONIC (Linux 5.18).
const DELIVERY_MONO: u32 = 1;

/// Whether the kernel has `bpf_skb_set_tstamp`; set by the loader. The verifier knows it and passes over the other branch.
#[unsafe(no_mangle)]
static HAS_SET_TSTAMP: u8 = 1;

/// Whether the controller is alive: a dead or stopped one must not leave the host throttled.
#[inline(always)]
fn controller_alive(cfg: &Config, now: u64) -> bool {
    match HEARTBEAT.get(0) {
        Some(beat) => now.wrapping_sub(*beat) <= cfg.failsafe_ns || *beat > now,
        None => false,
    }
}

/// The rate of the packet's queue pair, when it is limited and the controller alive.
#[inline(always)]
fn rate_of(packet: &Packet) -> Option<(PeerQp, &'static RateValue)> {
    let key = PeerQp::new(packet.dst, packet.bth.dest_qp);
    let rate = RATES.get_ptr(&key)?;
    // SAFETY: a live map value; user space replaces it whole.
    Some((key, unsafe { &*rate }))
}

/// Paces one packet of a local queue pair. Never drops.
#[inline(always)]
pub(crate) fn pace(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &Packet) {
    if cfg.pacer == Pacer::Off as u32 {
        return;
    }
    let (key, rate) = match rate_of(packet) {
        Some(limited) => limited,
        None => {
            if cfg.start_bytes_per_sec == 0 || packet.payload_len == 0 || !start(cfg, tally, packet) {
                return;
            }
            let Some(limited) = rate_of(packet) else { return };
            limited
        }
    };
    let Some(cell) = PACE.get_ptr_mut(&key) else { return };
    let len = u64::from(ctx.len());
    // SAFETY: aligned u64s of a live map value.
    unsafe {
        atomic::add_u64(&raw mut (*cell).bytes, len);
        atomic::add_u64(&raw mut (*cell).packets, 1);
    }
    // SAFETY: the helper has no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: aligned u64s of a live map value. Two CPUs that meet a new rate at once both note nearly the same.
    unsafe {
        if rate.cause_ns != (*cell).cause_ns && rate.cause_ns != 0 {
            (*cell).cause_ns = rate.cause_ns;
            (*cell).reaction_ns = now.saturating_sub(rate.cause_ns);
        }
    }
    let alive = controller_alive(cfg, now);
    tally.add(if alive { Counter::Paced } else { Counter::PacingFailsafe });
    if cfg.pacer != Pacer::Edt as u32 {
        return;
    }
    // An ACK takes its turn behind the data before it and costs nothing. Without a controller everything does: what is
    // booked leaves in order, and nothing is booked any more.
    let cost = if !alive || packet.bth.opcode.is_acknowledge() {
        0
    } else {
        Rate::from_bytes_per_sec(rate.bytes_per_sec).time_for(len).0
    };
    // SAFETY: an aligned u64 of a live map value.
    let Some(departure) = (unsafe { turn::take(&raw mut (*cell).next_ns, earliest(ctx, now), cost, HORIZON_NS) })
    else {
        tally.add(Counter::PaceContended);
        return;
    };
    depart_at(ctx, departure);
}

/// The packet departs neither now nor before a time that somebody else gave it. What is not a time of CLOCK_MONOTONIC within
/// the horizon is no departure time: newer rxe stamps packets with now, others with the wall clock.
#[inline(always)]
fn earliest(ctx: &TcContext, now: u64) -> u64 {
    // SAFETY: the context of this program run.
    let given = unsafe { (*ctx.skb.skb).tstamp };
    let lead = now + LEAD_NS;
    if given > lead && given < now + HORIZON_NS { given } else { lead }
}

/// Tells fq when the packet departs.
#[inline(always)]
fn depart_at(ctx: &TcContext, departure: u64) {
    // SAFETY: a byte of our own read-only data.
    if unsafe { (&raw const HAS_SET_TSTAMP).read_volatile() } != 0 {
        // SAFETY: the context of this program run. It fails on packets that are not IP only, which ours are.
        let _ip_always = unsafe { bpf_skb_set_tstamp(ctx.skb.skb, departure, DELIVERY_MONO) };
    } else {
        // SAFETY: the context of this program run. Before Linux 5.18 fq takes the field for CLOCK_MONOTONIC.
        unsafe { (*ctx.skb.skb).tstamp = departure };
    }
}

/// Limits a queue pair at the start rate, by its first data packet: user space learns of it only when the packets behind
/// it have left. The controller is told, and takes the limiter over. Says whether there is a limiter now.
#[inline(never)]
fn start(cfg: &Config, tally: Tally, packet: &Packet) -> bool {
    // Datagrams have no connection to hold back, and nobody answers them with CNPs.
    if packet.bth.opcode.service() as u8 == Service::Ud as u8 || packet.bth.dest_qp.get() <= Qpn::GSI.get() {
        return false;
    }
    // SAFETY: the helper has no arguments.
    if !controller_alive(cfg, unsafe { bpf_ktime_get_ns() }) {
        return false;
    }
    let mut rate = RateValue { bytes_per_sec: cfg.start_bytes_per_sec, cause_ns: 0, classid: 0, reserved: 0 };
    if cfg.pacer == Pacer::Htb as u32 {
        match START_CLASSES.pop() {
            Ok(Some(classid)) => rate.classid = classid,
            Ok(None) | Err(_) => {
                tally.add(Counter::StartUnlimited);
                return false;
            }
        }
    }
    let key = PeerQp::new(packet.dst, packet.bth.dest_qp);
    let cell = PaceCell { next_ns: 0, bytes: 0, packets: 0, cause_ns: 0, reaction_ns: 0 };
    // A cell that is there is as good: another CPU made it just now.
    let _there_now = PACE.insert(&key, &cell, NOEXIST);
    if RATES.insert(&key, &rate, NOEXIST).is_ok() {
        tally.add(Counter::StartLimited);
        let tap = Tap::new(cfg.ifindex, Direction::Egress);
        event::telemetry(cfg, tally, tap, packet, &event::What::plain(EventKind::Started, rate.classid));
        return true;
    }
    if rate.classid != 0 {
        let _cannot_be_full = START_CLASSES.push(&rate.classid, 0);
    }
    let limited = RATES.get_ptr(&key).is_some();
    if !limited {
        tally.add(Counter::StartUnlimited);
    }
    limited
}

/// The HTB class of a packet, when its queue pair is limited.
#[inline(always)]
pub(crate) fn htb_class(ctx: &TcContext) -> Option<u32> {
    let Ok(packet) = ctx::parse_skb(ctx, Slot::Htb) else { return None };
    if packet.bth.opcode.kind() as u8 == Kind::Cnp as u8 {
        return None;
    }
    let cfg = CONFIG.get(0)?;
    if cfg.role != Role::Host as u32 || cfg.pacer != Pacer::Htb as u32 || !is_local(&packet.src) {
        return None;
    }
    let (_, rate) = rate_of(packet)?;
    // SAFETY: the helper has no arguments.
    if rate.classid == 0 || !controller_alive(cfg, unsafe { bpf_ktime_get_ns() }) {
        return None;
    }
    Some(rate.classid)
}
