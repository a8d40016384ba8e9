//! `roce inspect`: capture files through the parser and the tracker that also run in the kernel.
//!
//! A capture interface is a tap. Frames are read one by one and forgotten; what stays are the flows, of which there are
//! at most [`roce_common::abi::MAX_FLOWS`].

mod analysis;
mod attribution;
mod capture;
mod link;
mod seen;
mod source;
mod table;
mod watch;

#[cfg(test)]
mod tests;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Context, Result};
use roce_common::units::Nanos;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use crate::export::CaptureReport;
use analysis::Analysis;
use source::{Progress, Source};

/// The name of stdin.
const STDIN: &str = "-";

/// Arguments of `roce inspect`.
#[derive(clap::Args, Clone, Debug)]
pub struct InspectArgs {
    /// Captures to read: pcap or pcapng, also packed with gzip; Ethernet, raw IP or Linux cooked; `-` is stdin
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print one JSON object per file, one per line, instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Reads every file and writes its report to `out`. A file that cannot be read does not keep the others from being
/// reported; the first such failure is the error returned, the others go to the log.
///
/// # Errors
///
/// A file cannot be opened or read, is no capture, has a link type that is not supported, or `out` cannot be written.
pub fn run(args: &InspectArgs, out: &mut impl Write) -> Result<()> {
    let mut failure = None;
    for (i, file) in args.files.iter().enumerate() {
        match inspect(file) {
            Ok((report, duration)) => {
                write_report(args, out, i, &report, duration).context("cannot write the report")?;
            }
            Err(error) => match failure {
                None => failure = Some(error),
                Some(_) => log::error!("{error:#}"),
            },
        }
    }
    failure.map_or(Ok(()), Err)
}

fn write_report(
    args: &InspectArgs,
    out: &mut impl Write,
    number: usize,
    report: &CaptureReport,
    duration: Nanos,
) -> io::Result<()> {
    if args.json {
        serde_json::to_writer(&mut *out, report)?;
        writeln!(out)?;
    } else {
        if number > 0 {
            writeln!(out)?;
        }
        table::write(out, report, duration)?;
    }
    if let Some(reason) = &report.incomplete {
        log::warn!("{}: {reason}", report.file);
    }
    out.flush()
}

/// The report of one capture.
///
/// # Errors
///
/// The file cannot be opened or read, is no capture, or has a link type that is not supported.
pub fn report(file: &Path) -> Result<CaptureReport> {
    Ok(inspect(file)?.0)
}

/// Frames go to the analysis.
struct ToAnalysis(Analysis);

impl source::Idle for ToAnalysis {
    fn idle(&mut self) -> Result<()> {
        Ok(())
    }
}

impl capture::Sink for ToAnalysis {
    fn frame(&mut self, frame: &capture::Frame<'_>) -> Result<bool> {
        self.0.frame(frame);
        Ok(true)
    }
}

/// Opens a file, or stdin for `-`. From then on Ctrl-C ends what stdin gives, and not the program.
fn open(file: &Path) -> Result<Source> {
    let progress = Progress::default();
    if file != Path::new(STDIN) {
        return Source::open(file, progress);
    }
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::clone(&interrupt)).context("cannot listen for Ctrl-C")?;
    }
    Source::pipe(io::stdin(), progress, interrupt)
}

fn inspect(file: &Path) -> Result<(CaptureReport, Nanos)> {
    let name = file.display().to_string();
    let mut sink = ToAnalysis(Analysis::default());
    let mut interfaces = capture::Interfaces::default();
    let incomplete = open(file)
        .and_then(|mut source| capture::read(&mut source, &mut interfaces, &mut 0, &mut sink))
        .with_context(|| format!("cannot inspect {name}"))?;
    let duration = sink.0.duration();
    Ok((sink.0.finish(name, capture::Capture { interfaces: interfaces.names(), incomplete }), duration))
}
