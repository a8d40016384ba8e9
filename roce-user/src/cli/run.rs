//! `roce run`.

use std::{cell::RefCell, path::PathBuf, rc::Rc, time::Duration};

use anyhow::{Context as _, Result, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::{JoinSet, LocalSet},
};

use crate::{
    agent::{Agent, Output, Plan, detected_link_rate},
    capture,
    config::{CpAt, Dcqcn, FileConfig, Guard, Ingress, Pacer, Policy, RateText, Role, Settings, TimeText},
    netlink::require_link,
};

/// Arguments of `roce run`.
#[derive(clap::Args, Debug)]
pub(super) struct RunArgs {
    /// Interfaces to attach to
    #[arg(long = "iface", value_name = "IF", required = true, num_args = 1.., value_delimiter = ',')]
    ifaces: Vec<String>,
    /// What the attachment may do [default: host]
    #[arg(long)]
    role: Option<Role>,
    /// Rate of the link, for example 100m or 25g [default: what the driver reports]
    #[arg(long, value_name = "R")]
    link_rate: Option<RateText>,
    /// Which hook does the ingress work [default: xdp; tc on virtual devices]
    #[arg(long)]
    ingress: Option<Ingress>,
    /// How limited queue pairs are paced [default: htb, else edt]
    #[arg(long)]
    pacer: Option<Pacer>,
    /// Where a congestion point marks [default: egress]
    #[arg(long)]
    cp_at: Option<CpAt>,
    /// DSCP of data, ACKs and READ responses [default: 26]
    #[arg(long, value_name = "N")]
    data_dscp: Option<u8>,
    /// DSCP of CNPs [default: 48]
    #[arg(long, value_name = "N")]
    cnp_dscp: Option<u8>,
    /// When DSCP and priority are set [default: fill]
    #[arg(long)]
    dscp_policy: Option<Policy>,
    /// When ECT(0) is set [default: fill]
    #[arg(long)]
    ecn_policy: Option<Policy>,
    /// Whether malformed packets are kept from rxe [default: auto]
    #[arg(long)]
    guard: Option<Guard>,
    /// Pacing stops when the controller has been silent for this long [default: 1s]
    #[arg(long, value_name = "T")]
    failsafe: Option<TimeText>,
    /// Poll for CNPs without sleeping: the quickest reaction, for a CPU core per interface
    #[arg(long)]
    busy_poll: bool,
    /// Where maps and links are pinned [default: /sys/fs/bpf]
    #[arg(long, value_name = "DIR")]
    bpffs: Option<PathBuf>,
    /// Settings in TOML; the command line wins
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Stop after this many seconds
    #[arg(long, value_name = "S", value_parser = duration)]
    duration: Option<Duration>,
    /// Seconds between two reports, 0.1 to 3600
    #[arg(long, value_name = "S", value_parser = interval, default_value = "1")]
    interval: Duration,
    /// Leave programs, maps and pins in place at the end (roce detach removes them)
    #[arg(long)]
    keep: bool,
    /// Print JSON lines, also on a terminal
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    dcqcn: Dcqcn,
    #[command(flatten)]
    capture: CaptureArgs,
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.trim_end_matches('s').parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    if !(seconds > 0.0 && seconds <= 1e9) {
        return Err(format!("`{text}`: must be above 0 and at most 1e9 seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if !(Duration::from_millis(100)..=Duration::from_hours(1)).contains(&interval) {
        return Err(format!("`{text}`: must be 0.1 to 3600 seconds"));
    }
    Ok(interval)
}

impl RunArgs {
    fn settings(&self) -> FileConfig {
        FileConfig {
            role: self.role,
            link_rate: self.link_rate,
            ingress: self.ingress,
            pacer: self.pacer,
            cp_at: self.cp_at,
            data_dscp: self.data_dscp,
            cnp_dscp: self.cnp_dscp,
            dscp_policy: self.dscp_policy,
            ecn_policy: self.ecn_policy,
            guard: self.guard,
            busy_poll: self.busy_poll.then_some(true),
            failsafe: self.failsafe,
            bpffs: self.bpffs.clone(),
            dcqcn: self.dcqcn.clone(),
            ..FileConfig::default()
        }
    }
}

/// Recording packets around what happens.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Capture")]
struct CaptureArgs {
    /// Write the packets around every gap, NAK, RNR NAK and storm of CNPs to a pcapng file in this directory
    #[arg(long, value_name = "DIR")]
    capture: Option<PathBuf>,
    /// Most bytes of a packet, payload included [default: the headers only, at most 128]
    #[arg(long, value_name = "N", requires = "capture", value_parser = clap::value_parser!(u32).range(64..=9_216))]
    capture_snaplen: Option<u32>,
    /// Packets before what happened
    #[arg(long, value_name = "N", requires = "capture", default_value_t = 500, value_parser = packets)]
    capture_before: usize,
    /// Packets after it
    #[arg(long, value_name = "N", requires = "capture", default_value_t = 500, value_parser = packets)]
    capture_after: usize,
    /// Bytes that all files together may take; the oldest are removed
    #[arg(long, value_name = "BYTES", requires = "capture", default_value = "64m")]
    capture_limit: String,
    /// Files to keep; the oldest are removed
    #[arg(long, value_name = "N", requires = "capture", default_value_t = 100)]
    capture_files: usize,
}

fn packets(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=100_000) => Ok(n),
        _ => Err("a number of packets from 1 to 100000".into()),
    }
}

impl CaptureArgs {
    /// The directory, tried, where there is to be a capture.
    fn folder(&self) -> Result<Option<capture::Folder>> {
        let Some(dir) = &self.capture else { return Ok(None) };
        let settings = capture::Settings {
            dir: dir.clone(),
            snaplen: self.capture_snaplen.unwrap_or(capture::HEADER_BYTES),
            payload: self.capture_snaplen.is_some(),
            before: self.capture_before,
            after: self.capture_after,
            limit_bytes: capture::bytes(&self.capture_limit).context("--capture-limit")?,
            limit_files: self.capture_files.max(1),
        };
        capture::Folder::open(settings).map(Some)
    }
}

/// Attaches to every interface, or to none, and runs.
pub(super) fn run(args: &RunArgs) -> Result<()> {
    let file = args.config.as_deref().map(FileConfig::load).transpose()?.unwrap_or_default();
    let capture = args.capture.folder()?;
    let mut plans = Vec::new();
    for (i, name) in args.ifaces.iter().enumerate() {
        if args.ifaces[..i].contains(name) {
            bail!("interface {name} is named twice");
        }
        let link = require_link(name)?;
        let mut settings = Settings::new(args.settings(), file.clone(), detected_link_rate(&link));
        if let Some(path) = &args.config {
            settings = settings.with_context(|| format!("{}, with the command line", path.display()));
        }
        let settings = settings?;
        let plan = Plan::new(link, settings, args.keep);
        plans.push(Plan { capture: capture.clone(), interval: args.interval, ..plan });
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let tasks = LocalSet::new();
    runtime.block_on(tasks.run_until(attach_and_run(plans, args.json, args.duration)))
}

async fn attach_and_run(plans: Vec<Plan>, json: bool, duration: Option<Duration>) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot catch SIGHUP")?;
    let mut agents: Vec<Agent> = Vec::new();
    for plan in plans {
        match Agent::open(plan) {
            Ok(agent) => agents.push(agent),
            // To every interface, or to none.
            Err(error) => {
                for agent in agents {
                    if let Err(error) = agent.close() {
                        log::error!("{error:#}");
                    }
                }
                return Err(error);
            }
        }
    }
    let output = Rc::new(RefCell::new(Output::new(json)));
    let (stop, stopped) = watch::channel(false);
    let mut running = JoinSet::new();
    for agent in agents {
        running.spawn_local(agent.run(Rc::clone(&output), stopped.clone()));
    }
    let mut failure = None;
    let mut end = std::pin::pin!(async {
        match duration {
            Some(d) => tokio::time::sleep(d).await,
            None => std::future::pending().await,
        }
    });
    let mut asked = false;
    while !running.is_empty() {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            () = &mut end, if !asked => {}
            Some(ended) = running.join_next() => {
                if let Err(error) = ended.context("an agent panicked").and_then(|r| r) {
                    failure.get_or_insert(error);
                } else {
                    continue;
                }
            }
        }
        // One agent that fails stops the others: they were asked for together.
        asked = true;
        stop.send(true).ok();
    }
    failure.map_or(Ok(()), Err)
}
