//! `cargo xtask`: everything a person does with this project, one verb each. See `cargo xtask help`.

mod args;
#[cfg(test)]
mod docs;
mod exec;
mod lint;
mod need;
mod project;
mod rebuild;
mod tiers;
mod vm;

use std::{ffi::OsString, process::ExitCode};

use args::Verb;
use exec::{Stop, say};
use project::Project;

/// Wrong usage or environment.
const ENVIRONMENT: u8 = 2;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let verb = match args::parse(&args) {
        Ok(verb) => verb,
        Err(e) => {
            say(format_args!("{e} (cargo xtask help)"));
            return ExitCode::from(ENVIRONMENT);
        }
    };
    match run(&verb) {
        Ok(code) | Err(Stop::Child(code)) => ExitCode::from(code),
        Err(Stop::Environment(e)) => {
            say(format_args!("{e:#}"));
            ExitCode::from(ENVIRONMENT)
        }
    }
}

/// Does what was asked for; the exit code.
fn run(verb: &Verb) -> Result<u8, Stop> {
    if *verb == Verb::Help {
        exec::print(args::HELP.trim_end());
        return Ok(0);
    }
    exec::outlive_children()?;
    let project = Project::find()?;
    match verb {
        Verb::Help => Ok(0),
        Verb::Setup => {
            need::to_lint(&project)?;
            need::to_run()?;
            say("everything is here");
            Ok(0)
        }
        Verb::Build { release } => {
            need::to_build(&project)?;
            build(&project, *release)?;
            let profile = if *release { "release" } else { "debug" };
            say(format_args!("roce and roce-lab are in {}", project.target.join(profile).display()));
            Ok(0)
        }
        Verb::Lab(options) => {
            // The lab's help needs no root.
            let help = options.iter().any(|o| o == "--help" || o == "-h");
            need::to_build(&project)?;
            if !help {
                need::to_run()?;
            }
            build(&project, true)?;
            let lab = project.release("roce-lab");
            let mut command = if help { std::process::Command::new(lab) } else { exec::as_root(lab)? };
            command.arg("run").arg("--roce").arg(project.release("roce")).args(options);
            Ok(exec::run(&mut command)?)
        }
        Verb::Roce(options) => {
            need::to_build(&project)?;
            need::to_run()?;
            build(&project, true)?;
            Ok(exec::run(exec::as_root(project.release("roce"))?.arg("run").args(options))?)
        }
        Verb::Test(tiers) => tiers::run(&project, tiers),
        Verb::Vm(options) => vm::run(&project, options),
        Verb::Lint => lint::run(&project),
        Verb::BenchInspect(options) => {
            need::to_build(&project)?;
            build(&project, true)?;
            let mut bench = std::process::Command::new(project.release("roce-bench"));
            bench.args(["inspect", "--roce"]).arg(project.release("roce")).arg("--dir").arg(&project.target);
            Ok(exec::run(bench.args(options))?)
        }
        Verb::BenchPacket(options) => bench(&project, "packet", options),
        Verb::BenchLoop(what, options) => bench(&project, what, options),
    }
}

/// A benchmark of `roce-bench` that needs root.
fn bench(project: &Project, what: &str, options: &[OsString]) -> Result<u8, Stop> {
    need::to_build(project)?;
    need::to_run()?;
    exec::must(project.cargo().args(["build", "--release", "-p", "roce-tests", "--bin", "roce-bench"]))?;
    Ok(exec::run(exec::as_root(project.release("roce-bench"))?.arg(what).args(options))?)
}

/// Builds the programs: roce with its BPF object, and the lab.
fn build(project: &Project, release: bool) -> Result<(), Stop> {
    let mut cargo = project.cargo();
    cargo.args(["build", "-p", "roce-user", "-p", "roce-tests", "--bins"]);
    if release {
        cargo.arg("--release");
    }
    exec::must(&mut cargo)
}
