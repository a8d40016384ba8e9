//! One pass of the main job: the lab, its agents, the traffic, and what came of it.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use roce_common::units::Nanos;

use super::{
    agents::Agents,
    live::{Live, Snapshot},
    options::{Agent, Options},
    report::{self, Side},
};
use crate::{
    endpoint::{Clock, Connection, Host, Message, Op, QpHandle, QpStats, Traffic, connect},
    lab::{Bottleneck, CpuTime, LEAF, Sampler, Star, mtu_for, signals},
};

/// Bytes of each WRITE.
const MESSAGE: u32 = 64 << 10;
/// How often the live table is drawn.
const REFRESH: Duration = Duration::from_millis(250);

/// The queue pair at each end of a flow.
pub(super) struct Flow {
    pub(super) sender: QpHandle,
    pub(super) receiver: QpHandle,
}

/// What the endpoints counted at the end of a pass.
pub(super) struct Outcome {
    pub(super) begin: Nanos,
    pub(super) half: Nanos,
    pub(super) end: Nanos,
    pub(super) senders: Vec<QpStats>,
    pub(super) receivers: Vec<QpStats>,
    /// The part of the CPUs' time that a hypervisor took, 0 to 1.
    pub(super) stolen: f64,
}

/// Whether the loop is closed in a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// Agents observe, or there are none.
    Without,
    /// Agents mark, notify and pace.
    With,
}

/// Runs one pass.
///
/// # Errors
/// When the lab cannot be built, an agent does not start, or a signal came.
pub(super) fn run_pass(options: &Options, pass: Pass, live: &mut Live) -> Result<Side> {
    live.note(match pass {
        Pass::Without => "building the lab (first pass: without the loop)",
        Pass::With => "building the lab (second pass: with the loop)",
    });
    let star = Star::new(
        options.senders,
        mtu_for(options.pmtu),
        Some(Bottleneck { bits_per_sec: options.link, queue: options.queue }),
    )?;
    let mut agents = match &options.agent {
        Agent::None => None,
        Agent::Program(path) => Some(Agents::start(path, &star, options, pass)?),
    };
    let sampler = Sampler::start(star.switch(), star.receiver_port.index, LEAF)?;
    let clock = Clock::start();
    let mut receiver = Host::start(&star.receiver.port, clock)?;
    let mut hosts = Vec::new();
    let mut flows = Vec::new();
    let (begin, cpu) = (clock.now(), CpuTime::begin()?);
    for (i, port) in star.senders.iter().enumerate() {
        let mut host = Host::start(&port.port, clock)?;
        for q in 0..options.qps {
            let (sender, at_receiver) =
                connect((&mut host, port), (&mut receiver, &star.receiver), &connection(options, i as u32, q))?;
            flows.push(Flow { sender, receiver: at_receiver });
        }
        hosts.push(host);
    }
    let end = Nanos(begin.0 + options.time.as_nanos() as u64);
    let half = Nanos(begin.0 + options.time.as_nanos() as u64 / 2);
    watch(options, pass, live, &flows, &sampler, agents.as_mut(), clock, begin, end)?;

    let outcome = Outcome {
        begin,
        half,
        end: clock.now(),
        senders: flows.iter().map(|f| f.sender.stats()).collect(),
        receivers: flows.iter().map(|f| f.receiver.stats()).collect(),
        stolen: cpu.stolen()?,
    };
    let half_at = clock.instant(half);
    let end_at = Instant::now();
    let queue = (sampler.summary(clock.instant(begin), end_at), sampler.summary(half_at, end_at));
    for f in &flows {
        f.sender.kill();
    }
    let mut host_stats: Vec<_> = hosts.iter().map(Host::stats).collect();
    host_stats.push(receiver.stats());
    drop(hosts);
    drop(receiver);
    let agents = agents.map(Agents::finish).transpose()?;
    Ok(report::side(options, &flows, &outcome, &host_stats, queue, agents.as_ref()))
}

/// Flow `q` of sender `i`: QPNs that differ at the two ends and from flow to flow, and PSNs that start anywhere.
fn connection(options: &Options, i: u32, q: u32) -> Connection {
    let n = i * options.qps + q;
    Connection {
        qpn_a: 0x11 + q,
        qpn_b: 0x100 + n,
        psn_a: (n + 1).wrapping_mul(0x9e_3779),
        psn_b: (n + 1).wrapping_mul(0x5b_d1e9),
        ipv6: options.ipv6,
        pmtu: options.pmtu,
        timeout: options.timeout,
        traffic_a: Traffic::endless(Message::new(Op::Write, MESSAGE)),
        ..Connection::default()
    }
}

#[expect(clippy::too_many_arguments, reason = "one caller; a structure would only rename them")]
fn watch(
    options: &Options,
    pass: Pass,
    live: &mut Live,
    flows: &[Flow],
    sampler: &Sampler,
    mut agents: Option<&mut Agents>,
    clock: Clock,
    begin: Nanos,
    end: Nanos,
) -> Result<()> {
    let mut before: Vec<u64> = vec![0; flows.len()];
    let mut last = begin;
    while clock.now() < end {
        if signals::interrupted() {
            bail!("interrupted");
        }
        let left = Duration::from_nanos(end.since(clock.now()).0);
        thread::sleep(left.min(REFRESH));
        let now = clock.now();
        if let Some(agents) = agents.as_deref_mut() {
            agents.check()?;
        }
        let accepted: Vec<u64> = flows.iter().map(|f| f.receiver.stats().accepted_bytes).collect();
        let seconds = now.since(last).0 as f64 / 1e9;
        let rates = accepted.iter().zip(&before).map(|(a, b)| (a - b) as f64 * 8.0 / seconds).collect();
        let queue = sampler.latest();
        live.draw(&Snapshot {
            pass,
            elapsed: Duration::from_nanos(now.since(begin).0),
            total: options.time,
            rates,
            queue_packets: queue.packets,
            queue_limit: options.queue,
            drops: queue.drops,
            retransmitted: flows.iter().map(|f| f.sender.stats().retransmitted).sum(),
            loop_counts: agents.as_deref().map(Agents::live_counts),
        });
        before = accepted;
        last = now;
    }
    Ok(())
}
