//! What a part found, told line by line, so that what a dying kernel leaves is known.

use std::{fmt, fs::File, io::Write, os::fd::AsRawFd, time::Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The guest's second serial port: the kernel writes nothing there.
pub(super) const PORT: &str = "/dev/ttyS1";

/// Why something could not run: an error that is no failure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Skip(String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// An error that says that something cannot run here, and what is missing.
pub fn skip(why: impl fmt::Display) -> anyhow::Error {
    Skip(why.to_string()).into()
}

/// `outcome` and `reason` of a result.
fn outcome(result: &Result<()>) -> (&'static str, Option<String>) {
    match result {
        Ok(()) => ("passed", None),
        Err(e) if e.is::<Skip>() => ("skipped", Some(e.to_string())),
        Err(e) => ("failed", Some(format!("{e:#}"))),
    }
}

/// Tells the host.
#[derive(Debug)]
pub struct Report {
    port: File,
}

impl Report {
    /// To the serial port.
    ///
    /// # Errors
    /// Outside of a guest.
    pub fn open() -> Result<Self> {
        Ok(Self { port: File::options().write(true).open(PORT).with_context(|| format!("opening {PORT}"))? })
    }

    fn tell(&mut self, line: &Value) {
        // Nobody is left to tell that the port is gone.
        let _ = writeln!(self.port, "{line}");
        // SAFETY: the descriptor is open; the call takes nothing else.
        let _ = unsafe { libc::tcdrain(self.port.as_raw_fd()) };
    }

    /// Runs one comparison, and tells what came of it. Whether it passed.
    pub fn case(&mut self, name: impl Into<String>, run: impl FnOnce(&mut Case) -> Result<()>) -> bool {
        let name = name.into();
        let start = Instant::now();
        let mut case = Case::default();
        let result = run(&mut case).and_then(|()| case.verdict());
        let (outcome, reason) = outcome(&result);
        println!("case {name}: {outcome} {}", reason.as_deref().unwrap_or_default());
        self.tell(&json!({
            "kind": "case", "case": name, "outcome": outcome, "reason": reason, "figures": case.figures,
            "seconds": (start.elapsed().as_secs_f64() * 10.0).round() / 10.0,
        }));
        result.is_ok()
    }

    /// A number of the whole part, for the table.
    pub fn figure(&mut self, name: &str, value: impl Serialize) {
        self.tell(&json!({"kind": "figures", "figures": {name: value}}));
    }

    /// The last line.
    pub fn end(&mut self, result: &Result<()>) {
        let (outcome, reason) = outcome(result);
        println!("end: {outcome} {}", reason.as_deref().unwrap_or_default());
        self.tell(&json!({"kind": "end", "outcome": outcome, "reason": reason}));
    }

    /// A line of another kind.
    pub(super) fn note(&mut self, kind: &str) {
        self.tell(&json!({"kind": kind}));
    }
}

/// One comparison: figures, and what did not hold.
#[derive(Debug, Default)]
pub struct Case {
    figures: Map<String, Value>,
    failures: Vec<String>,
}

impl Case {
    /// Keeps a number.
    pub fn figure(&mut self, name: &str, value: impl Serialize) {
        self.figures.insert(name.to_owned(), json!(value));
    }

    /// Keeps a share, 0 to 1, as per cent with one decimal.
    pub fn percent(&mut self, name: &str, share: f64) {
        self.figure(name, (share * 1_000.0).round() / 10.0);
    }

    /// Fails, and goes on, where `holds` does not.
    pub fn expect(&mut self, holds: bool, what: impl fmt::Display) {
        if !holds {
            self.failures.push(what.to_string());
        }
    }

    /// Fails, and goes on, where two values differ.
    #[expect(clippy::needless_pass_by_value, reason = "callers give what they have just computed")]
    pub fn equal<T: PartialEq + fmt::Debug>(&mut self, what: impl fmt::Display, ours: T, theirs: T) {
        if ours != theirs {
            self.failures.push(format!("{what}: {ours:?} is not {theirs:?}"));
        }
    }

    /// Whether everything has held so far.
    pub fn holds(&self) -> bool {
        self.failures.is_empty()
    }

    fn verdict(&self) -> Result<()> {
        match self.failures.as_slice() {
            [] => Ok(()),
            [first @ .., last] if first.len() < 6 => {
                Err(anyhow::anyhow!("{}", [first, std::slice::from_ref(last)].concat().join("; ")))
            }
            many => Err(anyhow::anyhow!("{}; and {} more", many[..6].join("; "), many.len() - 6)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_fails_by_what_did_not_hold_and_says_all_of_it() {
        let mut case = Case::default();
        case.equal("packets", 3, 3);
        assert!(case.verdict().is_ok());
        case.equal("bytes", 3, 4);
        case.expect(false, "no gap");
        assert_eq!(case.verdict().unwrap_err().to_string(), "bytes: 3 is not 4; no gap");
        for n in 0..10 {
            case.equal(n, 1, 2);
        }
        assert!(case.verdict().unwrap_err().to_string().ends_with("; and 6 more"));
    }

    #[test]
    fn a_skip_is_told_from_a_failure() {
        assert_eq!(outcome(&Err(skip("no fq here"))), ("skipped", Some("no fq here".into())));
        assert_eq!(outcome(&Err(anyhow::anyhow!("broken"))), ("failed", Some("broken".into())));
        assert_eq!(outcome(&Ok(())), ("passed", None));
    }
}
