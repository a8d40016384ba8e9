//! Telling user space.

use aya_ebpf::{helpers::generated::bpf_ktime_get_ns, maps::RingBuf};
use roce_common::{
    abi::{Config, Counter, Event, EventKind, Tap},
    wire::Packet,
};

use crate::{
    count::Tally,
    maps::{CNP_RING, EVENT_BUDGET, TELEMETRY},
};

/// A tick of the event budget: 2^26 ns, about 1/16 second.
const TICK_SHIFT: u64 = 26;

/// Hands a CNP for a local queue pair to the controller. Its ring carries nothing else.
#[inline(always)]
pub(crate) fn cnp(tally: Tally, tap: Tap, packet: &Packet, now: u64) {
    if !push(&CNP_RING, tap, packet, &What::plain(EventKind::Cnp, u32::from(packet.tos)), now) {
        tally.add(Counter::CnpRingFull);
    }
}

/// What an event says besides which packet it is about; see [`Event`].
pub(crate) struct What {
    pub(crate) kind: EventKind,
    pub(crate) value: u32,
    pub(crate) account: u64,
    /// [`Event::fate`] in the low half, [`Event::refused_qp`] in the high one.
    pub(crate) refused: u64,
}

impl What {
    #[inline(always)]
    pub(crate) const fn plain(kind: EventKind, value: u32) -> Self {
        Self { kind, value, account: 0, refused: 0 }
    }
}

/// Reports something about `packet`, within this CPU's budget. A function of its own: a packet may be reported twice.
#[inline(never)]
pub(crate) fn telemetry(cfg: &Config, tally: Tally, tap: Tap, packet: &Packet, what: &What) {
    // SAFETY: the helper has no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    if !within_budget(cfg, now) {
        tally.add(Counter::EventsLimited);
    } else if !push(&TELEMETRY, tap, packet, what, now) {
        tally.add(Counter::EventsLost);
    }
}

#[inline(always)]
pub(crate) fn within_budget(cfg: &Config, now: u64) -> bool {
    let Some(budget) = EVENT_BUDGET.get_ptr_mut(0) else { return false };
    let tick = now >> TICK_SHIFT;
    // SAFETY: a live per-CPU map value.
    let budget = unsafe { &mut *budget };
    if budget.tick != tick {
        budget.tick = tick;
        budget.used = 0;
    }
    if budget.used >= u64::from(cfg.events_per_tick) {
        return false;
    }
    budget.used += 1;
    true
}

/// A plain event of a packet.
#[inline(always)]
pub(crate) fn of(kind: EventKind, tap: Tap, packet: &Packet, now: u64) -> Event {
    Event {
        time_ns: now,
        kind: kind as u32,
        tap,
        src: packet.src,
        dst: packet.dst,
        dest_qp: packet.bth.dest_qp.get(),
        psn: packet.bth.psn.get(),
        value: 0,
        src_port: packet.src_port,
        opcode: packet.bth.opcode.get(),
        tos: packet.tos,
        account: 0,
        fate: 0,
        refused_qp: 0,
    }
}

#[inline(always)]
fn push(ring: &RingBuf, tap: Tap, packet: &Packet, what: &What, now: u64) -> bool {
    let Some(mut entry) = ring.reserve::<Event>(0) else { return false };
    entry.write(Event {
        value: what.value,
        account: what.account,
        fate: what.refused as u32,
        refused_qp: (what.refused >> 32) as u32,
        ..of(what.kind, tap, packet, now)
    });
    entry.submit(0);
    true
}
