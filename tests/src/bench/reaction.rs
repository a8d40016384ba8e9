//! How long a CNP takes to slow its queue pair, and a CE mark to become a CNP, on real packets between two namespaces, by
//! the kernel's clock.
//!
//! | figure | from | to |
//! |---|---|---|
//! | written | the ingress program reads the CNP | the rate stands in the map that the egress program reads |
//! | applied | the same | the egress program paces the first packet by that rate; packets pass every 50 µs |
//! | notified | the CE packet enters the host | the CNP leaves it, as a packet socket on the interface sees both |

use std::{
    hint,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use roce_common::{
    abi::{IngressMode, PeerQp, Role},
    dcqcn::params::RpParams,
    units::{Addr, Ecn, Nanos, Qpn, Rate},
    wire::{self, Opcode, Verdict, source_port},
};
use roce_user::{
    agent::{Controller, Wait},
    control::{Core, CoreConfig},
    dataplane::{self, DEFAULT_BPFFS, Maps, Options, Pins, ring},
    netlink::require_link,
    pacer::{Edt, Htb, Pacer},
};
use serde::Serialize;

use super::{introduce, micros, percentiles, place, precise_timers};
use crate::{endpoint::Tap, forge::Forger, lab::Pair, progtest};

const LOCAL_QPN: u32 = 0x21;
const PEER_QPN: u32 = 0x42;
/// The link: fast enough that nothing waits, so that only the path is measured.
const LINE: Rate = Rate::from_bits_per_sec(1_000_000_000);
/// Between two packets.
const SPACING: Duration = Duration::from_micros(50);
/// Between two CNPs: the loop comes to rest.
const PAUSE: Duration = Duration::from_millis(4);
/// One packet of so many is marked: a host that gets CE marks is one that gets packets.
const MARKED_OF: u32 = 20;
const CE: u8 = 3;
const ECT0: u8 = 2;
/// Within that pause the rate rises once.
const RISE: Nanos = Nanos::from_millis(2);
/// A reaction that takes longer is missing.
const PATIENCE: Duration = Duration::from_millis(100);

/// Times of one path in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Times {
    /// How many were measured.
    pub count: u64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// The slowest.
    pub max_ns: u64,
}

impl Times {
    fn of(ns: Vec<u64>) -> Self {
        let count = ns.len() as u64;
        let [p50_ns, p99_ns, max_ns] = percentiles(ns);
        Self { count, p50_ns, p99_ns, max_ns }
    }

    fn row(&self) -> String {
        let [p50, p99, max] = [self.p50_ns, self.p99_ns, self.max_ns].map(micros);
        format!("{:>8}{p50:>10.1}{p99:>10.1}{max:>10.1}", self.count)
    }
}

/// One way to run the controller.
#[derive(Clone, Debug, Serialize)]
pub struct Reaction {
    /// `edt` (without an fq behind it) or `htb`.
    pub pacer: &'static str,
    /// `sleep` or `busy-poll`.
    pub cnp_wait: &'static str,
    /// CNP to rate in the map.
    pub written: Times,
    /// CNP to first packet at the new rate.
    pub applied: Times,
}

/// Everything measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this contract.
    pub schema: u32,
    /// Each pacer in each mode.
    pub reaction: Vec<Reaction>,
    /// CE in to CNP out, by the hook that does the ingress work.
    pub notification: Vec<Notification>,
}

/// The notification point with one ingress hook.
#[derive(Clone, Debug, Serialize)]
pub struct Notification {
    /// `tc` or `xdp`.
    pub ingress: &'static str,
    /// CE in to CNP out.
    pub notified: Times,
}

/// Measures `cnps` reactions of each kind.
///
/// # Errors
/// Not root, or the kernel lacks what the lab needs.
pub fn run(cnps: u32) -> Result<Report> {
    let mut reaction = Vec::new();
    for pacer in ["edt", "htb"] {
        for wait in [Wait::Sleep, Wait::Busy] {
            reaction.push(reactions(pacer, wait, cnps)?);
        }
    }
    let mut notification = Vec::new();
    for (ingress, mode) in [("tc", IngressMode::Tc), ("xdp", IngressMode::Xdp)] {
        notification.push(Notification { ingress, notified: notifications(mode, cnps)? });
    }
    Ok(Report { schema: 1, reaction, notification })
}

impl Report {
    /// For people.
    pub fn table(&self) -> String {
        let mut out = format!("{:<44}{:>8}{:>10}{:>10}{:>10}\n", "µs", "count", "p50", "p99", "max");
        for r in &self.reaction {
            let name = format!("{}, {}", r.pacer, r.cnp_wait);
            out.push_str(&format!("{:<44}{}\n", format!("{name}: CNP to rate in the map"), r.written.row()));
            out.push_str(&format!("{:<44}{}\n", format!("{name}: CNP to first packet at it"), r.applied.row()));
        }
        for n in &self.notification {
            out.push_str(&format!("{:<44}{}\n", format!("{}: CE in to CNP out", n.ingress), n.notified.row()));
        }
        out
    }
}

/// A reaction point that a CNP cuts by a tenth and that has risen before the next, but not before a packet met the cut:
/// every CNP is a new rate, and the queue pair is never so slow that its packets wait.
fn rp() -> RpParams {
    let params = roce_common::dcqcn::Params::paper(LINE).rp;
    RpParams { min_rate: Rate::from_bits_per_sec(900_000_000), timer: RISE, ..params }
}

fn options(pair: &Pair, ingress: IngressMode, pacer: Option<&dyn Pacer>) -> Result<Options> {
    let mut config = progtest::config(Role::Host);
    config.pacer = pacer.map_or(0, |p| p.kind() as u32);
    config.cnp_interval_ns = 100_000;
    let link = require_link(&pair.a.port.name)?;
    Ok(Options { link, bpffs: DEFAULT_BPFFS.into(), ingress, config })
}

fn addresses(pair: &Pair) -> (Addr, Addr) {
    (pair.a.address(false).into(), pair.b.address(false).into())
}

fn reactions(pacer: &'static str, wait: Wait, cnps: u32) -> Result<Reaction> {
    let pair = Pair::new(1_500)?;
    let (local, peer) = addresses(&pair);
    let ns = pair.a.port.ns.clone();
    ns.run(|| {
        let mut attachment = dataplane::attach(&options(&pair, IngressMode::Tc, None)?)?;
        let link = require_link(&pair.a.port.name)?;
        let by: Box<dyn Pacer> = match pacer {
            "edt" => Box::new(Edt::unkept(link.index)),
            _ => Box::new(Htb::open(&link, &mut attachment.ebpf)?),
        };
        let mut config = attachment.maps.config()?;
        config.pacer = by.kind() as u32;
        attachment.maps.set_config(config)?;
        attachment.maps.set_local(&[local])?;
        let rings = (ring(&mut attachment.ebpf, "CNP_RING")?, ring(&mut attachment.ebpf, "TELEMETRY")?);
        let mut core = Core::new(CoreConfig::new(rp(), 1_098));
        core.add_local(local);
        let (qpn, remote) = (Qpn::new(LOCAL_QPN), Qpn::new(PEER_QPN));
        introduce(&mut core, &mut attachment.maps, link.index, local, peer, qpn, remote)?;
        let maps = Maps::open(&Pins::of(Path::new(DEFAULT_BPFFS), link.index)?)?;
        place(pair.a.port.cpu, true)?;
        let started = Controller::new(link.index, core, maps, by, rings, LINE, wait).start();
        place(pair.a.port.cpu, false)?;
        let (running, _news) = started?;

        let forger = Forger::new(&pair.b, pair.a.address(false))?;
        let cnp = forger.cnp(LOCAL_QPN);
        let key = PeerQp::new(peer, remote);
        let applied = while_sending(&pair, || {
            let mut applied = Vec::new();
            let mut last = 0;
            for _ in 0..cnps {
                forger.send(&cnp);
                thread::sleep(PAUSE);
                let mut waited = PAUSE;
                loop {
                    if let Some(cell) = attachment.maps.pace(key).filter(|c| c.cause_ns != last) {
                        last = cell.cause_ns;
                        applied.push(cell.reaction_ns);
                        break;
                    }
                    if waited > PATIENCE {
                        break;
                    }
                    thread::sleep(PAUSE);
                    waited += PAUSE;
                }
            }
            applied
        })?;
        let (mut controller, result) = running.stop()?;
        result?;
        let reactions = controller.progress().reactions.clone();
        controller.pacer.close(&mut controller.maps)?;
        attachment.detach()?;
        ensure!(
            applied.len() as u32 >= cnps / 2,
            "{pacer}: of {cnps} CNPs only {} changed a rate that a packet met",
            applied.len()
        );
        let ns = |share: f64| reactions.percentile(share).as_nanos() as u64;
        let written = Times {
            count: reactions.count(),
            p50_ns: ns(0.5),
            p99_ns: ns(0.99),
            max_ns: reactions.max().as_nanos() as u64,
        };
        Ok(Reaction { pacer, cnp_wait: wait.name(), written, applied: Times::of(applied) })
    })
}

/// Runs `measure` while packets of the local queue pair leave every [`SPACING`].
fn while_sending<T>(pair: &Pair, measure: impl FnOnce() -> T) -> Result<T> {
    let mut forger = Forger::new(&pair.a, pair.b.address(false))?;
    // The port of this pair of queue pairs: with another the pairing would be in doubt.
    forger.path.src_port = source_port(Qpn::new(LOCAL_QPN), Qpn::new(PEER_QPN));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            precise_timers();
            let mut psn = 1u32;
            while !done.load(Ordering::Relaxed) {
                forger.send(&forger.write(PEER_QPN, psn & 0xff_ffff, &[0; 1_024]));
                psn += 1;
                thread::sleep(SPACING);
            }
        });
        precise_timers();
        let result = measure();
        done.store(true, Ordering::Relaxed);
        if sender.join().is_err() {
            bail!("the sender panicked");
        }
        Ok(result)
    })
}

/// Waits without letting the CPU go idle: it would wake up slow, and a host that gets CE marks gets packets all the time.
fn wait_awake(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        hint::spin_loop();
    }
}

fn notifications(ingress: IngressMode, count: u32) -> Result<Times> {
    let pair = Pair::new(1_500)?;
    let (local, peer) = addresses(&pair);
    let ns = pair.a.port.ns.clone();
    ns.run(|| {
        let mut attachment = dataplane::attach(&options(&pair, ingress, None)?)?;
        attachment.maps.set_local(&[local])?;
        let mut core = Core::new(CoreConfig::new(rp(), 1_098));
        core.add_local(local);
        let ifindex = pair.a.port.index;
        introduce(&mut core, &mut attachment.maps, ifindex, local, peer, Qpn::new(LOCAL_QPN), Qpn::new(PEER_QPN))?;
        place(pair.a.port.cpu, false)?;
        // Read at the end: a reader that every frame wakes would be a part of what is measured.
        let tap = Tap::open(ifindex)?;
        let mut forger = Forger::new(&pair.b, pair.a.address(false))?;
        precise_timers();
        for psn in 0..count * MARKED_OF {
            forger.path.tos = if psn % MARKED_OF == 0 { CE } else { ECT0 };
            forger.send(&forger.write(LOCAL_QPN, psn & 0xff_ffff, &[0; 1_024]));
            wait_awake(SPACING);
        }
        let mut marked = None;
        let mut times = Vec::new();
        let mut frame = [0; 2_048];
        while let Some((length, at)) = tap.next(&mut frame)? {
            let Verdict::Roce(packet) = wire::parse(frame.get(..length).unwrap_or_default()) else { continue };
            if packet.ecn() == Ecn::Ce {
                marked = Some(at);
            } else if packet.bth.opcode == Opcode::CNP
                && let Some(marked) = marked.take()
            {
                times.push(at.saturating_sub(marked).as_nanos() as u64);
            }
        }
        ensure!(tap.dropped()? == 0, "the packet socket lost frames: fewer marks, please");
        attachment.detach()?;
        ensure!(!times.is_empty(), "no CE mark became a CNP");
        Ok(Times::of(times))
    })
    .context("the notification point")
}
