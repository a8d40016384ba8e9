//! The command line. Exit codes: 0 fine, 1 findings or failed check, 2 usage or environment error.

mod events;
mod flows;
mod run;
mod status;
mod story;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::{
    inspect::{self, InspectArgs},
    sim::{self, SimArgs},
};

const LONG_ABOUT: &str = "\
Gives soft-RoCE hosts what a good RoCE NIC has: correct marking, loss visibility per queue pair, and a working ECN → CNP → \
DCQCN loop, on an unpatched kernel; and shows what RoCEv2 traffic does, live or from a capture.

Hardware RoCE bypasses the kernel: nothing of it is seen by XDP or tc.";

const MALFORMED: &str = "\
Reasons why a datagram for port 4791 is counted as malformed:
  truncated_header    too short for the BTH, the opcode's headers and the ICRC
  truncated_capture   the capture (or the kernel) kept too few bytes to read the headers
  bad_length          IP, UDP and frame length contradict each other, or the payload length is one the opcode cannot have
  bad_version         transport header version other than 0
  unknown_opcode      an opcode that does not exist
  pad_beyond_payload  more pad bytes than bytes behind the headers
  read_too_long       a READ request for more than 2^31 bytes
  udp_fragment        a fragment of a UDP datagram that is or may be for port 4791

Exit codes: 0 fine, 1 findings or failed check, 2 usage or environment error.";

#[derive(Parser)]
#[command(name = "roce", version, about = "An eBPF/XDP dataplane for RoCEv2", long_about = LONG_ABOUT, after_long_help = MALFORMED)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Attach to interfaces and run the control loop until stopped; detaches on exit
    Run(Box<run::RunArgs>),
    /// Show what is attached and how it does, from another shell
    Status(status::StatusArgs),
    /// Show the flows of attached interfaces, from another shell
    Flows(flows::FlowsArgs),
    /// Show what happens to the flows of attached interfaces, from another shell while `roce run` is attached
    Events(events::EventsArgs),
    /// Remove everything that was attached or pinned, also after a crash
    Detach(flows::DetachArgs),
    /// Inspect capture files with the same parser and tracker
    Inspect(InspectArgs),
    /// Simulate flows and queues with the same DCQCN code, or search its constants
    Sim(Box<SimArgs>),
}

/// Parses the command line, does what it says, and returns the exit code.
pub fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).format_target(false).init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match dispatch(cli.verb) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(1),
        // Whoever read our output has had enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever the causes contain.
            let text = format!("{error:#}").lines().map(str::trim).collect::<Vec<_>>().join(" ");
            let _nobody_listens = writeln!(io::stderr(), "roce: {text}");
            ExitCode::from(2)
        }
    }
}

/// Help goes to stdout; a usage error is one line like every other error.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _nobody_reads = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let what: Vec<_> =
        text.lines().map(str::trim).take_while(|l| !l.starts_with("Usage:")).filter(|l| !l.is_empty()).collect();
    let what = what.join(" ");
    let _nobody_listens = writeln!(io::stderr(), "roce: {} (roce --help)", what.trim_start_matches("error: "));
    ExitCode::from(2)
}

/// Does what the verb says; whether it found something.
fn dispatch(verb: Verb) -> Result<bool> {
    match verb {
        Verb::Run(args) => run::run(&args).map(|()| false),
        Verb::Status(args) => status::status(&args).map(|()| false),
        Verb::Flows(args) => flows::flows(&args),
        Verb::Events(args) => events::events(&args).map(|()| false),
        Verb::Detach(args) => flows::detach(&args).map(|()| false),
        Verb::Sim(args) => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            sim::run(&args, &mut out)?;
            out.flush()?;
            Ok(false)
        }
        Verb::Inspect(args) => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            let found = inspect::run(&args, &mut out)?;
            out.flush()?;
            Ok(found)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}
