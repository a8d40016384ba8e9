//! From settings to a running agent.

use std::{collections::HashMap, io, os::fd::AsRawFd, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use aya::Ebpf;
use roce_common::{
    abi::{self, Config, Flags, FlowKey},
    units::{Addr, Rate},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{Controller, Wait, packets::KernelSource, publish::Publisher};
use crate::{
    capture::{self, Recorder},
    config::{self, Guard, Settings},
    control::Core,
    dataplane::{self, Attachment, FlowWalker, Maps, Options, Pins, ring},
    events,
    netlink::{
        LinkInfo, Netlink, link_speed,
        rdma::{self, Rdma},
    },
    pacer::{self, Edt, Htb, Pacer},
    rdma as devices,
};

/// Most telemetry events of a CPU in 1/16 s: about 160,000 a second and CPU reach the controller at the most.
const EVENTS_PER_TICK: u32 = 10_000;

/// What will be attached and how, decided before anything is touched.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The interface.
    pub link: LinkInfo,
    /// The settings.
    pub settings: Settings,
    /// Which hook tracks the ingress tap.
    pub ingress: config::Ingress,
    /// Why that hook, where it was not asked for.
    pub ingress_reason: Option<&'static str>,
    /// RDMA devices on the interface.
    pub rdma: devices::Devices,
    /// Leave programs and pins in place at the end.
    pub keep: bool,
    /// Where packets around what happens are recorded.
    pub capture: Option<capture::Folder>,
    /// Time between two reports.
    pub interval: Duration,
}

/// Time between two reports, where nothing else is said.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Development messages of the BPF programs, waiting to be written to the log.
pub(super) type Logger = AsyncFd<aya_log::EbpfLogger<&'static dyn log::Log>>;

/// An attached interface with its controller.
pub struct Agent {
    pub(super) plan: Plan,
    pub(super) attachment: Attachment,
    /// The controller; away while it works on its thread.
    pub(super) controller: Option<Controller>,
    /// Name of the pacer.
    pub(super) pacer: &'static str,
    /// The qdisc it works by.
    pub(super) qdisc: String,
    /// Why that pacer, where it was not asked for.
    pub(super) pacer_reason: Option<String>,
    /// The rate at which queue pairs start, where they are held to one.
    pub(super) start_rate: Option<Rate>,
    pub(super) locals: Vec<Addr>,
    /// What the kernel last said of its queue pairs.
    pub(super) rdma: Rdma,
    /// CNPs without a pair at the last look.
    pub(super) cnps_unpaired: u64,
    /// Flows at the last walk.
    pub(super) flows_seen: usize,
    /// Bytes of each flow of the last report, for rates.
    pub(super) last_bytes: HashMap<FlowKey, u64>,
    pub(super) cnp_ring_full: u64,
    /// Limiters made by the egress program that the controller has not heard of.
    pub(super) starts_missing: u64,
    /// The next walk over the flows is reported.
    pub(super) report_due: bool,
    /// The ring was full before the last reading of the pairs' counters.
    pub(super) cnps_to_confirm: bool,
    /// Walks the flows; away while it does.
    pub(super) walker: Option<FlowWalker>,
    pub(super) logger: Option<Logger>,
    /// Records packets. Before `events`: what it writes last is told there.
    pub(super) _recorder: Option<Recorder>,
    /// Serves what happens to other processes.
    pub(super) events: events::Server,
    pub(super) publisher: Publisher,
}

/// The link rate the driver reports.
pub fn detected_link_rate(link: &LinkInfo) -> Option<Rate> {
    link_speed(&link.name).map(Rate::from_bits_per_sec)
}

impl Plan {
    /// Decides. A virtual device gets tc ingress unless told otherwise: native XDP there switches GRO off for everything
    /// that passes.
    pub fn new(link: LinkInfo, settings: Settings, keep: bool) -> Self {
        let (ingress, ingress_reason) = match settings.ingress {
            Some(ingress) => (ingress, None),
            None if link.kind.is_some() => {
                (config::Ingress::Tc, Some("a virtual device, where native XDP would switch GRO off"))
            }
            None => (config::Ingress::Xdp, Some("the default on a physical device")),
        };
        let rdma = devices::devices(&link.name);
        Self { link, settings, ingress, ingress_reason, rdma, keep, capture: None, interval: REPORT_EVERY }
    }

    fn config(&self) -> Config {
        let s = &self.settings;
        let guard = match s.guard {
            Guard::On => true,
            Guard::Off => false,
            Guard::Auto => !self.rdma.soft.is_empty(),
        };
        let captured = self.capture.as_ref().map(capture::Folder::settings);
        let payload = captured.is_some_and(|c| c.payload);
        let is_cp = s.role == config::Role::Cp;
        Config {
            failsafe_ns: s.failsafe.0,
            cnp_interval_ns: s.params.cnp_interval.0,
            start_bytes_per_sec: 0,
            swap_until_ns: 0,
            vq_bytes_per_sec: if is_cp { s.cp_classes.rest.bytes_per_sec() } else { 0 },
            role: abi::Role::from(s.role) as u32,
            flags: if guard { Flags::GUARD | Flags::CONSUME_CNP } else { 0 }
                | if payload { Flags::CAPTURE_PAYLOAD } else { 0 }
                | if is_cp && s.cp_at == config::CpAt::Ingress { Flags::CP_INGRESS } else { 0 },
            dscp_policy: abi::MarkPolicy::from(s.dscp_policy) as u32,
            ecn_policy: abi::MarkPolicy::from(s.ecn_policy) as u32,
            data_dscp: u32::from(s.data_dscp.get()),
            cnp_dscp: u32::from(s.cnp_dscp.get()),
            data_priority: s.data_priority,
            cnp_priority: s.cnp_priority,
            pacer: abi::Pacer::Off as u32,
            sample_every: s.sample_every,
            kmin_bytes: s.params.kmin,
            kmax_bytes: s.params.kmax,
            pmax: s.params.pmax,
            vq_limit_bytes: s.queue_bytes,
            ifindex: self.link.index,
            events_per_tick: EVENTS_PER_TICK,
            capture_bytes: captured.map_or(0, |c| c.snaplen),
            reserved: 0,
        }
    }
}

impl Agent {
    /// Attaches everything, or nothing.
    ///
    /// # Errors
    /// What is missing, in the way or refused, with what to do about it.
    pub fn open(plan: Plan) -> Result<Self> {
        let s = &plan.settings;
        let options = Options {
            link: plan.link.clone(),
            bpffs: s.bpffs.clone(),
            ingress: plan.ingress.into(),
            config: plan.config(),
        };
        // A foreign root qdisc is found before anything is attached.
        let pacing = s.role == config::Role::Host && s.pacer != Some(config::Pacer::Off);
        if pacing {
            pacer::refuse_foreign(&plan.link.name, &Netlink::open()?.qdiscs(plan.link.index)?, s.pacer)?;
        }
        let mut attachment = dataplane::attach(&options)?;
        if plan.keep {
            attachment.keep();
        }
        let logger = start_logger(&mut attachment);
        let rings = (ring(&mut attachment.ebpf, "CNP_RING")?, ring(&mut attachment.ebpf, "TELEMETRY")?);
        let pins = Pins::of(&plan.settings.bpffs, plan.link.index)?;
        let walker = FlowWalker::open(&pins)?;
        let maps = Maps::open(&pins)?;
        let events = events::Server::start(&plan.link.name, plan.link.index)?;
        let recorder = match &plan.capture {
            Some(folder) => {
                let source = KernelSource::new(ring(&mut attachment.ebpf, "CAPTURE")?, Maps::open(&pins)?);
                Some(Recorder::start(folder.clone(), source, Arc::clone(events.log()))?)
            }
            None => None,
        };
        let locals = local_addresses()?;
        let rdma = rdma::list();
        attachment.maps.set_local(&locals)?;
        attachment.maps.set_cp_classes(&s.cp_classes.classes, &s.cp_classes.of_dscp)?;
        attachment.maps.beat(super::monotonic().0)?;
        // The pacer comes last: unlike programs and pins its qdisc does not go when a later step fails.
        let (mut pacer, pacer_reason) = if pacing {
            let Attachment { maps, ebpf, .. } = &mut attachment;
            maps.while_dropping(|_| open_pacer(&plan.link, s.pacer, ebpf))?
        } else {
            let reason = (s.role != config::Role::Host).then(|| format!("role {} paces nothing", s.role));
            (Box::new(pacer::Off) as Box<dyn Pacer>, reason)
        };
        let mut core = s.core();
        core.limiters = pacer.capacity();
        let mut core = Core::new(core);
        let start = core.start_rate().filter(|_| pacer.kind() != abi::Pacer::Off);
        let ready = start.map_or(Ok(()), |rate| pacer.prepare(&mut attachment.maps, rate)).and_then(|()| {
            let mut config = attachment.maps.config()?;
            config.pacer = pacer.kind() as u32;
            config.start_bytes_per_sec = start.map_or(0, Rate::bytes_per_sec);
            attachment.maps.set_config(config)
        });
        if let Err(error) = ready {
            pacer.close(&mut attachment.maps)?;
            return Err(error);
        }
        for local in &locals {
            core.add_local(*local);
        }
        let wait = if s.busy_poll { Wait::Busy } else { Wait::Sleep };
        let (pacer_name, qdisc) = (pacer.name(), pacer.qdisc());
        let controller = Controller::new(plan.link.index, core, maps, pacer, rings, s.link_rate, wait);
        Ok(Self {
            plan,
            attachment,
            controller: Some(controller),
            pacer: pacer_name,
            qdisc,
            pacer_reason,
            locals,
            rdma,
            cnps_unpaired: 0,
            flows_seen: 0,
            start_rate: start,
            last_bytes: HashMap::new(),
            cnp_ring_full: 0,
            starts_missing: 0,
            report_due: false,
            cnps_to_confirm: false,
            walker: Some(walker),
            logger,
            publisher: Publisher::new(Arc::clone(events.log()), recorder.as_ref().map(Recorder::triggers)),
            _recorder: recorder,
            events,
        })
    }
}

/// The host's addresses, as the maps hold them.
pub(super) fn local_addresses() -> Result<Vec<Addr>> {
    Ok(Netlink::open()?.addresses()?.into_iter().map(Addr::from).collect())
}

fn wait_on<T: AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: `inner` owns its descriptor and keeps it open and the same until it is dropped.
    unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) }.map_err(io::Error::from)
}

/// Development messages of the BPF programs go to the log; they are not needed for anything else.
fn start_logger(attachment: &mut Attachment) -> Option<Logger> {
    match aya_log::EbpfLogger::init(&mut attachment.ebpf) {
        Ok(logger) => wait_on(logger).ok(),
        Err(error) => {
            log::debug!("no development messages from the BPF programs: {error}");
            None
        }
    }
}

/// The pacer asked for; without a wish HTB, and EDT where HTB cannot be had. What waits in a class follows a new rate, what has its
/// departure time does not.
fn open_pacer(
    link: &LinkInfo,
    wish: Option<config::Pacer>,
    ebpf: &mut Ebpf,
) -> Result<(Box<dyn Pacer>, Option<String>)> {
    match wish {
        Some(config::Pacer::Edt) => Ok((Box::new(Edt::open(link)?), None)),
        Some(config::Pacer::Htb) => Ok((Box::new(Htb::open(link, ebpf)?), None)),
        Some(config::Pacer::Off) => bail!("the pacer is off"),
        None => match Htb::open(link, ebpf) {
            Ok(htb) => Ok((Box::new(htb), Some("the default".into()))),
            Err(no_htb) => {
                let edt = Edt::open(link).with_context(|| format!("{no_htb:#}"))?;
                Ok((Box::new(edt), Some(format!("no HTB: {no_htb:#}"))))
            }
        },
    }
}
