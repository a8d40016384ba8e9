//! The ends of a flow: responder, notification point, requester's timers, and the controller with its reaction points.

use roce_common::{
    dcqcn::{
        Rp,
        np::{self, Answer},
        params::HeldBackMarks,
    },
    units::Nanos,
};

use super::{
    events::{Event, Packet},
    flow::{NEVER, nanos},
    network::PS_PER_NS,
    run::Simulation,
    scenario::Workload,
    stats::BINS,
};

/// Small messages of the RPC workload are a quarter of the mean, large ones four times the mean.
const LARGE_SHARE: f64 = 0.2;

impl Simulation<'_> {
    /// A packet reaches its responder at `at`.
    pub(super) fn deliver(&mut self, packet: &Packet, at: u64) {
        let (flow, jitter) = (packet.flow, self.s.jitter.0 * PS_PER_NS);
        let f = &mut self.flows[flow as usize];
        f.arrived_ever += 1;
        match np::answer(packet.ce, f.owed, f.last_cnp.0, nanos(at).0, self.params.cnp_interval.0) {
            Answer::Nothing => {}
            Answer::HeldBack => f.owed = self.params.held_back_marks == HeldBackMarks::Answered,
            Answer::Cnp => {
                f.last_cnp = nanos(at);
                f.owed = false;
                f.counts.cnps += 1;
                f.cnp_at = f.cnp_at.max(at + f.reverse_ps + self.random.up_to(jitter));
                self.events.push(f.cnp_at, Event::Cnp(flow));
            }
        }
        if packet.psn == f.expected {
            f.expected += 1;
            f.nak_sent = false;
            f.unacked += 1;
            f.counts.accepted += 1;
            let ends = f.messages.front().is_some_and(|m| m.0 == f.expected);
            if ends || f.unacked >= self.s.ack_every {
                f.unacked = 0;
                let ack = Event::Ack { flow, psn: f.expected };
                self.events.push(at + f.reverse_ps, ack);
            }
            self.count_accepted(flow, at);
            if ends {
                self.message_arrived(flow, at);
            }
        } else if packet.psn > f.expected {
            if !f.nak_sent {
                f.nak_sent = true;
                let nak = Event::Nak { flow, psn: f.expected };
                self.events.push(at + f.reverse_ps, nak);
            }
        } else {
            f.unacked = 0;
            let ack = Event::Ack { flow, psn: f.expected };
            self.events.push(at + f.reverse_ps, ack);
        }
    }

    fn count_accepted(&mut self, flow: u32, at: u64) {
        let bin = ((at / self.bin_ps) as usize).min(BINS - 1);
        self.accepted[flow as usize * BINS + bin] += 1;
        if let Some(join) = self.s.join
            && flow + 1 == self.s.flows
        {
            let period = at.saturating_sub(join.0 * PS_PER_NS) / (self.params.rp.timer.0 * PS_PER_NS).max(1);
            // A period far below a packet time would need room without end.
            if let Ok(period) = usize::try_from(period)
                && period < 1 << 20
            {
                if self.join_periods.len() <= period {
                    self.join_periods.resize(period + 1, 0);
                }
                self.join_periods[period] += 1;
            }
        }
    }

    /// An acknowledgement or a NAK reaches the requester.
    pub(super) fn acknowledged(&mut self, flow: u32, psn: u32, nak: bool) {
        let (now, timeout) = (self.now, self.timeout);
        let f = &mut self.flows[flow as usize];
        f.acked(psn, now, timeout);
        if nak {
            f.go_back();
        }
        f.pump(now);
        let host = f.host;
        self.arm(flow);
        self.serve(host);
    }

    /// One event at a time waits for the ACK timer, whatever it is set to meanwhile.
    pub(super) fn arm(&mut self, flow: u32) {
        let f = &mut self.flows[flow as usize];
        if !f.timer_pending && f.timer_at != NEVER {
            f.timer_pending = true;
            self.events.push(f.timer_at, Event::Timeout(flow));
        }
    }

    pub(super) fn ack_timer(&mut self, flow: u32) {
        let (now, timeout) = (self.now, self.timeout);
        let f = &mut self.flows[flow as usize];
        f.timer_pending = false;
        if f.timer_at <= now {
            f.counts.timeouts += 1;
            f.go_back();
            f.timer_at = now + timeout;
            f.pump(now);
            let host = f.host;
            self.serve(host);
        }
        self.arm(flow);
    }

    /// The controller's timer for a flow.
    pub(super) fn tick(&mut self, flow: u32) {
        let f = &mut self.flows[flow as usize];
        // One that was arranged before an earlier one is stale.
        if f.tick_pending == self.now {
            f.tick_pending = NEVER;
            if f.tick_at <= self.now {
                self.control(flow, false);
            } else {
                self.arm_tick(flow);
            }
        }
    }

    /// The controller brings a flow's reaction point to now, with a CNP or without.
    pub(super) fn control(&mut self, flow: u32, cnp: bool) {
        let now = nanos(self.now);
        let jitter = self.random.up_to(self.s.jitter.0);
        let f = &mut self.flows[flow as usize];
        let sent = std::mem::take(&mut f.bytes);
        if cnp && f.rp.is_none() {
            f.rp = Some(Rp::new(self.params.rp, now));
        }
        let Some(rp) = f.rp.as_mut() else { return };
        rp.advance(now, Some(sent));
        if cnp {
            rp.on_cnp(now);
        }
        if rp.released(now) {
            f.rp = None;
            f.tick_at = NEVER;
        } else {
            let earliest = Nanos(now.0 + self.s.tick.0.max(1));
            let at = rp.next_deadline().max(earliest).0.saturating_add(jitter);
            f.tick_at = at.saturating_mul(PS_PER_NS);
        }
        let rate = f.rate();
        f.set_rate(rate);
        let host = f.host;
        self.arm_tick(flow);
        self.serve(host);
    }

    /// Where the parameters cap the first rate, a flow has a reaction point before its first packet.
    fn cap_start(&mut self, flow: u32) {
        let f = &mut self.flows[flow as usize];
        if self.s.params.is_none() || self.params.rp.start_rate.bytes_per_sec() == 0 || f.rp.is_some() {
            return;
        }
        let rp = Rp::start(self.params.rp, nanos(self.now));
        f.tick_at = rp.next_deadline().0.saturating_mul(PS_PER_NS);
        f.rp = Some(rp);
        let rate = f.rate();
        f.set_rate(rate);
        self.arm_tick(flow);
    }

    fn arm_tick(&mut self, flow: u32) {
        let f = &mut self.flows[flow as usize];
        if f.tick_at < f.tick_pending {
            f.tick_pending = f.tick_at;
            self.events.push(f.tick_at, Event::Tick(flow));
        }
    }

    /// A flow starts, or the next message of an RPC flow comes.
    pub(super) fn message(&mut self, flow: u32) {
        let (now, s) = (self.now, self.s);
        self.cap_start(flow);
        let packets = |bytes: f64| (bytes / f64::from(s.packet)).ceil().max(1.0) as u32;
        match s.workload {
            Workload::Incast | Workload::ParkingLot => self.flows[flow as usize].end = u32::MAX,
            Workload::Ring => self.ask(flow, packets(s.message as f64)),
            Workload::Rpc => {
                let mean = s.message as f64;
                // The first call is the start of the flow, not of a message: all at once would be an incast.
                if now > 0 {
                    let bytes = if self.random.unit() < LARGE_SHARE { 4.0 * mean } else { mean / 4.0 };
                    self.ask(flow, packets(bytes));
                }
                let per_flow = s.load * s.link.bytes_per_sec() as f64 / f64::from(s.flows);
                let gap = self.random.exponential(mean / per_flow * 1e12).clamp(1.0, 1e15);
                self.events.push(now + gap as u64, Event::Message(flow));
            }
        }
        let f = &mut self.flows[flow as usize];
        f.pump(now);
        let host = f.host;
        self.serve(host);
    }

    /// A message of `packets` is to be sent.
    fn ask(&mut self, flow: u32, packets: u32) {
        let f = &mut self.flows[flow as usize];
        f.end = f.end.saturating_add(packets);
        f.messages.push_back((f.end, self.now));
    }

    /// The oldest message of a flow has arrived at `at`.
    fn message_arrived(&mut self, flow: u32, at: u64) {
        let Some((_, asked)) = self.flows[flow as usize].messages.pop_front() else { return };
        if asked >= self.warmup {
            self.completions.push(at - asked);
        }
        if self.s.workload == Workload::Ring {
            // The next host may pass it on.
            self.events.push(at, Event::Message((flow + 1) % self.s.flows));
        }
    }
}
