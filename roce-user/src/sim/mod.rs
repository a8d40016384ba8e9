//! `roce sim`: the DCQCN code of the dataplane in a simulated network.

pub mod engine;
pub mod options;
pub mod plan;
pub mod report;
pub mod runner;
pub mod tune;
mod tune_report;

#[cfg(test)]
mod tests;

use std::{io::Write, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{config::Dcqcn, export::SCHEMA, plot};
use options::{Counts, Options};
use plan::Plan;
use runner::Finished;

const LONG_ABOUT: &str = "\
Simulates flows through switches, packet by packet, with the very code that marks, notifies and cuts in the dataplane. The
same options and seed give the same figures on every machine. docs/sim.md says what is modelled and what is not.

Preset soft simulates software endpoints: a window of 64 packets, a queue of 64, marks from a virtual queue on arrival, CNPs
and rate changes up to 50 us late. Presets paper and nvidia simulate adapters: no window, a 12 MB switch that marks on
departure, no latency but the links'. Every one of these defaults has an option.";

const EXAMPLES: &str = "\
Examples:
  roce sim --link 10g --flows 8 --preset soft --time 200ms
  roce sim --link 40g --flows 10 --preset paper --delay 85us --plot oscillation.svg
  roce sim --link 100m --flows 2,4,8,16 --seeds 5
  roce sim --link 25g --flows 16 --workload rpc --load 0.8 --pfc --json
  roce sim --file plan.toml
  roce sim tune --link 10g --flows 2..64

JSON (schema 1), measured after the warm-up: utilisation, jain, queue_bytes_mean, queue_bytes_std, queue_bytes_p50,
queue_bytes_p99, queue_bytes_peak, ce_share, cnp_per_flow_per_s, drops, pause_ns, retransmitted, timeouts, busy, flows
[{rate_bps}], completions_ns, join_periods; of the whole run: drops_in_warmup, fair_after_ns, over_time, events,
events_per_s; and what was simulated: scenario. Several runs are in `runs`, the seeds of one in `seeds`.

Exit codes: 0 fine, 2 usage or environment error.";

/// Arguments of `roce sim`.
#[derive(clap::Args, Clone, Debug)]
#[command(long_about = LONG_ABOUT, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct SimArgs {
    #[command(subcommand)]
    verb: Option<SimVerb>,
    #[command(flatten)]
    common: Common,
    /// Run the scenarios of a plan; options here win over those in the file
    #[arg(long, value_name = "PLAN")]
    file: Option<PathBuf>,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum SimVerb {
    /// Search constants for a link and a range of flow counts [default: 2..32], and print them as TOML to paste
    Tune(Box<TuneArgs>),
}

#[derive(clap::Args, Clone, Debug)]
struct Common {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    dcqcn: Dcqcn,
    /// Threads, over seeds and runs [default: as many as the machine has CPUs]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write diagrams over time to this SVG file; of several runs, the first eight
    #[arg(long, value_name = "SVG")]
    plot: Option<PathBuf>,
}

/// Most runs in one SVG file.
const PLOTTED: usize = 8;

#[derive(clap::Args, Clone, Debug)]
struct TuneArgs {
    /// Sets to try beside the preset's
    #[arg(long, default_value_t = 60, value_name = "N")]
    tries: u32,
    #[command(flatten)]
    common: Common,
}

impl Common {
    fn options(&self) -> Options {
        Options { dcqcn: Some(self.dcqcn.clone()), ..self.options.clone() }
    }

    fn threads(&self) -> Result<usize> {
        let threads = self.threads.unwrap_or_else(runner::default_threads);
        ensure!((1..=1_024).contains(&threads), "--threads {threads}: must be 1 to 1024");
        Ok(threads)
    }
}

/// Runs what `args` say and writes the report to `out`.
///
/// # Errors
/// An option or a plan makes no sense, a file cannot be read or written, or `out` cannot.
pub fn run(args: &SimArgs, out: &mut impl Write) -> Result<()> {
    let common = match &args.verb {
        Some(SimVerb::Tune(tune)) => return run_tune(tune, out),
        None => &args.common,
    };
    let options = common.options();
    let jobs = match &args.file {
        Some(path) => Plan::load(path)?.jobs(&options, path)?,
        None => options.jobs()?,
    };
    let finished = runner::run_all(jobs, common.threads()?)?;
    if let Some(path) = &common.plot {
        let panels: Vec<_> = finished.iter().take(PLOTTED).flat_map(report::panels).collect();
        plot::write(path, &panels)?;
    }
    if common.json {
        serde_json::to_writer(&mut *out, &json(&finished, args.file.is_some())).context("cannot write the report")?;
        writeln!(out)?;
    } else if let [one] = finished.as_slice() {
        report::write_text(out, one)?;
    } else {
        report::write_table(out, &finished)?;
    }
    Ok(())
}

/// One run is the object itself; several, and every plan, are in `runs`.
fn json(finished: &[Finished], plan: bool) -> Value {
    let mut objects: Vec<_> = finished.iter().map(report::to_json).collect();
    if objects.len() == 1 {
        let mut one = objects.remove(0);
        if plan {
            let runs = vec![Value::Object(one.clone())];
            one.insert("runs".into(), runs.into());
        }
        return Value::Object(one);
    }
    json!({"schema": SCHEMA, "runs": objects})
}

fn run_tune(args: &TuneArgs, out: &mut impl Write) -> Result<()> {
    ensure!((1..=100_000).contains(&args.tries), "--tries {}: must be 1 to 100000", args.tries);
    let options = args.common.options();
    let flows = options.flows.clone().unwrap_or(Counts(vec![2, 4, 8, 16, 32]));
    let tuned = tune::tune(&options, &flows.0, args.tries, args.common.threads()?)?;
    if let Some(path) = &args.common.plot {
        plot::write(path, &tune_report::panels(&tuned))?;
    }
    if args.common.json {
        serde_json::to_writer(&mut *out, &tune_report::to_json(&tuned)).context("cannot write the report")?;
        writeln!(out)?;
        return Ok(());
    }
    tune_report::write_text(out, &tuned)?;
    Ok(())
}
