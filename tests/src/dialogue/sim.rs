//! The two ends and the link between them.

use std::collections::VecDeque;

use roce_common::{
    psn::{Cause, Psn},
    units::Nanos,
    wire::Opcode,
};

use super::{
    End, Passed, Truth,
    ledger::{Ledger, Why},
    random::Random,
};

/// Path MTU of every dialogue: the least, so that frames are short.
pub(super) const PMTU: u64 = 256;
/// Most PSNs in flight. Less than the 1,024 that are remembered.
const FLIGHT: u64 = 400;

/// How long a requester waits for what does not come.
pub const TIMEOUT: Nanos = Nanos::from_millis(20);

/// What a dialogue is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Reliable, sends and writes.
    RcWrites,
    /// Reliable, READs.
    RcReads,
    /// Reliable, atomics.
    RcAtomics,
    /// Reliable, sends, writes and READs.
    RcMixed,
    /// Extended reliable, sends and writes.
    Xrc,
    /// Unreliable connection.
    Uc,
    /// Datagrams.
    Ud,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 7] =
        [Self::RcWrites, Self::RcReads, Self::RcAtomics, Self::RcMixed, Self::Xrc, Self::Uc, Self::Ud];

    const fn service(self) -> u8 {
        match self {
            Self::RcWrites | Self::RcReads | Self::RcAtomics | Self::RcMixed => 0x00,
            Self::Xrc => 0xa0,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
        }
    }

    const fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc | Self::Ud)
    }
}

/// What passed the tap, and what is true of it.
#[derive(Debug)]
pub struct Dialogue {
    /// What it was made of.
    pub kind: Kind,
    /// Packets in the order of the tap.
    pub packets: Vec<Passed>,
    /// Of the requests.
    pub requests: Truth,
    /// Of the answers.
    pub answers: Truth,
    /// Packets, by their numbers, before which the requester was silent for [`TIMEOUT`].
    pub silences: Vec<usize>,
    /// Why the repeats of requests that passed were sent, in the order in which they began. Copies that the network makes are
    /// spurious.
    pub causes: Vec<Cause>,
}

/// A request packet.
#[derive(Clone, Copy, Debug)]
struct Unit {
    at: u64,
    span: u64,
    op: u8,
    payload: u16,
    dma_len: u32,
}

/// Losses, in permille.
#[derive(Clone, Copy, Debug, Default)]
struct Losses {
    before: u64,
    behind: u64,
    /// Of NAKs, before and behind the tap alike.
    naks: u64,
}

struct Sim {
    random: Random,
    kind: Kind,
    next: u64,
    /// Why each repeat was sent; their numbers begin at 1.
    causes: Vec<Cause>,
    silences: Vec<usize>,
    requests: Ledger,
    answers: Ledger,
    packets: Vec<Passed>,
}

/// A dialogue of about this many packets; the same seed makes the same.
pub fn dialogue(kind: Kind, seed: u64, packets: usize) -> Dialogue {
    let mut random = Random::new(seed);
    // Some start shortly before the wrap.
    let start = if random.permille(300) { (1 << 24) - random.between(1, 2_000) } else { random.below(1 << 24) };
    let mut sim = Sim {
        random,
        kind,
        next: start,
        causes: Vec::new(),
        silences: Vec::new(),
        requests: Ledger::default(),
        answers: Ledger::default(),
        packets: Vec::with_capacity(packets + 1_000),
    };
    sim.quiet();
    while sim.packets.len() < packets {
        sim.act();
    }
    sim.quiet();
    // A datagram sender numbers its packets over all destinations: nothing is to be told of one.
    let of = |ledger: &mut Ledger| if kind == Kind::Ud { Truth::default() } else { ledger.close() };
    let (requests, answers) = (of(&mut sim.requests), of(&mut sim.answers));
    let cause = |n: &Option<u64>| n.map_or(Cause::Spurious, |n| sim.causes[n as usize - 1]);
    let causes = sim.requests.begun().iter().map(cause).collect();
    Dialogue { kind, packets: sim.packets, requests, answers, silences: sim.silences, causes }
}

impl Sim {
    fn act(&mut self) {
        let reliable = self.kind.is_reliable();
        match self.random.below(10) {
            0 | 1 => self.quiet(),
            // READ requests are never late, and what repeats answers of theirs repeats nothing else: see the module.
            2 | 3 | 8 if self.kind == Kind::RcMixed => self.lossy_flight(),
            2 | 3 => self.spray(),
            4 => self.copies(),
            5 if reliable && self.kind != Kind::RcReads => self.not_ready(),
            6 if self.kind != Kind::Ud && self.random.permille(300) => self.reconnect(),
            7 if self.kind == Kind::RcReads => self.answers_lost(),
            8 if reliable => self.answer_to_a_flight_lost(),
            _ => self.lossy_flight(),
        }
    }

    fn lossy_flight(&mut self) {
        let losses =
            Losses { before: self.random.below(60), behind: self.random.below(60), naks: self.random.below(300) };
        self.lossy(losses);
    }

    /// Requests of random messages, of at most `psns` PSNs.
    fn flight(&mut self, psns: u64) -> Vec<Unit> {
        let psns = self.random.between(4, psns);
        let (mut units, mut used) = (Vec::new(), 0);
        while used < psns {
            let mut message = self.message();
            for unit in &mut message {
                unit.at = self.next;
                self.next += unit.span;
                used += unit.span;
            }
            units.extend(message);
        }
        units
    }

    fn message(&mut self) -> Vec<Unit> {
        let unit = |op, payload, span, dma_len| Unit { at: 0, span, op, payload, dma_len };
        match self.kind {
            Kind::RcReads => {
                let len = self.random.below(8 * PMTU);
                vec![unit(0x0c, 0, len.div_ceil(PMTU).max(1), len as u32)]
            }
            Kind::RcMixed if self.random.permille(300) => {
                let len = self.random.below(8 * PMTU);
                vec![unit(0x0c, 0, len.div_ceil(PMTU).max(1), len as u32)]
            }
            Kind::RcAtomics => vec![unit(0x13 + self.random.below(2) as u8, 0, 1, 0)],
            Kind::Ud => vec![unit(0x04, self.random.below(PMTU) as u16, 1, 0)],
            Kind::RcWrites | Kind::RcMixed | Kind::Xrc | Kind::Uc => {
                let write = if self.random.permille(500) { 0x06 } else { 0x00 };
                let n = self.random.between(1, 7);
                let last = self.random.between(1, PMTU) as u16;
                let only = if self.random.permille(200) { 0 } else { last };
                let body = |i| match i {
                    0 if n == 1 => unit(write + 4, only, 1, u32::from(only)),
                    0 => unit(write, PMTU as u16, 1, (n * PMTU) as u32),
                    i if i + 1 == n => unit(write + 2, last, 1, 0),
                    _ => unit(write + 1, PMTU as u16, 1, 0),
                };
                (0..n).map(body).collect()
            }
        }
    }

    fn is_read(unit: &Unit) -> bool {
        unit.op == 0x0c
    }

    fn tap(&mut self, from: End, op: u8, at: u64, payload: u16, dma_len: u32, syndrome: u8) {
        let opcode = Opcode::new(self.kind.service() | op).expect("an opcode of the service");
        let psn = Psn::new((at & 0xff_ffff) as u32);
        self.packets.push(Passed { from, opcode, psn, payload, dma_len, syndrome });
    }

    fn pass(&mut self, unit: &Unit, why: Why) {
        self.requests.pass(unit.at, unit.span, why, true, Self::is_read(unit));
        self.tap(End::Requester, unit.op, unit.at, unit.payload, unit.dma_len, 0);
    }

    /// The responder carries out a request and answers; nothing happens to the answer.
    fn answer(&mut self, unit: &Unit, why: Why) {
        match unit.op {
            0x0c => {
                for i in 0..unit.span {
                    self.read_answer(unit, i, why);
                }
            }
            0x13 | 0x14 => {
                self.answers.pass(unit.at, 1, why, false, false);
                self.tap(End::Responder, 0x12, unit.at, 0, 0, 0x1f);
            }
            0x02 | 0x04 | 0x08 | 0x0a if self.kind.is_reliable() => {
                self.tap(End::Responder, 0x11, unit.at, 0, 0, 0x1f);
            }
            _ => {}
        }
    }

    fn read_answer(&mut self, unit: &Unit, i: u64, why: Why) {
        let (op, payload) = match (i, unit.span) {
            (0, 1) => (0x10, unit.dma_len as u16),
            (0, _) => (0x0d, PMTU as u16),
            (i, n) if i + 1 == n => (0x0f, (u64::from(unit.dma_len) - i * PMTU) as u16),
            _ => (0x0e, PMTU as u16),
        };
        self.answers.pass(unit.at + i, 1, why, op == 0x0e || op == 0x0f, false);
        self.tap(End::Responder, op, unit.at + i, payload, 0, 0x1f);
    }

    /// Nothing goes wrong.
    fn quiet(&mut self) {
        for unit in self.flight(FLIGHT) {
            self.pass(&unit, Why::New);
            self.answer(&unit, Why::New);
        }
    }

    /// Packets take different ways to the tap; the receiver puts them in order.
    fn spray(&mut self) {
        if self.kind == Kind::RcReads {
            return self.quiet();
        }
        let units = self.flight(2 * FLIGHT);
        let depth = self.random.between(2, 1_000);
        let mut order: Vec<(u64, usize)> = (0..units.len()).map(|i| (i as u64 + self.random.below(depth), i)).collect();
        order.sort_unstable();
        for (_, i) in order {
            self.pass(&units[i], Why::New);
        }
        for unit in units {
            self.answer(&unit, Why::New);
        }
    }

    /// The network sends some packets twice.
    fn copies(&mut self) {
        let mut copies = VecDeque::new();
        for unit in self.flight(FLIGHT) {
            self.pass(&unit, Why::New);
            self.answer(&unit, Why::New);
            if self.random.permille(60) {
                copies.push_back(unit);
            }
            if self.random.permille(200)
                && let Some(copy) = copies.pop_front()
            {
                self.pass(&copy, Why::Copy);
            }
        }
    }

    /// The receiver refuses a request, and everything behind it, once.
    fn not_ready(&mut self) {
        let units = self.flight(FLIGHT);
        let refused = self.random.below(units.len() as u64) as usize;
        for (i, unit) in units.iter().enumerate() {
            self.pass(unit, Why::New);
            if i < refused {
                self.answer(unit, Why::New);
            }
        }
        let timer = 0x20 | self.random.below(32) as u8;
        self.tap(End::Responder, 0x11, units[refused].at, 0, 0, timer);
        self.send_all(&units[refused..], Losses::default(), true);
    }

    /// Another connection on the same queue pair numbers.
    fn reconnect(&mut self) {
        // Forward, so that an answer may start there; a flow without tracked answers also goes back.
        let ahead = self.random.between(3_000, (1 << 23) - 200_000);
        let back = matches!(self.kind, Kind::RcWrites | Kind::Uc | Kind::Xrc) && self.random.permille(500);
        self.next += if back { (1 << 24) - ahead } else { ahead };
        self.requests.forget();
        self.requests.truth.discontinuities += 1;
        // The new place must be told from odd packets: nothing goes wrong at first.
        self.quiet();
    }

    /// An answer or ACK is lost behind the tap, and the requester times out and starts over.
    fn answer_to_a_flight_lost(&mut self) {
        let units = self.flight(FLIGHT);
        for unit in &units {
            self.pass(unit, Why::New);
            self.answer(unit, Why::New);
        }
        let from = self.random.below(units.len() as u64) as usize;
        let why = self.another_repeat(Cause::Timeout);
        for unit in &units[from..] {
            self.pass(unit, why);
            self.answer(unit, why);
        }
    }

    /// READ answers are lost on their way; the requester asks again from the first that is missing.
    fn answers_lost(&mut self) {
        let units = self.flight(FLIGHT);
        let end = units.last().map_or(0, |u| u.at + u.span);
        let (before, behind) = (self.random.below(60), self.random.below(60));
        let mut todo = units.clone();
        let mut why = Why::New;
        loop {
            for unit in &todo {
                self.pass(unit, why);
            }
            let mut wants = todo[0].at;
            for unit in &todo {
                for i in 0..unit.span {
                    let at = unit.at + i;
                    let middle = i > 0 && i + 1 < unit.span;
                    if middle && self.may_drop(End::Responder, at, 1, why) && self.random.permille(before) {
                        self.answers.drop(at, 1, why);
                        continue;
                    }
                    self.read_answer(unit, i, why);
                    if at == wants && !self.random.permille(behind) {
                        wants += 1;
                    }
                }
            }
            if wants == end {
                return;
            }
            why = self.another_repeat(Cause::Reask);
            todo = units.iter().filter(|u| u.at + u.span > wants).copied().collect();
            let first = &mut todo[0];
            let done = wants - first.at;
            first.at = wants;
            first.span -= done;
            first.dma_len -= (done * PMTU) as u32;
        }
    }

    /// Requests are lost before and behind the tap.
    fn lossy(&mut self, losses: Losses) {
        let units = self.flight(FLIGHT);
        if self.kind.is_reliable() {
            return self.send_all(&units, losses, false);
        }
        for unit in &units {
            if self.requests.end().is_some() && self.random.permille(losses.before) {
                self.requests.drop(unit.at, unit.span, Why::New);
            } else {
                self.pass(unit, Why::New);
            }
        }
    }

    /// Whether the loss of this packet before the tap is one that an order of packets tells; see the module.
    fn may_drop(&self, from: End, at: u64, span: u64, why: Why) -> bool {
        let ledger = if from == End::Requester { &self.requests } else { &self.answers };
        let Some(end) = ledger.end() else { return false };
        match why {
            Why::New | Why::Copy => true,
            Why::Repeat(n) => at >= end || at + span < end && ledger.has_repeated_in(n),
        }
    }

    /// Sends everything until all of it has arrived, starting over where a NAK or a time-out says. `again`: the first
    /// time is a repeat already.
    fn send_all(&mut self, units: &[Unit], losses: Losses, again: bool) {
        let (mut send, mut expected, mut refused, mut nak) = (0, 0, false, None);
        let mut why = if again { self.another_repeat(Cause::RnrRepeat) } else { Why::New };
        while expected < units.len() {
            if send == units.len() {
                why = self.another_repeat(if nak.is_some() { Cause::GoBackN } else { Cause::Timeout });
                send = nak.take().unwrap_or(expected);
                continue;
            }
            let unit = units[send];
            if self.may_drop(End::Requester, unit.at, unit.span, why) && self.random.permille(losses.before) {
                self.requests.drop(unit.at, unit.span, why);
            } else {
                self.pass(&unit, why);
                let arrives = !self.random.permille(losses.behind);
                if arrives && send == expected {
                    self.answer(&unit, Why::New);
                    expected += 1;
                    refused = false;
                } else if arrives && send > expected && !refused {
                    refused = true;
                    nak = self.nak(units[expected].at, losses).then_some(expected);
                }
            }
            send += 1;
        }
    }

    fn another_repeat(&mut self, cause: Cause) -> Why {
        if cause == Cause::Timeout {
            self.silences.push(self.packets.len());
        }
        self.causes.push(cause);
        Why::Repeat(self.causes.len() as u64)
    }

    /// The responder refuses what is not next; whether the NAK arrives.
    fn nak(&mut self, at: u64, losses: Losses) -> bool {
        if self.random.permille(losses.naks) {
            return false;
        }
        self.requests.nak(at);
        self.tap(End::Responder, 0x11, at, 0, 0, 0x60);
        !self.random.permille(losses.naks)
    }
}
