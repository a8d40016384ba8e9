//! What the BPF programs measure and report besides counters: round trips, silences, gaps in READ answers, copies of packets.
//! Through BPF_PROG_TEST_RUN, with the clock that they read. Needs root.

use std::{thread, time::Duration};

use aya::maps::{MapData, RingBuf};
use roce_common::{
    abi::{Answered, CaptureHead, CnpCount, Direction, Event, EventKind, Flags, FlowKey, MadEvent, Role, Tap},
    facts::SILENCE,
    flow::Flow,
    psn::{Fate, Psn, ReadPlace},
    units::Qpn,
    wire::{Bth, Deth, IpVersion, Opcode, Verdict, cm, emit, parse},
};
use roce_tests::{
    dialogue::{End, Passed, Wire},
    progtest::{Programs, config, monotonic_ns},
};
use roce_user::facts::RttReport;
use zerocopy::FromBytes as _;

const TAP: Tap = Tap::new(1, Direction::Ingress);
/// Longer than a tick of the kernel's coarse clock.
const TICKS: Duration = Duration::from_millis(12);

/// A connection whose pair is known, at one tap.
struct Bench {
    p: Programs,
    wire: Wire,
    telemetry: RingBuf<MapData>,
    frame: Vec<u8>,
}

impl Bench {
    fn new() -> Self {
        let mut p = Programs::load().expect("loading the programs needs root");
        p.maps.set_config(config(Role::Observe)).expect("configuration");
        let wire = Wire::numbered(2);
        for from in [End::Requester, End::Responder] {
            let (key, sender) = wire.pair(from);
            p.maps.add_pair(key, sender.get()).expect("a pair");
        }
        let telemetry = p.ring("TELEMETRY").expect("the ring");
        Self { p, wire, telemetry, frame: Vec::new() }
    }

    fn pass(&mut self, passed: Passed) {
        self.wire.frame(&passed, &mut self.frame).expect("a frame");
        self.p.xdp("roce_xdp", &self.frame, 1).expect("BPF_PROG_TEST_RUN");
    }

    /// A READ request for so many PSNs.
    fn read(&mut self, psn: u32, psns: u32) {
        self.pass_read(psn, psns * 256);
    }

    /// A READ request for so many bytes.
    fn pass_read(&mut self, psn: u32, bytes: u32) {
        let (opcode, psn) = (Opcode::READ_REQUEST, Psn::new(psn));
        self.pass(Passed { from: End::Requester, opcode, psn, payload: 0, dma_len: bytes, syndrome: 0 });
    }

    /// The flow of the requests.
    fn requests(&self) -> Flow {
        let key = self.wire.key(TAP, End::Requester);
        self.p.maps.flows().into_iter().find(|(k, _)| *k == key).expect("the flow").1
    }

    fn answer(&mut self, opcode: Opcode, psn: u32, syndrome: u8) {
        let payload = if opcode == Opcode::ACKNOWLEDGE { 0 } else { 256 };
        self.pass(Passed { from: End::Responder, opcode, psn: Psn::new(psn), payload, dma_len: 0, syndrome });
    }

    /// Events of a kind since the last call.
    fn events(&mut self, kind: EventKind) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(item) = self.telemetry.next() {
            events.extend(Event::read_from_bytes(&item).ok().filter(|event| event.kind == kind as u32));
        }
        events
    }

    fn round_trips(&self) -> Option<RttReport> {
        RttReport::of(&self.p.maps.round_trips(&self.wire.key(TAP, End::Responder))?)
    }
}

#[test]
fn round_trips_are_the_times_between_a_request_and_its_own_answer() {
    let mut b = Bench::new();
    // The flow of the answers must be there to be told of a request.
    b.read(0, 1);
    b.answer(Opcode::READ_RESPONSE_ONLY, 0, 0x1f);
    assert!(b.round_trips().is_none());
    let mut longest = 0;
    for psn in 1..6 {
        thread::sleep(TICKS);
        let before = monotonic_ns();
        b.read(psn, 1);
        thread::sleep(Duration::from_millis(2));
        b.answer(Opcode::READ_RESPONSE_ONLY, psn, 0x1f);
        longest = longest.max(monotonic_ns() - before);
    }
    let rtt = b.round_trips().expect("round trips");
    assert_eq!(rtt.spread.count, 5);
    assert!(rtt.spread.min >= 2_000_000 && rtt.spread.max <= longest, "{rtt:?} within {longest}");
    assert!(rtt.p50 >= 1_900_000 && rtt.p99 <= longest + longest / 16, "{rtt:?}");
    // Nobody knows which of two copies was answered.
    thread::sleep(TICKS);
    b.read(6, 1);
    b.read(6, 1);
    b.answer(Opcode::READ_RESPONSE_ONLY, 6, 0x1f);
    // A flow that is forgotten takes its times along.
    assert_eq!(b.round_trips().expect("round trips").spread.count, 5);
    b.p.maps.remove_flow(&b.wire.key(TAP, End::Responder)).expect("removed");
    assert!(b.round_trips().is_none());
}

#[test]
fn silences_are_told_while_something_is_unanswered() {
    let mut b = Bench::new();
    let silence = Duration::from_nanos(SILENCE.0) + TICKS;
    b.read(0, 1);
    b.answer(Opcode::READ_RESPONSE_ONLY, 0, 0x1f);
    thread::sleep(silence);
    // Everything was answered before.
    b.read(1, 1);
    b.read(2, 1);
    b.read(3, 1);
    assert_eq!(b.events(EventKind::Silence), []);
    thread::sleep(silence);
    b.answer(Opcode::READ_RESPONSE_ONLY, 1, 0x1f);
    let told = b.events(EventKind::Silence);
    let [one] = told[..] else { panic!("{told:?}") };
    assert_eq!((one.psn, one.refused_qp), (1, b.wire.key(TAP, End::Requester).dest_qp().get()));
    assert!((10_000..1_000_000).contains(&one.value), "{one:?}");
    thread::sleep(silence);
    b.read(4, 1);
    let told = b.events(EventKind::Silence);
    assert!(told.len() == 1 && told[0].psn == 4 && told[0].refused_qp == 0, "{told:?}");
    // Told to wait, it waits.
    b.answer(Opcode::ACKNOWLEDGE, 2, 0x34);
    thread::sleep(silence);
    b.read(2, 1);
    assert_eq!(b.events(EventKind::Silence), []);
}

#[test]
fn a_gap_in_answers_and_the_read_that_asks_again_name_each_other() {
    let mut b = Bench::new();
    b.read(20, 4);
    for (opcode, psn) in [(Opcode::READ_RESPONSE_FIRST, 20), (Opcode::READ_RESPONSE_MIDDLE, 22)] {
        b.answer(opcode, psn, 0x1f);
    }
    let gaps = b.events(EventKind::Gap);
    let [gap] = gaps[..] else { panic!("{gaps:?}") };
    let requests = b.wire.key(TAP, End::Requester).dest_qp().get();
    assert_eq!((gap.psn, gap.value, gap.refused_qp), (22, 1, requests));
    // What is missing inside, the whole again, and what has come.
    b.read(24, 1);
    for (next, psn, fate, place) in [
        (25, 21, Fate::Skipped, ReadPlace::Inside),
        (26, 20, Fate::Passed, ReadPlace::Start),
        (27, 22, Fate::Passed, ReadPlace::Inside),
    ] {
        b.read(psn, 1);
        b.read(next, 1);
        let told = b.events(EventKind::RunStarted);
        let [run] = told[..] else { panic!("{told:?}") };
        let answered = Answered::from_bits(run.fate).expect("answers are known");
        assert_eq!((run.psn, answered.highest().get(), answered.fate(), answered.place()), (psn, 22, fate, place));
    }
}

#[test]
fn messages_of_connection_management_come_whole() {
    let mut b = Bench::new();
    let mut mad = [0u8; 256];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    // REJ of connection 0x01020304 by the one called 5, for reason 8.
    mad[16..18].copy_from_slice(&[0, 0x12]);
    mad[24..32].copy_from_slice(&[0, 0, 0, 5, 1, 2, 3, 4]);
    mad[34..36].copy_from_slice(&[0, 8]);
    let path = emit::Path {
        src_mac: [2; 6],
        dst_mac: [4; 6],
        src: b.wire.requester.0,
        dst: b.wire.responder.0,
        tos: 0,
        ttl: 64,
        ip_id: 1,
        src_port: 55_410,
    };
    let frame = |qkey, qpn| {
        let deth = Deth { qkey, src_qp: Qpn::GSI };
        let ext = emit::Ext { deth: Some(deth), ..emit::Ext::default() };
        let mut out = vec![0; 512];
        let bth = Bth::new(Opcode::UD_SEND_ONLY, qpn, Psn::new(3));
        let n = emit::frame(&path, &bth, &ext, &mad, &mut out).expect("a frame");
        out.truncate(n);
        out
    };
    for (qkey, qpn, told) in [(0x8001_0000, Qpn::GSI, 1), (1, Qpn::GSI, 0), (0x8001_0000, Qpn::new(9), 0)] {
        b.p.xdp("roce_xdp", &frame(qkey, qpn), 1).expect("BPF_PROG_TEST_RUN");
        let mut messages = Vec::new();
        while let Some(item) = b.telemetry.next() {
            messages.extend(MadEvent::read_from_bytes(&item).ok());
        }
        assert_eq!(messages.len(), told, "{qkey:#x} {qpn:?}");
        for message in messages {
            assert_eq!((message.event.tap, message.event.psn), (TAP, 3));
            let read = cm::read(&message.mad[..], 0).expect("a message");
            assert_eq!((read.local_id, read.remote_id, read.message), (5, 0x0102_0304, cm::Message::Reject(8)));
        }
    }
}

#[test]
fn cnps_are_counted_by_whom_they_name() {
    let mut b = Bench::new();
    let ((requester, from), (responder, _)) = (b.wire.requester, b.wire.responder);
    let path = emit::Path {
        src_mac: [2; 6],
        dst_mac: [4; 6],
        src: responder,
        dst: requester,
        tos: 0xc2,
        ttl: 64,
        ip_id: 0,
        src_port: 0,
    };
    for (qpn, count) in [(from, 3), (Qpn::new(77), 1)] {
        let mut frame = [0; emit::CNP_FRAME_V6];
        // Those of the first one are as they should be.
        let tos = if qpn == from { 0xc2 } else { 0x6a };
        let n = emit::cnp(&emit::Path { tos, ..path }, IpVersion::V4, qpn, &mut frame);
        frame[46] = if qpn == from { frame[46] } else { 0 };
        for _ in 0..count {
            b.p.xdp("roce_xdp", &frame[..n], 1).expect("BPF_PROG_TEST_RUN");
        }
    }
    let of = |(key, n): &(FlowKey, CnpCount)| (key.src, key.dest_qp(), n.packets, n.in_other_dscp, n.without_becn);
    let mut counted: Vec<_> = b.p.maps.cnps().iter().map(of).collect();
    counted.sort_unstable();
    let mut want = [(responder, from, 3, 0, 0), (responder, Qpn::new(77), 1, 1, 1)];
    want.sort_unstable();
    assert_eq!(counted, want);
    // To a host it is news that nobody is meant: of many for one queue pair the first, second, fourth and eighth time.
    b.p.maps.set_config(config(Role::Host)).expect("configuration");
    b.p.maps.set_local(&[requester]).expect("a local address");
    let mut frame = [0; emit::CNP_FRAME_V6];
    let n = emit::cnp(&path, IpVersion::V4, Qpn::new(99), &mut frame);
    for _ in 0..9 {
        b.p.xdp("roce_xdp", &frame[..n], 1).expect("BPF_PROG_TEST_RUN");
    }
    let told = b.events(EventKind::CnpUnpaired);
    assert_eq!(told.iter().map(|event| (event.dest_qp, event.value)).collect::<Vec<_>>(), [(99, 0xc2); 4]);
}

#[test]
fn a_path_mtu_that_answers_have_shown_is_known_to_the_requests() {
    let mut b = Bench::new();
    b.read(0, 2);
    b.answer(Opcode::READ_RESPONSE_FIRST, 0, 0x1f);
    b.answer(Opcode::READ_RESPONSE_LAST, 1, 0x1f);
    // 600 PSNs of 256 bytes or 38 of 4,096: what comes next is no gap where the path MTU is known.
    b.read(2, 600);
    b.read(602, 1);
    b.read(610, 1);
    let requests = b.requests();
    assert_eq!((requests.tracker.pmtu, requests.tracker.missing_psns), (256, 7));
}

#[test]
fn a_path_mtu_that_management_told_is_known_to_requests_until_the_end() {
    let mut b = Bench::new();
    let (key, _) = b.wire.pair(End::Requester);
    b.p.maps.set_path_mtu(key, Some(512)).expect("a path MTU");
    // 300 PSNs of 512 bytes. Without it, the next READ could stand behind 38 of 4,096, and the jump to it would be a gap.
    b.pass_read(0, 300 * 512);
    b.pass_read(303, 512);
    assert_eq!(b.p.maps.path_mtu(key), Some(512));
    let requests = b.requests();
    assert_eq!((requests.tracker.pmtu, requests.tracker.missing_psns), (512, 3));
    // Told while the READ waits for an explanation, it still is one.
    let mut b = Bench::new();
    let (key, _) = b.wire.pair(End::Requester);
    b.pass_read(0, 300 * 512);
    b.p.maps.set_path_mtu(key, Some(512)).expect("a path MTU");
    b.pass_read(303, 512);
    let requests = b.requests();
    assert_eq!((requests.tracker.pmtu, requests.tracker.missing_psns), (512, 3));
    // What answers have shown is nearer.
    let mut b = Bench::new();
    let (key, _) = b.wire.pair(End::Requester);
    b.p.maps.set_path_mtu(key, Some(512)).expect("a path MTU");
    b.answer(Opcode::READ_RESPONSE_FIRST, 0, 0x1f);
    b.read(1, 300);
    b.read(301, 1);
    let requests = b.requests();
    assert_eq!((requests.tracker.pmtu, requests.tracker.missing_psns), (256, 0));
    b.p.maps.set_path_mtu(key, None).expect("forgotten");
    b.p.maps.set_path_mtu(key, None).expect("forgotten twice");
    assert_eq!(b.p.maps.path_mtu(key), None);
}

#[test]
fn a_capture_copies_headers_or_as_much_as_was_asked_for() {
    let mut b = Bench::new();
    let mut ring = b.p.ring("CAPTURE").expect("the ring");
    let write = Passed {
        from: End::Requester,
        opcode: Opcode::WRITE_MIDDLE,
        psn: Psn::new(7),
        payload: 256,
        dma_len: 0,
        syndrome: 0,
    };
    let mut copied = |b: &mut Bench, bytes, flags, passed: Passed| {
        let mut cfg = config(Role::Observe);
        (cfg.capture_bytes, cfg.flags) = (bytes, flags);
        b.p.maps.set_config(cfg).expect("configuration");
        b.pass(passed);
        ring.next().map(|item| item.to_vec())
    };
    assert_eq!(copied(&mut b, 0, 0, write), None);
    // IPv4: 14 + 20 + 8 + 12 bytes of headers.
    for (bytes, flags, kept) in [(512, 0, 54), (40, 0, 40), (512, Flags::CAPTURE_PAYLOAD, 54 + 256 + 4), (99, 16, 99)] {
        let record = copied(&mut b, bytes, flags, write).expect("a record");
        let (head, frame) = CaptureHead::read_from_prefix(&record).expect("a head");
        assert_eq!((head.captured, head.wire_len as usize), (kept, b.frame.len()), "{bytes} {flags}");
        assert_eq!((head.tap, head.opcode, head.psn), (TAP, 7, 7));
        assert!(head.time_ns <= monotonic_ns());
        assert_eq!(frame, &b.frame[..kept as usize]);
    }
    // Without payload there is nothing to hide: the ICRC is copied too.
    let ack = Passed { from: End::Responder, opcode: Opcode::ACKNOWLEDGE, payload: 0, syndrome: 0x1f, ..write };
    let record = copied(&mut b, 512, 0, ack).expect("a record");
    assert_eq!(record[size_of::<CaptureHead>()..], b.frame[..]);
    assert!(matches!(parse(&record[size_of::<CaptureHead>()..]), Verdict::Roce(_)));
    // What is no RoCEv2 packet is not copied.
    b.frame[23] = 6;
    let frame = b.frame.clone();
    b.p.xdp("roce_xdp", &frame, 1).expect("BPF_PROG_TEST_RUN");
    assert!(ring.next().is_none());
}
