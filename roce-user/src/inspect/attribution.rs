//! Which flow a NAK or a CNP is about. Both name the QP they are sent to, never the flow that caused them; the flow is
//! found by the rules of [`roce_common::pairing`], and where these leave none or several, there is no answer.

use foldhash::{HashMap, HashMapExt as _};
use roce_common::{
    abi::{FlowKey, Space, Tap},
    pairing::{Evidence, Fit, RequestFlow, Response, SLACK, fit, sole_match},
    psn::{Psn, Tracker},
    units::{Addr, Qpn},
    wire::{Packet, Service, source_port},
};

/// Number of a flow in the analysis.
pub(super) type FlowIndex = usize;

/// A path at a tap: from, to.
type Path = (Tap, Addr, Addr);
/// A QP at the end of a path: packets of this path carry its number.
type EndPoint = (Path, Qpn);

/// With up to this many candidates every response is weighed, with more of them only every so many.
const CANDIDATES_PER_RESPONSE: usize = 16;

/// A request flow as a candidate.
struct Candidate {
    request: RequestFlow,
    service: Service,
    /// The QP whose responses surely answer it, which is the QP that sends it.
    owner: Option<EndPoint>,
}

/// What the responses to one QP have shown.
#[derive(Default)]
struct Owner {
    evidence: Evidence<FlowIndex>,
    responses: usize,
}

/// Everything learnt about who sends what.
pub(super) struct Attribution {
    most: usize,
    candidates: HashMap<FlowIndex, Candidate>,
    paths: HashMap<Path, Vec<FlowIndex>>,
    owners: HashMap<EndPoint, Owner>,
    cnps: HashMap<EndPoint, u64>,
}

impl Attribution {
    /// Nothing learnt; at most `most` QPs will be remembered.
    pub(super) fn new(most: usize) -> Self {
        Self { most, candidates: HashMap::new(), paths: HashMap::new(), owners: HashMap::new(), cnps: HashMap::new() }
    }

    /// A request of the flow `number`, already in its tracker.
    pub(super) fn request(&mut self, number: FlowIndex, key: &FlowKey, packet: &Packet, tracker: &Tracker) {
        let service = packet.bth.opcode.service();
        if !matches!(service, Service::Rc | Service::Uc | Service::Xrc) || key.dest_qp().get() <= 1 {
            return;
        }
        let psn = packet.bth.psn;
        let psns = tracker.psns_of(packet);
        match self.candidates.get_mut(&number) {
            Some(candidate) => candidate.request.extend(psn, psns, packet.src_port),
            None => {
                let mut request = RequestFlow {
                    src: key.src,
                    dst: key.dst,
                    dest_qp: key.dest_qp(),
                    src_port: packet.src_port,
                    first: psn,
                    highest: psn,
                    open_ended: false,
                };
                request.extend(psn, psns, packet.src_port);
                self.candidates.insert(number, Candidate { request, service, owner: None });
                self.paths.entry((key.tap, key.src, key.dst)).or_default().push(number);
            }
        }
    }

    /// The connection's management has named the QP that sends the requests of the flow `number`, which has begun.
    pub(super) fn told(&mut self, number: FlowIndex, key: &FlowKey, sender: Qpn) {
        let me = ((key.tap, key.dst, key.src), sender);
        let Some(candidate) = self.candidates.get_mut(&number) else { return };
        let former = candidate.owner.replace(me);
        let first = candidate.request.first;
        if let Some(former) = former.filter(|former| *former != me)
            && let Some(owner) = self.owners.get_mut(&former)
        {
            owner.evidence.contradict();
        }
        if self.owners.len() < self.most || self.owners.contains_key(&me) {
            self.owners.entry(me).or_default().evidence.told(number, first);
        }
    }

    /// A response: evidence of which flow the QP it goes to sends. Returns that flow, once it is sure.
    pub(super) fn response(&mut self, tap: Tap, packet: &Packet) -> Option<FlowIndex> {
        if !matches!(packet.bth.opcode.service(), Service::Rc | Service::Xrc) {
            return None;
        }
        let me = end_point(tap, packet);
        let response = response_of(packet);
        if self.owners.len() >= self.most && !self.owners.contains_key(&me) {
            return None;
        }
        let owner = self.owners.entry(me).or_default();
        if let Some(flow) = owner.evidence.sure() {
            if fit(&self.candidates[&flow].request, &response, SLACK) != Fit::No {
                return Some(flow);
            }
            // A QP number in its next life.
            owner.evidence.contradict();
            self.release(flow, me);
        }
        let owner = self.owners.entry(me).or_default();
        owner.responses += 1;
        let rivals = self.paths.get(&reverse(me.0)).map_or(0, Vec::len);
        if rivals > CANDIDATES_PER_RESPONSE && !owner.responses.is_multiple_of(rivals / CANDIDATES_PER_RESPONSE) {
            return None;
        }
        let outcome = sole_match(self.candidates_of(me, |c| c.service != Service::Uc), &response, SLACK);
        let owner = self.owners.entry(me).or_default();
        owner.evidence.add(outcome, packet.bth.psn);
        let flow = owner.evidence.sure()?;
        let candidate = self.candidates.get_mut(&flow)?;
        match candidate.owner {
            None => candidate.owner = Some(me),
            Some(other) if other == me => {}
            // Two QPs claim one flow: neither is believed.
            Some(other) => {
                candidate.owner = None;
                for claimant in [me, other] {
                    if let Some(owner) = self.owners.get_mut(&claimant) {
                        owner.evidence.contradict();
                    }
                }
                return None;
            }
        }
        Some(flow)
    }

    /// The QP that surely sends the flow `number`.
    pub(super) fn sender_of(&self, number: FlowIndex) -> Option<Qpn> {
        self.candidates.get(&number)?.owner.map(|(_, qpn)| qpn)
    }

    fn release(&mut self, flow: FlowIndex, owner: EndPoint) {
        if let Some(candidate) = self.candidates.get_mut(&flow)
            && candidate.owner == Some(owner)
        {
            candidate.owner = None;
        }
    }

    /// The flows that the QP at `me` may send: those of the opposite path that no other QP surely sends.
    fn candidates_of(
        &self,
        me: EndPoint,
        admit: impl Fn(&Candidate) -> bool,
    ) -> impl Iterator<Item = (FlowIndex, RequestFlow)> {
        self.paths.get(&reverse(me.0)).into_iter().flatten().filter_map(move |&flow| {
            let candidate = self.candidates.get(&flow)?;
            (candidate.owner.is_none_or(|owner| owner == me) && admit(candidate)).then_some((flow, candidate.request))
        })
    }

    /// The flow whose request a NAK refuses: the one its QP surely sends, or else the only one that fits. Its tracker
    /// must know the PSN.
    pub(super) fn refused(
        &self,
        tap: Tap,
        packet: &Packet,
        in_window: impl Fn(FlowIndex, Psn) -> bool,
    ) -> Option<FlowIndex> {
        let me = end_point(tap, packet);
        let psn = packet.bth.psn;
        if let Some(flow) = self.owners.get(&me).and_then(|o| o.evidence.sure()) {
            return in_window(flow, psn).then_some(flow);
        }
        let candidates = self.candidates_of(me, |c| c.service != Service::Uc).filter(|&(flow, _)| in_window(flow, psn));
        sole_match(candidates, &response_of(packet), SLACK).one()
    }

    /// A CNP. Whose it is will be known at the end of the capture.
    pub(super) fn cnp(&mut self, tap: Tap, packet: &Packet) {
        let me = end_point(tap, packet);
        if self.cnps.len() < self.most || self.cnps.contains_key(&me) {
            *self.cnps.entry(me).or_default() += 1;
        }
    }

    /// The CNPs of every flow whose sender is known.
    pub(super) fn cnps_by_flow(&self, flows: &HashMap<FlowKey, FlowIndex>) -> Vec<(FlowIndex, u64)> {
        self.cnps.iter().filter_map(|(&me, &cnps)| Some((self.flow_of(me, flows)?, cnps))).collect()
    }

    /// The flow that the CNP `packet` tells to slow down, by what is known now.
    pub(super) fn notified(&self, tap: Tap, packet: &Packet, flows: &HashMap<FlowKey, FlowIndex>) -> Option<FlowIndex> {
        self.flow_of(end_point(tap, packet), flows)
    }

    /// The flow that the QP at `me` sends.
    fn flow_of(&self, me: EndPoint, flows: &HashMap<FlowKey, FlowIndex>) -> Option<FlowIndex> {
        self.sent_by(me).or_else(|| self.answered_by(me, flows))
    }

    /// The request flow that the QP at `me` sends: the one its responses answer, or else the only one that no other QP
    /// sends.
    fn sent_by(&self, me: EndPoint) -> Option<FlowIndex> {
        let evidence = self.owners.get(&me).map(|owner| owner.evidence).unwrap_or_default();
        if let Some(flow) = evidence.candidate() {
            let rival = self.candidates.get(&flow)?.owner.is_some_and(|owner| owner != me);
            return (!rival).then_some(flow);
        }
        let mut left: Vec<_> = self.candidates_of(me, |_| true).collect();
        let by_rule = |request: &RequestFlow| request.src_port == source_port(request.dest_qp, me.1);
        if left.iter().any(|(_, request)| by_rule(request)) {
            left.retain(|(_, request)| by_rule(request));
        }
        match left[..] {
            [(flow, _)] => Some(flow),
            _ => None,
        }
    }

    /// The response flow that the QP at `me` sends: congestion met by READ responses concerns the responder. The
    /// requests it answers name the QP, and the QP they come from is the flow's destination.
    fn answered_by(&self, me: EndPoint, flows: &HashMap<FlowKey, FlowIndex>) -> Option<FlowIndex> {
        let ((tap, src, dst), qpn) = me;
        let requests = flows.get(&FlowKey::new(tap, src, dst, qpn, Space::Request))?;
        let (_, requester) = self.candidates.get(requests)?.owner?;
        flows.get(&FlowKey::new(tap, dst, src, requester, Space::Response)).copied()
    }
}

fn reverse((tap, src, dst): Path) -> Path {
    (tap, dst, src)
}

fn end_point(tap: Tap, packet: &Packet) -> EndPoint {
    ((tap, packet.src, packet.dst), packet.bth.dest_qp)
}

fn response_of(packet: &Packet) -> Response {
    Response {
        src: packet.src,
        dst: packet.dst,
        dest_qp: packet.bth.dest_qp,
        src_port: packet.src_port,
        psn: packet.bth.psn,
    }
}
