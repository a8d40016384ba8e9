//! Pacers: what makes a rate of the controller a rate of the wire.
//!
//! | pacer | how | needs |
//! |---|---|---|
//! | `edt` | the egress program gives each packet a departure time | fq as the root qdisc (ours or the user's) |
//! | `htb` | one HTB class per limited queue pair | the HTB qdisc; at most 60,000 classes |
//! | `off` | nothing is paced | – |

mod edt;
mod htb;

use std::{io, thread, time::Duration};

use anyhow::{Context as _, Result, bail};
use netlink_packet_route::tc::TcHandle;
use roce_common::{
    abi::{self, PaceCell, PeerQp},
    units::{Nanos, Rate},
};

pub use edt::Edt;
pub use htb::Htb;

use crate::{
    config,
    dataplane::{Maps, QDISC_MAJOR},
    netlink::{Netlink, Qdisc, ROOT},
};

/// Handle of our root qdisc.
pub const ROOT_HANDLE: TcHandle = TcHandle { major: QDISC_MAJOR, minor: 0 };

/// A rate that holds nothing back, bytes per second.
const FULL_SPEED: u64 = 12_500_000_000;

/// A limiter at line rate goes once its queue pair has sent nothing for this long. A packet past a limiter would overtake
/// those that still wait in it, and the receiver would take that for loss.
const IDLE: Nanos = Nanos::from_millis(200);

/// A limiter that is to go, and when its queue pair was last seen sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Leaving {
    packets: u64,
    since: Nanos,
}

impl Leaving {
    /// Not looked at yet.
    const NEW: Self = Self { packets: u64::MAX, since: Nanos(0) };

    /// Takes a look at the limiter; whether it may go.
    fn may_go(&mut self, cell: Option<PaceCell>, now: Nanos) -> bool {
        let Some(cell) = cell else { return true };
        if cell.packets != self.packets {
            *self = Self { packets: cell.packets, since: now };
        }
        now.since(self.since) >= IDLE && cell.next_ns <= now.0
    }
}

/// Paces queue pairs.
pub trait Pacer: Send {
    /// The name shown to the user.
    fn name(&self) -> &'static str;

    /// The qdisc it works by, shown to the user.
    fn qdisc(&self) -> String;

    /// What the egress program has to do for it.
    fn kind(&self) -> abi::Pacer;

    /// Most limiters it can hold.
    fn capacity(&self) -> usize {
        abi::MAX_RATES as usize
    }

    /// Paces the packets of `key` at `rate`, frame bytes per second. `cause` is when the kernel received the CNP that led
    /// to it, 0 where none did.
    ///
    /// # Errors
    /// The kernel refuses a class or a map entry.
    fn set_rate(&mut self, maps: &mut Maps, key: PeerQp, rate: Rate, cause: Nanos) -> Result<()>;

    /// Makes ready for queue pairs that the egress program will limit at `rate` by itself.
    ///
    /// # Errors
    /// As [`Pacer::set_rate`].
    fn prepare(&mut self, _: &mut Maps, _rate: Rate) -> Result<()> {
        Ok(())
    }

    /// Takes over a limiter that the egress program has made; `classid` is the HTB class it took for it.
    ///
    /// # Errors
    /// As [`Pacer::set_rate`].
    fn adopt(&mut self, _: &mut Maps, _key: PeerQp, _classid: u32) -> Result<()> {
        Ok(())
    }

    /// Takes the limiter of a queue pair away that has sent nothing for long.
    ///
    /// # Errors
    /// As [`Pacer::set_rate`].
    fn forget(&mut self, maps: &mut Maps, key: PeerQp) -> Result<()> {
        maps.clear_rate(key)
    }

    /// Takes the limiter of `key` away once its queue pair pauses; it is at line rate already.
    ///
    /// # Errors
    /// As [`Pacer::set_rate`].
    fn release(&mut self, maps: &mut Maps, key: PeerQp) -> Result<()>;

    /// Finishes releases; called often.
    ///
    /// # Errors
    /// As [`Pacer::set_rate`].
    fn poll(&mut self, maps: &mut Maps, now: Nanos) -> Result<()>;

    /// Releases everything and restores the interface.
    ///
    /// # Errors
    /// The kernel refuses.
    fn close(&mut self, maps: &mut Maps) -> Result<()>;
}

/// Nothing is paced.
#[derive(Debug)]
pub struct Off;

impl Pacer for Off {
    fn name(&self) -> &'static str {
        "off"
    }

    fn qdisc(&self) -> String {
        "none of ours".into()
    }

    fn kind(&self) -> abi::Pacer {
        abi::Pacer::Off
    }

    fn set_rate(&mut self, _: &mut Maps, _: PeerQp, _: Rate, _: Nanos) -> Result<()> {
        Ok(())
    }

    fn release(&mut self, _: &mut Maps, _: PeerQp) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, _: &mut Maps, _: Nanos) -> Result<()> {
        Ok(())
    }

    fn close(&mut self, _: &mut Maps) -> Result<()> {
        Ok(())
    }
}

/// Whether a root qdisc is one we made.
pub fn is_ours(root: Option<&Qdisc>) -> bool {
    root.is_some_and(|q| q.handle.major == QDISC_MAJOR)
}

/// Whether the root qdisc is none, or the kernel's default, which comes back when ours goes.
pub(crate) fn is_default(root: Option<&Qdisc>) -> bool {
    root.is_none_or(|q| q.handle.major == 0)
}

/// What an interface's qdiscs mean for pacing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// Nothing, the kernel's default, or one of ours: it may be replaced. The kernel's default comes back when ours goes.
    Replaceable {
        /// The device has several transmit queues (its root is mq).
        queues: bool,
    },
    /// Somebody's fq, alone or on every transmit queue: used as it is.
    Fq {
        /// How many.
        count: usize,
        /// The smallest number of packets of a flow that one of them holds.
        flow_limit: Option<u32>,
    },
    /// Somebody's mq, with something else than fq on a queue.
    MixedMq(Qdisc),
    /// Somebody's root.
    Foreign(Qdisc),
}

/// Judges the qdiscs of an interface.
pub(crate) fn judge(qdiscs: &[Qdisc]) -> Found {
    let Some(root) = qdiscs.iter().find(|q| q.parent == ROOT) else { return Found::Replaceable { queues: false } };
    if is_default(Some(root)) || is_ours(Some(root)) {
        return Found::Replaceable { queues: root.kind == "mq" };
    }
    let fqs: Vec<&Qdisc> = match root.kind.as_str() {
        "fq" => vec![root],
        "mq" => qdiscs.iter().filter(|q| q.parent.major == root.handle.major && q.parent != ROOT).collect(),
        _ => return Found::Foreign(root.clone()),
    };
    if fqs.is_empty() || fqs.iter().any(|q| q.kind != "fq") {
        return Found::MixedMq(root.clone());
    }
    Found::Fq { count: fqs.len(), flow_limit: fqs.iter().filter_map(|q| q.flow_limit).min() }
}

/// Refuses to replace a root qdisc that somebody made. Somebody's fq is used by EDT as it is.
///
/// # Errors
/// Names the qdisc and the ways out.
pub fn refuse_foreign(name: &str, qdiscs: &[Qdisc], wish: Option<config::Pacer>) -> Result<()> {
    let (root, also) = match judge(qdiscs) {
        Found::Replaceable { .. } => return Ok(()),
        Found::Fq { .. } if wish != Some(config::Pacer::Htb) => return Ok(()),
        Found::Fq { .. } => (qdiscs.iter().find(|q| q.parent == ROOT).cloned(), " or --pacer edt".to_owned()),
        Found::MixedMq(root) => {
            let fq = format!(
                ", or give every queue an fq (tc qdisc replace dev {name} parent {:x}:N fq limit 10000000 flow_limit \
                 1000000 orphan_mask 65535 horizon_cap) for --pacer edt",
                root.handle.major
            );
            (Some(root), fq)
        }
        Found::Foreign(root) => (Some(root), String::new()),
    };
    let (kind, major) = root.map_or((String::new(), 0), |q| (q.kind, q.handle.major));
    bail!(
        "{name}: its root qdisc {kind} {major:x}: was set up by somebody and is not replaced: use --pacer off{also}, or remove it (tc qdisc del dev {name} root)"
    )
}

/// Removes our root qdisc. What waits in its classes leaves first, at full speed: deleting a class drops its packets. `maps` are
/// those of the egress program, where it is still attached.
///
/// # Errors
/// The kernel refuses.
pub fn remove_root(netlink: &mut Netlink, ifindex: u32, maps: Option<&mut Maps>) -> Result<()> {
    drain(netlink, ifindex)?;
    match maps {
        Some(maps) => maps.while_dropping(|_| delete_root(netlink, ifindex)),
        None => delete_root(netlink, ifindex),
    }
}

fn delete_root(netlink: &mut Netlink, ifindex: u32) -> Result<()> {
    match netlink.delete_qdisc(ifindex, ROOT_HANDLE, ROOT) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e).context("cannot delete the root qdisc"),
    }
}

/// Opens every class of ours and waits, at most a second, until nothing waits in the root qdisc.
fn drain(netlink: &mut Netlink, ifindex: u32) -> Result<()> {
    let ours = |c: &Qdisc| c.handle.major == QDISC_MAJOR && c.kind == "htb";
    for class in netlink.classes(ifindex)?.into_iter().filter(ours) {
        netlink
            .set_htb_class(ifindex, class.handle, ROOT_HANDLE, FULL_SPEED, 1 << 20, false)
            .context("cannot open a class")?;
    }
    for _ in 0..100 {
        if netlink.root_qdisc(ifindex)?.is_none_or(|q| q.backlog_packets == 0) {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qdisc(kind: &str, major: u16, parent: TcHandle) -> Qdisc {
        let handle = TcHandle { major, minor: 0 };
        Qdisc { kind: kind.into(), handle, parent, backlog_packets: 0, flow_limit: (kind == "fq").then_some(100) }
    }

    fn queue(major: u16, minor: u16) -> TcHandle {
        TcHandle { major, minor }
    }

    #[test]
    fn qdiscs_are_used_replaced_or_left() {
        assert_eq!(judge(&[]), Found::Replaceable { queues: false });
        assert_eq!(judge(&[qdisc("noqueue", 0, ROOT)]), Found::Replaceable { queues: false });
        // The kernel's own mq, also with fq on its queues (net.core.default_qdisc).
        let defaults = [qdisc("mq", 0, ROOT), qdisc("fq", 0, queue(0, 1)), qdisc("fq", 0, queue(0, 2))];
        assert_eq!(judge(&defaults), Found::Replaceable { queues: true });
        assert_eq!(judge(&[qdisc("fq", 5, ROOT)]), Found::Fq { count: 1, flow_limit: Some(100) });
        let mut mq = vec![qdisc("mq", 5, ROOT), qdisc("fq", 6, queue(5, 1)), qdisc("fq", 7, queue(5, 2))];
        assert_eq!(judge(&mq), Found::Fq { count: 2, flow_limit: Some(100) });
        mq.push(qdisc("fq_codel", 0, queue(5, 3)));
        assert_eq!(judge(&mq), Found::MixedMq(mq[0].clone()));
        assert_eq!(judge(&mq[..1]), Found::MixedMq(mq[0].clone()));
        let tbf = qdisc("tbf", 0x8001, ROOT);
        assert_eq!(judge(std::slice::from_ref(&tbf)), Found::Foreign(tbf.clone()));
        assert!(matches!(judge(&[qdisc("htb", QDISC_MAJOR, ROOT)]), Found::Replaceable { .. }));
        // A clsact beside the root is not one.
        let clsact = qdisc("clsact", 0xffff, queue(0xffff, 0xfff1));
        assert_eq!(judge(&[clsact, qdisc("fq", 5, ROOT)]), Found::Fq { count: 1, flow_limit: Some(100) });

        assert!(refuse_foreign("e", &mq, None).unwrap_err().to_string().contains("parent 5:N fq"));
        assert!(refuse_foreign("e", &[qdisc("fq", 5, ROOT)], None).is_ok());
        let htb = refuse_foreign("e", &[qdisc("fq", 5, ROOT)], Some(config::Pacer::Htb)).unwrap_err().to_string();
        assert!(htb.contains("--pacer edt") && htb.contains("fq 5:"), "{htb}");
        assert!(refuse_foreign("e", &[tbf], None).unwrap_err().to_string().contains("tc qdisc del dev e root"));
    }

    #[test]
    fn a_limiter_goes_only_after_a_pause() {
        let cell = |packets, next_ns| Some(PaceCell { packets, next_ns, ..PaceCell::default() });
        let mut leaving = Leaving::NEW;
        let at = |ms: u64| Nanos::from_millis(1_000 + ms);
        assert!(!leaving.may_go(cell(10, 0), at(0)), "the first look starts the clock");
        assert!(!leaving.may_go(cell(11, 0), at(190)), "it sent");
        assert!(!leaving.may_go(cell(11, 0), at(380)));
        assert!(!leaving.may_go(cell(11, at(500).0), at(400)), "a packet still waits for its time");
        assert!(leaving.may_go(cell(11, at(500).0), at(501)));
        let mut fresh = Leaving::NEW;
        assert!(fresh.may_go(None, at(0)), "there is none");
    }
}
