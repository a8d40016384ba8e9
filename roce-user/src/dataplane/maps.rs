//! Typed handles of the maps, from a loaded object or from pins.

use std::{fmt::Debug, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use aya::{
    Ebpf, Pod,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, Queue},
};
use roce_common::{
    abi::{
        CnpCount, Config, Counter, Counters, CpClass, CpStats, Direction, FlowKey, PaceCell, PairKey, PairValue,
        PeerQp, RateValue, Space, VirtualQueue,
    },
    facts::RoundTrips,
    flow::Flow,
    units::{Addr, Nanos},
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{monotonic, pins::Pins};

/// A type of the ABI as a map key or value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct Abi<T>(pub T);

// SAFETY: every bit pattern is a value (`FromBytes`), there is no padding (`IntoBytes`) and no interior mutability.
unsafe impl<T: FromBytes + IntoBytes + Immutable + Copy + 'static> Pod for Abi<T> {}

/// Longest time for which the egress program drops what leaves.
const SWAP: Nanos = Nanos::from_millis(1_000);
/// Longer than a packet takes from the egress program to the qdisc.
const SETTLED: Duration = Duration::from_millis(1);

/// `BPF_EXIST` of linux/bpf.h: update what is there, and nothing else.
const BPF_EXIST: u64 = 2;
/// `BPF_NOEXIST`: add what is not there.
const BPF_NOEXIST: u64 = 1;

type Hash<K, V> = HashMap<MapData, Abi<K>, Abi<V>>;

/// Every map that user space reads or writes, ring buffers excepted.
pub struct Maps {
    config: Array<MapData, Abi<Config>>,
    heartbeat: Array<MapData, u64>,
    counters: PerCpuArray<MapData, Abi<Counters>>,
    local: Hash<Addr, u32>,
    flows: Hash<FlowKey, Flow>,
    round_trips: Hash<FlowKey, RoundTrips>,
    cnps: Hash<FlowKey, CnpCount>,
    pairs: Hash<PairKey, PairValue>,
    path_mtus: Hash<PairKey, u32>,
    rates: Hash<PeerQp, RateValue>,
    pace: Hash<PeerQp, PaceCell>,
    start_classes: Queue<MapData, u32>,
    vqueue: Array<MapData, Abi<VirtualQueue>>,
    cp_classes: Array<MapData, Abi<CpClass>>,
    cp_dscp: Array<MapData, u32>,
    cp_stats: PerCpuArray<MapData, Abi<CpStats>>,
}

impl Maps {
    /// Takes them out of a loaded object.
    ///
    /// # Errors
    /// When the object lacks a map.
    pub fn take(ebpf: &mut Ebpf) -> Result<Self> {
        Self::build(|name| ebpf.take_map(name).ok_or_else(|| anyhow!("the BPF object has no map {name}")))
    }

    /// Opens the pinned ones.
    ///
    /// # Errors
    /// When a pin is missing or may not be read.
    pub fn open(pins: &Pins) -> Result<Self> {
        Self::build(|name| pinned(pins, name))
    }

    fn build(mut map: impl FnMut(&str) -> Result<Map>) -> Result<Self> {
        Ok(Self {
            config: typed("CONFIG", map("CONFIG")?)?,
            heartbeat: typed("HEARTBEAT", map("HEARTBEAT")?)?,
            counters: typed("COUNTERS", map("COUNTERS")?)?,
            local: typed("LOCAL", map("LOCAL")?)?,
            flows: typed("FLOWS", map("FLOWS")?)?,
            round_trips: typed("ROUND_TRIPS", map("ROUND_TRIPS")?)?,
            cnps: typed("CNPS", map("CNPS")?)?,
            pairs: typed("PAIRS", map("PAIRS")?)?,
            path_mtus: typed("PATH_MTUS", map("PATH_MTUS")?)?,
            rates: typed("RATES", map("RATES")?)?,
            pace: typed("PACE", map("PACE")?)?,
            start_classes: typed("START_CLASSES", map("START_CLASSES")?)?,
            vqueue: typed("VQUEUE", map("VQUEUE")?)?,
            cp_classes: typed("CP_CLASSES", map("CP_CLASSES")?)?,
            cp_dscp: typed("CP_DSCP", map("CP_DSCP")?)?,
            cp_stats: typed("CP_STATS", map("CP_STATS")?)?,
        })
    }

    /// The configuration in force.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn config(&self) -> Result<Config> {
        Ok(self.config.get(&0, 0).context("cannot read the configuration map")?.0)
    }

    /// Puts a configuration in force.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn set_config(&mut self, config: Config) -> Result<()> {
        self.config.set(0, Abi(config), 0).context("cannot write the configuration map")
    }

    /// Does something that replaces the root qdisc while the egress program drops what this host's queue pairs send, at most for a
    /// second: what they send again later is less harm than a packet that the kernel refuses meanwhile, which ends them.
    ///
    /// # Errors
    /// When the configuration cannot be written, or what `change` says.
    pub fn while_dropping<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let mut config = self.config()?;
        config.swap_until_ns = monotonic().0.saturating_add(SWAP.0);
        self.set_config(config)?;
        // What passed the program before that is in the old qdisc by then.
        thread::sleep(SETTLED);
        let done = change(self);
        let mut config = self.config()?;
        config.swap_until_ns = 0;
        self.set_config(config)?;
        done
    }

    /// Tells the programs that the controller is alive at `now_ns`; 0 releases all pacing at once.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn beat(&mut self, now_ns: u64) -> Result<()> {
        self.heartbeat.set(0, now_ns, 0).context("cannot write the heartbeat map")
    }

    /// When the controller last said that it is alive, CLOCK_MONOTONIC.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn heartbeat(&self) -> Result<u64> {
        self.heartbeat.get(&0, 0).context("cannot read the heartbeat map")
    }

    /// The counters of one direction, summed over CPUs.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn counters(&self, direction: Direction) -> Result<Counters> {
        let mut sum = [0u64; Counter::COUNT];
        for cpu in self.counters.get(&(direction as u32), 0).context("cannot read the counters")?.iter() {
            for (total, n) in sum.iter_mut().zip(cpu.0) {
                *total = total.wrapping_add(n);
            }
        }
        Ok(sum)
    }

    /// Makes `addresses` the set of local addresses.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn set_local(&mut self, addresses: &[Addr]) -> Result<()> {
        let old = self.locals();
        for address in addresses {
            if !old.contains(address) {
                self.local.insert(Abi(*address), Abi(1), 0).context("cannot add a local address")?;
            }
        }
        for address in old {
            if !addresses.contains(&address) {
                ignore_missing(self.local.remove(&Abi(address))).context("cannot remove a local address")?;
            }
        }
        Ok(())
    }

    /// The local addresses.
    pub fn locals(&self) -> Vec<Addr> {
        self.local.keys().flatten().map(|k| k.0).collect()
    }

    /// Every flow. A flow that appears or goes while the map is walked may be missing.
    pub fn flows(&self) -> Vec<(FlowKey, Flow)> {
        all_flows(&self.flows)
    }

    /// Forgets a flow.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn remove_flow(&mut self, key: &FlowKey) -> Result<()> {
        forget(&mut self.flows, &mut self.round_trips, key)
    }

    /// Round trips of the requests that the flow `key` answers, where any were measured.
    pub fn round_trips(&self, key: &FlowKey) -> Option<RoundTrips> {
        self.round_trips.get(&Abi(*key), 0).ok().map(|v| v.0)
    }

    /// CNPs by tap, source, destination and the queue pair they name.
    pub fn cnps(&self) -> Vec<(FlowKey, CnpCount)> {
        self.cnps.iter().flatten().map(|(k, v)| (k.0, v.0)).collect()
    }

    /// Tells who sends the packets of `key`. A pair that exists keeps its CNP time and counter.
    ///
    /// # Errors
    /// When the map is full or cannot be written.
    pub fn add_pair(&mut self, key: PairKey, sender_qpn: u32) -> Result<()> {
        let kept = self.pairs.get(&Abi(key), 0).map(|v| v.0).unwrap_or_default();
        if kept.sender_qpn == sender_qpn {
            return Ok(());
        }
        self.pairs
            .insert(Abi(key), Abi(PairValue { sender_qpn, ..PairValue::default() }), 0)
            .context("cannot add a pair")
    }

    /// What is known of the packets of `key`.
    pub fn pair(&self, key: PairKey) -> Option<PairValue> {
        self.pairs.get(&Abi(key), 0).ok().map(|v| v.0)
    }

    /// Forgets a pair.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn remove_pair(&mut self, key: PairKey) -> Result<()> {
        ignore_missing(self.pairs.remove(&Abi(key))).context("cannot remove a pair")
    }

    /// Every pair.
    pub fn pairs(&self) -> Vec<(PairKey, PairValue)> {
        self.pairs.iter().flatten().map(|(k, v)| (k.0, v.0)).collect()
    }

    /// Tells with what path MTU, in bytes, the connection of the packets of `key` was made; `None`: that is no longer known.
    ///
    /// # Errors
    /// When the map is full or cannot be written.
    pub fn set_path_mtu(&mut self, key: PairKey, bytes: Option<u32>) -> Result<()> {
        match bytes {
            Some(bytes) => self.path_mtus.insert(Abi(key), Abi(bytes), 0).context("cannot add a path MTU"),
            None => ignore_missing(self.path_mtus.remove(&Abi(key))).context("cannot remove a path MTU"),
        }
    }

    /// The path MTU that the connection of the packets of `key` was made with.
    pub fn path_mtu(&self, key: PairKey) -> Option<u32> {
        self.path_mtus.get(&Abi(key), 0).ok().map(|v| v.0)
    }

    /// Limits the packets of `key`; the limiter's cell is made first.
    ///
    /// # Errors
    /// When a map is full or cannot be written.
    pub fn set_rate(&mut self, key: PeerQp, rate: RateValue) -> Result<()> {
        // Nearly always the limiter exists: one system call on the way from a CNP to its rate.
        if self.rates.insert(Abi(key), Abi(rate), BPF_EXIST).is_ok() {
            return Ok(());
        }
        match self.pace.insert(Abi(key), Abi(PaceCell::default()), BPF_NOEXIST) {
            Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::AlreadyExists => {}
            done => done.context("cannot add a limiter")?,
        }
        self.rates.insert(Abi(key), Abi(rate), 0).context("cannot set a rate")
    }

    /// Removes the limit of `key`.
    ///
    /// # Errors
    /// When a map cannot be written.
    pub fn clear_rate(&mut self, key: PeerQp) -> Result<()> {
        ignore_missing(self.rates.remove(&Abi(key))).context("cannot remove a rate")?;
        ignore_missing(self.pace.remove(&Abi(key))).context("cannot remove a limiter")
    }

    /// Sets the classes of a congestion point, numbered from 1, and the class of each DSCP.
    ///
    /// # Errors
    /// When a map cannot be written; more classes than there is room for.
    pub fn set_cp_classes(&mut self, classes: &[CpClass], of_dscp: &[u32; 64]) -> Result<()> {
        for (number, class) in (1..).zip(classes) {
            self.cp_classes.set(number, Abi(*class), 0).context("cannot write a class of the congestion point")?;
        }
        for (dscp, class) in (0..).zip(of_dscp) {
            self.cp_dscp.set(dscp, *class, 0).context("cannot write the class of a DSCP")?;
        }
        Ok(())
    }

    /// The class of each DSCP.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn cp_dscp(&self) -> Result<Vec<u32>> {
        (0..64).map(|dscp| self.cp_dscp.get(&dscp, 0).context("cannot read the class of a DSCP")).collect()
    }

    /// A class of the congestion point, where it has one of that number.
    pub fn cp_class(&self, number: u32) -> Option<CpClass> {
        self.cp_classes.get(&number, 0).ok().map(|c| c.0).filter(|c| *c != CpClass::default())
    }

    /// When virtual queue `number` will be empty, CLOCK_MONOTONIC.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn virtual_queue(&self, number: u32) -> Result<VirtualQueue> {
        Ok(self.vqueue.get(&number, 0).context("cannot read a virtual queue")?.0)
    }

    /// What class `number` saw, over all CPUs; the peak is that of the newest second any of them had a packet in.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn cp_stats(&self, number: u32) -> Result<CpStats> {
        let mut sum = CpStats::default();
        for Abi(cpu) in self.cp_stats.get(&number, 0).context("cannot read the congestion point's statistics")?.iter() {
            sum.packets = sum.packets.wrapping_add(cpu.packets);
            sum.bytes = sum.bytes.wrapping_add(cpu.bytes);
            sum.marked = sum.marked.wrapping_add(cpu.marked);
            sum.depth_sum = sum.depth_sum.wrapping_add(cpu.depth_sum);
            if cpu.second > sum.second {
                (sum.second, sum.peak_bytes) = (cpu.second, 0);
            }
            if cpu.second == sum.second {
                sum.peak_bytes = sum.peak_bytes.max(cpu.peak_bytes);
            }
        }
        Ok(sum)
    }

    /// Offers an HTB class at the start rate to the egress program.
    ///
    /// # Errors
    /// When the queue is full.
    pub fn offer_start_class(&mut self, classid: u32) -> Result<()> {
        self.start_classes.push(classid, 0).context("cannot offer an HTB class")
    }

    /// The rate `key` is limited to.
    pub fn rate(&self, key: PeerQp) -> Option<RateValue> {
        self.rates.get(&Abi(key), 0).ok().map(|v| v.0)
    }

    /// Every rate.
    pub fn rates(&self) -> Vec<(PeerQp, RateValue)> {
        self.rates.iter().flatten().map(|(k, v)| (k.0, v.0)).collect()
    }

    /// What the limiter of `key` has counted.
    pub fn pace(&self, key: PeerQp) -> Option<PaceCell> {
        self.pace.get(&Abi(key), 0).ok().map(|v| v.0)
    }
}

/// The flow maps alone, for a thread of its own: a full table takes the better part of a second to walk, and a controller
/// that walked it would meanwhile serve no CNP.
pub struct FlowWalker {
    flows: Hash<FlowKey, Flow>,
    round_trips: Hash<FlowKey, RoundTrips>,
    cnps: Hash<FlowKey, CnpCount>,
}

impl FlowWalker {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// When a pin is missing or may not be read.
    pub fn open(pins: &Pins) -> Result<Self> {
        Ok(Self {
            flows: typed("FLOWS", pinned(pins, "FLOWS")?)?,
            round_trips: typed("ROUND_TRIPS", pinned(pins, "ROUND_TRIPS")?)?,
            cnps: typed("CNPS", pinned(pins, "CNPS")?)?,
        })
    }

    /// Every flow that `is_live`, the `busiest` busiest first; the others are forgotten, and so are CNPs that are not `recent`.
    ///
    /// # Errors
    /// When the map cannot be written.
    pub fn walk(
        &mut self,
        is_live: impl Fn(&Flow) -> bool,
        is_recent: impl Fn(Nanos) -> bool,
        busiest: usize,
    ) -> Result<Vec<(FlowKey, Flow)>> {
        let (mut live, idle): (Vec<_>, Vec<_>) =
            all_flows(&self.flows).into_iter().partition(|(_, flow)| is_live(flow));
        for (key, _) in idle {
            forget(&mut self.flows, &mut self.round_trips, &key)?;
        }
        let named: Vec<_> = self.cnps.iter().flatten().map(|(key, count)| (key.0, count.0)).collect();
        for (key, _) in named.into_iter().filter(|(_, count)| !is_recent(Nanos(count.last_seen_ns))) {
            ignore_missing(self.cnps.remove(&Abi(key))).context("cannot remove a count of CNPs")?;
        }
        if live.len() > busiest {
            live.select_nth_unstable_by_key(busiest, |(key, flow)| (std::cmp::Reverse(flow.packets), *key));
        }
        Ok(live)
    }
}

fn forget(flows: &mut Hash<FlowKey, Flow>, times: &mut Hash<FlowKey, RoundTrips>, key: &FlowKey) -> Result<()> {
    ignore_missing(flows.remove(&Abi(*key))).context("cannot remove a flow")?;
    if key.space() == Space::Response {
        ignore_missing(times.remove(&Abi(*key))).context("cannot remove the round trips of a flow")?;
    }
    Ok(())
}

fn all_flows(map: &Hash<FlowKey, Flow>) -> Vec<(FlowKey, Flow)> {
    let settled = |(key, flow): (Abi<FlowKey>, Abi<Flow>)| {
        let (key, mut flow) = (key.0, flow.0);
        flow.settle();
        (key, flow)
    };
    map.iter().flatten().map(settled).collect()
}

fn pinned(pins: &Pins, name: &str) -> Result<Map> {
    let path = pins.path(name);
    let data = MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))?;
    Map::from_map_data(data).with_context(|| format!("{} is not a map of ours", path.display()))
}

fn typed<T: TryFrom<Map>>(name: &str, map: Map) -> Result<T>
where
    T::Error: Debug,
{
    T::try_from(map).map_err(|e| anyhow!("map {name} is not what this program expects: {e:?}"))
}

fn ignore_missing(result: std::result::Result<(), MapError>) -> std::result::Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
