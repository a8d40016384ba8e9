//! Dialogues made for the purpose: frames with times, addresses and markings, through the whole analysis.

use std::collections::BTreeSet;

use roce_common::{
    psn::Psn,
    units::{Addr, Nanos, Qpn},
    wire::{Aeth, Bth, Deth, IpVersion, Opcode, Reth, emit, source_port},
};

use crate::{
    export::CaptureReport,
    inspect::{
        analysis::Analysis,
        capture::{Capture, Frame},
        link::LinkLayer,
    },
};

const A: Addr = Addr::v4([10, 0, 0, 1]);
pub(super) const B: Addr = Addr::v4([10, 0, 0, 2]);
/// A's queue pair, and B's.
pub(super) const QA: u32 = 40;
pub(super) const QB: u32 = 17;
/// DSCP 26, ECT(0).
const MARKED: u8 = 0x6a;
/// Time between frames that follow each other.
const STEP: u64 = 2_000;

/// A capture in the making: QP 40 at A asks QP 17 at B, a WRITE packet a PSN unless said otherwise.
pub(super) struct Story {
    analysis: Analysis,
    pub(super) now: u64,
    number: u64,
    pub(super) tos: u8,
    pub(super) answer_tos: u8,
    /// Counted on, unless it is 0.
    pub(super) ip_id: u16,
    pub(super) opcode: Opcode,
    pub(super) payload: usize,
    pub(super) qp: u32,
    pub(super) port: Option<u16>,
    pub(super) to: Addr,
    /// Bytes kept of each frame.
    pub(super) snap: usize,
    /// A change to each frame on its way.
    pub(super) damage: fn(&mut [u8]),
    /// Every frame is captured as often.
    pub(super) copies: u32,
}

impl Story {
    pub(super) fn new() -> Self {
        Self {
            analysis: Analysis::default(),
            now: 1_000_000_000,
            number: 0,
            tos: MARKED,
            answer_tos: MARKED,
            ip_id: 1,
            opcode: Opcode::WRITE_MIDDLE,
            payload: 1024,
            qp: QB,
            port: None,
            to: B,
            snap: usize::MAX,
            damage: |_| {},
            copies: 1,
        }
    }

    pub(super) fn wait_ms(&mut self, ms: u64) {
        self.now += ms * 1_000_000;
    }

    /// Requests with these PSNs.
    pub(super) fn send(&mut self, psns: impl IntoIterator<Item = u32>) {
        for psn in psns {
            let mut bth = Bth::new(self.opcode, Qpn::new(self.qp), Psn::new(psn));
            bth.ack_req = psn % 8 == 7;
            let reth = Reth { va: 0, rkey: 0, dma_len: 4 * 1024 };
            let has_reth = matches!(self.opcode, Opcode::READ_REQUEST | Opcode::WRITE_ONLY | Opcode::WRITE_FIRST);
            let ext = emit::Ext { reth: has_reth.then_some(reth), ..emit::Ext::default() };
            let payload = if self.opcode == Opcode::READ_REQUEST { 0 } else { self.payload };
            let port = self.port.unwrap_or(source_port(Qpn::new(QA), Qpn::new(self.qp)));
            self.packet((A, self.to), port, self.tos, &bth, &ext, payload);
        }
    }

    /// An AETH from B, in an ACKNOWLEDGE.
    pub(super) fn answer(&mut self, psn: u32, raw_syndrome: u8) {
        self.respond(Opcode::ACKNOWLEDGE, psn, raw_syndrome, 0);
    }

    pub(super) fn ack(&mut self, psn: u32) {
        self.answer(psn, 0x1f);
    }

    /// READ responses of the path MTU.
    pub(super) fn responses(&mut self, psns: impl IntoIterator<Item = u32>) {
        for psn in psns {
            let opcode = match psn % 4 {
                0 => Opcode::READ_RESPONSE_FIRST,
                3 => Opcode::READ_RESPONSE_LAST,
                _ => Opcode::READ_RESPONSE_MIDDLE,
            };
            self.respond(opcode, psn, 0x1f, 1024);
        }
    }

    fn respond(&mut self, opcode: Opcode, psn: u32, raw_syndrome: u8, payload: usize) {
        let bth = Bth::new(opcode, Qpn::new(QA), Psn::new(psn));
        let aeth = (opcode != Opcode::READ_RESPONSE_MIDDLE).then_some(Aeth { raw_syndrome, msn: 1 });
        let port = self.port.unwrap_or(source_port(Qpn::new(QA), Qpn::new(self.qp)));
        self.packet((self.to, A), port, self.answer_tos, &bth, &emit::Ext { aeth, ..emit::Ext::default() }, payload);
    }

    /// A CNP from B for a queue pair at A.
    pub(super) fn cnp(&mut self, qp: u32, tos: u8, change: fn(&mut [u8])) {
        let path = self.path((B, A), 0, tos);
        let mut frame = [0; emit::CNP_FRAME_V6];
        let len = emit::cnp(&path, IpVersion::V4, Qpn::new(qp), &mut frame);
        change(&mut frame[..len]);
        self.frame(&frame[..len]);
    }

    /// A message of connection management on QP1, from A or from B: its attribute, its sender's and its receiver's
    /// number of the connection, and what stands at byte 8 of a REJ.
    pub(super) fn manage(&mut self, from_a: bool, attribute: u8, ids: (u32, u32), word: u32) {
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[17] = attribute;
        for (at, value) in [(24, ids.0), (28, ids.1), (32, word)] {
            mad[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        let ends = if from_a { (A, self.to) } else { (self.to, A) };
        let deth = Deth { qkey: 0x8001_0000, src_qp: Qpn::GSI };
        let ext = emit::Ext { deth: Some(deth), ..emit::Ext::default() };
        let bth = Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(0));
        let mut frame = [0; 512];
        let len = emit::frame(&self.path(ends, 55_410, 0), &bth, &ext, &mad, &mut frame).expect("a frame");
        self.frame(&frame[..len]);
    }

    /// Any frame.
    pub(super) fn frame(&mut self, bytes: &[u8]) {
        for _ in 0..self.copies {
            self.number += 1;
            self.now += STEP;
            self.analysis.frame(&Frame {
                number: self.number,
                interface: 0,
                interface_name: "",
                tunnel: None,
                link: LinkLayer::Ethernet,
                time: Nanos(self.now),
                bytes: &bytes[..bytes.len().min(self.snap)],
                wire_len: bytes.len(),
            });
        }
        self.ip_id += u16::from(self.ip_id != 0);
    }

    fn path(&self, (src, dst): (Addr, Addr), src_port: u16, tos: u8) -> emit::Path {
        emit::Path { src_mac: [2; 6], dst_mac: [4; 6], src, dst, tos, ttl: 64, ip_id: self.ip_id, src_port }
    }

    fn packet(&mut self, ends: (Addr, Addr), port: u16, tos: u8, bth: &Bth, ext: &emit::Ext, payload: usize) {
        let path = self.path(ends, port, tos);
        let mut frame = [0; 2048];
        let len = emit::frame(&path, bth, ext, &[5; 1024][..payload], &mut frame).expect("a frame");
        (self.damage)(&mut frame[..len]);
        self.frame(&frame[..len]);
    }

    pub(super) fn report(self) -> CaptureReport {
        self.analysis.finish("story".to_owned(), &Capture { interfaces: vec!["if0".to_owned()], incomplete: None })
    }

    /// The codes found.
    pub(super) fn codes(self) -> BTreeSet<&'static str> {
        self.report().findings.iter().map(|f| f.code).collect()
    }
}
