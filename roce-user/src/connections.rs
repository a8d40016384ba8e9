//! Connections as their management makes them: who is paired with whom, what they agreed on, and which never came to be.

use std::collections::{HashMap, VecDeque};

use roce_common::{
    abi::{FlowKey, Space, Tap},
    psn::Psn,
    units::{Addr, Nanos, Qpn},
    wire::cm::{Mad, Message, Request},
};

use crate::{
    facts::ConnectionReport,
    findings::{Code, Evidence, Findings, Subject},
};

/// Connections remembered while they are made. Those that are made go first where there are more.
const MOST: usize = 16_384;

/// Live, a connection that was asked for so long ago is not answered any more: rdma-cm asks again after four seconds, and by
/// then has done so twice.
const UNANSWERED: Nanos = Nanos::from_millis(10_000);

/// Where a connection is asked for: tap, requester, responder, the requester's number of it.
type Key = (Tap, Addr, Addr, u32);

/// A connection in the making.
struct Asked {
    request: Request,
    state: State,
    mark: Mark,
}

/// Where a message stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    /// Number of the frame; `None` live.
    pub(crate) frame: Option<u64>,
    /// When it passed.
    pub(crate) time: Nanos,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Made,
    Rejected,
    /// It was said that nobody answers; that stands.
    GivenUp,
}

/// What is known of a queue pair's packets from its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Terms {
    /// The queue pair that sends them.
    pub(crate) sender: Qpn,
    /// The PSN of its first request.
    pub(crate) starting_psn: Psn,
    /// Path MTU in bytes; 0 = not known.
    pub(crate) pmtu: u32,
    /// Exponent of the sender's ACK timeout; 0 = none.
    pub(crate) ack_timeout: u8,
    /// How often it may repeat a packet; 7 is without end in rxe.
    pub(crate) retries: u8,
    /// How often after RNR NAKs; 7 is without end.
    pub(crate) rnr_retries: u8,
}

impl Terms {
    /// In JSON.
    pub(crate) fn report(&self) -> ConnectionReport {
        ConnectionReport {
            sender_qp: self.sender.get(),
            starting_psn: self.starting_psn.get(),
            path_mtu: (self.pmtu != 0).then_some(self.pmtu),
            ack_timeout_ns: (self.ack_timeout != 0).then(|| 4_096 << self.ack_timeout),
            retries: self.retries,
            rnr_retries: self.rnr_retries,
        }
    }
}

/// Packets of a connection one way: tap, source, destination, destination QPN.
type Direction = (Tap, Addr, Addr, Qpn);

/// A connection that was just made, or made again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Made {
    /// Where, and from whom to whom each direction goes.
    pub(crate) directions: [Direction; 2],
}

/// All connections of a capture.
#[derive(Default)]
pub(crate) struct Connections {
    asked: HashMap<Key, Asked>,
    /// Answers since room was last made: without one, none can be made, and a flood must not make us look every time.
    answers: u64,
    terms: HashMap<Direction, Terms>,
    /// Their keys, the oldest first: where there are more it goes.
    oldest: VecDeque<Direction>,
}

impl Connections {
    /// Takes a message that passed a tap from `src` to `dst`.
    pub(crate) fn message(
        &mut self,
        (tap, src, dst): (Tap, Addr, Addr),
        mad: &Mad,
        mark: Mark,
        findings: &mut Findings,
    ) -> Option<Made> {
        // The same connection, seen from the side that asked for it.
        let asked = (tap, src, dst, mad.local_id);
        let answered = (tap, dst, src, mad.remote_id);
        match mad.message {
            Message::Request(request) => {
                self.make_room();
                if self.asked.len() < MOST || self.asked.contains_key(&asked) {
                    // A REQ may come again: the first one tells when it began.
                    let fresh = || Asked { request, state: State::Open, mark };
                    let known = self.asked.entry(asked).or_insert_with(fresh);
                    if known.request != request {
                        *known = fresh();
                    }
                }
                None
            }
            Message::Reply(reply) => {
                let connection = self.asked.get_mut(&answered)?;
                connection.state = State::Made;
                self.answers += 1;
                let request = connection.request;
                let (requester, responder) = (dst, src);
                let there = (tap, requester, responder, reply.qpn);
                let back = (tap, responder, requester, request.qpn);
                let Request { pmtu, ack_timeout, retries, .. } = request;
                // The REQ asks for retries of both sides, and each side says how often its peer may come after RNR NAKs.
                let terms = |sender, starting_psn, rnr_retries| Terms {
                    sender,
                    starting_psn,
                    pmtu,
                    ack_timeout,
                    retries,
                    rnr_retries,
                };
                self.agree(there, terms(request.qpn, request.starting_psn, reply.rnr_retries));
                self.agree(back, terms(reply.qpn, reply.starting_psn, request.rnr_retries));
                Some(Made { directions: [there, back] })
            }
            Message::Reject(reason) => {
                // Either side may refuse: the answer to a REQ, or the REQ's sender who does not like the REP.
                let key = if self.asked.contains_key(&answered) { answered } else { asked };
                let connection = self.asked.get_mut(&key)?;
                if connection.state != State::Rejected {
                    connection.state = State::Rejected;
                    self.answers += 1;
                    let evidence = mark.evidence(reason_name(reason));
                    findings.note(Code::ConnectRejected, Subject::Path(key.0, key.1, key.2), evidence);
                }
                None
            }
            Message::Ready
            | Message::Wait
            | Message::Disconnect(_)
            | Message::Disconnected
            | Message::LookUp
            | Message::Found(_) => None,
        }
    }

    fn agree(&mut self, direction: Direction, terms: Terms) {
        if self.terms.insert(direction, terms).is_none() {
            self.oldest.push_back(direction);
            if self.oldest.len() > 2 * MOST
                && let Some(oldest) = self.oldest.pop_front()
            {
                self.terms.remove(&oldest);
            }
        }
    }

    fn make_room(&mut self) {
        if self.asked.len() >= MOST && self.answers > 0 {
            self.answers = 0;
            self.asked.retain(|_, asked| asked.state == State::Open);
        }
    }

    /// What is known of the packets of a flow.
    pub(crate) fn terms(&self, key: &FlowKey) -> Option<Terms> {
        self.terms.get(&(key.tap, key.src, key.dst, key.dest_qp())).copied()
    }

    /// Both ways of the connection whose end is asked for by a message from `src` to queue pair `qpn` of `dst`.
    pub(crate) fn ending(&self, (tap, src, dst): (Tap, Addr, Addr), qpn: Qpn) -> Option<[Direction; 2]> {
        let there = (tap, src, dst, qpn);
        Some([there, (tap, dst, src, self.terms.get(&there)?.sender)])
    }

    /// The end of the capture: what was asked for and neither granted nor refused.
    pub(crate) fn finish(&self, findings: &mut Findings) {
        let mut open: Vec<_> = self.asked.iter().filter(|(_, asked)| asked.state == State::Open).collect();
        open.sort_by_key(|(_, asked)| asked.mark.frame);
        for (key, asked) in open {
            asked.unanswered(key, findings);
        }
    }

    /// Live there is no end: what was asked for [`UNANSWERED`] ago, and neither granted nor refused, is given up.
    pub(crate) fn give_up(&mut self, now: Nanos, findings: &mut Findings) {
        for (key, asked) in &mut self.asked {
            if asked.state == State::Open && now.since(asked.mark.time) >= UNANSWERED {
                asked.unanswered(key, findings);
                asked.state = State::GivenUp;
                self.answers += 1;
            }
        }
    }
}

impl Asked {
    fn unanswered(&self, (tap, src, dst, _): &Key, findings: &mut Findings) {
        let evidence = self.mark.evidence("REQ without REP or REJ");
        findings.note(Code::ConnectUnanswered, Subject::Path(*tap, *src, *dst), evidence);
    }
}

impl Mark {
    const fn evidence(self, what: &'static str) -> Evidence {
        Evidence { frame: self.frame, time: self.time, psn: None, what }
    }
}

impl Made {
    /// The keys of the flows of requests.
    pub(crate) fn request_flows(&self) -> [FlowKey; 2] {
        self.directions.map(|(tap, src, dst, qpn)| FlowKey::new(tap, src, dst, qpn, Space::Request))
    }

    /// The keys of the flows of answers.
    pub(crate) fn answer_flows(&self) -> [FlowKey; 2] {
        self.directions.map(|(tap, src, dst, qpn)| FlowKey::new(tap, src, dst, qpn, Space::Response))
    }
}

/// What the reason of a REJ means (`enum ib_cm_rej_reason` of Linux).
const fn reason_name(reason: u16) -> &'static str {
    match reason {
        1 => "REJ: no queue pair (1)",
        3 => "REJ: no resources (3)",
        4 => "REJ: timeout (4)",
        5 => "REJ: unsupported request (5)",
        6 => "REJ: invalid communication ID (6)",
        7 => "REJ: invalid communication instance (7)",
        8 => "REJ: invalid service ID, nobody listens (8)",
        9 => "REJ: invalid transport service type (9)",
        10 => "REJ: stale connection (10)",
        11 => "REJ: no RDC (11)",
        12 => "REJ: primary GID refused (12)",
        13 => "REJ: primary LID refused (13)",
        14 => "REJ: invalid service level (14)",
        15 => "REJ: invalid traffic class (15)",
        16 => "REJ: invalid hop limit (16)",
        17 => "REJ: invalid packet rate (17)",
        24 => "REJ: port and CM redirection (24)",
        25 => "REJ: port redirection (25)",
        26 => "REJ: invalid MTU (26)",
        27 => "REJ: insufficient response resources (27)",
        28 => "REJ: by the application (28)",
        29 => "REJ: RNR retry count (29)",
        33 => "REJ: vendor option not supported (33)",
        _ => "REJ: other reason",
    }
}

#[cfg(test)]
mod tests {
    use roce_common::wire::cm::Reply;

    use super::*;

    const A: Addr = Addr::v4([10, 0, 0, 1]);
    const B: Addr = Addr::v4([10, 0, 0, 2]);
    const TAP: Tap = Tap::new(0, roce_common::abi::Direction::Ingress);

    /// Connections, and what was found.
    #[derive(Default)]
    struct Bench {
        connections: Connections,
        findings: Findings,
        frame: u64,
    }

    impl Bench {
        fn send(&mut self, from: Addr, ids: (u32, u32), message: Message) -> Option<Made> {
            self.frame += 1;
            let dst = if from == A { B } else { A };
            let mad = Mad { local_id: ids.0, remote_id: ids.1, message };
            let mark = Mark { frame: Some(self.frame), time: Nanos(self.frame) };
            self.connections.message((TAP, from, dst), &mad, mark, &mut self.findings)
        }

        fn counts(mut self) -> (u64, u64) {
            self.connections.finish(&mut self.findings);
            (self.findings.count(Code::ConnectUnanswered), self.findings.count(Code::ConnectRejected))
        }
    }

    fn request(qpn: u32) -> Message {
        Message::Request(Request {
            qpn: Qpn::new(qpn),
            starting_psn: Psn::new(7),
            pmtu: 1024,
            ack_timeout: 17,
            retries: 7,
            rnr_retries: 5,
            transport: 0,
        })
    }

    fn reply(qpn: u32) -> Message {
        Message::Reply(Reply { qpn: Qpn::new(qpn), starting_psn: Psn::new(9), rnr_retries: 6 })
    }

    #[test]
    fn a_reply_pairs_both_directions() {
        let mut b = Bench::default();
        assert_eq!(b.send(A, (1, 0), request(17)), None);
        let made = b.send(B, (2, 1), reply(42)).expect("made");
        assert_eq!(made.directions, [(TAP, A, B, Qpn::new(42)), (TAP, B, A, Qpn::new(17))]);
        let [there, back] = made.request_flows();
        let terms = |sender, psn, rnr_retries| {
            let (sender, starting_psn) = (Qpn::new(sender), Psn::new(psn));
            Some(Terms { sender, starting_psn, pmtu: 1024, ack_timeout: 17, retries: 7, rnr_retries })
        };
        assert_eq!((b.connections.terms(&there), b.connections.terms(&back)), (terms(17, 7, 6), terms(42, 9, 5)));
        // Requests and replies that come again change nothing.
        b.send(A, (1, 0), request(17));
        assert_eq!(b.send(B, (2, 1), reply(42)), Some(made));
        assert_eq!(b.counts(), (0, 0));
    }

    #[test]
    fn what_is_not_answered_is_found_once() {
        let mut b = Bench::default();
        for _ in 0..4 {
            b.send(A, (1, 0), request(17));
        }
        b.send(A, (2, 0), request(18));
        // Another connection's reply, and one that nobody asked for, are none to these.
        assert_eq!(b.send(B, (9, 3), reply(42)), None);
        assert_eq!(b.send(A, (9, 1), reply(42)), None);
        // Being worked on is no answer either.
        b.send(B, (5, 2), Message::Wait);
        assert_eq!(b.counts(), (2, 0));
    }

    #[test]
    fn live_a_request_is_given_up_once() {
        let mut b = Bench::default();
        b.send(A, (1, 0), request(17));
        b.send(B, (2, 0), request(18));
        b.send(A, (3, 2), reply(42));
        for seconds in [9, 11, 30] {
            b.connections.give_up(Nanos(seconds * Nanos::SECOND.0), &mut b.findings);
            assert_eq!(b.findings.count(Code::ConnectUnanswered), u64::from(seconds > 10));
        }
        // The answer comes after all, and counts.
        assert!(b.send(B, (4, 1), reply(43)).is_some());
        assert_eq!(b.counts(), (1, 0));
    }

    #[test]
    fn a_refusal_is_an_answer_and_counts_once() {
        let mut b = Bench::default();
        b.send(A, (1, 0), request(17));
        b.send(B, (0, 1), Message::Reject(8));
        b.send(B, (0, 1), Message::Reject(8));
        // The requester may refuse the reply.
        b.send(B, (4, 0), request(19));
        b.send(A, (5, 4), reply(20));
        b.send(B, (4, 5), Message::Reject(28));
        // Nobody asked.
        b.send(B, (0, 77), Message::Reject(8));
        assert_eq!(b.findings.log()[0].evidence.what, "REJ: invalid service ID, nobody listens (8)");
        assert_eq!(b.counts(), (0, 2));
    }

    #[test]
    fn the_terms_of_new_connections_are_known_after_ever_so_many() {
        let mut b = Bench::default();
        for id in 1..=40_000 {
            b.send(A, (id, 0), request(id));
            b.send(B, (id, id), reply(id));
        }
        assert_eq!((b.connections.terms.len(), b.connections.oldest.len()), (2 * MOST, 2 * MOST));
        let terms = |qpn| b.connections.terms(&FlowKey::new(TAP, A, B, Qpn::new(qpn), Space::Request));
        assert!(terms(40_000).is_some() && terms(1).is_none());
        // Whoever ends it, both ways are found.
        let ways = [(TAP, A, B, Qpn::new(40_000)), (TAP, B, A, Qpn::new(40_000))];
        assert_eq!(b.connections.ending((TAP, A, B), Qpn::new(40_000)), Some(ways));
        assert_eq!(b.connections.ending((TAP, A, B), Qpn::new(1)), None);
    }

    #[test]
    fn a_flood_of_requests_is_bounded() {
        let mut b = Bench::default();
        b.send(A, (1, 0), request(17));
        b.send(B, (2, 1), reply(42));
        for id in 10..40_000 {
            b.send(A, (id, 0), request(id));
        }
        assert_eq!(b.connections.asked.len(), MOST);
        assert_eq!(b.counts(), (MOST as u64, 0));
    }
}
