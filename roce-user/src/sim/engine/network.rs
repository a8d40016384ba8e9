//! Hosts, ports and paths: what a workload is made of.

use std::collections::VecDeque;

use roce_common::units::Rate;

use super::{
    events::Packet,
    scenario::{Scenario, Workload},
    stats::QueueStats,
};

/// Picoseconds: at 100 Gb/s a packet takes 80 ns, and rounding that to whole nanoseconds would cost a per cent.
pub(super) const PS_PER_NS: u64 = 1_000;
const PS_PER_SECOND: u64 = 1_000_000_000_000;

/// The time `bytes` take at `rate`, in picoseconds.
#[inline]
pub(super) const fn ps_for(rate: u64, bytes: u32) -> u64 {
    if rate == 0 {
        return PS_PER_SECOND;
    }
    // 16384 bytes · 10^12 stays below 2^54.
    (bytes as u64 * PS_PER_SECOND).div_ceil(rate)
}

/// A sending host's port.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) flows: Vec<u32>,
    /// Whose turn it is.
    pub(super) turn: usize,
    pub(super) busy_until: u64,
    /// When the event that counts will come; others are stale.
    pub(super) wake_at: u64,
    pub(super) packet_ps: u64,
}

/// A switch's port.
#[derive(Debug)]
pub(super) struct Port {
    /// What waits, and its bytes.
    pub(super) queue: VecDeque<Packet>,
    pub(super) bytes: u64,
    /// What is being sent; it waits no more.
    pub(super) sending: Option<Packet>,
    pub(super) packet_ps: u64,
    pub(super) rate: Rate,
    /// The virtual queue's cell.
    pub(super) empty_at_ns: u64,
    pub(super) arrived: u64,
    pub(super) marked: u64,
    pub(super) sent: u64,
    /// Of the ports that are watched.
    pub(super) stats: Option<Box<QueueStats>>,
}

/// What pauses: hosts first, then ports, by number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transmitter {
    /// Its bytes in the switch at the other end.
    pub(super) held: u64,
    /// It has been told to pause.
    pub(super) told: bool,
    pub(super) paused: bool,
    pub(super) paused_since: u64,
    pub(super) paused_ps: u64,
}

/// The network of a scenario.
pub(super) struct Network {
    pub(super) hosts: Vec<Host>,
    pub(super) ports: Vec<Port>,
    /// The ports that each flow crosses.
    pub(super) paths: Vec<Vec<u32>>,
    /// Propagation delay of every link.
    pub(super) link_ps: u64,
}

impl Network {
    pub(super) fn new(s: &Scenario) -> Self {
        let flows = s.flows as usize;
        let port = |rate: Rate, watched: bool| Port {
            queue: VecDeque::new(),
            bytes: 0,
            sending: None,
            packet_ps: ps_for(rate.bytes_per_sec(), s.packet),
            rate,
            empty_at_ns: 0,
            arrived: 0,
            marked: 0,
            sent: 0,
            stats: watched.then(|| Box::new(QueueStats::new(s))),
        };
        let (ports, paths): (Vec<Port>, Vec<Vec<u32>>) = match s.workload {
            Workload::Incast | Workload::Rpc => (vec![port(s.link, true)], vec![vec![0]; flows]),
            Workload::ParkingLot => {
                // As many ports as a path may have; what is left of the flows shares them in turn.
                let hops = (flows - 1).min(MAX_HOPS);
                let mut paths = vec![(0..hops as u32).collect()];
                paths.extend((1..flows).map(|i| vec![((i - 1) % hops) as u32]));
                ((0..hops).map(|_| port(s.link, true)).collect(), paths)
            }
            Workload::Ring => {
                let half = (s.flows / 2).max(1);
                let trunk = Rate::from_bytes_per_sec((s.link.bytes_per_sec() * u64::from(half) / 2).max(1));
                let mut ports = vec![port(trunk, true), port(trunk, true)];
                ports.extend((0..flows).map(|_| port(s.link, false)));
                let path = |i: u32| {
                    let next = (i + 1) % s.flows;
                    let last = next + 2;
                    // With an odd number of hosts the last and the first stand on the same switch.
                    if i % 2 == next % 2 { vec![last] } else { vec![i % 2, last] }
                };
                (ports, (0..s.flows).map(path).collect())
            }
        };
        let mut hosts: Vec<Host> = (0..s.hosts)
            .map(|_| Host {
                flows: Vec::new(),
                turn: 0,
                busy_until: 0,
                wake_at: u64::MAX,
                packet_ps: ps_for(s.host_link.bytes_per_sec(), s.packet),
            })
            .collect();
        for flow in 0..s.flows {
            hosts[(flow % s.hosts) as usize].flows.push(flow);
        }
        Self { hosts, ports, paths, link_ps: s.delay.0 * PS_PER_NS / 4 }
    }
}

/// Most ports on a path.
const MAX_HOPS: usize = 32;
