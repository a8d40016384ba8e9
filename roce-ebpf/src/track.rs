//! Flow state: one entry per (tap, source, destination, destination QPN, space), under a short lock.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use roce_common::{
    abi::{Config, Counter, EventKind, FlowKey, PairKey, Space, Tap},
    flow::Flow,
    units::Qpn,
    wire::{Kind, Packet, Syndrome},
};

use crate::{
    atomic,
    count::Tally,
    event,
    maps::{FLOWS, NEW_FLOW, PAIRS},
};

/// `BPF_NOEXIST`: another CPU may have inserted the flow meanwhile.
const NOEXIST: u64 = 1;
/// The first packets of a flow are all sampled: the pairing lives on them.
const ALWAYS_SAMPLED: u64 = 16;

/// Follows one packet at a tap.
#[inline(always)]
pub(crate) fn observe(cfg: &Config, tally: Tally, tap: Tap, packet: &Packet) {
    let space = match packet.bth.opcode.kind() {
        Kind::Request => Space::Request,
        Kind::Response => Space::Response,
        Kind::Cnp => return,
    };
    let key = FlowKey::new(tap, packet.src, packet.dst, packet.bth.dest_qp, space);
    let (flow, fresh) = match FLOWS.get_ptr_mut(key) {
        Some(flow) => (flow, false),
        None => match create(&key) {
            Some(flow) => (flow, true),
            None => {
                tally.add(Counter::FlowsRefused);
                return;
            }
        },
    };
    // SAFETY: an aligned u32 of a live map value, used as a lock only.
    if !unsafe { atomic::try_lock(&raw mut (*flow).lock) } {
        tally.add(Counter::Untracked);
        return;
    }
    // SAFETY: the helper has no arguments; the lock makes this CPU the only writer of the flow.
    let (outcome, packets) = unsafe {
        let outcome = (*flow).observe(packet, bpf_ktime_get_coarse_ns());
        (outcome, (*flow).packets)
    };
    // SAFETY: this CPU holds the lock.
    unsafe { atomic::unlock(&raw mut (*flow).lock) };

    if let Some(aeth) = packet.aeth {
        match aeth.syndrome() {
            Syndrome::Ack(_) => {}
            Syndrome::PsnSequence => {
                sequence_nak(tap, packet);
                event::telemetry(cfg, tally, tap, packet, EventKind::Nak, u32::from(aeth.raw_syndrome));
                return;
            }
            Syndrome::RnrNak(_) => {
                rnr_nak(tap, packet);
                event::telemetry(cfg, tally, tap, packet, EventKind::RnrNak, u32::from(aeth.raw_syndrome));
                return;
            }
            _ => {
                event::telemetry(cfg, tally, tap, packet, EventKind::Nak, u32::from(aeth.raw_syndrome));
                return;
            }
        }
    }
    let _ = outcome;
    let kind = if fresh {
        EventKind::FirstSight
    } else if packets <= ALWAYS_SAMPLED || (cfg.sample_every != 0 && packets & u64::from(cfg.sample_every - 1) == 0) {
        EventKind::Sample
    } else {
        return;
    };
    event::telemetry(cfg, tally, tap, packet, kind, 0);
}

#[inline(always)]
fn create(key: &FlowKey) -> Option<*mut Flow> {
    let zeroed = NEW_FLOW.get_ptr(0)?;
    // SAFETY: a live per-CPU map value that nobody writes.
    let _lost_a_race_or_full = FLOWS.insert(key, unsafe { &*zeroed }, NOEXIST);
    FLOWS.get_ptr_mut(key)
}

/// The request flow a NAK speaks of: the same interface's other direction, or this one on a mirror port.
#[inline(always)]
fn refused_flow(tap: Tap, nak: &Packet) -> Option<*mut Flow> {
    let pair = PAIRS.get_ptr(PairKey::new(nak.src, nak.dst, nak.bth.dest_qp))?;
    // SAFETY: a live map value.
    let responder = Qpn::new(unsafe { (*pair).sender_qpn });
    let across = FlowKey::new(tap.opposite(), nak.dst, nak.src, responder, Space::Request);
    FLOWS
        .get_ptr_mut(across)
        .or_else(|| FLOWS.get_ptr_mut(FlowKey::new(tap, nak.dst, nak.src, responder, Space::Request)))
}

#[inline(always)]
fn sequence_nak(tap: Tap, nak: &Packet) {
    let Some(flow) = refused_flow(tap, nak) else { return };
    // SAFETY: an aligned u32 of a live map value; the lock makes this CPU the only writer.
    unsafe {
        if atomic::try_lock(&raw mut (*flow).lock) {
            (*flow).note_sequence_nak(nak.bth.psn);
            atomic::unlock(&raw mut (*flow).lock);
        }
    }
}

#[inline(always)]
fn rnr_nak(tap: Tap, nak: &Packet) {
    let Some(flow) = refused_flow(tap, nak) else { return };
    // SAFETY: as above.
    unsafe {
        if atomic::try_lock(&raw mut (*flow).lock) {
            (*flow).note_rnr_nak(nak.bth.psn);
            atomic::unlock(&raw mut (*flow).lock);
        }
    }
}
