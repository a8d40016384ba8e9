//! Which flows, and which CNPs, belong together: by the pairs in an interface's maps.

use std::collections::{HashMap, HashSet};

use roce_common::{
    abi::{CnpCount, FlowKey, PairKey, PairValue, Space},
    facts::RoundTrips,
    flow::Flow,
    units::{Addr, Qpn},
};

use crate::{
    dataplane::Maps,
    findings::{Code, Findings, Subject},
};

/// What the maps of an interface say of who is connected with whom, and of the CNPs that passed.
pub struct Partners {
    pairs: HashMap<PairKey, PairValue>,
    /// CNPs by tap, source, destination and the queue pair they name.
    cnps: HashMap<FlowKey, CnpCount>,
}

impl Partners {
    /// Reads the maps.
    pub fn new(maps: &Maps) -> Self {
        Self { pairs: maps.pairs().into_iter().collect(), cnps: maps.cnps().into_iter().collect() }
    }

    /// The queue pair that sends a flow.
    fn sender(&self, key: &FlowKey) -> Option<Qpn> {
        Some(Qpn::new(self.pairs.get(&PairKey::new(key.src, key.dst, key.dest_qp()))?.sender_qpn))
    }

    /// Where what passes between the two queue pairs of a flow the other way may be found, by [`FlowKey::back`].
    fn back(&self, key: &FlowKey, space: Space) -> Option<[FlowKey; 2]> {
        Some(key.back(self.sender(key)?, space))
    }

    /// The keys of the flow that answers this one, or is answered by it: the first that exists is it.
    pub fn of(&self, key: &FlowKey) -> Option<[FlowKey; 2]> {
        self.back(key, if key.space() == Space::Request { Space::Response } else { Space::Request })
    }

    /// Round trips of the requests of a flow.
    pub fn round_trips(&self, maps: &Maps, key: &FlowKey) -> Option<RoundTrips> {
        self.back(key, Space::Response)?.iter().find_map(|answers| maps.round_trips(answers))
    }

    /// CNPs that the source of a flow sent to the queue pair that the flow goes to.
    pub fn cnps_sent(&self, key: &FlowKey) -> u64 {
        let named = FlowKey::new(key.tap, key.src, key.dst, key.dest_qp(), Space::Request);
        self.cnps.get(&named).map_or(0, |count| count.packets)
    }

    /// Gives every flow the CNPs that tell its sender to slow down. They concern the requests that a queue pair sends, else its
    /// READ responses.
    pub fn count_cnps(&self, flows: &mut [(FlowKey, Flow)]) {
        if self.cnps.is_empty() {
            return;
        }
        let requests: HashSet<FlowKey> =
            flows.iter().map(|(key, _)| *key).filter(|key| key.space() == Space::Request).collect();
        for (key, flow) in flows {
            let asks = FlowKey::new(key.tap, key.src, key.dst, key.dest_qp(), Space::Request);
            if key.space() == Space::Response && requests.contains(&asks) {
                continue;
            }
            let told = self.back(key, Space::Request);
            flow.cnp = told.iter().flatten().find_map(|named| self.cnps.get(named)).map_or(0, |count| count.packets);
        }
    }

    /// Finds CNPs in an unusual class, those that do not say what they are for, and those between a host with the addresses
    /// `locals` and another one that name no queue pair known to be connected. Between others no pairs are known.
    pub fn judge_cnps(&self, locals: &[Addr], findings: &mut Findings) {
        for (key, count) in &self.cnps {
            let path = Subject::Path(key.tap, key.src, key.dst);
            findings.add(Code::CnpDscpUnexpected, path, count.in_other_dscp);
            findings.add(Code::CnpBecnMissing, path, count.without_becn);
            let ours = locals.contains(&key.src) || locals.contains(&key.dst);
            if ours && self.sender(key).is_none() {
                findings.add(Code::CnpUnmatched, path, count.packets);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use roce_common::abi::{Direction, Tap};

    use super::*;

    #[test]
    fn cnps_slow_down_the_requests_of_the_queue_pair_they_name_or_else_its_answers() {
        let (a, b) = (Addr::v4([10, 0, 0, 1]), Addr::v4([10, 0, 0, 2]));
        let (out, back) = (Tap::new(3, Direction::Egress), Tap::new(3, Direction::Ingress));
        let key = |tap, src, dst, qp, space| FlowKey::new(tap, src, dst, Qpn::new(qp), space);
        // QP 17 of A and QP 42 of B are connected, and so are 18 and 43.
        let pair = |src, dst, qp, sender| {
            (PairKey::new(src, dst, Qpn::new(qp)), PairValue { sender_qpn: sender, ..PairValue::default() })
        };
        let cnps = |named, packets| (named, CnpCount { packets, ..CnpCount::default() });
        let partners = Partners {
            pairs: [pair(a, b, 42, 17), pair(b, a, 17, 42), pair(a, b, 43, 18), pair(b, a, 18, 43)].into(),
            cnps: [cnps(key(back, b, a, 17, Space::Request), 5), cnps(key(out, a, b, 43, Space::Request), 3)].into(),
        };
        let keys = [
            key(out, a, b, 42, Space::Request),
            key(out, a, b, 42, Space::Response),
            key(back, b, a, 17, Space::Response),
            // It only answers READs.
            key(back, b, a, 18, Space::Response),
            key(out, a, b, 99, Space::Request),
        ];
        let mut flows: Vec<(FlowKey, Flow)> = keys.iter().map(|key| (*key, Flow::default())).collect();
        partners.count_cnps(&mut flows);
        assert_eq!(flows.iter().map(|(_, flow)| flow.cnp).collect::<Vec<_>>(), [5, 0, 0, 3, 0]);
        assert_eq!(keys.map(|key| partners.cnps_sent(&key)), [0, 0, 5, 0, 0]);
        assert_eq!(partners.cnps_sent(&key(out, a, b, 43, Space::Response)), 3);
        assert_eq!(partners.of(&keys[0]), Some([keys[2], key(out, b, a, 17, Space::Response)]));
        assert_eq!(partners.of(&keys[4]), None);
        // Others than these two are none of our business.
        let mut found = Findings::default();
        partners.judge_cnps(&[b], &mut found);
        assert_eq!(found.worst(), None);
        let stray = cnps(key(back, b, a, 99, Space::Request), 7);
        let partners = Partners { cnps: [stray].into(), ..partners };
        for (locals, count) in [(vec![], 0), (vec![a], 7), (vec![b], 7)] {
            let mut found = Findings::default();
            partners.judge_cnps(&locals, &mut found);
            assert_eq!(found.count(Code::CnpUnmatched), count);
        }
    }
}
