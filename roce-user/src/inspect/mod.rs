//! `roce inspect`: capture files through the parser and the tracker that also run in the kernel.
//!
//! A capture interface is a tap. Frames are read one by one and forgotten; what stays are the flows, of which there are
//! at most [`roce_common::abi::MAX_FLOWS`].

mod analysis;
mod attribution;
mod capture;
mod link;
mod seen;
mod table;
mod watch;

#[cfg(test)]
mod tests;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use roce_common::units::Nanos;

use crate::export::CaptureReport;
use analysis::Analysis;

/// Arguments of `roce inspect`.
#[derive(clap::Args, Clone, Debug)]
pub struct InspectArgs {
    /// Captures to read: pcap or pcapng; Ethernet, raw IP or Linux cooked
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

fn inspect(file: &Path) -> Result<(CaptureReport, Nanos)> {
    let mut analysis = Analysis::default();
    let name = file.display().to_string();
    let capture =
        capture::read(file, |frame| _ = analysis.frame(frame)).with_context(|| format!("cannot inspect {name}"))?;
    let duration = analysis.duration();
    Ok((analysis.finish(name, capture), duration))
}
