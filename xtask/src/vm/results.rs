//! What came out of a guest, and the table of it all.

use std::{fmt::Write as _, time::Duration};

use serde_json::{Map, Value, json};

use super::qemu::Ended;

/// Lines of a console that mean that a kernel is broken.
const FAULTS: [&str; 6] = ["Kernel panic", "Oops:", "BUG:", "general protection fault", "UBSAN:", "refcount_t:"];

/// How something ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Passed,
    Failed(String),
    /// With what is missing.
    Skipped(String),
}

impl Outcome {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::Skipped(_) => "skipped",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Passed => None,
            Self::Failed(why) | Self::Skipped(why) => Some(why),
        }
    }

    /// From the `outcome` and `reason` of one of the guest's lines.
    fn read(line: &Value) -> Self {
        let reason = || line["reason"].as_str().unwrap_or("no reason was given").to_owned();
        match line["outcome"].as_str() {
            Some("passed") => Self::Passed,
            Some("skipped") => Self::Skipped(reason()),
            _ => Self::Failed(reason()),
        }
    }
}

/// What one guest did.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct PartResult {
    pub(super) name: String,
    pub(super) outcome: Outcome,
    /// The guest's lines of kind `case`.
    pub(super) cases: Vec<Value>,
    pub(super) figures: Map<String, Value>,
    pub(super) time: Duration,
}

impl PartResult {
    /// Of a guest that was not booted.
    pub(super) fn unbooted(name: &str, outcome: Outcome) -> Self {
        Self { name: name.to_owned(), outcome, cases: Vec::new(), figures: Map::new(), time: Duration::ZERO }
    }

    /// From the lines of its results and its console.
    pub(super) fn read(name: &str, ended: Ended, limit: Duration, lines: &str, console: &str, time: Duration) -> Self {
        let mut result = Self::unbooted(name, Outcome::Passed);
        result.time = time;
        let mut end = None;
        for line in lines.lines().filter_map(|line| serde_json::from_str::<Value>(line.trim()).ok()) {
            match line["kind"].as_str() {
                Some("case") => result.cases.push(line),
                Some("figures") => result.figures.extend(line["figures"].as_object().cloned().unwrap_or_default()),
                Some("end") => end = Some(Outcome::read(&line)),
                _ => {}
            }
        }
        let fault = console.lines().find(|line| FAULTS.iter().any(|fault| line.contains(fault)));
        let failures = result.cases.iter().filter(|c| c["outcome"] == "failed").count();
        result.outcome = match (fault, ended, end) {
            (Some(fault), ..) => Outcome::Failed(format!("the guest's kernel broke: {}", fault.trim())),
            (None, Ended::Late, _) => Outcome::Failed(format!("the guest was ended after {} s", limit.as_secs())),
            (None, _, None) => {
                let last = console.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
                Outcome::Failed(format!("the guest ended without a result; the last that it said was: {}", last.trim()))
            }
            (None, _, Some(Outcome::Passed)) if failures > 0 => Outcome::Failed(format!("{failures} cases failed")),
            (None, _, Some(end)) => end,
        };
        result
    }

    fn json(&self) -> Value {
        json!({
            "part": self.name, "outcome": self.outcome.name(), "reason": self.outcome.reason(),
            "seconds": seconds(self.time), "figures": self.figures, "cases": self.cases,
        })
    }
}

/// A scenario on a kernel.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Row {
    pub(super) kernel: String,
    pub(super) release: String,
    pub(super) scenario: String,
    pub(super) parts: Vec<PartResult>,
}

impl Row {
    /// Failed if a part failed; skipped if all were.
    pub(super) fn outcome(&self) -> Outcome {
        let failed = self.parts.iter().find(|p| matches!(p.outcome, Outcome::Failed(_)));
        let passed = self.parts.iter().find(|p| p.outcome == Outcome::Passed);
        match failed.or(passed).or(self.parts.first()) {
            Some(part) => part.outcome.clone(),
            None => Outcome::Skipped("it has no parts".into()),
        }
    }

    fn cases(&self, outcome: &str) -> usize {
        self.parts.iter().flat_map(|p| &p.cases).filter(|c| c["outcome"] == outcome).count()
    }

    fn time(&self) -> Duration {
        self.parts.iter().map(|p| p.time).sum()
    }

    fn json(&self) -> Value {
        let outcome = self.outcome();
        let parts: Vec<Value> = self.parts.iter().map(PartResult::json).collect();
        json!({
            "kernel": self.kernel, "release": self.release, "scenario": self.scenario, "outcome": outcome.name(),
            "reason": outcome.reason(), "seconds": seconds(self.time()), "parts": parts,
        })
    }

    /// The figures that parts gave for the whole, and what did not pass.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for part in &self.parts {
            let figures: Vec<String> = part
                .figures
                .iter()
                .filter(|(_, v)| !v.is_object() && !v.is_array())
                .map(|(k, v)| format!("{k} {}", plain(v)))
                .collect();
            if !figures.is_empty() {
                notes.push(format!("{}: {}", part.name, figures.join(", ")));
            }
            if let Some(reason) = part.outcome.reason() {
                notes.push(format!("{} {}: {reason}", part.name, part.outcome.name()));
            }
            for case in part.cases.iter().filter(|c| c["outcome"] != "passed") {
                let text = |key: &str| case[key].as_str().unwrap_or_default().to_owned();
                notes.push(format!("{} {}, {}: {}", part.name, text("outcome"), text("case"), text("reason")));
            }
        }
        notes
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) if n.is_f64() => format!("{:.3}", n.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    }
}

/// Seconds, to a tenth.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

/// Everything, as one JSON object.
pub(super) fn json(rows: &[Row], accel: &str, wall: Duration) -> Value {
    let rows: Vec<Value> = rows.iter().map(Row::json).collect();
    json!({"schema": 1, "kind": "vm", "accel": accel, "seconds": seconds(wall), "runs": rows})
}

/// Everything, for people.
pub(super) fn table(rows: &[Row], accel: &str, wall: Duration) -> String {
    let mut text = format!("\n{:<26} {:<12} {:<8} {:>6} {:>6}\n", "kernel", "scenario", "result", "cases", "time");
    for row in rows {
        let ran = row.cases("passed") + row.cases("failed");
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<26} {:<12} {:<8} {:>6} {:>5.0}s",
            row.release,
            row.scenario,
            row.outcome().name(),
            format!("{}/{ran}", row.cases("passed")),
            row.time().as_secs_f64()
        );
        for note in row.notes() {
            let _ = writeln!(text, "    {note}");
        }
    }
    let count = |name: &str| rows.iter().filter(|r| r.outcome().name() == name).count();
    let _ = write!(
        text,
        "\n{} passed, {} failed, {} skipped in {:.0} s ({accel})",
        count("passed"),
        count("failed"),
        count("skipped"),
        wall.as_secs_f64()
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: &str = r#"{"kind":"case","case":"a","outcome":"passed","figures":{}}"#;
    const BAD: &str = r#"{"kind":"case","case":"b","outcome":"failed","reason":"3 is not 4","figures":{}}"#;
    const END: &str = r#"{"kind":"end","outcome":"passed"}"#;

    fn read(ended: Ended, lines: &[&str], console: &str) -> PartResult {
        PartResult::read("p", ended, Duration::from_secs(9), &lines.join("\r\n"), console, Duration::from_secs(1))
    }

    fn row(parts: Vec<PartResult>) -> Row {
        Row { kernel: "6.1".into(), release: "6.1.0-40-amd64".into(), scenario: "loss".into(), parts }
    }

    #[test]
    fn a_guest_has_passed_when_it_says_so_and_nothing_speaks_against_it() {
        let passed = read(Ended::Off, &[CASE, END], "boots");
        assert_eq!((passed.outcome.clone(), passed.cases.len()), (Outcome::Passed, 1));
        let reason = |r: PartResult| r.outcome.reason().map(str::to_owned).expect("it has not passed");
        assert!(reason(read(Ended::Off, &[CASE, BAD, END], "")).contains("1 cases failed"));
        assert!(reason(read(Ended::Off, &[CASE], "boots\nlast words\n\n")).contains("last words"));
        assert!(reason(read(Ended::Late, &[CASE, END], "")).contains("after 9 s"));
        assert!(reason(read(Ended::Off, &[CASE, END], "x\nOops: 0000\n")).contains("Oops: 0000"));
        assert!(reason(read(Ended::Failed, &[], "no such machine")).contains("no such machine"));
    }

    #[test]
    fn a_skip_is_no_pass_and_a_failure_outweighs_all() {
        let skip = read(Ended::Off, &[r#"{"kind":"end","outcome":"skipped","reason":"no fq"}"#], "");
        assert_eq!(row(vec![skip.clone()]).outcome(), Outcome::Skipped("no fq".into()));
        assert_eq!(row(vec![skip.clone(), read(Ended::Off, &[END], "")]).outcome(), Outcome::Passed);
        assert_eq!(row(vec![skip, read(Ended::Off, &[BAD, END], "")]).outcome().name(), "failed");
    }

    #[test]
    fn table_and_json_tell_what_failed() {
        let figures = r#"{"kind":"figures","figures":{"goodput":0.91}}"#;
        let rows = [row(vec![read(Ended::Off, &[CASE, BAD, figures, END], "")])];
        let table = table(&rows, "tcg", Duration::from_secs(2));
        for part in ["6.1.0-40-amd64", "1/2", "p: goodput 0.910", "p failed, b: 3 is not 4", "0 passed, 1 failed"] {
            assert!(table.contains(part), "{part}: {table}");
        }
        let json = json(&rows, "tcg", Duration::from_secs(2));
        assert_eq!(json["runs"][0]["parts"][0]["cases"][1]["case"], "b");
        assert_eq!(json["runs"][0]["outcome"], "failed");
    }
}
