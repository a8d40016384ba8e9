//! What came of a run.

use std::time::Duration;

use super::{
    network::PS_PER_NS,
    run::Simulation,
    stats::{BINS, Depth, jain},
};

/// Fair enough to say that fairness was reached.
const FAIR: f64 = 0.95;
/// Increase periods over which a joining flow's rate is taken.
pub const JOIN_WINDOW: usize = 10;
/// Share of a fair share at which a joining flow has arrived.
pub const JOIN_SHARE: f64 = 0.8;

/// One point of the curves over time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Point {
    /// Middle of the bin, nanoseconds.
    pub at_ns: u64,
    /// Mean depth of the bottleneck's queue in it, bytes.
    pub queue_mean: f64,
    /// Peak.
    pub queue_peak: u64,
    /// Jain's index over the flows.
    pub jain: f64,
    /// Bits per second that all flows together had accepted.
    pub goodput_bps: f64,
}

/// Everything measured between the warm-up and the end, except where it says otherwise.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// Accepted packets that crossed the bottleneck, as a share of what it could carry.
    pub utilisation: f64,
    /// Share of the time in which the bottleneck sent, useful or not.
    pub busy: f64,
    /// Jain's index of what the flows got.
    pub jain: f64,
    /// Depth of the bottleneck's queue.
    pub queue: Depth,
    /// CE-marked packets among those that reached the bottleneck.
    pub ce_share: f64,
    /// CNPs per flow and second.
    pub cnp_per_flow_per_s: f64,
    /// Packets dropped before the warm-up ended, and after.
    pub drops: [u64; 2],
    /// When the last packet of the whole run was dropped, nanoseconds; 0: none was.
    pub last_drop_ns: u64,
    /// Time that transmitters were paused, in sum.
    pub pause_ns: u64,
    /// Packets sent again.
    pub retransmitted: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Bits per second of each flow, accepted.
    pub rates_bps: Vec<f64>,
    /// Completion times of messages, sorted, nanoseconds.
    pub completions_ns: Vec<u64>,
    /// From when on two bins in a row, of the whole run, were fair.
    pub fair_after_ns: Option<u64>,
    /// Its own increase periods after which the joining flow had its share; `None`: nobody joined, or it never had.
    pub join_periods: Option<u64>,
    /// Over the whole run.
    pub curve: Vec<Point>,
    /// Rate of each flow in each bin, bits per second, of at most 16 flows.
    pub flow_curves: Vec<Vec<f64>>,
    /// Events handled, of the whole run.
    pub events: u64,
    /// Time it took.
    pub took: Duration,
}

/// Flows whose rates over time are kept.
const CURVES: usize = 16;

pub(super) fn outcome(sim: &Simulation<'_>, took: Duration) -> Outcome {
    let s = sim.s;
    let bits = f64::from(s.packet) * 8.0;
    let seconds = (s.time.0 - s.warmup.0) as f64 / 1e9;
    let accepted = |port: usize| -> u64 {
        let crosses = |flow: usize| sim.net.paths[flow].contains(&(port as u32));
        sim.flows.iter().enumerate().filter(|&(i, _)| crosses(i)).map(|(_, f)| f.counts.accepted).sum()
    };
    // Of the ports that are watched, the one that had most to send.
    let load = |i: &usize| sim.net.ports[*i].sent * sim.net.ports[*i].packet_ps;
    let watched = (0..sim.net.ports.len()).filter(|&i| sim.net.ports[i].stats.is_some());
    let bottleneck = watched.max_by_key(load).unwrap_or(0);
    let port = &sim.net.ports[bottleneck];
    let capacity = port.rate.bytes_per_sec() as f64 * 8.0 * seconds;
    let bin_s = sim.bin_ps as f64 / 1e12;
    let bin = |flow: usize, i: usize| f64::from(sim.accepted[flow * BINS + i]);
    let curve: Vec<Point> = port
        .stats
        .iter()
        .flat_map(|stats| stats.curve())
        .enumerate()
        .map(|(i, (queue_mean, queue_peak))| {
            let in_bin = || (0..sim.flows.len()).map(|f| bin(f, i));
            Point {
                at_ns: (i as u64 * sim.bin_ps + sim.bin_ps / 2) / PS_PER_NS,
                queue_mean,
                queue_peak,
                jain: jain(in_bin()),
                goodput_bps: in_bin().sum::<f64>() * bits / bin_s,
            }
        })
        .collect();
    let carries = |p: &Point| p.goodput_bps > 0.0 && p.jain >= FAIR;
    let fair_after_ns = curve.windows(2).find(|w| w.iter().all(carries)).map(|w| w[0].at_ns);
    let flow_curves =
        (0..sim.flows.len().min(CURVES)).map(|f| (0..BINS).map(|i| bin(f, i) * bits / bin_s).collect()).collect();
    let mut completions_ns: Vec<u64> = sim.completions.iter().map(|ps| ps / PS_PER_NS).collect();
    completions_ns.sort_unstable();
    let sum = |count: fn(&super::flow::Counts) -> u64| sim.flows.iter().map(|f| count(&f.counts)).sum::<u64>();
    Outcome {
        utilisation: accepted(bottleneck) as f64 * bits / capacity,
        busy: port.sent as f64 * bits / capacity,
        jain: jain(sim.flows.iter().map(|f| f.counts.accepted as f64)),
        queue: port.stats.as_ref().map(|s| s.depth()).unwrap_or_default(),
        ce_share: port.marked as f64 / port.arrived.max(1) as f64,
        cnp_per_flow_per_s: sum(|c| c.cnps) as f64 / f64::from(s.flows) / seconds,
        drops: sim.drops,
        last_drop_ns: sim.last_drop / PS_PER_NS,
        pause_ns: sim.transmitters.iter().map(|t| t.paused_ps).sum::<u64>() / PS_PER_NS,
        retransmitted: sum(|c| c.retransmitted),
        timeouts: sum(|c| c.timeouts),
        rates_bps: sim.flows.iter().map(|f| f.counts.accepted as f64 * bits / seconds).collect(),
        completions_ns,
        fair_after_ns,
        join_periods: joined(sim),
        curve,
        flow_curves,
        events: sim.handled,
        took,
    }
}

/// After how many of its own increase periods the joining flow had its share for [`JOIN_WINDOW`] periods.
fn joined(sim: &Simulation<'_>) -> Option<u64> {
    let s = sim.s;
    s.join?;
    let period_s = sim.params.rp.timer.0 as f64 / 1e9;
    let share = s.link.bytes_per_sec() as f64 / f64::from(s.flows) / f64::from(s.packet);
    let want = JOIN_SHARE * share * period_s * JOIN_WINDOW as f64;
    let at =
        sim.join_periods.windows(JOIN_WINDOW).position(|w| w.iter().map(|&n| f64::from(n)).sum::<f64>() >= want)?;
    Some((at + JOIN_WINDOW) as u64)
}
