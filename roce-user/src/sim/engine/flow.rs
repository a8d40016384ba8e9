//! A flow: a requester with window, go-back-N and limiter at one end, a responder and notification point at the other.

use std::collections::VecDeque;

use roce_common::{dcqcn::Rp, units::Nanos};

use super::{
    network::{PS_PER_NS, ps_for},
    scenario::{Scenario, Shaper},
};

/// Never.
pub(super) const NEVER: u64 = u64::MAX;

/// A packet in the shaper, and the departure time it was given.
#[derive(Clone, Copy, Debug)]
struct Held {
    psn: u32,
    at: u64,
}

/// What a flow has counted since the measurement began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) accepted: u64,
    pub(super) retransmitted: u64,
    pub(super) cnps: u64,
    pub(super) timeouts: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) host: u32,
    /// Everything below is acknowledged; next to hand over or send; one past the highest sent; one past what there is.
    pub(super) una: u32,
    next: u32,
    high: u32,
    pub(super) end: u32,
    window: u32,
    shaper: Shaper,
    /// What waits in the shaper: of flows with a window only.
    held: VecDeque<Held>,
    /// Time per packet, 0 without a limiter; the slot of the last packet; the next one's.
    gap_ps: u64,
    slot: u64,
    next_at: u64,
    packet: u32,
    /// The limiter, from the first CNP until it is released.
    pub(super) rp: Option<Rp>,
    /// Bytes sent since the controller last looked.
    pub(super) bytes: u64,
    /// When the controller shall look next, and when the event comes that sees to it.
    pub(super) tick_at: u64,
    pub(super) tick_pending: u64,
    /// The ACK timer.
    pub(super) timer_at: u64,
    pub(super) timer_pending: bool,
    /// The last CNP's arrival at the controller: none overtakes another.
    pub(super) cnp_at: u64,
    /// The responder's next PSN, packets accepted since the last acknowledgement, and whether it has sent its NAK.
    pub(super) expected: u32,
    pub(super) unacked: u32,
    pub(super) nak_sent: bool,
    /// When the last CNP was sent, 0 = never; and whether a mark has been held back since.
    pub(super) last_cnp: Nanos,
    pub(super) owed: bool,
    /// Ends of messages, with the times at which they were asked for.
    pub(super) messages: VecDeque<(u32, u64)>,
    /// From the responder back to the sender.
    pub(super) reverse_ps: u64,
    pub(super) counts: Counts,
    /// Of the whole run.
    pub(super) sent_ever: u64,
    pub(super) arrived_ever: u64,
}

impl Flow {
    pub(super) fn new(s: &Scenario, host: u32, reverse_ps: u64) -> Self {
        Self {
            host,
            una: 0,
            next: 0,
            high: 0,
            end: 0,
            window: s.window,
            shaper: s.shaper,
            held: VecDeque::new(),
            gap_ps: 0,
            slot: 0,
            next_at: 0,
            packet: s.packet,
            rp: None,
            bytes: 0,
            tick_at: NEVER,
            tick_pending: NEVER,
            timer_at: NEVER,
            timer_pending: false,
            cnp_at: 0,
            expected: 0,
            unacked: 0,
            nak_sent: false,
            last_cnp: Nanos(0),
            owed: false,
            messages: VecDeque::new(),
            reverse_ps,
            counts: Counts::default(),
            sent_ever: 0,
            arrived_ever: 0,
        }
    }

    /// Hands packets to the shaper while the window and the shaper have room (`RXE_INFLIGHT_SKBS_PER_QP_HIGH`).
    pub(super) fn pump(&mut self, now: u64) {
        if self.window == 0 {
            return;
        }
        while self.next < self.end && self.next - self.una < self.window && self.held.len() < self.window as usize {
            let at = if self.shaper == Shaper::Stamped { self.take_slot(now) } else { 0 };
            self.held.push_back(Held { psn: self.next, at });
            self.next += 1;
        }
    }

    /// When the next packet may leave.
    #[inline]
    pub(super) fn ready_at(&self) -> u64 {
        if self.window == 0 {
            return if self.next < self.end { self.next_at } else { NEVER };
        }
        match (self.held.front(), self.shaper) {
            (None, _) => NEVER,
            (Some(held), Shaper::Stamped) => held.at,
            (Some(_), Shaper::Immediate) => self.next_at,
        }
    }

    /// The packet that leaves now; one is [`Self::ready_at`].
    #[inline]
    pub(super) fn send(&mut self, now: u64, timeout_ps: u64) -> u32 {
        let psn = match self.held.pop_front() {
            Some(held) => held.psn,
            None => {
                self.next += 1;
                self.next - 1
            }
        };
        if self.window == 0 || self.shaper == Shaper::Immediate {
            self.take_slot(now);
        }
        self.counts.retransmitted += u64::from(psn < self.high);
        self.high = self.high.max(psn + 1);
        self.bytes += u64::from(self.packet);
        self.counts.sent += 1;
        self.sent_ever += 1;
        if self.timer_at == NEVER {
            self.timer_at = now + timeout_ps;
        }
        self.pump(now);
        psn
    }

    /// `next = max(now, next) + cost`; a slot missed by less than its length, because another flow of the host had the
    /// port, is not lost.
    #[inline]
    fn take_slot(&mut self, now: u64) -> u64 {
        let late = now.saturating_sub(self.next_at);
        self.slot = if late < self.gap_ps { self.next_at } else { now };
        self.next_at = self.slot + self.gap_ps;
        self.slot
    }

    /// A new rate in bytes per second; `None`: no limiter.
    pub(super) fn set_rate(&mut self, rate: Option<u64>) {
        self.gap_ps = rate.map_or(0, |rate| ps_for(rate, self.packet));
        if self.shaper == Shaper::Immediate {
            self.next_at = self.slot + self.gap_ps;
        }
    }

    /// Everything below `psn` has arrived. Says whether that is news.
    pub(super) fn acked(&mut self, psn: u32, now: u64, timeout_ps: u64) -> bool {
        if psn <= self.una {
            return false;
        }
        self.una = psn;
        self.next = self.next.max(psn);
        self.timer_at = if self.high > psn { now + timeout_ps } else { NEVER };
        true
    }

    /// Starts again at the oldest packet that is not acknowledged. What waits in the shaper leaves first, as it does in a
    /// qdisc.
    pub(super) fn go_back(&mut self) {
        self.next = self.una;
    }

    /// The rate of the limiter in bytes per second.
    pub(super) fn rate(&self) -> Option<u64> {
        self.rp.as_ref().map(|rp| rp.rate().bytes_per_sec())
    }
}

/// The nanosecond that `ps` lies in.
#[inline]
pub(super) const fn nanos(ps: u64) -> Nanos {
    Nanos(ps / PS_PER_NS)
}
