//! Removing what an agent left: pins (and with them links and programs), filters, HTB root and classes.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::programs::{TcAttachType, tc::qdisc_detach_program};

use super::{Instance, Maps, Pins};
use crate::{
    netlink::{LinkInfo, Netlink},
    pacer,
};

/// What was removed from an interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Interface index.
    pub ifindex: u32,
    /// Its name, where it still exists.
    pub name: Option<String>,
    /// Pinned maps and links.
    pub pins: u32,
    /// tc filters that were not links.
    pub filters: u32,
    /// The root qdisc of a pacer, with its classes.
    pub qdisc: bool,
}

impl Removed {
    /// Whether there was anything.
    pub const fn anything(&self) -> bool {
        self.pins != 0 || self.filters != 0 || self.qdisc
    }
}

/// Interfaces of this namespace on which something of ours is, by pins or by qdisc.
///
/// # Errors
/// When pins or links cannot be listed.
pub fn list(bpffs: &Path) -> Result<Vec<(u32, Option<LinkInfo>)>> {
    let mut netlink = Netlink::open()?;
    let links = netlink.links()?;
    let mut found: Vec<u32> = Pins::all(bpffs)?.into_iter().map(|(ifindex, _)| ifindex).collect();
    for link in &links {
        if pacer::is_ours(netlink.root_qdisc(link.index)?.as_ref()) {
            found.push(link.index);
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found.into_iter().map(|i| (i, links.iter().find(|l| l.index == i).cloned())).collect())
}

/// Removes everything of ours from the interfaces of this namespace (`only` one of them, where named).
///
/// # Errors
/// An agent is still running on the interface, or the kernel refuses.
pub fn detach(bpffs: &Path, only: Option<&LinkInfo>) -> Result<Vec<Removed>> {
    let mut all = Vec::new();
    for (ifindex, link) in list(bpffs)? {
        if only.is_some_and(|o| o.index != ifindex) {
            continue;
        }
        let name = link.as_ref().map_or_else(|| format!("interface {ifindex}"), |l| l.name.clone());
        let _instance = Instance::take(&name, ifindex)?;
        all.extend(detach_stale(bpffs, ifindex)?);
    }
    Ok(all)
}

/// Removes what an agent that is gone left on an interface; `None` where there was nothing.
///
/// # Errors
/// The kernel refuses.
pub fn detach_stale(bpffs: &Path, ifindex: u32) -> Result<Option<Removed>> {
    let mut netlink = Netlink::open()?;
    let name = netlink.links()?.into_iter().find(|l| l.index == ifindex).map(|l| l.name);
    let mut removed = Removed { ifindex, name: name.clone(), ..Removed::default() };
    let pins = Pins::of(bpffs, ifindex)?;
    let our_clsact = pins.take_clsact()?;
    // First, while the egress program is still there.
    if let Some(name) = &name
        && pacer::is_ours(netlink.root_qdisc(ifindex)?.as_ref())
    {
        let mut maps = Maps::open(&pins).ok();
        pacer::remove_root(&mut netlink, ifindex, maps.as_mut())
            .with_context(|| format!("{name}: cannot remove our root qdisc"))?;
        removed.qdisc = true;
    }
    if pins.exist() {
        removed.pins = pins.remove()?;
    }
    if let Some(name) = &name {
        // Before TCX (Linux 6.6) the programs are filters of clsact, which no pin holds.
        for (hook, program) in [(TcAttachType::Ingress, "roce_tc_ingress"), (TcAttachType::Egress, "roce_tc_egress")] {
            if qdisc_detach_program(name, hook, program).is_ok() {
                removed.filters += 1;
            }
        }
        if our_clsact {
            netlink.delete_clsact_if_empty(ifindex).with_context(|| format!("{name}: its clsact"))?;
        }
    }
    Ok(removed.anything().then_some(removed))
}

/// Removes the clsact qdisc that an attachment made, once its filters are gone.
pub(super) fn remove_clsact(pins: &Pins, ifindex: u32) -> Result<()> {
    if pins.take_clsact()? {
        let mut netlink = Netlink::open()?;
        // With the interface it is gone already.
        if netlink.links()?.iter().any(|l| l.index == ifindex) {
            netlink.delete_clsact_if_empty(ifindex)?;
        }
    }
    Ok(())
}
