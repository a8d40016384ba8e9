//! The main job on real soft-RoCE: four hosts send to one, whose port of the switch is slow and has a short queue. Once as the
//! kernel does it, once with the loop; each in a guest of its own, for what the first leaves behind may hang a kernel.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use roce_common::{abi::Direction, units::Addr};
use roce_user::{export, sim::engine::jain};

use super::{BUSY, MESSAGE, MESSAGE_ON_WIRE, PATH_MTU};
use crate::{
    lab::{Bottleneck, CpuByProgram, CpuTime, LEAF, Sampler, Watch, shape},
    rig,
    run::AgentProcess,
    vm::{
        Case, Counters, Fabric, Part, Passed, Perf, Placement, Report, Running, Scenario, Served, Wire, load, share,
        skip,
    },
};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "loop",
    about: "incast of four hosts into a slow port with a short queue, without and with us, and with 16 queue pairs",
    parts: &[
        Part::new("without", 300, without).memory(1_024).share(10),
        Part::new("with", 400, |report| with(report, &FOUR)).memory(1_024).share(75),
        Part::new("sixteen", 400, |report| with(report, &SIXTEEN)).memory(1_024),
    ],
};

/// The receiver, and how many send.
const RECEIVER: usize = 0;
const SENDERS: usize = 4;
/// The slow port: at twice this rate an emulated CPU that carries six agents and eight perftests, too, is never idle.
const PORT: Bottleneck = Bottleneck { bits_per_sec: 4_000_000, queue: 64 };
const RATE: &str = "4m";
/// How late an emulated CPU that runs all this answers.
const FEEDBACK: &str = "10ms";
/// What the senders do.
struct Incast {
    /// Queue pairs of each sender.
    qps: u64,
    /// Messages that each sender sends, over all its queue pairs.
    messages: u64,
    /// From the first packet on, this long the flows find their rates.
    start_up: Duration,
}

const FOUR: Incast = Incast { qps: 1, messages: 48, start_up: Duration::from_secs(12) };
const SIXTEEN: Incast = Incast { qps: 4, messages: 72, start_up: Duration::from_secs(25) };
/// Nothing may be dropped later than this after the first packet.
const MAY_DROP: Duration = Duration::from_millis(200);
/// A port that lets out less than this of its rate while packets wait for it is not the port that a fabric has.
const PORT_KEEPS: f64 = 0.9;
/// ACK timeout 4.096 µs × 2^21, 8.6 s: a sixteenth of the port takes 2.3 s for what rxe hands over at once.
const TIMEOUT: u8 = 21;
/// An agent forgets a flow that was silent for a minute: of a transfer that takes longer, a queue pair that was done early may be missing.
const REMEMBERED: Duration = Duration::from_secs(90);
/// The step of the rates that perftest reports, bits per second.
const PERFTEST_STEP: f64 = 0.01 * 8.0 * 1_048_576.0;
/// A transfer gets twice what its share of the port would take, or more.
const PATIENCE: Duration = Duration::from_secs(120);
/// Without the loop, where none ends, twice what [`FOUR`] take: 27 s each.
const PATIENCE_ALONE: Duration = Duration::from_secs(55);

/// Payload bits per second that the port can carry.
fn capacity() -> f64 {
    PORT.bits_per_sec as f64 * MESSAGE as f64 / MESSAGE_ON_WIRE as f64
}

fn fabric() -> Result<Fabric> {
    load(&["sch_htb"])?;
    let fabric = Fabric::new(1 + SENDERS as u8, 1_500, Placement::Initial)?;
    shape(&fabric.nodes[RECEIVER].switch_port, PORT)?;
    Ok(fabric)
}

fn start(fabric: &Fabric, incast: &Incast, patience: Duration) -> Result<Vec<Running>> {
    // It sleeps for its completions (-e), which WRITE cannot: an emulated CPU has more to do than to poll.
    let args = format!("-e -s {MESSAGE} -q {} -n {}", incast.qps, incast.messages / incast.qps);
    let perf = Perf::new("ib_send_bw").args(&args).timeout(TIMEOUT).limit(patience);
    let servers = (1..=SENDERS).map(|sender| perf.serve(fabric, sender, RECEIVER)).collect::<Result<Vec<_>>>()?;
    servers.into_iter().map(Served::connect).collect()
}

/// Every 20 ms: asked every millisecond an emulated CPU does little else.
fn sampler(fabric: &Fabric) -> Result<Sampler> {
    let port = &fabric.nodes[RECEIVER].switch_port;
    Sampler::every(Duration::from_millis(20), &port.ns, port.index, LEAF)
}

/// What all devices together count of trouble.
fn trouble(fabric: &Fabric) -> Result<Vec<String>> {
    let all = Counters::all(fabric)?;
    let named = fabric.nodes.iter().zip(&all);
    Ok(named.flat_map(|(n, rxe)| rxe.trouble().into_iter().map(|t| format!("{}: {t}", n.device))).collect())
}

/// As the kernel does it: nothing is asked of it, what happens is told.
fn without(report: &mut Report) -> Result<()> {
    let fabric = fabric()?;
    report.case("four into one, the kernel alone", |case| {
        let (sampler, wire) = (sampler(&fabric)?, Wire::headers(&fabric.nodes[RECEIVER])?);
        let begin = Instant::now();
        let transfers = start(&fabric, &FOUR, PATIENCE_ALONE)?;
        let done: Vec<_> = transfers.into_iter().filter_map(|t| t.wait().ok()).collect();
        let end = Instant::now();
        let arrived = arrived(&fabric, &wire.finish()?);
        let queue = sampler.summary(begin, end);
        case.figure("transfers_done", format!("{} of {SENDERS}", done.len()));
        case.figure("seconds", end.duration_since(begin).as_secs());
        case.figure("drops", queue.drops);
        case.figure("rxe", trouble(&fabric)?);
        let payload: u64 = arrived.values().flatten().map(|(_, bytes)| bytes).sum();
        let goodput = payload as f64 * 8.0 / end.duration_since(begin).as_secs_f64() / capacity();
        case.percent("goodput_percent", goodput);
        ensure!(queue.samples > 0, "the queue was never looked at");
        Ok(())
    });
    Ok(())
}

/// The agents of the loop: one on every host, one at the slow port.
struct Agents {
    hosts: Vec<AgentProcess>,
    port: AgentProcess,
}

impl Agents {
    fn start(fabric: &Fabric) -> Result<Self> {
        let host = ["--link-rate", RATE, "--pacer", "htb", "--ingress", "tc", "--feedback-delay", FEEDBACK];
        // One after the other: the verifier takes its time on an emulated CPU.
        let hosts = (0..=SENDERS).map(|n| fabric.agent(n, &host)).collect::<Result<_>>()?;
        let cp = ["--link-rate", RATE, "--pacer", "off", "--ingress", "tc"];
        let port = fabric.congestion_point(RECEIVER, &cp)?;
        Ok(Self { hosts, port })
    }
}

/// With the loop.
fn with(report: &mut Report, incast: &Incast) -> Result<()> {
    let fabric = fabric()?;
    let begin = Instant::now();
    let agents = Agents::start(&fabric)?;
    report.figure("attach_seconds", begin.elapsed().as_secs());
    let mut seen = None;
    let name = format!("{} queue pairs of four hosts into one, with the loop", SENDERS as u64 * incast.qps);
    report.case(name, |case| run(case, &fabric, incast).map(|outcome| seen = Some(outcome)));
    report.case(format!("drops after the first {MAY_DROP:?}"), |case| {
        let outcome = seen.as_ref().context("the transfers were not seen through")?;
        let drops = outcome.drops_after(MAY_DROP);
        case.figure("drops_later", drops);
        outcome.asks_of_port(case, drops == 0, format!("{drops} drops later than {MAY_DROP:?}"))
    });
    report.case("goodput of the port", |case| {
        let outcome = seen.as_ref().context("the transfers were not seen through")?;
        case.percent("goodput_percent", outcome.goodput);
        let said = format!("goodput is {:.1} % of the port", outcome.goodput * 100.0);
        outcome.asks_of_port(case, outcome.goodput >= 0.9, said)
    });
    let Agents { hosts, port } = agents;
    report.case("what the agents counted", |case| {
        let hosts = hosts.into_iter().map(rig::finish).collect::<Result<Vec<_>>>()?;
        let port = rig::finish(port)?;
        let sum = |hook, name| hosts.iter().map(|h| rig::counter(h, hook, name)).sum::<u64>();
        let marked = rig::counter(&port, "egress", "ce_marked");
        let cnps = sum("egress", "np_cnp_sent");
        let handled: u64 = hosts.iter().map(|h| rig::control(h, "rp_handled")).sum();
        case.figure("ce_marked", marked);
        case.figure("cnp_sent", cnps);
        case.figure("pacing_failsafe", sum("egress", "pacing_failsafe"));
        case.figure("cnp_handled", handled);
        case.expect(marked > 0 && cnps > 0, "the loop never closed");
        case.equal("CNPs sent and handled", handled, cnps);
        // User space pairs a queue pair at its first packet; CE until then has nobody to tell.
        let early = sum("ingress", "np_unpaired");
        case.figure("ce_before_the_pairing", early);
        let outcome = seen.as_ref().context("the transfers were not seen through")?;
        outcome.asks(case, early * 20 < marked, format!("{early} of {marked} CE had no sender"))?;
        let slowest = hosts.iter().filter_map(|h| h["control"]["reaction_ns"]["p99"].as_u64()).max();
        case.figure("reaction_p99_us", slowest.map(|ns| ns / 1_000));
        for name in ["cnp_unpaired", "np_failed", "cnp_bad_icrc"] {
            case.equal(name, sum("ingress", name), 0);
        }
        Ok(())
    });
    Ok(())
}

/// Packets that arrived: when, and how much new payload.
type Arrivals = Vec<(Duration, u64)>;

/// What the slow port let out, by sender and queue pair at the receiver.
fn arrived(fabric: &Fabric, wire: &Passed) -> BTreeMap<(usize, u32), Arrivals> {
    let mut known = HashSet::new();
    let mut of: BTreeMap<_, Arrivals> = BTreeMap::new();
    let sources: Vec<Addr> = (1..=SENDERS).map(|sender| fabric.nodes[sender].address(false).into()).collect();
    for seen in wire.received().filter(|seen| seen.packet.payload_len > 0) {
        let packet = &seen.packet;
        let Some(sender) = sources.iter().position(|source| *source == packet.src) else { continue };
        let flow = (sender + 1, packet.bth.dest_qp.get());
        if known.insert((flow, packet.bth.psn.get())) {
            of.entry(flow).or_default().push((seen.at, u64::from(packet.payload_len)));
        }
    }
    of
}

/// What became of the transfers.
struct Outcome {
    /// The part of the port that was used after the start-up.
    goodput: f64,
    sampler: Sampler,
    /// When the first packet arrived, and when the last transfer was over.
    time: Range<Instant>,
    /// The part of the time in which the guest's CPU was busy.
    busy: f64,
    /// What the port let out around its drops, as [`port_kept`] tells.
    port_kept: Option<f64>,
}

impl Outcome {
    fn drops_after(&self, since_first: Duration) -> u32 {
        self.sampler.summary(self.time.start + since_first, self.time.end).drops
    }

    /// Asks it of the port, which must be one: its qdisc, the bridge and the hosts are one emulated CPU.
    fn asks_of_port(&self, case: &mut Case, holds: bool, said: String) -> Result<()> {
        if let Some(kept) = self.port_kept.filter(|kept| !holds && *kept < PORT_KEEPS) {
            let kept = kept * 100.0;
            return Err(skip(format!(
                "{said}, but around drops the port itself let out {kept:.0} % of its rate while packets waited for it"
            )));
        }
        self.asks(case, holds, said)
    }

    /// Asks for what a fabric must have, and only a machine that had the CPU for it can show.
    fn asks(&self, case: &mut Case, holds: bool, said: String) -> Result<()> {
        if !holds && self.busy > BUSY {
            return Err(skip(format!(
                "{said}, but the guest's CPU was busy for {:.1} % of the time",
                self.busy * 100.0
            )));
        }
        case.expect(holds, said);
        Ok(())
    }
}

/// The seconds in which the port dropped, with how many: `[3, 49]`.
fn drops_by_second(sampler: &Sampler, time: Range<Instant>) -> Vec<[u64; 2]> {
    let seconds = time.end.saturating_duration_since(time.start).as_secs();
    let begin = |second| time.start + Duration::from_secs(second);
    let by_second = (0..=seconds).map(|s| [s, sampler.summary(begin(s), begin(s + 1)).drops.into()]);
    by_second.filter(|[_, drops]| *drops > 0).collect()
}

/// The part of its rate that the port let out in these times, each from its key to its value, in which packets waited for it; none where
/// that is less than a tenth of a second. Frames come with their time and length.
fn port_kept(waiting: &BTreeMap<Instant, Instant>, frames: impl Iterator<Item = (Instant, u64)>) -> Option<f64> {
    let time: Duration = waiting.iter().map(|(begin, end)| *end - *begin).sum();
    let waited = |at: &Instant| waiting.range(..=at).next_back().is_some_and(|(_, end)| at < end);
    let bytes: u64 = frames.filter(|(at, _)| waited(at)).map(|(_, len)| len).sum();
    (time >= Duration::from_millis(100)).then(|| bytes as f64 * 8.0 / time.as_secs_f64() / PORT.bits_per_sec as f64)
}

/// The longest time for which nothing new arrived.
fn longest_silence(arrived: &BTreeMap<(usize, u32), Arrivals>) -> Duration {
    let mut times: Vec<Duration> = arrived.values().flatten().map(|(at, _)| *at).collect();
    times.sort_unstable();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

fn run(case: &mut Case, fabric: &Fabric, incast: &Incast) -> Result<Outcome> {
    let sampler = sampler(fabric)?;
    let wire = Wire::headers(&fabric.nodes[RECEIVER])?;
    let watch = Watch::urgent(Duration::from_millis(10));
    let (cpu, programs) = (CpuTime::begin()?, CpuByProgram::begin()?);
    let (begin, clock) = (Instant::now(), SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?);
    let mut rates = Vec::new();
    for transfer in start(fabric, incast, PATIENCE)? {
        match transfer.wait() {
            Ok(result) => rates.push(result.bits_per_sec()),
            Err(e) => case.expect(false, format_args!("a transfer did not complete: {e:#}")),
        }
    }
    let (end, wire) = (Instant::now(), wire.finish()?);
    let busy = cpu.busy()?;
    case.percent("cpu_busy_percent", busy);
    case.figure("cpu_by_program", programs.most(6)?);
    case.figure("cpu_longest_pause_ms", watch.longest_pause().as_millis() as u64);
    let arrived = arrived(fabric, &wire);
    case.equal("queue pairs that sent", arrived.len() as u64, SENDERS as u64 * incast.qps);
    let first = arrived.values().flat_map(|of| of.first()).map(|(at, _)| *at).min().context("nothing arrived")?;
    let all_began = arrived.values().filter_map(|of| of.first()).map(|(at, _)| *at).max().unwrap_or(first);
    // Until the first is done: from then on the others have more room.
    let (from, until) =
        (all_began + incast.start_up, arrived.values().filter_map(|of| of.last()).map(|(at, _)| *at).min());
    let window = until.and_then(|until| until.checked_sub(from)).unwrap_or_default().as_secs_f64();
    let within = |of: &[(Duration, u64)]| {
        let bytes: u64 = of.iter().filter(|(at, _)| *at >= from && Some(*at) < until).map(|(_, bytes)| bytes).sum();
        bytes as f64 * 8.0 / window
    };
    let by_flow: Vec<f64> = arrived.values().map(|of| within(of)).collect();
    let (goodput, fairness) = (by_flow.iter().sum::<f64>() / capacity(), jain(by_flow.iter().copied()));
    let instant = |at: Duration| begin + at.saturating_sub(clock);
    let queue = sampler.summary(instant(from), instant(until.unwrap_or(from)));
    case.figure("transfers_done", format!("{} of {SENDERS}", rates.len()));
    case.figure("seconds", end.duration_since(begin).as_secs());
    case.percent("goodput_percent", goodput);
    case.figure("jain", (fairness * 10_000.0).round() / 10_000.0);
    case.figure("mbit_per_sec", by_flow.iter().map(|rate| (rate / 1e5).round() / 10.0).collect::<Vec<_>>());
    case.figure("drops", sampler.summary(begin, end).drops);
    let dropped = drops_by_second(&sampler, instant(first)..end);
    if !dropped.is_empty() {
        let name = format!("{}-queue-pairs", SENDERS as u64 * incast.qps);
        std::fs::write(share().join(format!("{name}.csv")), sampler.table(instant(first)))
            .context("writing samples")?;
        wire.save(&format!("{name}.pcap"))?;
    }
    let frames = wire.received().map(|seen| (instant(seen.at), seen.wire_len as u64));
    let waiting = dropped.iter().flat_map(|[second, _]| {
        let at = instant(first) + Duration::from_secs(*second);
        sampler.backlogged(at.checked_sub(Duration::from_secs(1)).unwrap_or(at), at + Duration::from_secs(1))
    });
    let port_kept = port_kept(&waiting.collect(), frames);
    case.figure("port_kept_percent_around_drops", port_kept.map(|kept| (kept * 1_000.0).round() / 10.0));
    case.figure("drops_by_second", dropped);
    case.figure("longest_silence_ms", longest_silence(&arrived).as_millis() as u64);
    case.figure("queue_p50_p99_bytes", [queue.p50, queue.p99]);
    case.figure("window_seconds", (window * 10.0).round() / 10.0);
    case.figure("rxe", trouble(fabric)?);
    case.figure("perftest_mbit_per_sec", rates.iter().map(|rate| (rate / 1e5).round() / 10.0).collect::<Vec<_>>());
    case.expect(rates.iter().any(|rate| *rate > 0.0), "perftest reported no rate at all");
    ensure!(window >= 1.0, "the transfers were over {window:.2} s after the start-up");
    case.expect(fairness >= 0.9, format_args!("Jain's index is {fairness:.3}"));
    // perftest divides all its bytes by all its time; so do we, by what our agents counted and the wire's clock.
    for (sender, reported) in (1..).zip(&rates) {
        let src = fabric.nodes[sender].address(false).into();
        let (mut sent, mut repeated) = (0, 0);
        let flows = rig::maps(&fabric.nodes[sender].port)?.flows();
        for (_, flow) in flows.iter().filter(|(key, _)| key.tap.direction() == Direction::Egress && key.src == src) {
            let counted = export::Counters::of(flow);
            sent += flow.bytes;
            repeated += (counted.retransmitted + counted.duplicates) * PATH_MTU;
        }
        let whole = MESSAGE * incast.messages;
        case.expect(
            (sent >= whole || end.duration_since(begin) > REMEMBERED) && sent <= whole + repeated,
            format_args!(
                "sender {sender} has sent {sent} bytes by its agent, {repeated} of them again, and {whole} by perftest"
            ),
        );
        let of = arrived.iter().filter(|((from, _), _)| *from == sender).flat_map(|(_, of)| of).map(|(at, _)| *at);
        let (Some(a), Some(z)) = (of.clone().min(), of.max()) else { continue };
        let ours = whole as f64 * 8.0 / (z - a).as_secs_f64();
        // Where it cannot measure the clock of an emulated CPU it says 0 (one of 16 transfers, seen on 7.3). It rounds to
        // hundredths of 2^20 bytes.
        case.expect(
            *reported == 0.0 || (ours - reported).abs() < 0.05 * reported + PERFTEST_STEP / 2.0,
            format_args!("sender {sender}: perftest says {reported:.0} bit/s, we {ours:.0}"),
        );
    }
    Ok(Outcome { goodput, sampler, time: instant(first)..end, busy, port_kept })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_keeps_its_rate_where_packets_wait_for_it() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        // 1,000 bytes every 2 ms: 4 Mb/s; from 400 ms on every 4 ms.
        let frames = || (0..200).map(|n| (at(n * 2), 1_000)).chain((100..200).map(|n| (at(n * 4), 1_000)));
        let kept =
            |waiting: &[(u64, u64)]| port_kept(&waiting.iter().map(|(a, b)| (at(*a), at(*b))).collect(), frames());
        assert_eq!(kept(&[(0, 200)]), Some(1.0));
        assert_eq!(kept(&[(100, 200), (400, 500), (100, 200)]), Some(0.75), "the same time only once");
        assert_eq!(kept(&[(400, 450)]), None);
        assert_eq!(kept(&[]), None);
    }
}
