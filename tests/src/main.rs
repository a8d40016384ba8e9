//! `roce-lab`: the main job on a lab of network namespaces.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use roce_tests::{
    lab::{privileged, signals},
    run::{self, RunArgs, Summary},
};

/// A lab on one machine: hosts, a switch with one slow port, RoCEv2 traffic, with and without the loop.
///
/// Exit codes: 0 done, 2 usage or environment error, 130 interrupted.
#[derive(Parser)]
#[command(name = "roce-lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the same traffic without and with the loop and compare
    Run(RunArgs),
}

fn main() -> ExitCode {
    let Command::Run(args) = Cli::parse().command;
    match execute(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if signals::interrupted() => {
            eprintln!("interrupted; everything is removed");
            ExitCode::from(130)
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}

fn execute(args: &RunArgs) -> Result<(), String> {
    let options = args.check()?;
    if !privileged() {
        return Err("the lab makes network namespaces: run it as root (sudo)".into());
    }
    signals::install().map_err(|e| format!("cannot handle signals: {e}"))?;
    let summary = run::run(&options).map_err(|e| format!("{e:#}"))?;
    print(&summary, options.json).map_err(|e| format!("cannot write the summary: {e}"))
}

/// The table on stdout; with `--json` on stderr, and the object as the last line on stdout.
fn print(summary: &Summary, json: bool) -> io::Result<()> {
    if !json {
        return io::stdout().write_all(summary.table().as_bytes());
    }
    // The table is a courtesy here; the object is the answer.
    let _ = io::stderr().write_all(summary.table().as_bytes());
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, summary)?;
    out.write_all(b"\n")?;
    out.flush()
}
