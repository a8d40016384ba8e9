//! The EDT pacer: rates in a map, departure times by the egress program, fq to keep them.

use std::{collections::HashMap, io};

use anyhow::{Context as _, Result, bail};
use roce_common::{
    abi::{self, PeerQp, RateValue},
    units::{Nanos, Rate},
};

use super::{FULL_SPEED, Found, Leaving, Pacer, ROOT_HANDLE, drain, judge, refuse_foreign, remove_root};
use crate::{
    config,
    dataplane::{Maps, QDISC_MAJOR},
    netlink::{LinkInfo, Netlink},
};

/// Somebody's fq that holds fewer packets of a flow than this may drop: rxe has 65 of each queue pair on their way, and
/// several queue pairs share a flow.
const FEW_PACKETS: u32 = 1_000;

/// Paces by departure time.
#[derive(Debug)]
pub struct Edt {
    ifindex: u32,
    made_root: bool,
    qdisc: String,
    leaving: HashMap<PeerQp, Leaving>,
}

impl Edt {
    /// Uses the fq that is the root qdisc or stands on every transmit queue, or makes such in place of the kernel's default.
    ///
    /// # Errors
    /// The kernel has no fq, or somebody's qdisc is in the way.
    pub fn open(link: &LinkInfo) -> Result<Self> {
        let mut netlink = Netlink::open()?;
        let (ifindex, name) = (link.index, &link.name);
        let qdiscs = netlink.qdiscs(ifindex)?;
        refuse_foreign(name, &qdiscs, Some(config::Pacer::Edt))?;
        let made = |qdisc: String, made_root| Self { ifindex, made_root, qdisc, leaving: HashMap::new() };
        let result = match judge(&qdiscs) {
            Found::Fq { count, flow_limit } => {
                let small = flow_limit.filter(|l| *l < FEW_PACKETS).map_or(String::new(), |l| {
                    format!(": flow_limit {l} may drop; 1000000 does not, nor do limit 10000000, orphan_mask 65535 and horizon_cap")
                });
                let queues = if count > 1 { format!(" on {count} queues") } else { String::new() };
                return Ok(made(format!("fq{queues}, as found{small}"), false));
            }
            Found::Replaceable { queues: true } => fq_on_every_queue(&mut netlink, ifindex),
            _ => netlink.add_fq_root(ifindex, ROOT_HANDLE).map(|()| "fq, ours".to_owned()),
        };
        match result {
            Ok(qdisc) => Ok(made(qdisc, true)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                bail!("{name}: this kernel has no fq qdisc (CONFIG_NET_SCH_FQ): use --pacer htb")
            }
            Err(e) => Err(e).with_context(|| format!("{name}: cannot make fq the root qdisc")),
        }
    }
}

/// One fq would make one queue of many: an mq root, and an fq on each transmit queue.
fn fq_on_every_queue(netlink: &mut Netlink, ifindex: u32) -> io::Result<String> {
    netlink.add_mq_root(ifindex, ROOT_HANDLE)?;
    let filled = netlink.classes(ifindex).map_err(io::Error::other).and_then(|classes| {
        let queues: Vec<_> = classes.iter().map(|c| c.handle).filter(|h| h.major == QDISC_MAJOR).collect();
        queues.iter().try_for_each(|queue| netlink.replace_fq_leaf(ifindex, *queue))?;
        Ok(queues.len())
    });
    match filled {
        Ok(count) => Ok(format!("mq with fq on {count} queues, ours")),
        Err(e) => {
            if let Err(error) = remove_root(netlink, ifindex, None) {
                log::error!("{error:#}");
            }
            Err(e)
        }
    }
}

impl Edt {
    /// Rates and departure times without an fq to keep them: everything of this pacer but the wire, for measurements where
    /// the kernel has no fq.
    pub fn unkept(ifindex: u32) -> Self {
        Self { ifindex, made_root: false, qdisc: "none".into(), leaving: HashMap::new() }
    }
}

impl Pacer for Edt {
    fn name(&self) -> &'static str {
        "edt"
    }

    fn qdisc(&self) -> String {
        self.qdisc.clone()
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
            remove_root(&mut netlink, self.ifindex, Some(maps))?;
        }
        Ok(())
    }
}
