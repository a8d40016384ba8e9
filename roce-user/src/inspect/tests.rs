//! Whom NAKs and CNPs are attributed to, and what happens at the limits, on frames made for the purpose.

use roce_common::{
    psn::{Outcome, Psn},
    units::{Addr, Nanos, Qpn},
    wire::{Aeth, Bth, Opcode, Reth, emit, source_port},
};

use super::{
    analysis::Analysis,
    capture::{Capture, Frame},
    link::LinkLayer,
    seen::Seen,
};
use crate::export::{CaptureReport, FlowReport};

const A: Addr = Addr::v4([10, 0, 0, 1]);
const B: Addr = Addr::v4([10, 0, 0, 2]);

/// A capture in the making.
struct Bench {
    analysis: Analysis,
    interface: u32,
    number: u64,
    /// What the newest frame was.
    seen: Option<Seen>,
}

impl Bench {
    fn new() -> Self {
        Self { analysis: Analysis::default(), interface: 0, number: 0, seen: None }
    }

    fn send(&mut self, (src, dst): (Addr, Addr), port: u16, bth: &Bth, ext: &emit::Ext, payload: usize) {
        let path =
            emit::Path { src_mac: [2; 6], dst_mac: [4; 6], src, dst, tos: 0x6a, ttl: 64, ip_id: 1, src_port: port };
        let mut frame = [0; 2048];
        let len = emit::frame(&path, bth, ext, &[5; 1024][..payload], &mut frame).expect("a frame");
        self.frame(&frame[..len]);
    }

    fn frame(&mut self, bytes: &[u8]) {
        self.number += 1;
        self.seen = Some(self.analysis.frame(&Frame {
            number: self.number,
            interface: self.interface,
            interface_name: "",
            tunnel: None,
            link: LinkLayer::Ethernet,
            time: Nanos(0),
            bytes,
            wire_len: bytes.len(),
        }));
    }

    /// A WRITE packet A → B of a QP at A to QP `to` at B.
    fn write(&mut self, port: u16, to: u32, psn: u32) {
        let bth = Bth::new(Opcode::WRITE_MIDDLE, Qpn::new(to), Psn::new(psn));
        self.send((A, B), port, &bth, &emit::Ext::default(), 1024);
    }

    /// An answer B → A to QP `to` at A.
    fn answer(&mut self, port: u16, to: u32, psn: u32, raw_syndrome: u8) {
        let bth = Bth::new(Opcode::ACKNOWLEDGE, Qpn::new(to), Psn::new(psn));
        let ext = emit::Ext { aeth: Some(Aeth { raw_syndrome, msn: 1 }), ..emit::Ext::default() };
        self.send((B, A), port, &bth, &ext, 0);
    }

    /// A CNP for QP `to`.
    fn cnp(&mut self, (src, dst): (Addr, Addr), to: u32) {
        let mut bth = Bth::new(Opcode::WRITE_ONLY, Qpn::new(to), Psn::new(0));
        let reth = Reth { va: 0, rkey: 0, dma_len: 0 };
        bth.becn = true;
        let path = emit::Path { src_mac: [2; 6], dst_mac: [4; 6], src, dst, tos: 0xc0, ttl: 64, ip_id: 1, src_port: 0 };
        let mut frame = [0; 128];
        let ext = emit::Ext { reth: Some(reth), ..emit::Ext::default() };
        let len = emit::frame(&path, &bth, &ext, &[], &mut frame).expect("a frame");
        // A CNP's sixteen reserved bytes are as long as a RETH.
        frame[42] = Opcode::CNP.get();
        self.frame(&frame[..len]);
    }

    fn report(self) -> CaptureReport {
        let interfaces = vec!["if0".to_owned(), "if1".to_owned()];
        self.analysis.finish("bench".to_owned(), &Capture { interfaces, incomplete: None })
    }
}

fn port(a: u32, b: u32) -> u16 {
    source_port(Qpn::new(a), Qpn::new(b))
}

fn flow<'a>(report: &'a CaptureReport, space: &str, to: u32) -> &'a FlowReport {
    report.flows.iter().find(|f| f.space == space && f.dest_qp == to).expect("the flow")
}

/// Eight QPs between two hosts with the same PSNs; QP 100 + i at A is connected to QP 207 − i at B.
fn lockstep(port_of: impl Fn(u32, u32) -> u16) -> CaptureReport {
    let mut bench = Bench::new();
    let pairs: Vec<(u32, u32)> = (0..8).map(|i| (100 + i, 207 - i)).collect();
    for psn in 0..60 {
        for &(a, b) in &pairs {
            bench.write(port_of(a, b), b, psn);
        }
        if psn >= 10 && psn % 5 == 0 {
            for &(a, b) in &pairs {
                bench.answer(port_of(a, b), a, psn - 5, 0x1f);
            }
        }
    }
    // One flow loses a packet behind the tap, and one QP at A is told to slow down.
    let (a, b) = pairs[3];
    bench.answer(port_of(a, b), a, 57, 0x60);
    bench.cnp((B, A), a);
    bench.cnp((B, A), 999);
    bench.report()
}

#[test]
fn the_source_port_rule_tells_qps_in_lockstep_apart() {
    let report = lockstep(port);
    assert_eq!((report.cnp, report.counters.lost_after_tap), (2, 1));
    let named = flow(&report, "request", 204);
    assert_eq!((named.cnp, named.counters.lost_after_tap, named.counters.nak.total()), (1, 1, 0));
    assert_eq!(report.flows.iter().map(|f| f.cnp).sum::<u64>(), 1, "nobody owns QP 999");
    assert_eq!(flow(&report, "response", 103).counters.nak.psn_sequence, 1);
}

#[test]
fn qps_in_lockstep_without_that_rule_stay_unknown() {
    let report = lockstep(|_, _| 49_152);
    assert_eq!((report.cnp, report.counters.nak.psn_sequence), (2, 1));
    assert_eq!((report.counters.lost_after_tap, report.flows.iter().map(|f| f.cnp).sum::<u64>()), (0, 0));
}

#[test]
fn psns_tell_flows_apart_where_ports_do_not() {
    let mut bench = Bench::new();
    for i in 0..50 {
        bench.write(1, 17, 1_000 + i);
        bench.write(1, 18, 900_000 + i);
    }
    bench.answer(1, 40, 900_020, 0x60);
    bench.answer(1, 41, 1_030, 0x60);
    // Out of every window.
    bench.answer(1, 41, 500_000, 0x60);
    let report = bench.report();
    assert_eq!(flow(&report, "request", 17).counters.lost_after_tap, 1);
    assert_eq!(flow(&report, "request", 18).counters.lost_after_tap, 1);
    assert_eq!(report.counters.nak.psn_sequence, 3);
}

#[test]
fn a_cnp_for_a_qp_that_answers_reads_goes_to_its_responses() {
    let mut bench = Bench::new();
    for i in 0..6 {
        let bth = Bth::new(Opcode::READ_REQUEST, Qpn::new(40), Psn::new(100 + 2 * i));
        let reth = Some(Reth { va: 0, rkey: 0, dma_len: 2048 });
        bench.send((A, B), 7, &bth, &emit::Ext { reth, ..emit::Ext::default() }, 0);
        for (opcode, psn) in [(Opcode::READ_RESPONSE_FIRST, 0), (Opcode::READ_RESPONSE_LAST, 1)] {
            let bth = Bth::new(opcode, Qpn::new(17), Psn::new(100 + 2 * i + psn));
            let aeth = Some(Aeth { raw_syndrome: 0x1f, msn: i });
            bench.send((B, A), 8, &bth, &emit::Ext { aeth, ..emit::Ext::default() }, 1024);
        }
    }
    // The responses meet congestion: the requester's host tells the responder's QP.
    bench.cnp((A, B), 40);
    let report = bench.report();
    assert_eq!(flow(&report, "response", 17).cnp, 1);
    assert_eq!(flow(&report, "request", 40).cnp, 0);
    assert_eq!(report.counters.missing_psns, 0);
}

#[test]
fn a_qp_number_in_its_next_life_is_learnt_anew() {
    let mut bench = Bench::new();
    for (to, start) in [(17, 1_000), (18, 700_000)] {
        for i in 0..40 {
            bench.write(1, to, start + i);
            if i % 8 == 7 {
                bench.answer(1, 40, start + i, 0x1f);
            }
        }
    }
    bench.answer(1, 40, 700_020, 0x60);
    bench.cnp((B, A), 40);
    let report = bench.report();
    assert_eq!((flow(&report, "request", 17).cnp, flow(&report, "request", 18).cnp), (0, 1));
    assert_eq!(flow(&report, "request", 18).counters.lost_after_tap, 1);
}

#[test]
fn taps_do_not_answer_for_each_other() {
    let mut bench = Bench::new();
    for i in 0..20 {
        bench.write(1, 17, i);
    }
    bench.interface = 1;
    bench.answer(1, 40, 10, 0x60);
    bench.cnp((B, A), 40);
    let report = bench.report();
    assert_eq!((report.counters.lost_after_tap, report.flows.iter().map(|f| f.cnp).sum::<u64>()), (0, 0));
}

#[test]
fn flows_beyond_the_limit_are_counted_at_the_top_only() {
    let mut bench = Bench { analysis: Analysis::new(3), interface: 0, number: 0, seen: None };
    for i in 0..40 {
        bench.write(1, 2 + i % 10, i / 10);
        bench.answer(1, 50 + i, 0, 0x60);
        bench.cnp((B, A), 50 + i);
    }
    let report = bench.report();
    assert_eq!(report.flows.len(), 3);
    let kept: u64 = report.flows.iter().map(|f| f.packets).sum();
    assert_eq!((report.rocev2, report.cnp, report.flows_refused), (120, 40, 80 - kept));
    assert_eq!(report.ecn.total(), 80);
}

#[test]
fn a_flow_with_many_dscps_names_each_of_them() {
    let mut bench = Bench::new();
    let bth = Bth::new(Opcode::SEND_ONLY, Qpn::new(17), Psn::new(1));
    for dscp in (0..12).chain([11, 2]) {
        let path = emit::Path {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src: A,
            dst: B,
            tos: dscp << 2,
            ttl: 64,
            ip_id: 1,
            src_port: 1,
        };
        let mut frame = [0; 128];
        let len = emit::frame(&path, &bth, &emit::Ext::default(), &[0; 4], &mut frame).expect("a frame");
        bench.frame(&frame[..len]);
    }
    let report = bench.report();
    assert_eq!(report.flows[0].dscp, report.dscp);
    assert_eq!((report.dscp.len(), report.dscp["11"], report.dscp["2"], report.dscp["5"]), (12, 2, 2, 1));
}

#[test]
fn a_cnp_goes_to_the_only_flow_that_no_other_qp_sends() {
    let mut bench = Bench::new();
    for psn in 0..20 {
        bench.write(port(40, 17), 17, psn);
        bench.write(1, 18, psn);
    }
    bench.answer(port(40, 17), 40, 10, 0x1f);
    bench.cnp((B, A), 41);
    let report = bench.report();
    assert_eq!((flow(&report, "request", 17).cnp, flow(&report, "request", 18).cnp), (0, 1));
}

#[test]
fn a_cnp_of_a_qp_that_was_never_answered_is_placed_by_the_source_port() {
    let mut bench = Bench::new();
    for psn in 0..20 {
        bench.write(port(40, 17), 17, psn);
        bench.write(port(41, 18), 18, psn);
    }
    bench.cnp((B, A), 41);
    let report = bench.report();
    assert_eq!((flow(&report, "request", 17).cnp, flow(&report, "request", 18).cnp), (0, 1));
}

#[test]
fn a_nak_is_about_the_flow_that_has_its_psn_in_the_window() {
    let mut bench = Bench::new();
    for psn in 0..5_000 {
        bench.write(1, 17, psn);
    }
    for psn in 100..600 {
        bench.write(1, 18, psn);
    }
    bench.answer(1, 40, 300, 0x60);
    let report = bench.report();
    assert_eq!(flow(&report, "request", 17).counters.lost_after_tap, 0);
    assert_eq!(flow(&report, "request", 18).counters.lost_after_tap, 1);
}

#[test]
fn a_retry_after_an_rnr_nak_is_a_retransmission_even_where_it_fills_a_hole() {
    let run = |raw_syndrome| {
        let mut bench = Bench::new();
        for psn in [10, 11, 13] {
            bench.write(1, 17, psn);
        }
        bench.answer(1, 40, 12, raw_syndrome);
        for psn in [12, 14] {
            bench.write(1, 17, psn);
        }
        let c = bench.report().counters;
        (c.missing_psns, c.lost, c.reordered, c.retransmitted, c.rnr_nak)
    };
    assert_eq!(run(0x2c), (1, 1, 0, 1, 1));
    assert_eq!(run(0x1f), (1, 0, 1, 0, 0));
}

#[test]
fn every_frame_is_told_what_it_was() {
    let mut bench = Bench::new();
    let mut seen = Vec::new();
    for psn in [10, 11, 13, 12, 13] {
        bench.write(1, 17, psn);
        seen.push(bench.seen);
    }
    bench.answer(1, 40, 13, 0x60);
    seen.push(bench.seen);
    bench.frame(&[0; 60]);
    let told: Vec<_> = seen
        .iter()
        .map(|s| match s {
            Some(Seen::Packet(p)) => (p.number, p.flow, p.outcome, p.refused),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        told,
        [
            (1, Some(0), Outcome::First, None),
            (2, Some(0), Outcome::InOrder, None),
            (3, Some(0), Outcome::Gap(1), None),
            (4, Some(0), Outcome::Filled(1), None),
            (5, Some(0), Outcome::Duplicate, None),
            (6, Some(1), Outcome::NotTracked, Some(0)),
        ]
    );
    assert_eq!(bench.seen, Some(Seen::NotRoce));
}
