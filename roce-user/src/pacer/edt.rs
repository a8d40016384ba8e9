//! The EDT pacer: rates in a map, departure times by the egress program, fq to keep them.

use std::{collections::HashMap, io};

use anyhow::{Context as _, Result, bail};
use roce_common::{
    abi::{self, PeerQp, RateValue},
    units::{Nanos, Rate},
};

use super::{FULL_SPEED, Leaving, Pacer, ROOT_HANDLE, drain, is_default, is_ours, refuse_foreign, remove_root};
use crate::{
    config,
    dataplane::Maps,
    netlink::{LinkInfo, Netlink},
};

// fq's options (linux/pkt_sched.h, TCA_FQ_*). Its defaults would drop: 100 packets a flow, a horizon beyond which
// packets vanish, and rxe's sockets, being unconnected, share flows by hash.
const TCA_FQ_PLIMIT: u16 = 1;
const TCA_FQ_FLOW_PLIMIT: u16 = 2;
const TCA_FQ_ORPHAN_MASK: u16 = 10;
const OPTIONS: [(u16, u32); 3] = [(TCA_FQ_PLIMIT, 100_000), (TCA_FQ_FLOW_PLIMIT, 10_000), (TCA_FQ_ORPHAN_MASK, 65_535)];

/// Paces by departure time.
#[derive(Debug)]
pub struct Edt {
    ifindex: u32,
    made_root: bool,
    leaving: HashMap<PeerQp, Leaving>,
}

impl Edt {
    /// Uses the fq that is the root qdisc, or makes one in place of the kernel's default.
    ///
    /// # Errors
    /// The kernel has no fq, or somebody's qdisc is in the way.
    pub fn open(link: &LinkInfo) -> Result<Self> {
        let mut netlink = Netlink::open()?;
        let root = netlink.root_qdisc(link.index)?;
        let (ifindex, name) = (link.index, &link.name);
        if root.as_ref().is_some_and(|q| q.kind == "fq") {
            return Ok(Self { ifindex, made_root: is_ours(root.as_ref()), leaving: HashMap::new() });
        }
        refuse_foreign(name, root.as_ref(), Some(config::Pacer::Edt))?;
        debug_assert!(is_default(root.as_ref()) || is_ours(root.as_ref()), "refuse_foreign lets nothing else pass");
        match netlink.add_fq_root(ifindex, ROOT_HANDLE, &OPTIONS) {
            Ok(()) => Ok(Self { ifindex, made_root: true, leaving: HashMap::new() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                bail!("{name}: this kernel has no fq qdisc (CONFIG_NET_SCH_FQ): use --pacer htb")
            }
            Err(e) => Err(e).with_context(|| format!("{name}: cannot make fq the root qdisc")),
        }
    }
}

impl Edt {
    /// Rates and departure times without an fq to keep them: everything of this pacer but the wire, for measurements where
    /// the kernel has no fq.
    pub fn unkept(ifindex: u32) -> Self {
        Self { ifindex, made_root: false, leaving: HashMap::new() }
    }
}

impl Pacer for Edt {
    fn name(&self) -> &'static str {
        "edt"
    }

    fn kind(&self) -> abi::Pacer {
        abi::Pacer::Edt
    }

    fn set_rate(&mut self, maps: &mut Maps, key: PeerQp, rate: Rate, cause: Nanos) -> Result<()> {
        self.leaving.remove(&key);
        let bytes_per_sec = rate.bytes_per_sec().max(1);
        maps.set_rate(key, RateValue { bytes_per_sec, cause_ns: cause.0, ..RateValue::default() })
    }

    fn forget(&mut self, maps: &mut Maps, key: PeerQp) -> Result<()> {
        self.leaving.remove(&key);
        maps.clear_rate(key)
    }

    fn release(&mut self, _: &mut Maps, key: PeerQp) -> Result<()> {
        self.leaving.entry(key).or_insert(Leaving::NEW);
        Ok(())
    }

    fn poll(&mut self, maps: &mut Maps, now: Nanos) -> Result<()> {
        let gone: Vec<PeerQp> =
            self.leaving.iter_mut().filter_map(|(key, l)| l.may_go(maps.pace(*key), now).then_some(*key)).collect();
        for key in gone {
            self.leaving.remove(&key);
            maps.clear_rate(key)?;
        }
        Ok(())
    }

    fn close(&mut self, maps: &mut Maps) -> Result<()> {
        let mut netlink = Netlink::open()?;
        // Packets without a departure time would overtake those that wait for theirs.
        let rates = maps.rates();
        for (key, _) in &rates {
            maps.set_rate(*key, RateValue { bytes_per_sec: FULL_SPEED, ..RateValue::default() })?;
        }
        drain(&mut netlink, self.ifindex)?;
        for (key, _) in rates {
            maps.clear_rate(key)?;
        }
        if self.made_root {
            remove_root(&mut netlink, self.ifindex)?;
        }
        Ok(())
    }
}
