//! The responding half of a queue pair, with rxe's habits (`rxe_resp.c`): an ACK where one is asked for, one sequence NAK
//! per gap, duplicates answered with the newest ACK, READs answered again from wherever they are asked again.

use std::collections::VecDeque;

use roce_common::{
    psn::Psn,
    units::Nanos,
    wire::{Aeth, Opcode, Packet, Position, Reth},
};

use super::{
    config::{Op, QpConfig, Rnr},
    opcodes,
    qp::Outgoing,
    stats::QpStats,
};

/// ACK without credit information, all that rxe sends.
const ACK: u8 = 0x1f;
const NAK_SEQUENCE: u8 = 0x60;
const NAK_INVALID: u8 = 0x61;
const RNR: u8 = 0x20;

/// An answer waiting to be sent, in the order the requests came.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Ack { psn: Psn, syndrome: u8, msn: u32 },
    Read { psn: Psn, index: u32, count: u32, len: u32, msn: u32 },
}

/// The responder's state.
#[derive(Debug)]
pub(super) struct Responder {
    expected: Psn,
    msn: u32,
    /// A NAK for `expected` is out; nothing more is said until it comes.
    nak_sent: bool,
    /// The message under way.
    current: Option<Op>,
    answers: VecDeque<Answer>,
    rnr: Option<Rnr>,
    /// SENDs since the last refusal.
    sends: u32,
    pmtu: u32,
}

impl Responder {
    pub(super) fn new(cfg: &QpConfig) -> Self {
        Self {
            expected: cfg.recv_psn,
            msn: 0,
            nak_sent: false,
            current: None,
            answers: VecDeque::new(),
            rnr: cfg.rnr,
            sends: 0,
            pmtu: u32::from(cfg.pmtu),
        }
    }

    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    fn answer(&mut self, psn: Psn, syndrome: u8) {
        self.answers.push_back(Answer::Ack { psn, syndrome, msn: self.msn });
    }

    /// A request packet.
    pub(super) fn on_request(&mut self, now: Nanos, packet: &Packet, stats: &mut QpStats) {
        let psn = packet.bth.psn;
        let d = psn.diff(self.expected);
        if d > 0 {
            stats.out_of_sequence += 1;
            if !self.nak_sent {
                self.nak_sent = true;
                stats.naks_sent += 1;
                self.answer(self.expected, NAK_SEQUENCE);
            }
            return;
        }
        let Some(op) = opcodes::operation(packet.bth.opcode) else {
            self.answer(psn, NAK_INVALID);
            return;
        };
        if d < 0 {
            stats.duplicates += 1;
            match packet.reth {
                Some(reth) if op == Op::Read => self.read(psn, reth),
                _ => self.answer(self.expected.sub(1), ACK),
            }
            return;
        }
        self.nak_sent = false;
        self.in_sequence(now, op, packet, stats);
    }

    fn in_sequence(&mut self, now: Nanos, op: Op, packet: &Packet, stats: &mut QpStats) {
        let psn = packet.bth.psn;
        let position = packet.bth.opcode.position();
        let starts = matches!(position, Position::First | Position::Only);
        // A message begins only where none is under way, and goes on only as what it began.
        if self.current != (!starts).then_some(op) {
            self.answer(psn, NAK_INVALID);
            return;
        }
        if op == Op::Send && starts && self.refuses() {
            stats.rnrs_sent += 1;
            // What follows in flight is ahead of the refused packet: no word about it.
            self.nak_sent = true;
            let code = self.rnr.map_or(0, |r| r.code & 0x1f);
            self.answer(psn, RNR | code);
            return;
        }
        if let Some(reth) = packet.reth
            && op == Op::Read
        {
            self.msn = (self.msn + 1) & 0xff_ffff;
            self.expected = psn.add(reth.dma_len.div_ceil(self.pmtu).max(1));
            self.read(psn, reth);
            return;
        }
        self.expected = psn.add(1);
        let bytes = u64::from(packet.payload_len);
        stats.accepted_bytes += bytes;
        stats.accepted.add(now, bytes);
        let ends = matches!(position, Position::Last | Position::Only);
        self.current = (!ends).then_some(op);
        if ends {
            self.msn = (self.msn + 1) & 0xff_ffff;
        }
        if packet.bth.ack_req {
            self.answer(psn, ACK);
        }
    }

    fn refuses(&mut self) -> bool {
        let Some(rnr) = self.rnr else { return false };
        self.sends += 1;
        if self.sends > rnr.every {
            self.sends = 0;
            return false;
        }
        self.sends == rnr.every
    }

    fn read(&mut self, psn: Psn, reth: Reth) {
        let count = reth.dma_len.div_ceil(self.pmtu).max(1);
        self.answers.push_back(Answer::Read { psn, index: 0, count, len: reth.dma_len, msn: self.msn });
    }

    /// The next answer to send.
    pub(super) fn poll(&mut self) -> Option<Outgoing> {
        match self.answers.front_mut()? {
            Answer::Ack { psn, syndrome, msn } => {
                let mut out = Outgoing::new(Opcode::ACKNOWLEDGE, *psn);
                out.ext.aeth = Some(Aeth { raw_syndrome: *syndrome, msn: *msn });
                self.answers.pop_front();
                Some(out)
            }
            Answer::Read { psn, index, count, len, msn } => {
                let position = opcodes::position(*index, *count);
                let offset = *index * self.pmtu;
                let mut out = Outgoing::new(opcodes::read_response(position), psn.add(*index));
                if position != Position::Middle {
                    out.ext.aeth = Some(Aeth { raw_syndrome: ACK, msn: *msn });
                }
                out.offset = offset;
                out.payload = (*len - offset).min(self.pmtu) as usize;
                *index += 1;
                if index == count {
                    self.answers.pop_front();
                }
                Some(out)
            }
        }
    }
}
