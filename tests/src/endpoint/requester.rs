//! The requesting half of a queue pair: sends messages, retries by go-back-N as rxe does (`rxe_req.c`, `rxe_comp.c`).

use std::collections::VecDeque;

use roce_common::{
    psn::Psn,
    units::Nanos,
    wire::{Aeth, Packet, Position, Reth, Syndrome},
};

use super::{
    config::{MAX_READS, MAX_UNASKED, Message, Op, QpConfig, Traffic, WINDOW, rnr_time},
    opcodes,
    qp::Outgoing,
    stats::QpStats,
};

/// Remote key and base address that stand in our RETHs; nothing checks them.
const RKEY: u32 = 0x0000_1a2b;
const BASE_VA: u64 = 0x7f00_0000_0000;

/// A message on its way.
#[derive(Clone, Copy, Debug)]
struct Wqe {
    message: Message,
    first: Psn,
    /// PSNs it takes.
    count: u32,
}

impl Wqe {
    const fn end(&self) -> Psn {
        self.first.add(self.count)
    }

    const fn holds(&self, psn: Psn) -> bool {
        psn.diff(self.first) >= 0 && psn.diff(self.end()) < 0
    }
}

/// The requester's state.
#[derive(Debug)]
pub(super) struct Requester {
    traffic: Traffic,
    /// Index of the next message of the list, and rounds finished.
    upcoming: usize,
    round: u64,
    wqes: VecDeque<Wqe>,
    /// Oldest PSN not acknowledged.
    una: Psn,
    /// PSN to send next.
    next: Psn,
    /// One past the highest PSN ever sent, READ spans included.
    high: Psn,
    unasked: u32,
    need_retry: bool,
    /// A retry was started and nothing was acknowledged since: further NAKs start none (`comp.started_retry`).
    started_retry: bool,
    rnr_until: Option<Nanos>,
    timer: Option<Nanos>,
    timeout: Nanos,
    pmtu: u32,
    stopping: bool,
}

impl Requester {
    pub(super) fn new(cfg: &QpConfig) -> Self {
        let psn = cfg.send_psn;
        Self {
            traffic: cfg.traffic.clone(),
            upcoming: 0,
            round: 0,
            wqes: VecDeque::new(),
            una: psn,
            next: psn,
            high: psn,
            unasked: 0,
            need_retry: false,
            started_retry: false,
            rnr_until: None,
            timer: None,
            timeout: Nanos(cfg.timeout.as_nanos() as u64),
            pmtu: u32::from(cfg.pmtu),
            stopping: false,
        }
    }

    /// Takes no further message from the list.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Everything asked for is done.
    pub(super) fn is_done(&self) -> bool {
        self.wqes.is_empty() && !self.has_more()
    }

    fn has_more(&self) -> bool {
        !self.stopping && !self.traffic.messages.is_empty() && self.traffic.rounds.is_none_or(|n| self.round < n)
    }

    /// Whether the window is open and there is something to send.
    pub(super) fn may_send(&self) -> bool {
        let open = self.need_retry || self.next.diff(self.una) < WINDOW as i32;
        open && self.rnr_until.is_none() && (self.next.diff(self.high) < 0 || self.need_retry || self.has_more())
    }

    fn outstanding(&self) -> bool {
        self.high.diff(self.una) > 0
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        match (self.rnr_until, self.timer) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Fires what is due.
    pub(super) fn on_timer(&mut self, now: Nanos, stats: &mut QpStats) {
        if self.rnr_until.is_some_and(|t| t <= now) {
            self.rnr_until = None;
            self.need_retry = true;
        }
        if self.timer.is_some_and(|t| t <= now) {
            self.timer = None;
            if self.outstanding() && self.rnr_until.is_none() {
                stats.timeouts += 1;
                self.need_retry = true;
                self.started_retry = true;
            }
        }
    }

    /// The next request packet, if one may be sent now.
    pub(super) fn poll(&mut self, now: Nanos, stats: &mut QpStats) -> Option<Outgoing> {
        if self.rnr_until.is_some() || stats.fatal.is_some() {
            return None;
        }
        if self.need_retry {
            self.need_retry = false;
            self.next = self.una;
            self.unasked = 0;
        }
        if self.next.diff(self.una) >= WINDOW as i32 {
            return None;
        }
        let wqe = self.wqe_to_send()?;
        let out = if wqe.message.op == Op::Read { self.read_request(&wqe, stats) } else { self.data(&wqe, stats) };
        if self.next.diff(self.high) > 0 {
            self.high = self.next;
        }
        self.timer.get_or_insert(Nanos(now.0 + self.timeout.0));
        Some(out)
    }

    /// The message that holds `next`, taken from the list where it is a new one.
    fn wqe_to_send(&mut self) -> Option<Wqe> {
        if let Some(&wqe) = self.wqes.iter().rev().find(|w| w.holds(self.next)) {
            return Some(wqe);
        }
        if !self.has_more() {
            return None;
        }
        let message = self.traffic.messages[self.upcoming];
        if message.op == Op::Read && self.wqes.iter().filter(|w| w.message.op == Op::Read).count() >= MAX_READS {
            return None;
        }
        self.upcoming += 1;
        if self.upcoming == self.traffic.messages.len() {
            self.upcoming = 0;
            self.round += 1;
        }
        let count = message.len.div_ceil(self.pmtu).max(1);
        let wqe = Wqe { message, first: self.next, count };
        self.wqes.push_back(wqe);
        Some(wqe)
    }

    fn reth(&self, wqe: &Wqe, offset: u32) -> Reth {
        let offset = offset.min(wqe.message.len);
        Reth { va: BASE_VA + u64::from(offset), rkey: RKEY, dma_len: wqe.message.len - offset }
    }

    /// A READ request, from the middle where part of the answer is here already.
    fn read_request(&mut self, wqe: &Wqe, stats: &mut QpStats) -> Outgoing {
        let psn = self.next;
        if psn.diff(self.high) < 0 {
            stats.reasked += 1;
        }
        let offset = psn.diff(wqe.first) as u32 * self.pmtu;
        self.next = wqe.end();
        self.unasked = 0;
        let mut out = Outgoing::new(roce_common::wire::Opcode::READ_REQUEST, psn);
        out.ack_req = true;
        out.ext.reth = Some(self.reth(wqe, offset));
        out
    }

    /// A packet of a WRITE or SEND.
    fn data(&mut self, wqe: &Wqe, stats: &mut QpStats) -> Outgoing {
        let psn = self.next;
        if psn.diff(self.high) < 0 {
            stats.retransmitted += 1;
        }
        let index = psn.diff(wqe.first) as u32;
        let position = opcodes::position(index, wqe.count);
        let offset = index * self.pmtu;
        self.next = psn.add(1);
        let mut out = Outgoing::new(opcodes::request(wqe.message.op, position), psn);
        out.payload = (wqe.message.len - offset).min(self.pmtu) as usize;
        out.offset = offset;
        if wqe.message.op == Op::Write && matches!(position, Position::First | Position::Only) {
            out.ext.reth = Some(self.reth(wqe, 0));
        }
        let ends = matches!(position, Position::Last | Position::Only);
        out.ack_req = ends || self.unasked > MAX_UNASKED;
        self.unasked = if out.ack_req { 0 } else { self.unasked + 1 };
        out
    }

    /// An ACK or NAK.
    pub(super) fn on_ack(&mut self, now: Nanos, psn: Psn, aeth: Aeth, stats: &mut QpStats) {
        if !self.concerns(psn) {
            return;
        }
        match aeth.syndrome() {
            Syndrome::Ack(_) => {
                self.acknowledge(psn.add(1), stats);
            }
            Syndrome::PsnSequence => {
                stats.naks += 1;
                if self.acknowledge_silently(psn, stats) {
                    self.retry();
                }
            }
            Syndrome::RnrNak(code) => {
                stats.rnrs += 1;
                if self.acknowledge_silently(psn, stats) {
                    self.rnr_until = Some(Nanos(now.0 + rnr_time(code).as_nanos() as u64));
                }
            }
            Syndrome::InvalidRequest | Syndrome::RemoteAccess | Syndrome::RemoteOperational | Syndrome::Other(_) => {
                stats.fatal = Some(aeth.raw_syndrome);
            }
        }
        self.rearm(now);
    }

    /// A READ response; returns whether its payload was accepted.
    pub(super) fn on_read_response(&mut self, now: Nanos, packet: &Packet, stats: &mut QpStats) -> bool {
        let psn = packet.bth.psn;
        if psn.diff(self.una) < 0 && psn.diff(self.high) < 0 {
            stats.duplicates += 1;
            return false;
        }
        if !self.concerns(psn) {
            return false;
        }
        // A response acknowledges every request before it; where a READ is skipped that is an implied NAK.
        let reached = self.acknowledge_silently(psn, stats);
        let accepted = reached && self.una == psn && self.fits_front(psn, packet);
        if accepted {
            self.una = psn.add(1);
            self.started_retry = false;
            self.pop_finished(stats);
        } else {
            stats.out_of_sequence += 1;
        }
        self.rearm(now);
        accepted
    }

    /// Whether `psn` is one that is sent and not acknowledged.
    fn concerns(&self, psn: Psn) -> bool {
        psn.diff(self.una) >= 0 && psn.diff(self.high) < 0
    }

    fn fits_front(&self, psn: Psn, packet: &Packet) -> bool {
        self.wqes.front().is_some_and(|w| {
            let offset = psn.diff(w.first) as u32 * self.pmtu;
            w.message.op == Op::Read
                && w.holds(psn)
                && u32::from(packet.payload_len) == (w.message.len - offset).min(self.pmtu)
        })
    }

    /// Acknowledges everything before `end`; progress ends a retry.
    fn acknowledge(&mut self, end: Psn, stats: &mut QpStats) {
        let before = self.una;
        if self.acknowledge_silently(end, stats) && self.una != before {
            self.started_retry = false;
        }
    }

    /// Acknowledges everything before `end`, up to the first READ whose answer is missing. False, and a retry begun,
    /// where such a READ stands in the way: the implied NAK.
    fn acknowledge_silently(&mut self, end: Psn, stats: &mut QpStats) -> bool {
        while self.una.diff(end) < 0 {
            let Some(front) = self.wqes.front() else { break };
            if front.message.op == Op::Read {
                self.retry();
                return false;
            }
            self.una = if front.end().diff(end) <= 0 { front.end() } else { end };
            self.pop_finished(stats);
        }
        true
    }

    fn pop_finished(&mut self, stats: &mut QpStats) {
        while self.wqes.front().is_some_and(|w| w.end().diff(self.una) <= 0) {
            self.wqes.pop_front();
            stats.completed += 1;
        }
        // A retry under way may stand before what is acknowledged now.
        if self.next.diff(self.una) < 0 {
            self.next = self.una;
        }
    }

    fn retry(&mut self) {
        if !self.started_retry && self.next.diff(self.una) > 0 {
            self.need_retry = true;
            self.started_retry = true;
        }
    }

    fn rearm(&mut self, now: Nanos) {
        self.timer = self.outstanding().then_some(Nanos(now.0 + self.timeout.0));
    }
}
