//! Flow state: one entry per (tap, source, destination, destination QPN, space), under a short lock.

use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns};
use roce_common::{
    abi::{Answered, CnpCount, Config, Counter, EventKind, FlowKey, PairKey, Space, Tap},
    facts::{Measured, Probe, SILENCE},
    flow::{Flow, refusal},
    psn::{Account, Fate, Mark, MarkRange, Outcome, Psn, ReadPlace, Refusals, Ring},
    units::{Dscp, Nanos, Qpn},
    wire::{Kind, Packet, Service, Syndrome},
};

use crate::{
    atomic,
    count::Tally,
    event::{self, What},
    maps::{CNPS, FLOWS, NEW_FLOW, NEW_ROUND_TRIPS, PAIRS, PATH_MTUS, ROUND_TRIPS},
};

/// `BPF_NOEXIST`: another CPU may have inserted the flow meanwhile.
const NOEXIST: u64 = 1;
/// The first packets of a flow are all sampled: the pairing lives on them.
const ALWAYS_SAMPLED: u64 = 16;

/// Tries to tell a flow of a refusal this often: the flow takes it, or another NAK is told, at just that moment.
const TELL_TRIES: u32 = 4;

/// What [`roce_flow_measure`] says: nothing more to be done, or the request is to be timed. Anything above is the
/// [`Probe`] that a response answers.
const NOTHING: u64 = 0;
const TIME_IT: u64 = 1;

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
    let mut silent = 0;
    // SAFETY: the helper has no arguments; the lock makes this CPU the only writer of the flow, a live map value.
    let (account, measured, packets, silence) = unsafe {
        let now = bpf_ktime_get_coarse_ns();
        let silence = now.wrapping_sub((*flow).last_seen_ns);
        if silence >= SILENCE.0 && fresh == 0 {
            silent = roce_silence(tap.number(), packet, flow, now);
        }
        if (*flow).tracker.needs_pmtu(packet.bth.opcode.is_read_request()) {
            roce_learn_pmtu(tap.number(), packet, flow);
        }
        let account = Account::from_bits(roce_flow_observe(flow, packet, now));
        let mut measured = NOTHING;
        if !Measured::skips(packet, account) || packet.bth.ack_req {
            measured = roce_flow_measure(flow, packet, account.bits(), now);
        }
        if measured > TIME_IT {
            roce_round_trip(tap.number(), packet, measured);
        }
        let packets = (*flow).packets;
        atomic::unlock(&raw mut (*flow).lock);
        (account, measured, packets, silence)
    };
    if measured == TIME_IT {
        roce_probe(tap.number(), packet);
    }
    if silent != 0 {
        let refused = silent >> 32 << 32;
        event::telemetry(cfg, tally, tap, packet, &What { refused, ..What::plain(EventKind::Silence, silent as u32) });
    }
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
            Outcome::Gap(skipped) => {
                what.refused = roce_asked_by(tap.number(), packet);
                (EventKind::Gap, skipped)
            }
            _ if account.run_started() => {
                what.refused = roce_answered(tap.number(), packet, flow);
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

/// The flow of the answers to a request, where it is known, and the queue pair that they go to.
#[inline(always)]
fn answers_to(tap: Tap, request: &Packet) -> Option<(*mut Flow, Qpn)> {
    partner(tap, request, Space::Response)
}

/// The flow of the requests that a response answers, likewise.
#[inline(always)]
fn requests_to(tap: Tap, response: &Packet) -> Option<(*mut Flow, Qpn)> {
    partner(tap, response, Space::Request)
}

/// What passes between the two queue pairs of a packet the other way. It passes the same interface's other direction, or this
/// one on a mirror port.
#[inline(always)]
fn partner(tap: Tap, packet: &Packet, space: Space) -> Option<(*mut Flow, Qpn)> {
    let pair = PAIRS.get_ptr(&PairKey::new(packet.src, packet.dst, packet.bth.dest_qp))?;
    // SAFETY: a live map value.
    let sender = Qpn::new(unsafe { (*pair).sender_qpn });
    let mut key = FlowKey::new(tap.opposite(), packet.dst, packet.src, sender, space);
    if let Some(flow) = FLOWS.get_ptr_mut(&key) {
        return Some((flow, sender));
    }
    key.tap = tap;
    Some((FLOWS.get_ptr_mut(&key)?, sender))
}

/// Before a READ, or the packet behind one, under a path MTU that `flow` has not shown: the answers may have shown it, or the
/// connection's management told it. Called under the flow's lock. A global function, as [`roce_flow_observe`], and for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_learn_pmtu(tap: u32, packet: *const Packet, flow: *mut Flow) -> u64 {
    // SAFETY: the callers pass live map values; the verifier asks for the null checks.
    let (Some(packet), Some(flow)) = (unsafe { packet.as_ref() }, unsafe { flow.as_mut() }) else { return 0 };
    if let Some((answers, _)) = answers_to(Tap::from_number(tap), packet) {
        // SAFETY: a live map value, and an aligned number in it.
        flow.tracker.teach_pmtu(unsafe { (&raw const (*answers).tracker.pmtu).read_volatile() });
    }
    if let Some(bytes) = PATH_MTUS.get_ptr(&PairKey::new(packet.src, packet.dst, packet.bth.dest_qp)) {
        // SAFETY: an aligned number of a live map value.
        flow.tracker.teach_pmtu(unsafe { bytes.read_volatile() });
    }
    0
}

/// What [`cnp`] says of a CNP that found no room: not one short of a power of two.
const UNCOUNTED: u64 = 2;

/// Counts a CNP, which belongs to no flow by its addresses. How many there were before it, or [`UNCOUNTED`].
#[inline(never)]
pub(crate) fn cnp(tap: Tap, packet: &Packet) -> u64 {
    let key = FlowKey::new(tap, packet.src, packet.dst, packet.bth.dest_qp, Space::Request);
    let mut count = CNPS.get_ptr_mut(&key);
    if count.is_none() {
        // Full, it counts no further ones one by one; the tap's counter does.
        let _full = CNPS.insert(&key, &CnpCount::default(), NOEXIST);
        count = CNPS.get_ptr_mut(&key);
    }
    let Some(count) = count else { return UNCOUNTED };
    // SAFETY: aligned numbers of a live map value; the helper has no arguments.
    unsafe {
        let before = (&raw const (*count).packets).read_volatile();
        atomic::add_u64(&raw mut (*count).packets, 1);
        atomic::add_u64(&raw mut (*count).in_other_dscp, u64::from(packet.dscp().get() != Dscp::CNP.get()));
        atomic::add_u64(&raw mut (*count).without_becn, u64::from(!packet.bth.becn));
        (&raw mut (*count).last_seen_ns).write_volatile(bpf_ktime_get_coarse_ns());
        before
    }
}

/// Which requests a READ response answers: their destination QPN in the high half; 0 where it is not known, and for requests.
/// A global function, as [`roce_flow_observe`], and for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_asked_by(tap: u32, packet: *const Packet) -> u64 {
    // SAFETY: the callers pass a live map value; the verifier asks for the null check.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return 0 };
    if packet.bth.opcode.kind() as u8 != Kind::Response as u8 {
        return 0;
    }
    match requests_to(Tap::from_number(tap), packet) {
        Some((_, responder)) => u64::from(responder.get()) << 32,
        None => 0,
    }
}

/// How far the queue pair of a request of `flow` that begins a repeat had been answered: the bits of an [`Answered`] in the low
/// half, µs since the newest answer in the high one; 0 where they are not known. What is being timed is asked for again now, and
/// no longer timed. A global function, as [`roce_flow_observe`], and for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_answered(tap: u32, request: *const Packet, flow: *const Flow) -> u64 {
    let tap = Tap::from_number(tap);
    // SAFETY: the callers pass live map values; the verifier asks for the null checks.
    let (Some(request), Some(flow)) = (unsafe { request.as_ref() }, unsafe { flow.as_ref() }) else { return 0 };
    let Some((answers, _)) = answers_to(tap, request) else { return 0 };
    // SAFETY: a live map value. Another CPU may just change it: then this is how far it had been, or is now.
    let (highest, at, answers) = unsafe {
        (&raw mut (*answers).probe).write_volatile(Probe::default());
        ((&raw const (*answers).last_psn).read_volatile(), (*answers).last_seen_ns, &*answers)
    };
    let mut fate = Fate::Unknown;
    let mut place = ReadPlace::Unknown;
    if request.bth.opcode.is_read_request() {
        fate = answers.tracker.fate(request.bth.psn);
        place = flow.measured.reads.place(request.bth.psn);
    }
    // SAFETY: the helper has no arguments.
    let age = unsafe { bpf_ktime_get_coarse_ns() }.wrapping_sub(at);
    u64::from(micros(age)) << 32 | u64::from(Answered::new(Psn::new(highest), fate, place).bits())
}

/// A packet of `flow`, not counted yet, ends a silence of it: for how many µs nothing of the whole connection had passed, in the
/// low half, where a request was unanswered and its sender not told to wait; else 0. The high half is that of an event's
/// `refused`. A global function, as [`roce_flow_observe`], and for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_silence(tap: u32, packet: *const Packet, flow: *const Flow, now: u64) -> u64 {
    let tap = Tap::from_number(tap);
    // SAFETY: the callers pass live map values; the verifier asks for the null checks.
    let (Some(packet), Some(flow)) = (unsafe { packet.as_ref() }, unsafe { flow.as_ref() }) else { return 0 };
    if !matches!(packet.bth.opcode.service(), Service::Rc | Service::Xrc) {
        return 0;
    }
    let response = packet.bth.opcode.kind() as u8 == Kind::Response as u8;
    let partner = if response { requests_to(tap, packet) } else { answers_to(tap, packet) };
    let Some((partner, qpn)) = partner else { return 0 };
    // SAFETY: a live map value. Another CPU may just change it; what is read was so a moment ago or is so now.
    let (other, other_seen) = unsafe { (&*partner, (&raw const (*partner).last_seen_ns).read_volatile()) };
    let (requests, answers) = if response { (other, flow) } else { (flow, other) };
    let newest = if other_seen > flow.last_seen_ns { other_seen } else { flow.last_seen_ns };
    let silence = now.wrapping_sub(newest);
    let unanswered = requests.tracker.next().diff(Psn::new(answers.last_psn)) > 1;
    if silence > now || silence < SILENCE.0 || !unanswered || requests.is_told_to_wait() {
        return 0;
    }
    u64::from(micros(silence)) | if response { u64::from(qpn.get()) << 32 } else { 0 }
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
    // SAFETY: an aligned u64 of a live map value.
    if unsafe { (&raw const flow.refusals).read_volatile() } != Refusals::default() {
        // SAFETY: likewise.
        flow.tracker.hear(Refusals::from_bits(unsafe { atomic::take_u64((&raw mut flow.refusals).cast()) }));
    }
    flow.count::<Apart>(packet, Nanos(now)).bits()
}

/// Has ranges marked by [`roce_mark_range`].
struct Apart;

impl MarkRange for Apart {
    #[inline(always)]
    fn mark_range(ring: &mut Ring, start: u32, count: u32, mark: Mark) -> u32 {
        roce_mark_range(ring, start, count, mark as u32) as u32
    }
}

/// Marks a range of a flow's ring; how many holes it held. A global function, as [`roce_flow_observe`], which calls it in several
/// hundred states: Linux 6.1 does not get to the end of them with the sixteen words of the ring in each.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_mark_range(ring: *mut Ring, start: u32, count: u32, mark: u32) -> u64 {
    // SAFETY: the callers pass a part of a live map value; the verifier asks for the null check.
    let Some(ring) = (unsafe { ring.as_mut() }) else { return 0 };
    u64::from(ring.mark_range(start, count, Mark::from_number(mark)))
}

/// Measures a packet that [`roce_flow_observe`] has counted, of which it said `account`. A global function for the same reason:
/// its ways are added to the other's, and not multiplied with them.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_flow_measure(flow: *mut Flow, packet: *const Packet, account: u64, now: u64) -> u64 {
    // SAFETY: as above.
    let (Some(flow), Some(packet)) = (unsafe { flow.as_mut() }, unsafe { packet.as_ref() }) else { return NOTHING };
    let account = Account::from_bits(account);
    if !Measured::skips(packet, account) {
        flow.measured.packet(packet, account);
    }
    if packet.bth.opcode.kind() as u8 == Kind::Response as u8 {
        return flow.answered_probe(packet).bits();
    }
    if flow.wants_probe(packet, account, Nanos(now)) { TIME_IT } else { NOTHING }
}

/// Tells the flow of its answers that a request passes now. A global function for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_probe(tap: u32, request: *const Packet) -> u64 {
    // SAFETY: the callers pass a live map value; the verifier asks for the null check.
    let Some(request) = (unsafe { request.as_ref() }) else { return 0 };
    let Some((flow, _)) = answers_to(Tap::from_number(tap), request) else { return 0 };
    // SAFETY: the helper has no arguments; an aligned u64 of a live map value. Whoever holds the flow may just take away what
    // was there: then one of two probes is lost, and a sample with it.
    unsafe { (&raw mut (*flow).probe).write_volatile(Probe::new(request.bth.psn, Nanos(bpf_ktime_get_ns()))) };
    0
}

/// A response answers a request that was timed. Called under the lock of its flow, which is also that of its round trips.
/// A global function for the same reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn roce_round_trip(tap: u32, response: *const Packet, probe: u64) -> u64 {
    // SAFETY: the helper has no arguments.
    let time = Probe::from_bits(probe).age(Nanos(unsafe { bpf_ktime_get_ns() }));
    // SAFETY: the callers pass a live map value; the verifier asks for the null check.
    let Some(response) = (unsafe { response.as_ref() }) else { return 0 };
    let key = FlowKey::new(Tap::from_number(tap), response.src, response.dst, response.bth.dest_qp, Space::Response);
    let mut times = ROUND_TRIPS.get_ptr_mut(&key);
    if times.is_none() {
        let Some(zeroed) = NEW_ROUND_TRIPS.get_ptr(0) else { return 0 };
        // SAFETY: a live per-CPU map value that nobody writes.
        let _full = ROUND_TRIPS.insert(&key, unsafe { &*zeroed }, NOEXIST);
        times = ROUND_TRIPS.get_ptr_mut(&key);
    }
    let Some(times) = times else { return 0 };
    // SAFETY: a live map value, and the only writer of it.
    unsafe { (*times).add(time) };
    0
}

/// Tells the request flow that a NAK refuses what became of it, so that its next run is explained. The flow passes the
/// same interface's other direction, or this one on a mirror port. Returns the fate of the PSN named in the low half and
/// the flow's destination QPN in the high one; 0 where the flow is not known.
#[inline(never)]
fn note_refusal(tap: Tap, nak: &Packet) -> u64 {
    let Some((flow, responder)) = requests_to(tap, nak) else { return 0 };
    let rnr = matches!(refusal(nak), Some(Syndrome::RnrNak(_)));
    // SAFETY: a live map value. Another CPU may just change it; what is read was so a moment ago or is so now.
    let tracker = unsafe { &(*flow).tracker };
    // SAFETY: as above, and an aligned u64 of it.
    let word = unsafe { &raw mut (*flow).refusals };
    let mut fate = Fate::Unknown;
    for _ in 0..TELL_TRIES {
        if !tracker.in_window(nak.bth.psn) {
            break;
        }
        // SAFETY: as above.
        let before = unsafe { word.read_volatile() };
        let after = if rnr {
            before.and_rnr(nak.bth.psn)
        } else {
            fate = tracker.nak_fate(nak.bth.psn, before);
            before.and_nak(nak.bth.psn, fate)
        };
        // SAFETY: as above.
        if unsafe { atomic::replace_u64(word.cast(), before.bits(), after.bits()) } {
            break;
        }
    }
    // SAFETY: an aligned u32 of a live map value.
    unsafe { (&raw mut (*flow).refused_after).write_volatile((*flow).packets as u32) };
    u64::from(responder.get()) << 32 | fate as u64
}
