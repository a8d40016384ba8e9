//! What the kernel tells of this host's queue pairs: which are connected, for the pairing, and whose they are, for reports.

use std::collections::{HashMap, HashSet};

use roce_common::{
    abi::{Direction, FlowKey, PairKey},
    units::{Addr, Nanos, Qpn},
    wire::Service,
};
use serde::Serialize;

use super::monotonic;
use crate::{
    control::{KernelList, KernelQp, LocalQp},
    dataplane::Maps,
    netlink::rdma::{self, Owner, QpType, Rdma},
};

/// Asks the kernel.
pub(super) fn ask() -> (KernelList, Rdma) {
    let asked = monotonic();
    let rdma = rdma::list();
    (connected(asked, &rdma), rdma)
}

/// Its connected queue pairs.
fn connected(asked: Nanos, rdma: &Rdma) -> KernelList {
    let Rdma::Available(devices) = rdma else { return KernelList::new(asked, None) };
    let mut qps = Vec::new();
    for device in devices {
        for qp in device.qps.iter().filter(|q| q.state.is_connected()) {
            let service = match qp.qp_type {
                QpType::Rc => Service::Rc,
                QpType::Uc => Service::Uc,
                _ => continue,
            };
            let Some(remote) = qp.rqpn else { continue };
            let local = |&ifindex: &u32| KernelQp {
                local: LocalQp { ifindex, qpn: qp.lqpn },
                remote,
                service,
                expects: qp.rq_psn,
            };
            qps.extend(device.ifindexes.iter().map(local));
        }
    }
    KernelList::new(asked, Some(&qps))
}

/// The two queue pairs of a flow, and whose the local one is. What is not known is left out.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Ends {
    /// QPN on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_qp: Option<u32>,
    /// QPN at the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_qp: Option<u32>,
    /// RDMA device of the local queue pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,
    /// Process that owns it, as numbered here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of that process; in brackets that of an owner in the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
}

impl Ends {
    /// Device and owner on one line: `rxe0 ib_write_bw/1234`.
    pub fn owner(&self) -> String {
        let process = match (&self.process, self.pid) {
            (Some(name), Some(pid)) => format!("{name}/{pid}"),
            (Some(name), None) => name.clone(),
            (None, Some(pid)) => format!("process {pid}"),
            (None, None) => String::new(),
        };
        [self.rdma_device.clone().unwrap_or_default(), process].join(" ").trim().to_owned()
    }
}

/// Who owns the queue pairs of an interface, for one report.
pub struct Owners<'a> {
    rdma: &'a Rdma,
    locals: HashSet<Addr>,
    names: HashMap<u32, Option<String>>,
}

impl<'a> Owners<'a> {
    /// As the kernel said last; `maps` are those of the interface.
    pub fn new(rdma: &'a Rdma, maps: &Maps) -> Self {
        Self { rdma, locals: maps.locals().into_iter().collect(), names: HashMap::new() }
    }

    /// The ends of a flow. Both are known of a paired one; of any other the one that its packets name.
    pub fn ends(&mut self, key: &FlowKey, maps: &Maps) -> Ends {
        let named = key.dest_qp().get();
        let sender = maps.pair(PairKey::new(key.src, key.dst, key.dest_qp())).map(|p| p.sender_qpn);
        let (local_qp, remote_qp) = match key.tap.direction() {
            Direction::Ingress if self.locals.contains(&key.dst) => (Some(named), sender),
            Direction::Egress if self.locals.contains(&key.src) => (sender, Some(named)),
            _ => return Ends::default(),
        };
        let mut ends = Ends { local_qp, remote_qp, ..Ends::default() };
        let Some((device, qp)) = local_qp.and_then(|q| self.rdma.find(key.tap.ifindex(), Qpn::new(q))) else {
            return ends;
        };
        // One that is connected otherwise has taken the number over.
        if remote_qp.is_some_and(|remote| qp.rqpn.is_some_and(|listed| listed.get() != remote)) {
            return ends;
        }
        ends.rdma_device = Some(device.name.clone());
        match &qp.owner {
            Owner::Process(pid) => {
                ends.pid = Some(*pid);
                ends.process = self.names.entry(*pid).or_insert_with(|| rdma::process_name(*pid)).clone();
            }
            Owner::Kernel(name) => ends.process = Some(format!("[{name}]")),
            Owner::Unknown => {}
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_told_as_far_as_it_is_known() {
        let ends = |device: Option<&str>, pid, process: Option<&str>| Ends {
            rdma_device: device.map(Into::into),
            pid,
            process: process.map(Into::into),
            ..Ends::default()
        };
        assert_eq!(ends(Some("rxe0"), Some(77), Some("ib_write_bw")).owner(), "rxe0 ib_write_bw/77");
        assert_eq!(ends(Some("rxe0"), Some(77), None).owner(), "rxe0 process 77");
        assert_eq!(ends(Some("rxe0"), None, Some("[nvmet_rdma]")).owner(), "rxe0 [nvmet_rdma]");
        assert_eq!(ends(Some("rxe0"), None, None).owner(), "rxe0");
        assert_eq!(ends(None, None, None).owner(), "");
    }
}
