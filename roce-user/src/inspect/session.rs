//! One capture on its way through the analysis and everything that is made of it while it passes.

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, atomic::AtomicBool, atomic::Ordering::Relaxed},
};

use anyhow::{Context, Result};
use roce_common::{abi::FlowKey, flow::Flow, psn::Episode, units::Nanos};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use super::{
    InspectArgs,
    analysis::Analysis,
    capture::{self, Capture, Frame, Interfaces, Sink},
    extract::Spool,
    filter::{Flows, Span},
    packets::{self, Line},
    plot::Recorder,
    progress::Bar,
    source::{Idle, Progress, Source},
    tunnels::{FIRST_TAP, Tunnels},
};
use crate::{export::CaptureReport, plot::Panel};

/// The name of stdin.
pub(super) const STDIN: &str = "-";
/// Frames between two looks at the progress bar.
const FRAMES_PER_LOOK: u64 = 1 << 13;

/// What one capture gave.
pub(super) struct Outcome {
    /// The report, of the flows asked for.
    pub(super) report: CaptureReport,
    /// Time from the first to the last frame.
    pub(super) duration: Nanos,
    /// The plot, where it is asked for.
    pub(super) panels: Vec<Panel>,
    /// What stdin gave, where it must be read again.
    pub(super) spool: Option<Spool>,
}

/// Where frames go.
struct Session<'a, W> {
    args: &'a InspectArgs,
    out: &'a mut W,
    analysis: Analysis,
    tunnels: Option<Tunnels>,
    span: Span,
    /// Time of the first frame of all.
    start: Option<Nanos>,
    plot: Option<Recorder>,
    bar: Bar,
}

impl<W: Write> Idle for Session<'_, W> {
    fn idle(&mut self) -> Result<()> {
        self.bar.show(self.analysis.frames());
        self.out.flush().context(CANNOT_WRITE)
    }
}

const CANNOT_WRITE: &str = "cannot write the report";

impl<W: Write> Sink for Session<'_, W> {
    fn frame(&mut self, frame: &Frame<'_>) -> Result<bool> {
        let start = *self.start.get_or_insert(frame.time);
        if !self.span.holds(frame.time, start) {
            return Ok(true);
        }
        let inner = self.tunnels.as_mut().and_then(|t| t.inner(frame));
        let frame = inner.as_ref().unwrap_or(frame);
        let seen = self.analysis.frame(frame);
        if let Some(plot) = &mut self.plot {
            plot.frame(frame, &seen, start);
        }
        if self.args.packets {
            let tap = self.tunnels.as_ref().and_then(|t| t.name(frame.interface)).unwrap_or(frame.interface_name);
            if packets::is_asked_for(Flows(&self.args.flows), tap, &seen) {
                let line = Line { frame, tap, start, seen: &seen };
                line.write(self.out, self.args.json).context(CANNOT_WRITE)?;
            }
        }
        if frame.number.is_multiple_of(FRAMES_PER_LOOK) {
            self.bar.show(frame.number);
        }
        Ok(true)
    }
}

/// Opens a file, or stdin for `-`. From then on Ctrl-C ends what stdin gives, and not the program.
pub(super) fn open(file: &Path, progress: Progress, spool: Option<&Spool>) -> Result<Source> {
    if file != Path::new(STDIN) {
        return Source::open(file, progress);
    }
    static INTERRUPT: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let interrupt = INTERRUPT.get_or_init(Arc::default);
    interrupt.store(false, Relaxed);
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::clone(interrupt)).context("cannot listen for Ctrl-C")?;
    }
    match spool {
        None => Source::pipe(std::io::stdin(), progress, Arc::clone(interrupt)),
        Some(spool) => Source::pipe(spool.copying(std::io::stdin())?, progress, Arc::clone(interrupt)),
    }
}

/// A capture that was read.
struct Read<'a, W> {
    session: Session<'a, W>,
    /// What it is called.
    name: String,
    capture: Capture,
    spool: Option<Spool>,
}

/// Reads `files` as one capture. What lines there are per packet go to `out`.
fn read<'a, W: Write>(args: &'a InspectArgs, files: &[PathBuf], out: &'a mut W) -> Result<Read<'a, W>> {
    let name = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
    let progress = Progress::default();
    let mut session = Session {
        args,
        out,
        analysis: Analysis::default(),
        tunnels: args.decap.then(Tunnels::default),
        span: Span { from: args.from, to: args.to },
        start: None,
        plot: args.plot.is_some().then(Recorder::default),
        bar: Bar::new(files, Arc::clone(&progress), args.packets),
    };
    if args.no_icrc {
        session.analysis.leave_icrcs();
    }
    let mut interfaces = Interfaces::default();
    let mut packets = 0;
    let mut incomplete = Vec::new();
    let is_stdin = files.iter().any(|f| f == Path::new(STDIN));
    let spool = (is_stdin && args.write_findings.is_some()).then(Spool::new).transpose()?;
    for file in files {
        let reason = open(file, Arc::clone(&progress), spool.as_ref())
            .and_then(|mut source| capture::read(&mut source, &mut interfaces, &mut packets, &mut session))
            .with_context(|| format!("cannot inspect {}", file.display()))?;
        if let Some(reason) = reason {
            incomplete.push(if files.len() == 1 { reason } else { format!("{}: {reason}", file.display()) });
        }
    }
    session.bar.done();
    session.out.flush().context(CANNOT_WRITE)?;
    let mut names = interfaces.names();
    if let Some(tunnels) = &session.tunnels {
        names.resize(FIRST_TAP as usize, String::new());
        names.extend_from_slice(tunnels.names());
    }
    let incomplete = (!incomplete.is_empty()).then(|| incomplete.join("; "));
    Ok(Read { session, name, capture: Capture { interfaces: names, incomplete }, spool })
}

/// What a tap saw of its flows.
pub(super) struct Observed {
    /// The capture.
    pub(super) name: String,
    pub(super) capture: Capture,
    /// Its flows with their episodes.
    pub(super) flows: Vec<(FlowKey, Flow, Vec<Episode>)>,
}

/// Reads a file for its flows and their episodes.
///
/// # Errors
///
/// As [`inspect`].
pub(super) fn observe(args: &InspectArgs, file: &PathBuf, out: &mut impl Write) -> Result<Observed> {
    let Read { session, name, capture, .. } = read(args, std::slice::from_ref(file), out)?;
    Ok(Observed { name, capture, flows: session.analysis.flows() })
}

/// Reads `files` as one capture. What lines there are per packet go to `out`.
///
/// # Errors
///
/// A file cannot be opened or read, is no capture, or has a link type that is not supported; or `out` cannot be written.
/// Where several files are one capture, those before are lost with it.
pub(super) fn inspect(args: &InspectArgs, files: &[PathBuf], out: &mut impl Write) -> Result<Outcome> {
    let Read { mut session, name, capture, spool } = read(args, files, out)?;
    let duration = session.analysis.duration();
    if let Some(plot) = &mut session.plot {
        plot.name_cnps(|tap, packet| session.analysis.notified(tap, packet));
    }
    session.analysis.ask_for(&args.flows);
    let mut report = session.analysis.finish(name, &capture);
    report.tunnels = session.tunnels.map(|t| t.counts());
    let flows = Flows(&args.flows);
    let panels = session.plot.map(|plot| plot.panels(&report, flows)).unwrap_or_default();
    select(&mut report, flows);
    Ok(Outcome { report, duration, panels, spool })
}

/// Keeps the flows and paths asked for, and the sums over them.
fn select(report: &mut CaptureReport, flows: Flows<'_>) {
    if flows.all() {
        return;
    }
    report.flows.retain(|flow| flows.report(flow));
    report.paths.retain(|path| flows.path(path));
    report.counters = report.flows.iter().fold(Default::default(), |mut sum, flow| {
        sum.add(&flow.counters);
        sum
    });
}
