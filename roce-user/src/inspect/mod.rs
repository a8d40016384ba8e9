//! `roce inspect`: captures through the parser and the tracker that also run in the kernel.
//!
//! A capture interface is a tap. Frames are read one by one and forgotten; what stays are the flows, of which there are
//! at most [`roce_common::abi::MAX_FLOWS`].

mod analysis;
mod args;
mod attribution;
mod between;
mod capture;
mod csv;
mod extract;
mod filter;
mod link;
mod packets;
mod plot;
mod progress;
mod seen;
mod session;
mod source;
mod table;
mod tunnels;
mod watch;

#[cfg(test)]
mod tests;

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::{Context, Result};

use crate::{export::CaptureReport, facts::detail, findings::Severity};
pub use args::InspectArgs;
use extract::Extract;
use session::Outcome;

/// Reads every capture and writes its report to `out`. One that cannot be read does not keep the others from being
/// reported; the first such failure is the error returned, the others go to the log. Returns whether something was found
/// that is at least a [`Severity::Warning`], or a capture could not be read to its end.
///
/// # Errors
///
/// A file cannot be opened or read, is no capture, has a link type that is not supported, or what is asked for cannot be
/// written.
pub fn run(args: &InspectArgs, out: &mut impl Write) -> Result<bool> {
    if args.between {
        return between::run(args, out);
    }
    let captures = if args.join { args.files.chunks(args.files.len()) } else { args.files.chunks(1) };
    let mut extract = args.write_findings.as_deref().map(Extract::create).transpose()?;
    let (mut failure, mut found, mut panels) = (None, false, Vec::new());
    if args.csv {
        csv::header(out)?;
    }
    for (i, files) in captures.enumerate() {
        match session::inspect(args, files, out) {
            Ok(outcome) => {
                let report = &outcome.report;
                write_report(args, out, i, &outcome).context("cannot write the report")?;
                found |= report.incomplete.is_some() || report.findings.iter().any(|f| f.severity >= Severity::Warning);
                if let Some(extract) = &mut extract {
                    extract.add(report, files, outcome.spool.as_ref(), args.decap)?;
                }
                panels.extend(outcome.panels);
            }
            Err(error) => match failure {
                None => failure = Some(error),
                Some(_) => log::error!("{error:#}"),
            },
        }
    }
    if let Some(extract) = extract {
        extract.finish()?;
    }
    if let Some(path) = &args.plot {
        crate::plot::write(path, &panels)?;
    }
    failure.map_or(Ok(found), Err)
}

fn write_report(args: &InspectArgs, out: &mut impl Write, number: usize, outcome: &Outcome) -> io::Result<()> {
    let report = &outcome.report;
    if args.csv {
        csv::write(out, report)?;
    } else if args.json {
        serde_json::to_writer(&mut *out, report)?;
        writeln!(out)?;
    } else {
        if number > 0 || args.packets {
            writeln!(out)?;
        }
        table::write(out, report, outcome.duration)?;
        if args.detail {
            detail::write(out, &report.paths, &report.flows, table::MOST_ROWS)?;
        }
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
    let args = InspectArgs::of([file]);
    Ok(session::inspect(&args, &args.files, &mut io::sink())?.report)
}
