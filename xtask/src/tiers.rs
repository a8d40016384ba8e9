//! The test tiers: what each runs, and the table at the end.

use std::{
    collections::BTreeSet,
    fmt,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use crate::{
    args::Tier,
    build,
    exec::{self, Stop, print, say},
    need,
    project::Project,
    rebuild,
};

/// A test executable that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(20 * 60);
/// The crate whose integration tests need root, unless their name starts otherwise.
const TESTS_CRATE: &str = "roce-tests";
/// How a test says that it could not run: the start of a line that it prints before it returns.
const SKIP: &str = "SKIP";

/// Tests of a tier, by how they ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// How a tier ended.
#[derive(PartialEq, Eq, Debug)]
enum Ended {
    /// Its tests ran.
    Ran(Tally),
    /// It could not run, for this reason; it has neither passed nor failed.
    Skipped(String),
    /// It could not even be built.
    Broken(String),
}

impl Ended {
    /// A skipped tier counts as one skipped test, a broken one as one that failed.
    fn tally(&self) -> Tally {
        match self {
            Self::Ran(tally) => *tally,
            Self::Skipped(_) => Tally { skipped: 1, ..Tally::default() },
            Self::Broken(_) => Tally { failed: 1, ..Tally::default() },
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran(t) => {
                let word = if t.failed > 0 { "failed" } else { "passed" };
                write!(f, "{word:<8} {} passed, {} failed, {} skipped", t.passed, t.failed, t.skipped)
            }
            Self::Skipped(why) => write!(f, "{:<8} {why}", "skipped"),
            Self::Broken(why) => write!(f, "{:<8} {why}", "failed"),
        }
    }
}

/// Runs the tiers. 0: none failed; 1: one did; 2: none could run.
pub(crate) fn run(project: &Project, tiers: &BTreeSet<Tier>) -> Result<u8, Stop> {
    let start = Instant::now();
    need::to_build(project)?;
    let mut rows = Vec::new();
    for &tier in tiers {
        let start = Instant::now();
        say(format_args!("test tier {}", tier.name()));
        let ended = match tier {
            Tier::Unit => unit(project),
            Tier::Build => rebuilds(project),
            Tier::Bpf => as_root(project, "bpf_", need::to_load),
            Tier::Lab => as_root(project, "lab_", need::to_run),
        };
        let ended = match ended {
            Ok(ended) => ended,
            Err(Stop::Child(code)) => Ended::Broken(format!("a program it needs ended with exit code {code}")),
            Err(Stop::Environment(e)) => Ended::Broken(format!("{e:#}")),
        };
        rows.push((tier, ended, start.elapsed()));
    }
    print(table(&rows, start.elapsed()));
    Ok(verdict(&rows))
}

/// The result of each tier, and a plain line that sums them up.
fn table(rows: &[(Tier, Ended, Duration)], total: Duration) -> String {
    let mut lines = vec![String::new(), format!("{:<6} {:>7}  result", "tier", "time")];
    let mut sum = Tally::default();
    for (tier, ended, time) in rows {
        lines.push(format!("{:<6} {:>6.0}s  {ended}", tier.name(), time.as_secs_f64()));
        sum += ended.tally();
    }
    lines.push(format!("{:<6} {:>6.0}s\n", "all", total.as_secs_f64()));
    lines.push(format!("{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped));
    lines.join("\n")
}

fn verdict(rows: &[(Tier, Ended, Duration)]) -> u8 {
    if rows.iter().any(|(_, ended, _)| ended.tally().failed > 0) {
        1
    } else if rows.iter().all(|(_, ended, _)| matches!(ended, Ended::Skipped(_))) {
        2
    } else {
        0
    }
}

/// Every test that needs nothing, and the examples in the documentation.
fn unit(project: &Project) -> Result<Ended, Stop> {
    const HOST: [&str; 8] = ["-p", "roce-common", "-p", "roce-user", "-p", "xtask", "-p", TESTS_CRATE];
    let mut tally = Tally::default();
    for test in executables(project.cargo().arg("test").args(HOST))? {
        if !test.needs_root() {
            tally += test.run(Command::new(&test.file), &[])?;
        }
    }
    // xtask has no library, hence no such examples.
    let mut doc = project.cargo();
    doc.args(["test", "--quiet", "--doc"]).args(&HOST[..4]).args(&HOST[6..]);
    tally += run_tests("the examples in the documentation", &mut doc)?;
    Ok(Ended::Ran(tally))
}

/// The test of the build.
fn rebuilds(project: &Project) -> Result<Ended, Stop> {
    match rebuild::files(project) {
        Ok(files) => {
            rebuild::run(project, &files)?;
            Ok(Ended::Ran(Tally { passed: 1, ..Tally::default() }))
        }
        Err(e) => Ok(Ended::Skipped(format!("it copies the files that git lists: {e:#}"))),
    }
}

/// The integration tests of the tests crate whose name starts with `prefix`: built as we are, run as root, one test at a
/// time, with the release profile, which is the one that `cargo xtask run` uses and the lab's endpoints are fast enough in.
fn as_root(project: &Project, prefix: &str, need: fn() -> Result<(), Stop>) -> Result<Ended, Stop> {
    match need() {
        Ok(()) => {}
        Err(Stop::Environment(e)) => return Ok(Ended::Skipped(format!("{e:#}"))),
        Err(Stop::Child(code)) => {
            return Ok(Ended::Skipped(format!("what it needs could not be installed (exit code {code})")));
        }
    }
    build(project, true)?;
    let tests = executables(project.cargo().args(["test", "--release", "-p", TESTS_CRATE]))?;
    let tests: Vec<_> = tests.iter().filter(|test| test.needs_root() && test.name.starts_with(prefix)).collect();
    if tests.is_empty() {
        return Ok(Ended::Skipped(format!("{TESTS_CRATE} has no test whose name starts with {prefix}")));
    }
    let mut tally = Tally::default();
    for test in tests {
        let mut command = exec::as_root(&test.file)?;
        command.env("ROCE_BIN", project.release("roce")).env("ROCE_LAB_BIN", project.release("roce-lab"));
        tally += test.run(command, &["--test-threads=1"])?;
    }
    Ok(Ended::Ran(tally))
}

/// A test program that cargo has built.
#[derive(PartialEq, Eq, Debug)]
struct Executable {
    /// The name of its target: the crate, or the file in `tests/`.
    name: String,
    /// Whether it is an integration test of the tests crate.
    integration: bool,
    file: PathBuf,
    /// The directory of its package, in which cargo runs it.
    dir: PathBuf,
}

impl Executable {
    /// From one of cargo's messages; `None` for any other message.
    fn from_message(message: &Value) -> Option<Self> {
        let target = &message["target"];
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let dir = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        let kinds = target["kind"].as_array()?;
        Some(Self {
            name: target["name"].as_str()?.to_owned(),
            integration: dir.ends_with("tests") && kinds.iter().any(|kind| kind == "test"),
            file: message["executable"].as_str()?.into(),
            dir,
        })
    }

    fn needs_root(&self) -> bool {
        self.integration && (self.name.starts_with("bpf_") || self.name.starts_with("lab_"))
    }

    fn run(&self, mut command: Command, args: &[&str]) -> anyhow::Result<Tally> {
        command.arg("--show-output").args(args).current_dir(&self.dir).env("CARGO_MANIFEST_DIR", &self.dir);
        run_tests(&self.name, &mut command)
    }
}

/// Builds the tests that the cargo command names.
fn executables(cargo: &mut Command) -> Result<Vec<Executable>, Stop> {
    let output = exec::must_output(cargo.args(["--no-run", "--message-format=json-render-diagnostics"]))?;
    let mut found = Vec::new();
    for message in output.split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
        let message = serde_json::from_slice(message).context("reading cargo's messages")?;
        found.extend(Executable::from_message(&message));
    }
    Ok(found)
}

/// Runs a program of the Rust test harness and shows what it prints, less what tests say that went well.
fn run_tests(name: &str, command: &mut Command) -> anyhow::Result<Tally> {
    say(format_args!("running {name}"));
    let mut harness = Harness::default();
    let code = exec::run_lines(command, LIMIT, |line| {
        if harness.read(&String::from_utf8_lossy(line)) {
            let _ = io::stdout().write_all(line);
        }
    })?;
    if let Some(problem) = harness.end(code) {
        print(format_args!("{name} {problem}"));
    }
    Ok(harness.tally)
}

/// Reads what the Rust test harness prints with `--show-output`.
#[derive(Default)]
struct Harness {
    tally: Tally,
    /// Result lines seen.
    results: usize,
    /// Within the output of tests that went well.
    successes: bool,
    /// The test whose output follows has already said that it was skipped.
    skip_counted: bool,
    /// Tests that went well by the harness, but were skipped by their own word.
    skips: usize,
}

impl Harness {
    /// Takes one line; whether to show it.
    fn read(&mut self, line: &str) -> bool {
        let line = line.trim_end();
        if line == "successes:" {
            self.successes = true;
            return false;
        }
        if line == "failures:" {
            self.successes = false;
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            self.successes = false;
            self.result(result);
            return true;
        }
        if !self.successes {
            return true;
        }
        if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.skip_counted = false;
            return false;
        }
        if !line.starts_with(SKIP) {
            return false;
        }
        self.skips += usize::from(!self.skip_counted);
        self.skip_counted = true;
        true
    }

    /// `ok. 12 passed; 0 failed; 1 ignored; …`
    fn result(&mut self, text: &str) {
        let count = |what: &str| -> usize {
            text.split([';', '.']).find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok()).unwrap_or(0)
        };
        let skips = std::mem::take(&mut self.skips);
        self.tally += Tally {
            passed: count("passed").saturating_sub(skips),
            failed: count("failed"),
            skipped: count("ignored") + skips,
        };
        self.results += 1;
    }

    /// Takes the exit code, `None` for a program that ran into [`LIMIT`]. What the harness itself could not count is one
    /// failure more, and named.
    fn end(&mut self, code: Option<u8>) -> Option<String> {
        let problem = match code {
            None => format!("was ended after {} minutes", LIMIT.as_secs() / 60),
            Some(0) if self.results > 0 => return None,
            Some(_) if self.tally.failed > 0 => return None,
            // It died or could not start, or ran nothing.
            Some(code) => format!("ended with exit code {code} and without a result"),
        };
        self.tally.failed += 1;
        Some(problem)
    }
}

/// A result for a tier that is one test.
pub(crate) fn failed(why: impl fmt::Display) -> Stop {
    Stop::Environment(anyhow!("{why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Tally, Vec<&str>) {
        let mut harness = Harness::default();
        let shown = text.lines().filter(|line| harness.read(line)).collect();
        (harness.tally, shown)
    }

    #[test]
    fn results_are_counted_over_all_executables() {
        let (tally, _) = read(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s\n\
             test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s\n",
        );
        assert_eq!(tally, Tally { passed: 15, failed: 2, skipped: 1 });
    }

    #[test]
    fn a_test_that_says_it_was_skipped_has_not_passed() {
        let (tally, shown) = read(
            "running 3 tests\n\
             test a ... ok\n\
             test b ... ok\n\
             test c ... ok\n\
             \n\
             successes:\n\
             \n\
             ---- a stdout ----\n\
             SKIP a: tshark is not installed\n\
             SKIP a: nor is scapy\n\
             ---- b stdout ----\n\
             much talk\n\
             \n\
             \n\
             successes:\n    a\n    b\n    c\n\
             \n\
             test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally, Tally { passed: 2, failed: 0, skipped: 1 });
        assert!(shown.contains(&"SKIP a: tshark is not installed") && !shown.contains(&"much talk"), "{shown:?}");
    }

    #[test]
    fn what_a_failed_test_said_is_shown_and_is_no_skip() {
        let (tally, shown) = read(
            "successes:\n\nsuccesses:\n\nfailures:\n\n---- a stdout ----\nSKIP that was not one\n\nfailures:\n    a\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally, Tally { passed: 0, failed: 1, skipped: 0 });
        assert!(shown.contains(&"SKIP that was not one"), "{shown:?}");
    }

    #[test]
    fn a_program_without_a_result_has_failed() {
        let end = |text: &str, code| {
            let mut harness = Harness::default();
            for line in text.lines() {
                harness.read(line);
            }
            (harness.end(code), harness.tally.failed)
        };
        let ok = "test result: ok. 3 passed; 0 failed; 0 ignored\n";
        assert_eq!(end(ok, Some(0)), (None, 0));
        assert_eq!(end("test result: FAILED. 3 passed; 2 failed; 0 ignored\n", Some(101)), (None, 2));
        assert!(matches!(end("", Some(0)), (Some(_), 1)));
        assert!(matches!(end("", Some(139)), (Some(_), 1)));
        assert!(matches!(end(ok, Some(1)), (Some(_), 1)));
        assert!(matches!(end("", None), (Some(_), 1)));
    }

    #[test]
    fn a_tier_that_could_not_run_has_not_passed() {
        let time = Duration::ZERO;
        let skipped = || (Tier::Lab, Ended::Skipped("no root".into()), time);
        let passed = || (Tier::Unit, Ended::Ran(Tally { passed: 3, ..Tally::default() }), time);
        let broken = || (Tier::Bpf, Ended::Broken("does not build".into()), time);
        assert_eq!(verdict(&[skipped()]), 2);
        assert_eq!(verdict(&[passed(), skipped()]), 0);
        assert_eq!(verdict(&[passed(), broken()]), 1);
        assert!(table(&[passed(), skipped()], time).ends_with("\n3 passed, 0 failed, 1 skipped"));
        assert_eq!(skipped().1.tally(), Tally { skipped: 1, ..Tally::default() });
        assert_eq!(skipped().1.to_string(), "skipped  no root");
    }

    #[test]
    fn test_programs_are_found_in_cargos_messages() {
        let message = |name: &str, kind: &str, test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "manifest_path": "/w/tests/Cargo.toml",
                "target": {"name": name, "kind": [kind]}, "profile": {"test": test}, "executable": "/t/x",
            })
        };
        let found = |name, kind| Executable::from_message(&message(name, kind, true)).map(|e| e.needs_root());
        assert_eq!(found("lab_loop", "test"), Some(true));
        assert_eq!(found("bpf_fixtures", "test"), Some(true));
        assert_eq!(found("cli_errors", "test"), Some(false));
        assert_eq!(found("roce_tests", "lib"), Some(false));
        assert_eq!(Executable::from_message(&message("roce-lab", "bin", false)), None);
        assert_eq!(Executable::from_message(&serde_json::json!({"reason": "build-finished"})), None);
    }
}
