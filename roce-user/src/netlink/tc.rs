//! Queueing disciplines and classes.

use std::io;

use anyhow::{Context as _, Result};
use netlink_packet_core::{DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, Nla as _};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcHandle, TcMessage, TcOption, TcStats2},
};

use super::Netlink;

/// Parent of a root qdisc.
pub const ROOT: TcHandle = TcHandle { major: 0xffff, minor: 0xffff };
/// Parent of the clsact and ingress qdiscs.
const CLSACT: TcHandle = TcHandle { major: 0xffff, minor: 0xfff1 };
/// Minor numbers of clsact's hooks.
const CLSACT_INGRESS: u16 = 0xfff2;
const CLSACT_EGRESS: u16 = 0xfff3;

const TCA_OPTIONS: u16 = 2;
// Of linux/pkt_sched.h.
const TCA_FQ_PLIMIT: u16 = 1;
const TCA_FQ_FLOW_PLIMIT: u16 = 2;
const TCA_FQ_ORPHAN_MASK: u16 = 10;
const TCA_FQ_HORIZON_DROP: u16 = 15;
const TCA_HTB_PARMS: u16 = 1;
const TCA_HTB_INIT: u16 = 2;
const TCA_HTB_DIRECT_QLEN: u16 = 5;
const TCA_HTB_RATE64: u16 = 6;
const TCA_HTB_CEIL64: u16 = 7;
/// `TC_LINKLAYER_ETHERNET`: the kernel needs no rate table then.
const LINKLAYER_ETHERNET: u8 = 1;
/// A kernel tick of packet schedulers is 2^6 ns.
const TICK_SHIFT: u32 = 6;

/// A qdisc of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Qdisc {
    /// Kind, e.g. `htb`.
    pub kind: String,
    /// Handle; major 0 for what the kernel chose by default.
    pub handle: TcHandle,
    /// Parent; [`ROOT`] for the root qdisc.
    pub parent: TcHandle,
    /// Packets waiting.
    pub backlog_packets: u32,
    /// Packets of one flow that may wait, where it is an fq: what comes on top is dropped.
    pub flow_limit: Option<u32>,
}

impl Netlink {
    /// The qdiscs of an interface.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn qdiscs(&mut self, ifindex: u32) -> Result<Vec<Qdisc>> {
        let answers = self
            .request(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(ifindex as i32)), NLM_F_DUMP)
            .context("cannot list the queueing disciplines")?;
        Ok(answers
            .into_iter()
            .filter_map(|a| match a {
                RouteNetlinkMessage::NewQueueDiscipline(m) if m.header.index == ifindex as i32 => Some(qdisc(&m)),
                _ => None,
            })
            .collect())
    }

    /// The root qdisc of an interface.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn root_qdisc(&mut self, ifindex: u32) -> Result<Option<Qdisc>> {
        Ok(self.qdiscs(ifindex)?.into_iter().find(|q| q.parent == ROOT))
    }

    /// The kind of the qdisc that holds the tc hooks: `clsact`, or `ingress`, which has no egress hook.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn hook_qdisc(&mut self, ifindex: u32) -> Result<Option<String>> {
        Ok(self.qdiscs(ifindex)?.into_iter().find(|q| q.parent == CLSACT).map(|q| q.kind))
    }

    /// Deletes the clsact qdisc, unless somebody has a filter there.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn delete_clsact_if_empty(&mut self, ifindex: u32) -> Result<bool> {
        if self.hook_qdisc(ifindex)?.as_deref() != Some("clsact") {
            return Ok(false);
        }
        for minor in [CLSACT_INGRESS, CLSACT_EGRESS] {
            let mut message = TcMessage::with_index(ifindex as i32);
            message.header.parent = TcHandle { major: CLSACT.major, minor };
            let filters = self
                .request(RouteNetlinkMessage::GetTrafficFilter(message), NLM_F_DUMP)
                .context("cannot list the tc filters")?;
            if !filters.is_empty() {
                return Ok(false);
            }
        }
        let handle = TcHandle { major: CLSACT.major, minor: 0 };
        self.delete_qdisc(ifindex, handle, CLSACT).context("cannot delete clsact")?;
        Ok(true)
    }

    /// Adds an HTB root qdisc without a default class: what no filter classifies is sent at once.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add_htb_root(&mut self, ifindex: u32, handle: TcHandle, direct_qlen: u32) -> io::Result<()> {
        let options = htb_root_options(direct_qlen);
        let message = tc(ifindex, handle, ROOT, "htb", Some(TcAttribute::Options(options)));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Adds an fq root qdisc that drops nothing of ours; see [`fq_options`].
    ///
    /// # Errors
    /// The kernel's refusal; `NotFound` where it does not have fq.
    pub fn add_fq_root(&mut self, ifindex: u32, handle: TcHandle) -> io::Result<()> {
        let message = tc(ifindex, handle, ROOT, "fq", Some(TcAttribute::Options(fq_options())));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Adds an mq root qdisc: a qdisc for each transmit queue of the device, whose classes name them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add_mq_root(&mut self, ifindex: u32, handle: TcHandle) -> io::Result<()> {
        let message = tc(ifindex, handle, ROOT, "mq", None);
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Makes such an fq the qdisc of one transmit queue, in place of what the kernel put there.
    ///
    /// # Errors
    /// As [`Netlink::add_fq_root`].
    pub fn replace_fq_leaf(&mut self, ifindex: u32, parent: TcHandle) -> io::Result<()> {
        let none = TcHandle { major: 0, minor: 0 };
        let message = tc(ifindex, none, parent, "fq", Some(TcAttribute::Options(fq_options())));
        let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), flags).map(drop)
    }

    /// Deletes a qdisc.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_qdisc(&mut self, ifindex: u32, handle: TcHandle, parent: TcHandle) -> io::Result<()> {
        let mut message = TcMessage::with_index(ifindex as i32);
        message.header.handle = handle;
        message.header.parent = parent;
        self.request(RouteNetlinkMessage::DelQueueDiscipline(message), NLM_F_ACK).map(drop)
    }

    /// Adds an HTB class (`create`) or changes its rate.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_htb_class(
        &mut self,
        ifindex: u32,
        classid: TcHandle,
        parent: TcHandle,
        bytes_per_sec: u64,
        burst_bytes: u64,
        create: bool,
    ) -> io::Result<()> {
        let options = htb_class_options(bytes_per_sec, burst_bytes);
        let message = tc(ifindex, classid, parent, "htb", Some(TcAttribute::Options(options)));
        let flags = if create { NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL } else { NLM_F_ACK };
        self.request(RouteNetlinkMessage::NewTrafficClass(message), flags).map(drop)
    }

    /// Adds a pfifo of `packets` as the leaf of a class.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add_pfifo_leaf(&mut self, ifindex: u32, parent: TcHandle, packets: u32) -> io::Result<()> {
        let message = tc(ifindex, TcHandle { major: 0, minor: 0 }, parent, "pfifo", Some(pfifo_options(packets)));
        self.request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL).map(drop)
    }

    /// Deletes a class; the kernel drops what still waits in it.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_class(&mut self, ifindex: u32, classid: TcHandle) -> io::Result<()> {
        let mut message = TcMessage::with_index(ifindex as i32);
        message.header.handle = classid;
        self.request(RouteNetlinkMessage::DelTrafficClass(message), NLM_F_ACK).map(drop)
    }

    /// The leaf classes of an interface with the packets waiting in each.
    ///
    /// # Errors
    /// When netlink fails.
    pub fn classes(&mut self, ifindex: u32) -> Result<Vec<Qdisc>> {
        let answers = self
            .request(RouteNetlinkMessage::GetTrafficClass(TcMessage::with_index(ifindex as i32)), NLM_F_DUMP)
            .context("cannot list the traffic classes")?;
        Ok(answers
            .into_iter()
            .filter_map(|a| match a {
                RouteNetlinkMessage::NewTrafficClass(m) if m.header.index == ifindex as i32 => Some(qdisc(&m)),
                _ => None,
            })
            .collect())
    }
}

fn other(kind: u16, value: Vec<u8>) -> TcOption {
    TcOption::Other(DefaultNla::new(kind, value))
}

fn tc(ifindex: u32, handle: TcHandle, parent: TcHandle, kind: &str, options: Option<TcAttribute>) -> TcMessage {
    let mut message = TcMessage::with_index(ifindex as i32);
    message.header.handle = handle;
    message.header.parent = parent;
    message.attributes.push(TcAttribute::Kind(kind.into()));
    message.attributes.extend(options);
    message
}

/// `struct tc_htb_glob` without a default class, and the length of the queue of what no filter classifies.
fn htb_root_options(direct_qlen: u32) -> Vec<TcOption> {
    let version: [u32; 5] = [3, 10, 0, 0, 0];
    vec![
        other(TCA_HTB_INIT, version.iter().flat_map(|w| w.to_ne_bytes()).collect()),
        other(TCA_HTB_DIRECT_QLEN, direct_qlen.to_ne_bytes().to_vec()),
    ]
}

/// `struct tc_fifo_qopt`.
fn pfifo_options(packets: u32) -> TcAttribute {
    TcAttribute::Other(DefaultNla::new(TCA_OPTIONS, packets.to_ne_bytes().to_vec()))
}

/// What fq needs so that it never drops a paced packet, since rxe since Linux 6.10 gives up a queue pair for that: room for
/// 65 packets (`RXE_INFLIGHT_SKBS_PER_QP_HIGH`) of 150,000 queue pairs and for long READ responses; rxe's sockets, being
/// unconnected, share flows by hash, so as many flows as there can be; and a horizon that caps instead of dropping.
fn fq_options() -> Vec<TcOption> {
    vec![
        other(TCA_FQ_PLIMIT, 10_000_000u32.to_ne_bytes().to_vec()),
        other(TCA_FQ_FLOW_PLIMIT, 1_000_000u32.to_ne_bytes().to_vec()),
        other(TCA_FQ_ORPHAN_MASK, 65_535u32.to_ne_bytes().to_vec()),
        other(TCA_FQ_HORIZON_DROP, vec![0]),
    ]
}

/// `struct tc_htb_opt` with rate = ceil, and the 64-bit rates where 32 bits do not hold them.
fn htb_class_options(bytes_per_sec: u64, burst_bytes: u64) -> Vec<TcOption> {
    let rate32 = u32::try_from(bytes_per_sec).unwrap_or(u32::MAX);
    let mut spec = [0u8; 12];
    spec[1] = LINKLAYER_ETHERNET;
    spec[8..].copy_from_slice(&rate32.to_ne_bytes());
    let burst_ns = u128::from(burst_bytes) * 1_000_000_000 / u128::from(bytes_per_sec.max(1));
    let burst_ticks = u32::try_from(burst_ns >> TICK_SHIFT).unwrap_or(u32::MAX);
    let quantum = u32::try_from(burst_bytes).unwrap_or(u32::MAX).clamp(1_514, 200_000);
    let mut parms = Vec::with_capacity(44);
    parms.extend(spec);
    parms.extend(spec);
    for word in [burst_ticks, burst_ticks, quantum, 0, 0] {
        parms.extend(word.to_ne_bytes());
    }
    let mut options = vec![other(TCA_HTB_PARMS, parms)];
    if bytes_per_sec > u64::from(u32::MAX) {
        options.push(other(TCA_HTB_RATE64, bytes_per_sec.to_ne_bytes().to_vec()));
        options.push(other(TCA_HTB_CEIL64, bytes_per_sec.to_ne_bytes().to_vec()));
    }
    options
}

fn qdisc(message: &TcMessage) -> Qdisc {
    let mut q = Qdisc {
        kind: String::new(),
        handle: message.header.handle,
        parent: message.header.parent,
        backlog_packets: 0,
        flow_limit: None,
    };
    for attribute in &message.attributes {
        match attribute {
            TcAttribute::Kind(kind) => q.kind.clone_from(kind),
            // The kind comes first (`tc_fill_qdisc` in net/sched/sch_api.c).
            TcAttribute::Options(options) if q.kind == "fq" => {
                q.flow_limit = options.iter().find_map(|option| match option {
                    TcOption::Other(nla) if nla.kind() == TCA_FQ_FLOW_PLIMIT => {
                        let mut value = [0; 4];
                        nla.emit_value(value.get_mut(..nla.value_len())?);
                        Some(u32::from_ne_bytes(value))
                    }
                    _ => None,
                });
            }
            TcAttribute::Stats2(stats) => {
                for stat in stats {
                    if let TcStats2::Queue(queue) = stat {
                        q.backlog_packets = queue.qlen;
                    }
                }
            }
            _ => {}
        }
    }
    q
}

#[cfg(test)]
#[path = "tc_tests.rs"]
mod tests;
