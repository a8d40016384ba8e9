//! Every finding with a dialogue that has it, and one that nearly has.

mod facts;
mod story;

use std::collections::BTreeSet;

use roce_common::{units::Addr, wire::Opcode};
use story::{B, QA, QB, Story};

use crate::findings::{Code, rules};

const NOTHING: &[Code] = &[];

/// A dialogue, and the codes that it must give: these and no others.
type Case = (&'static str, &'static [Code], fn(&mut Story));

/// A hundred packets, acknowledged as they pass.
fn undisturbed(s: &mut Story, from: u32) {
    for psn in from..from + 100 {
        s.send([psn]);
        if psn % 8 == 7 {
            s.ack(psn);
        }
    }
    s.ack(from + 99);
}

/// Opcodes of unreliable connections are those of reliable ones with another service.
fn uc() -> Opcode {
    Opcode::new(0x27).expect("UC WRITE_MIDDLE")
}

const LOSSES: &[Case] = &[
    ("undisturbed", NOTHING, |s| undisturbed(s, 0)),
    ("a gap, its NAK, a go-back-N", &[Code::LossBeforeTap], |s| {
        undisturbed(s, 0);
        s.send([100, 101, 103, 104]);
        s.answer(102, 0x60);
        s.send(102..110);
        s.ack(109);
    }),
    ("the missing packet comes late", &[Code::Reordering], |s| {
        undisturbed(s, 0);
        s.send([100, 101, 103, 104, 102, 105, 106, 107]);
        s.ack(107);
    }),
    ("a NAK for what had passed", &[Code::LossAfterTap], |s| {
        undisturbed(s, 0);
        s.send(100..106);
        s.answer(102, 0x60);
        s.send(102..110);
        s.ack(109);
    }),
    ("repeated without a reason", &[Code::SpuriousRetransmit], |s| {
        undisturbed(s, 0);
        s.send(100..106);
        s.send(102..110);
        s.ack(109);
    }),
    ("nobody asks for the missing packet", &[Code::LossUnexplained], |s| {
        undisturbed(s, 0);
        s.send([100, 102]);
        for psn in (103..2_000).step_by(8) {
            s.send(psn..psn + 8);
            s.ack(psn + 7);
        }
    }),
    ("an unreliable connection loses a packet", &[Code::UcLoss], |s| {
        s.opcode = uc();
        s.send((0..50).chain(51..100));
        s.wait_ms(100);
        s.send(100..120);
    }),
    ("an unreliable connection's packet is late", &[Code::Reordering], |s| {
        s.opcode = uc();
        s.send((0..50).chain([51, 52, 50]).chain(53..100));
        s.wait_ms(100);
        s.send(100..120);
    }),
    ("the last packets are repeated after 20 ms", &[Code::TimeoutRetransmit], |s| {
        undisturbed(s, 0);
        s.send(100..108);
        s.wait_ms(20);
        s.send(100..116);
        s.ack(115);
    }),
    ("what was acknowledged is repeated after 20 ms", &[Code::SpuriousRetransmit], |s| {
        undisturbed(s, 0);
        s.send(100..108);
        s.ack(107);
        s.wait_ms(20);
        s.send(100..116);
        s.ack(115);
    }),
    ("RNR, a wait, a retry", &[Code::RnrNotLoss], |s| {
        undisturbed(s, 0);
        s.send([100]);
        s.answer(100, 0x2c);
        s.wait_ms(80);
        s.send(100..108);
        s.ack(107);
    }),
    ("the receiver took reordering for loss", &[Code::ReorderingNaked, Code::Reordering], |s| {
        undisturbed(s, 0);
        s.send([100, 101, 103, 102, 104, 105]);
        s.answer(102, 0x60);
        s.send(102..110);
        s.ack(109);
    }),
    ("a connection ends by a NAK", &[Code::NakFatal], |s| {
        undisturbed(s, 0);
        s.send([100]);
        s.answer(100, 0x62);
    }),
];

const READS: &[Case] = &[
    ("READs answered", NOTHING, |s| {
        s.opcode = Opcode::READ_REQUEST;
        for psn in (0..80).step_by(4) {
            s.send([psn]);
            s.responses(psn..psn + 4);
        }
    }),
    ("an answer is lost and asked for again", &[Code::ReadReasked, Code::LossBeforeTap], |s| {
        s.opcode = Opcode::READ_REQUEST;
        for psn in (0..80).step_by(4) {
            s.send([psn]);
            s.responses(psn..psn + 4);
        }
        s.send([80]);
        s.responses([80, 82, 83]);
        s.send([80]);
        s.responses(80..84);
    }),
    ("an answer is lost behind the tap", &[Code::ReadReasked, Code::LossAfterTap], |s| {
        s.opcode = Opcode::READ_REQUEST;
        for psn in (0..80).step_by(4) {
            s.send([psn]);
            s.responses(psn..psn + 4);
        }
        s.send([80]);
        s.responses(80..84);
        s.send([80]);
        s.responses(80..84);
    }),
];

const TIMES: &[Case] = &[
    ("silent for 60 ms, unanswered", &[Code::Stall], |s| {
        undisturbed(s, 0);
        s.send(100..104);
        s.wait_ms(60);
        s.send(104..108);
        s.ack(107);
    }),
    ("the answer takes 60 ms", &[Code::Stall], |s| {
        undisturbed(s, 0);
        s.send(100..108);
        s.wait_ms(60);
        s.ack(107);
    }),
    ("silent for 49 ms, unanswered", NOTHING, |s| {
        undisturbed(s, 0);
        s.send(100..104);
        s.wait_ms(49);
        s.send(104..108);
        s.ack(107);
    }),
    ("silent for a minute, all answered", NOTHING, |s| {
        undisturbed(s, 0);
        s.wait_ms(60_000);
        undisturbed(s, 100);
    }),
];

const CAPTURES: &[Case] = &[
    ("every packet twice", &[Code::DuplicateCapture], |s| {
        s.copies = 2;
        undisturbed(s, 0);
    }),
    ("every packet twice, headers only", &[Code::DuplicateCapture], |s| {
        (s.copies, s.snap) = (2, 80);
        undisturbed(s, 0);
    }),
    ("every packet twice, without IP identification", &[Code::DuplicateCapture], |s| {
        (s.copies, s.ip_id) = (2, 0);
        undisturbed(s, 0);
    }),
    ("repeated packet by packet, without IP identification", &[Code::SpuriousRetransmit], |s| {
        s.ip_id = 0;
        for psn in 0..100 {
            s.send([psn]);
            s.now += 200_000;
            s.send([psn]);
        }
        s.ack(99);
    }),
    ("a few packets twice", &[Code::SpuriousRetransmit], |s| {
        undisturbed(s, 0);
        s.copies = 2;
        s.send(100..110);
        s.copies = 1;
        undisturbed(s, 110);
    }),
    ("every packet sent twice", &[Code::SpuriousRetransmit], |s| {
        for psn in 0..100 {
            s.send([psn, psn]);
        }
        s.ack(99);
    }),
    ("cut inside the headers", &[Code::TruncatedCapture], |s| {
        s.snap = 50;
        s.send([1]);
    }),
    ("cut behind the headers", NOTHING, |s| {
        s.snap = 80;
        undisturbed(s, 0);
    }),
    ("damaged on the way", &[Code::BadIcrc], |s| {
        undisturbed(s, 0);
        s.damage = |frame| frame[70] ^= 1;
        s.send([100]);
    }),
    ("damaged on the way and cut", NOTHING, |s| {
        s.snap = 80;
        s.damage = |frame| frame[70] ^= 1;
        s.send([100]);
    }),
    ("an opcode that does not exist", &[Code::MalformedOn4791], |s| {
        s.damage = |frame| frame[42] = 0x1f;
        s.send([1]);
    }),
    ("another version", &[Code::NotRoceOn4791], |s| {
        s.damage = |frame| frame[43] |= 1;
        s.send([1]);
    }),
    ("another port", NOTHING, |s| {
        s.damage = |frame| frame[37] ^= 1;
        s.send([1]);
    }),
    ("RoCEv1", &[Code::Rocev1], |s| {
        let mut frame = [0; 80];
        frame[12..14].copy_from_slice(&[0x89, 0x15]);
        s.frame(&frame);
    }),
    ("a segment of another path MTU", &[Code::MtuSegmentMismatch], |s| {
        undisturbed(s, 0);
        s.payload = 512;
        s.send([100]);
    }),
    ("segments of no path MTU", &[Code::MtuSegmentMismatch], |s| {
        s.payload = 1_000;
        s.send([100]);
    }),
    ("a short last packet", NOTHING, |s| {
        undisturbed(s, 0);
        (s.opcode, s.payload) = (Opcode::WRITE_LAST, 8);
        s.send([100]);
    }),
    ("far away, on the same port", &[Code::PsnDiscontinuity], |s| {
        undisturbed(s, 0);
        s.send(500_000..500_020);
    }),
    ("far away, on another port", &[Code::QpnReuse], |s| {
        undisturbed(s, 0);
        s.port = Some(50_000);
        s.send(500_000..500_020);
    }),
    ("far away, one packet", NOTHING, |s| {
        undisturbed(s, 0);
        s.send([500_000]);
        undisturbed(s, 100);
    }),
];

const CONNECTIONS: &[Case] = &[
    ("a connection that nobody answers", &[Code::ConnectUnanswered], |s| {
        s.manage(true, 0x10, (1, 0), 0);
        s.wait_ms(4_000);
        s.manage(true, 0x10, (1, 0), 0);
    }),
    ("a connection that is refused", &[Code::ConnectRejected], |s| {
        s.manage(true, 0x10, (1, 0), 0);
        s.manage(false, 0x12, (0, 1), 8);
    }),
    ("a connection that is made and ends", NOTHING, |s| {
        s.manage(true, 0x10, (1, 0), 0);
        s.manage(false, 0x13, (2, 1), 0);
        s.manage(true, 0x14, (1, 2), 0);
        s.manage(true, 0x15, (1, 2), 0);
        s.manage(false, 0x16, (2, 1), 0);
    }),
];

const MARKINGS: &[Case] = &[
    ("Not-ECT", &[Code::NotEct], |s| {
        (s.tos, s.answer_tos) = (0x68, 0x68);
        undisturbed(s, 0);
    }),
    ("Not-ECT, few packets", NOTHING, |s| {
        (s.tos, s.answer_tos) = (0x68, 0x68);
        s.send(0..rules::MARKING_LEAST as u32 - 1);
    }),
    ("DSCP 0", &[Code::DscpUnmarked], |s| {
        (s.tos, s.answer_tos) = (2, 2);
        undisturbed(s, 0);
    }),
    ("another DSCP in the middle", &[Code::DscpMixedInFlow], |s| {
        undisturbed(s, 0);
        s.tos = 0x2a;
        s.send([100]);
    }),
    ("answered in DSCP 0", &[Code::DscpAsymmetric], |s| {
        s.answer_tos = 2;
        undisturbed(s, 0);
    }),
    ("answered with another codepoint", NOTHING, |s| {
        s.answer_tos = 0x68;
        undisturbed(s, 0);
    }),
    ("two flows, two DSCPs", &[Code::DscpMixedOnHost], |s| {
        s.send(0..20);
        (s.qp, s.tos) = (QB + 1, 0x2a);
        s.send(1_000..1_020);
    }),
    ("CE on every packet, and CNPs", &[Code::CeAtSource], |s| {
        s.tos = 0x6b;
        undisturbed(s, 0);
        s.cnp(QA, 0xc2, |_| {});
    }),
    ("CE on almost every packet, and CNPs", NOTHING, |s| {
        s.send([0]);
        s.tos = 0x6b;
        undisturbed(s, 1);
        s.cnp(QA, 0xc2, |_| {});
    }),
    ("CE, no CNP", &[Code::CeWithoutCnp], |s| {
        undisturbed(s, 0);
        s.tos = 0x6b;
        s.send(100..108);
        s.ack(107);
    }),
    ("little CE, no CNP", NOTHING, |s| {
        undisturbed(s, 0);
        s.tos = 0x6b;
        s.send(100..107);
        s.ack(106);
    }),
    ("CE, and nothing is seen of the way back", NOTHING, |s| {
        s.send(0..100);
        s.tos = 0x6b;
        s.send(100..120);
    }),
    ("a CNP, no CE", &[Code::CnpWithoutCe], |s| {
        undisturbed(s, 0);
        s.cnp(QA, 0xc2, |_| {});
    }),
    ("a CNP for nobody", &[Code::CnpUnmatched], |s| {
        undisturbed(s, 0);
        s.cnp(99, 0xc2, |_| {});
    }),
    ("a CNP without BECN", &[Code::CnpBecnMissing, Code::CnpUnmatched], |s| {
        s.cnp(99, 0xc2, |frame| frame[46] = 0);
    }),
    ("a CNP in the class of data", &[Code::CnpDscpUnexpected, Code::CnpUnmatched], |s| s.cnp(99, 0x6a, |_| {})),
    ("four queue pairs, one port", &[Code::OnePortManyQps], |s| {
        s.port = Some(50_000);
        for qp in 0..4 {
            s.qp = qp + 100;
            s.send(qp * 10_000..qp * 10_000 + 20);
        }
    }),
    ("four queue pairs, two ports", NOTHING, |s| {
        for qp in 0..4 {
            (s.qp, s.port) = (qp + 100, Some(50_000 + u16::from(qp == 3)));
            s.send(qp * 10_000..qp * 10_000 + 20);
        }
    }),
    ("three queue pairs, one port, and one to another host", NOTHING, |s| {
        s.port = Some(50_000);
        for qp in 0..4 {
            (s.qp, s.to) = (qp + 100, if qp == 3 { Addr::v4([10, 0, 0, 3]) } else { B });
            s.send(qp * 10_000..qp * 10_000 + 20);
        }
    }),
];

#[test]
fn every_story_gives_its_findings_and_no_others() {
    let mut wrong = Vec::new();
    for (name, want, tell) in [LOSSES, READS, TIMES, CAPTURES, CONNECTIONS, MARKINGS].into_iter().flatten() {
        let mut story = Story::new();
        tell(&mut story);
        let want: BTreeSet<_> = want.iter().map(|c| c.name()).collect();
        let got = story.codes();
        if got != want {
            wrong.push(format!("{name}: want {want:?}, got {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_code_has_a_story() {
    let told: BTreeSet<_> = [LOSSES, READS, TIMES, CAPTURES, CONNECTIONS, MARKINGS]
        .into_iter()
        .flatten()
        .flat_map(|(_, codes, _)| *codes)
        .collect();
    let untold: Vec<_> = Code::ALL.iter().filter(|code| !told.contains(code)).map(|code| code.name()).collect();
    assert!(untold.is_empty(), "{untold:?}");
}
