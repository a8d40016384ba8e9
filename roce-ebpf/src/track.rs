//! Flow state: one entry per (tap, source, destination, destination QPN, space), under a short lock.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use roce_common::{
    abi::{Config, Counter, EventKind, FlowKey, PairKey, Space, Tap},
    flow::{Flow, refusal},
    psn::{Account, Fate, Outcome},
    units::{Nanos, Qpn},
    wire::{Kind, Packet, Syndrome},
};

use crate::{
    atomic,
    count::Tally,
    event::{self, What},
    maps::{FLOWS, NEW_FLOW, PAIRS},
};

/// `BPF_NOEXIST`: another CPU may have inserted the flow meanwhile.
const NOEXIST: u64 = 1;
/// The first packets of a flow are all sampled: the pairing lives on them.
const ALWAYS_SAMPLED: u64 = 16;

/// Follows one packet at a tap.
///
/// A stack of 512 bytes for the whole call chain decides the shape: what needs room is a function of its own, and none
/// of them calls another.
#[inline(always)]
pub(crate) fn observe(cfg: &Config, tally: Tally, tap: Tap, packet: &Packet) {
    let mut fresh = 0;
    let Some(flow) = lookup(tap, packet, &mut fresh) else {
        tally.add(Counter::FlowsRefused);
        return;
    };
    // SAFETY: an aligned u64 of a live map value, used as a lock only.
    if !unsafe { atomic::try_lock(&raw mut (*flow).lock) } {
        tally.add(Counter::Untracked);
        return;
    }
    // SAFETY: the helper has no arguments; the lock makes this CPU the only writer of the flow, a live map value.
    let (account, packets, silence) = unsafe {
        let now = bpf_ktime_get_coarse_ns();
        let silence = now.wrapping_sub((*flow).last_seen_ns);
        let account = Account::from_bits(roce_flow_observe(flow, packet, now));
        let packets = (*flow).packets;
        atomic::unlock(&raw mut (*flow).lock);
        (account, packets, silence)
    };
    let mut what = What { kind: EventKind::Sample, value: 0, account: account.bits(), refused: 0 };
    if let Some(syndrome) = refusal(packet) {
        if matches!(syndrome, Syndrome::PsnSequence | Syndrome::RnrNak(_)) {
            what.refused = note_refusal(tap, packet);
        }
        what.kind = if matches!(syndrome, Syndrome::RnrNak(_)) { EventKind::RnrNak } else { EventKind::Nak };
        what.value = packet.aeth.map_or(0, |a| u32::from(a.raw_syndrome));
    } else if fresh != 0 {
        what.kind = EventKind::FirstSight;
    } else if account.is_notable() {
        (what.kind, what.value) = match account.outcome() {
            Outcome::Discontinuity => (EventKind::Discontinuity, 0),
            Outcome::Gap(skipped) => (EventKind::Gap, skipped),
            _ if account.run_started() => {
                what.refused = roce_answered(tap.number(), packet);
                (EventKind::RunStarted, micros(silence))
            }
            _ => match account.ended() {
                Some(run) => (EventKind::RunEnded, run.packets),
                None => (EventKind::Expired, account.expired()),
            },
        };
    } else if packets > ALWAYS_SAMPLED && (cfg.sample_every == 0 || packets & u64::from(cfg.sample_every - 1) != 0) {
        return;
    }
    event::telemetry(cfg, tally, tap, packet, &what);
}

/// The flow of a packet, made where there is none; `None` where the map is full. Sets `fresh` for a new one.
#[inline(never)]
fn lookup(tap: Tap, packet: &Packet, fresh: &mut u32) -> Option<*mut Flow> {
    let space = if packet.bth.opcode.kind() == Kind::Response { Space::Response } else { Space::Request };
    let key = FlowKey::new(tap, packet.src, packet.dst, packet.bth.dest_qp, space);
    if let Some(flow) = FLOWS.get_ptr_mut(&key) {
        return Some(flow);
    }
    let zeroed = NEW_FLOW.get_ptr(0)?;
    // SAFETY: a live per-CPU map value that nobody writes.
    let _lost_a_race_or_full = FLOWS.insert(&key, unsafe { &*zeroed }, NOEXIST);
    *fresh = 1;
    FLOWS.get_ptr_mut(&key)
}

/// How far a request's queue pair had been answered: 1 + the highest PSN of the responses in the low half, µs since the newest
/// of them in the high one. They pass the same interface's other direction, or this one on a mirror port. 0 where they are not
/// known. A global function, as [`roce_flow_observe`], and for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_answered(tap: u32, request: *const Packet) -> u64 {
    let tap = Tap::from_number(tap);
    // SAFETY: the callers pass a live map value; the verifier asks for the null check.
    let Some(request) = (unsafe { request.as_ref() }) else { return 0 };
    let Some(pair) = PAIRS.get_ptr(&PairKey::new(request.src, request.dst, request.bth.dest_qp)) else { return 0 };
    // SAFETY: a live map value.
    let requester = Qpn::new(unsafe { (*pair).sender_qpn });
    let mut key = FlowKey::new(tap.opposite(), request.dst, request.src, requester, Space::Response);
    let mut flow = FLOWS.get_ptr(&key);
    if flow.is_none() {
        key.tap = tap;
        flow = FLOWS.get_ptr(&key);
    }
    let Some(flow) = flow else { return 0 };
    // SAFETY: a live map value. Another CPU may just change it: then this is how far it had been, or is now.
    let (psn, at) = unsafe { ((&raw const (*flow).last_psn).read_volatile(), (*flow).last_seen_ns) };
    // SAFETY: the helper has no arguments.
    let age = unsafe { bpf_ktime_get_coarse_ns() }.wrapping_sub(at);
    u64::from(micros(age)) << 32 | u64::from(psn + 1)
}

/// Whole microseconds, up to the largest number there is room for.
#[inline(always)]
fn micros(ns: u64) -> u32 {
    let us = ns / 1_000;
    if us < u64::from(u32::MAX) { us as u32 } else { u32::MAX }
}

/// Takes a packet into a flow; returns the bits of the tracker's [`Account`].
///
/// A global function: the verifier checks it once, by the types of its arguments, instead of once for every state a
/// program may call it in, which it cannot finish.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_flow_observe(flow: *mut Flow, packet: *const Packet, now: u64) -> u64 {
    // SAFETY: the callers pass live map values and hold the flow's lock; the verifier asks for the null checks.
    let (Some(flow), Some(packet)) = (unsafe { flow.as_mut() }, unsafe { packet.as_ref() }) else { return 0 };
    flow.observe(packet, Nanos(now)).bits()
}

/// Tells the request flow that a NAK refuses what became of it, so that its next run is explained. The flow passes the
/// same interface's other direction, or this one on a mirror port. Returns the fate of the PSN named in the low half and
/// the flow's destination QPN in the high one; 0 where the flow is not known.
#[inline(never)]
fn note_refusal(tap: Tap, nak: &Packet) -> u64 {
    let Some(pair) = PAIRS.get_ptr(&PairKey::new(nak.src, nak.dst, nak.bth.dest_qp)) else { return 0 };
    // SAFETY: a live map value.
    let responder = Qpn::new(unsafe { (*pair).sender_qpn });
    let mut key = FlowKey::new(tap.opposite(), nak.dst, nak.src, responder, Space::Request);
    let mut flow = FLOWS.get_ptr_mut(&key);
    if flow.is_none() {
        key.tap = tap;
        flow = FLOWS.get_ptr_mut(&key);
    }
    let Some(flow) = flow else { return 0 };
    // SAFETY: an aligned u64 of a live map value, used as a lock only.
    if !unsafe { atomic::try_lock(&raw mut (*flow).lock) } {
        return 0;
    }
    let rnr = matches!(refusal(nak), Some(Syndrome::RnrNak(_)));
    // SAFETY: the lock makes this CPU the only writer of the flow.
    let fate = unsafe {
        let fate = if rnr {
            (*flow).tracker.note_rnr_nak(nak.bth.psn);
            Fate::Unknown
        } else {
            (*flow).tracker.note_sequence_nak(nak.bth.psn)
        };
        atomic::unlock(&raw mut (*flow).lock);
        fate
    };
    u64::from(responder.get()) << 32 | fate as u64
}
