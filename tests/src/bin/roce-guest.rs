//! What runs in a guest of `cargo xtask vm`: process 1, and the scenarios. `list` names them anywhere.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use roce_tests::vm::{Report, init, scenarios};
use serde_json::json;

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init();
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["list"] => {
            list();
            Ok(())
        }
        ["run", name] => run(name),
        _ => Err(anyhow::anyhow!("usage: roce-guest list | run SCENARIO/PART")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(2)
        }
    }
}

/// The scenarios, as xtask reads them.
fn list() {
    let all: Vec<_> = scenarios::ALL
        .iter()
        .map(|s| {
            let parts: Vec<_> = s
                .parts
                .iter()
                .map(|p| {
                    let since = p.since.map(|(major, minor)| [major, minor]);
                    json!({"name": p.name, "cpus": p.cpus, "share": p.share, "memory_mib": p.memory_mib, "seconds": p.seconds, "since": since})
                })
                .collect();
            json!({"name": s.name, "about": s.about, "parts": parts})
        })
        .collect();
    println!("{}", json!(all));
}

/// Runs a part. What came of it is told by the serial port; the exit code says only whether it could be told.
fn run(name: &str) -> Result<()> {
    let Some(part) = scenarios::find(name) else { bail!("there is no part {name}") };
    let mut report = Report::open().context("this is no guest")?;
    let result = (part.run)(&mut report);
    report.end(&result);
    Ok(())
}
