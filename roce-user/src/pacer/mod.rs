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

/// Refuses to replace a root qdisc that somebody made. Somebody's fq is used by EDT as it is.
///
/// # Errors
/// Names the qdisc and the ways out.
pub fn refuse_foreign(name: &str, root: Option<&Qdisc>, wish: Option<config::Pacer>) -> Result<()> {
    let Some(q) = root else { return Ok(()) };
    let usable = q.kind == "fq" && wish != Some(config::Pacer::Htb);
    if is_default(root) || is_ours(root) || usable {
        return Ok(());
    }
    bail!(
        "{name}: its root qdisc {} {:x}: was set up by somebody and is not replaced: use --pacer off{}, or remove it (tc qdisc del dev {name} root)",
        q.kind,
        q.handle.major,
        if q.kind == "fq" { " or --pacer edt" } else { "" }
    )
}

/// Removes our root qdisc. What waits in its classes leaves first, at full speed: deleting a class drops its packets.
///
/// # Errors
/// The kernel refuses.
pub fn remove_root(netlink: &mut Netlink, ifindex: u32) -> Result<()> {
    drain(netlink, ifindex)?;
    match netlink.delete_qdisc(ifindex, ROOT_HANDLE, ROOT) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e).context("cannot delete the root qdisc"),
    }
}

/// Opens every class of ours and waits, at most a second, until nothing waits in the root qdisc.
fn drain(netlink: &mut Netlink, ifindex: u32) -> Result<()> {
    for class in netlink.classes(ifindex)?.into_iter().filter(|c| c.handle.major == QDISC_MAJOR) {
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
