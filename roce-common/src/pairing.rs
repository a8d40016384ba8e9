//! Which local QP is connected to which remote QP: the rules, without the tables.
//!
//! A BTH names its destination QP only. A request flow A→B shows the QPN `b` at B and the PSNs that A's QP sent; the
//! responses to it (ACKs, NAKs, READ responses) travel B→A, show the QPN `a` at A, and echo those PSNs. So `a ↔ b` is
//! found by elimination: of the request flows between two hosts that a response could answer, all but one must fall out.
//!
//! 1. *Addresses*: the response travels from the flow's destination to its source.
//! 2. *PSN*: it lies within what the flow sent, give or take the packets in flight when the observation began.
//! 3. *Source port*: senders that use the kernel's rule put [`source_port`] of both QPNs into both directions. Where
//!    one candidate obeys it, those that do not are out. Where none does (other senders follow other rules) it says nothing.
//! 4. *One to one*: a reliable connection has one QP at each end, so a flow that surely belongs to another QP is out.
//!    The caller leaves such flows out of what it passes in.
//!
//! [`sole_match`] applies 1 to 3 to one response; [`Evidence`] says how many responses make a pair. A wrong pair sends
//! congestion notifications to an innocent QP, a missing one only delays them: in doubt there is no pair.

use crate::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::source_port,
};

/// How far outside the PSNs seen of a flow a response may lie: twice the 128 PSNs an rxe requester leaves unanswered
/// (`RXE_MAX_UNACKED_PSNS`), for what was in flight before the first packet seen and for packets not sampled.
pub const SLACK: u32 = 256;

/// How many responses at different PSNs a pair needs that no source port supports.
pub const CONFIRMATIONS: u8 = 4;

/// What is known of the requests from `src` to `dest_qp` at `dst`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestFlow {
    /// The requester's address.
    pub src: Addr,
    /// The responder's address.
    pub dst: Addr,
    /// The responder's QPN.
    pub dest_qp: Qpn,
    /// UDP source port of the requests.
    pub src_port: u16,
    /// PSN of the first request seen.
    pub first: Psn,
    /// The serially highest PSN a request seen so far uses, READ spans included.
    pub highest: Psn,
    /// The highest request seen is a READ whose length is not known: answers may lie any distance ahead.
    pub open_ended: bool,
}

/// A flow remembers at most this many PSNs behind its highest, a quarter of the circle, so that comparisons stay serial.
const MEMORY: i32 = 1 << 22;

impl RequestFlow {
    /// Takes one more request of this flow into account. `psns` is how many PSNs it uses, `None` for a READ whose
    /// length or path MTU is not known. A request before everything seen, beyond [`SLACK`], is a new life of the QPN.
    #[inline]
    pub fn extend(&mut self, psn: Psn, psns: Option<u32>, src_port: u16) {
        self.src_port = src_port;
        if psn.diff(self.first) <= -(SLACK as i32) {
            self.first = psn;
            self.highest = psn;
            self.open_ended = false;
        }
        let last = psn.add(psns.unwrap_or(1).saturating_sub(1));
        if last.diff(self.highest) > 0 {
            self.highest = last;
            self.open_ended = psns.is_none();
        } else if psns.is_none() && psn == self.highest {
            self.open_ended = true;
        }
        if self.highest.diff(self.first) > MEMORY {
            self.first = self.highest.sub(MEMORY as u32);
        }
    }
}

/// A response on its way from `src` to `dest_qp` at `dst`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// The responder's address.
    pub src: Addr,
    /// The requester's address.
    pub dst: Addr,
    /// The requester's QPN.
    pub dest_qp: Qpn,
    /// UDP source port of the response.
    pub src_port: u16,
    /// The PSN it answers.
    pub psn: Psn,
}

/// How well a response fits a request flow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fit {
    /// It cannot answer it.
    No,
    /// Addresses and PSN allow it.
    Psn,
    /// Addresses and PSN allow it, and both directions carry the source port of this very pair of QPNs.
    Port,
}

/// Whether `response` can answer something `flow` sent. `slack` is how far outside the PSNs seen it may lie: a response
/// PSN must be in `(first − slack, highest + slack]`.
#[inline]
pub fn fit(flow: &RequestFlow, response: &Response, slack: u32) -> Fit {
    if response.src != flow.dst || response.dst != flow.src {
        return Fit::No;
    }
    // Everything relative to `first`, so that the serial comparison stays below half the circle.
    let at = response.psn.diff(flow.first);
    let end = flow.highest.diff(flow.first);
    let slack = slack.min(1 << 20) as i32;
    if at <= -slack || (!flow.open_ended && at > end.saturating_add(slack)) {
        return Fit::No;
    }
    let port = source_port(flow.dest_qp, response.dest_qp);
    if flow.src_port == port && response.src_port == port { Fit::Port } else { Fit::Psn }
}

/// What is left of the candidates for one response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome<K> {
    /// No flow seen can have caused the response.
    Nothing,
    /// Exactly one can.
    One {
        /// Which.
        key: K,
        /// [`Fit::Psn`] or [`Fit::Port`].
        fit: Fit,
    },
    /// More than one can: the response says nothing.
    Several,
}

impl<K> Outcome<K> {
    /// The one candidate, if there is exactly one.
    pub fn one(self) -> Option<K> {
        match self {
            Self::One { key, .. } => Some(key),
            Self::Nothing | Self::Several => None,
        }
    }
}

/// The one flow of `candidates` that `response` can answer. Candidates are (the caller's key, flow); leave out the flows
/// that surely belong to another QP than the response's.
pub fn sole_match<K, I>(candidates: I, response: &Response, slack: u32) -> Outcome<K>
where
    I: IntoIterator<Item = (K, RequestFlow)>,
{
    let mut best = Outcome::Nothing;
    let mut best_fit = Fit::No;
    for (key, flow) in candidates {
        let fit = fit(&flow, response, slack);
        if fit == Fit::No || fit < best_fit {
            continue;
        }
        best = if fit > best_fit { Outcome::One { key, fit } } else { Outcome::Several };
        best_fit = fit;
    }
    best
}

/// What the responses to one QP have shown so far: which flow they answer, and how often that was the only explanation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Evidence<K> {
    candidate: Option<K>,
    confirmations: u8,
    supported: bool,
    last: Psn,
}

impl<K> Default for Evidence<K> {
    fn default() -> Self {
        Self { candidate: None, confirmations: 0, supported: false, last: Psn::new(0) }
    }
}

impl<K: Copy + PartialEq> Evidence<K> {
    /// Adds what the response at `psn` left. A response that only another flow explains contradicts what was believed
    /// and starts over with that one; a response that nothing explains contradicts it too.
    pub fn add(&mut self, outcome: Outcome<K>, psn: Psn) {
        match outcome {
            Outcome::Several => {}
            Outcome::Nothing => self.contradict(),
            Outcome::One { key, fit } => {
                if self.candidate != Some(key) {
                    *self = Self { candidate: Some(key), confirmations: 1, supported: false, last: psn };
                } else if psn != self.last {
                    self.confirmations = self.confirmations.saturating_add(1);
                    self.last = psn;
                }
                self.supported |= fit == Fit::Port;
            }
        }
    }

    /// It is known from the connection's management which flow the responses answer.
    pub fn told(&mut self, key: K, psn: Psn) {
        *self = Self { candidate: Some(key), confirmations: CONFIRMATIONS, supported: true, last: psn };
    }

    /// Forgets everything: something contradicts what was believed.
    pub fn contradict(&mut self) {
        *self = Self::default();
    }

    /// The flow the responses seem to answer, sure or not.
    pub const fn candidate(&self) -> Option<K> {
        self.candidate
    }

    /// The source-port rule named this candidate.
    pub const fn supported(&self) -> bool {
        self.supported
    }

    /// The flow the responses answer, once that is sure: by the source port, or by [`CONFIRMATIONS`] responses at
    /// different PSNs for which it was the only explanation. It must also be the only QP that claims this flow, which
    /// the caller checks.
    pub const fn sure(&self) -> Option<K> {
        if self.supported || self.confirmations >= CONFIRMATIONS { self.candidate } else { None }
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use super::*;

    const A: Addr = Addr::v4([10, 0, 0, 1]);
    const B: Addr = Addr::v4([10, 0, 0, 2]);
    const C: Addr = Addr::v4([10, 0, 0, 3]);

    /// A flow A→B to QPN `b`, sent by QPN `a` under the kernel's source-port rule.
    fn flow(a: u32, b: u32, first: u32, highest: u32) -> RequestFlow {
        RequestFlow {
            src: A,
            dst: B,
            dest_qp: Qpn::new(b),
            src_port: source_port(Qpn::new(a), Qpn::new(b)),
            first: Psn::new(first),
            highest: Psn::new(highest),
            open_ended: false,
        }
    }

    fn response(a: u32, b: u32, psn: u32) -> Response {
        Response {
            src: B,
            dst: A,
            dest_qp: Qpn::new(a),
            src_port: source_port(Qpn::new(a), Qpn::new(b)),
            psn: Psn::new(psn),
        }
    }

    /// The same with the port of a sender that follows another rule.
    fn hardware(mut flows: Vec<RequestFlow>) -> Vec<RequestFlow> {
        for f in &mut flows {
            f.src_port = 49_152;
        }
        flows
    }

    fn matched(flows: &[RequestFlow], r: &Response) -> Outcome<u32> {
        sole_match(flows.iter().map(|f| (f.dest_qp.get(), *f)), r, SLACK)
    }

    #[test]
    fn a_response_psn_must_lie_in_what_was_sent() {
        for base in [0u32, 1_000, 0xff_ffff, 0xff_ff00, 0x80_0000] {
            let at = |d: i32| base.wrapping_add_signed(d) & 0xff_ffff;
            let f = flow(17, 40, at(0), at(500));
            for (d, want) in [(-256, false), (-255, true), (0, true), (500, true), (756, true), (757, false)] {
                assert_eq!(fit(&f, &response(17, 40, at(d)), SLACK) != Fit::No, want, "base {base:#x}, offset {d}");
            }
        }
    }

    #[test]
    fn addresses_must_be_reversed() {
        let f = flow(17, 40, 0, 10);
        let mut r = response(17, 40, 5);
        assert_eq!(fit(&f, &r, SLACK), Fit::Port);
        r.src = C;
        assert_eq!(fit(&f, &r, SLACK), Fit::No);
        r = response(17, 40, 5);
        (r.src, r.dst) = (A, B);
        assert_eq!(fit(&f, &r, SLACK), Fit::No);
    }

    #[test]
    fn a_read_of_unknown_length_opens_the_flow_until_a_later_request() {
        let mut f = flow(17, 40, 100, 100);
        f.extend(Psn::new(101), None, f.src_port);
        assert!(f.open_ended);
        assert_ne!(fit(&f, &response(17, 40, 5_000), SLACK), Fit::No);
        assert_eq!(fit(&f, &response(17, 40, 100_u32.wrapping_sub(300)), SLACK), Fit::No);
        f.extend(Psn::new(1_125), Some(1), f.src_port);
        assert!(!f.open_ended);
        assert_eq!(fit(&f, &response(17, 40, 5_000), SLACK), Fit::No);
        // A known span counts to its last PSN; a retransmission moves nothing.
        f.extend(Psn::new(1_126), Some(1_024), f.src_port);
        assert_eq!(f.highest, Psn::new(2_149));
        f.extend(Psn::new(101), Some(1), f.src_port);
        assert_eq!((f.first, f.highest), (Psn::new(100), Psn::new(2_149)));
    }

    #[test]
    fn the_source_port_picks_one_of_several_in_lockstep() {
        // Different QPNs at the two ends, and remote order unlike local order.
        let pairs = [(17, 42), (18, 40), (19, 41), (20, 47)];
        let flows: Vec<_> = pairs.iter().map(|&(a, b)| flow(a, b, 0, 900)).collect();
        for (a, b) in pairs {
            assert_eq!(matched(&flows, &response(a, b, 450)), Outcome::One { key: b, fit: Fit::Port });
        }
    }

    #[test]
    fn a_port_both_directions_do_not_carry_is_no_support() {
        // The flow to 40 belongs to QP 18. A peer that answers QP 17 with the port of (17, 40) gains no support.
        let flows = [flow(18, 40, 0, 900)];
        assert_eq!(matched(&flows, &response(17, 40, 450)), Outcome::One { key: 40, fit: Fit::Psn });
    }

    #[test]
    fn colliding_ports_leave_no_pair() {
        let port = |b| source_port(Qpn::new(17), Qpn::new(b));
        let twin_qpn = (41..0x10_0000).find(|&b| port(b) == port(40)).expect("20 bits fold into 14");
        let flows = [flow(17, 40, 0, 900), RequestFlow { dest_qp: Qpn::new(twin_qpn), ..flow(17, 40, 0, 900) }];
        assert_eq!(matched(&flows, &response(17, 40, 450)), Outcome::Several);
    }

    #[test]
    fn a_flow_follows_its_qp_around_the_circle_and_into_a_new_life() {
        let mut f = flow(17, 40, 0xff_f000, 0xff_f000);
        let mut psn = Psn::new(0xff_f000);
        for _ in 0..40_000 {
            psn = psn.add(1_000);
            f.extend(psn, Some(1), f.src_port);
            assert_ne!(fit(&f, &response(17, 40, psn.sub(60).get()), SLACK), Fit::No);
            assert_eq!(fit(&f, &response(17, 40, psn.add(400).get()), SLACK), Fit::No);
        }
        let restarted = f.first.sub(70_000);
        f.extend(restarted, Some(1), f.src_port);
        assert_eq!((f.first, f.highest), (restarted, restarted));
    }

    #[test]
    fn other_port_rules_eliminate_nobody() {
        let flows = hardware(vec![flow(17, 42, 0, 900), flow(18, 40, 0, 900)]);
        let mut r = response(17, 42, 450);
        r.src_port = 49_152;
        assert_eq!(matched(&flows, &r), Outcome::Several);
        // One of them is far away: the PSN alone decides.
        let flows = hardware(vec![flow(17, 42, 0, 900), flow(18, 40, 0x40_0000, 0x40_0900)]);
        assert_eq!(matched(&flows, &r), Outcome::One { key: 42, fit: Fit::Psn });
    }

    #[test]
    fn lockstep_without_ports_never_makes_a_pair() {
        for step in 0..2_000u32 {
            let flows = hardware((0..8).map(|i| flow(17 + i, 40 + i, 0, step)).collect());
            for i in 0..8 {
                let mut r = response(17 + i, 40 + i, step.saturating_sub(20));
                r.src_port = 49_152;
                assert_eq!(matched(&flows, &r), Outcome::Several);
            }
        }
    }

    #[test]
    fn evidence_needs_several_psns_unless_a_port_supports_it() {
        let one = |fit| Outcome::One { key: 40u32, fit };
        let mut e = Evidence::default();
        e.add(one(Fit::Port), Psn::new(1));
        assert_eq!((e.sure(), e.supported()), (Some(40), true));

        let mut e = Evidence::default();
        for _ in 0..20 {
            e.add(one(Fit::Psn), Psn::new(1));
        }
        assert_eq!((e.sure(), e.candidate()), (None, Some(40)), "one PSN many times is one confirmation");
        for psn in 2..u32::from(CONFIRMATIONS) {
            e.add(one(Fit::Psn), Psn::new(psn));
            assert_eq!(e.sure(), None);
        }
        e.add(Outcome::Several, Psn::new(90));
        assert_eq!(e.sure(), None);
        e.add(one(Fit::Psn), Psn::new(91));
        assert_eq!(e.sure(), Some(40));
    }

    #[test]
    fn contradiction_drops_what_was_believed() {
        for against in [Outcome::Nothing, Outcome::One { key: 41u32, fit: Fit::Psn }] {
            let mut e = Evidence::default();
            e.add(Outcome::One { key: 40u32, fit: Fit::Port }, Psn::new(1));
            e.add(against, Psn::new(2));
            assert_eq!(e.sure(), None);
            assert!(!e.supported());
        }
    }
}
