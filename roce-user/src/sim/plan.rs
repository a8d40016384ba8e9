//! Plans: several runs in a TOML file.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::options::{Job, Options};

/// A file of runs. Keys are the options of `roce sim`, with `_` for `-`; `[defaults]` is below every `[[run]]`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What every run starts from.
    #[serde(default)]
    pub defaults: Options,
    /// The runs.
    #[serde(default)]
    pub run: Vec<Options>,
}

impl Plan {
    /// Reads a file.
    ///
    /// # Errors
    /// Names the file, the line and the key.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text, path)
    }

    /// Parses the text of the file at `path`.
    ///
    /// # Errors
    /// Names the file, the line and the key.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let error = match toml::from_str::<Self>(text) {
            Ok(plan) => {
                ensure!(!plan.run.is_empty(), "{}: a plan needs at least one [[run]]", path.display());
                return Ok(plan);
            }
            Err(error) => error,
        };
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.get(..at).unwrap_or("").matches('\n').count() + 1;
        let content = text.lines().nth(line - 1).unwrap_or("");
        let key = content.split_once('=').map_or("", |(key, _)| key.trim());
        let what = error.message().lines().collect::<Vec<_>>().join(" ");
        if key.is_empty() || what.contains(&format!("`{key}`")) {
            bail!("{}:{line}: {what}", path.display());
        }
        bail!("{}:{line}: {key}: {what}", path.display());
    }

    /// The jobs of every run; `command_line` is above them all.
    ///
    /// # Errors
    /// A run that cannot be simulated; named by its name or number.
    pub fn jobs(&self, command_line: &Options, path: &Path) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        for (i, run) in self.run.iter().enumerate() {
            let mut options = command_line.clone().over(run.clone()).over(self.defaults.clone());
            let name = options.name.take().unwrap_or_else(|| (i + 1).to_string());
            options.name = Some(name.clone());
            jobs.extend(options.jobs().with_context(|| format!("{}: run {name}", path.display()))?);
        }
        Ok(jobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    fn parse(text: &str) -> Result<Vec<Job>> {
        let path = Path::new("plan.toml");
        Plan::parse(text, path)?.jobs(&Options::default(), path)
    }

    #[test]
    fn runs_start_from_the_defaults_and_lists_multiply() {
        let jobs = parse(
            "[defaults]\nlink = \"1g\"\ntime = \"50ms\"\nseeds = 2\n[defaults.dcqcn]\nkmin = 2000\n\
             [[run]]\nname = \"a\"\nflows = [2, 4]\npreset = [\"soft\", \"paper\"]\n[run.dcqcn]\nkmax = 50000\n\
             [[run]]\nqueue = 32\nlink = [\"100m\", \"200m\", 300000000]\n",
        )
        .unwrap();
        assert_eq!(jobs.len(), 4 + 3);
        let first = &jobs[0];
        assert_eq!((first.name.as_str(), first.seeds, first.preset), ("a", 2, Some(Preset::Soft)));
        let params = first.scenario.params.unwrap();
        assert_eq!((params.kmin, params.kmax), (2_000, 50_000));
        assert_eq!((jobs[3].scenario.flows, jobs[3].preset), (4, Some(Preset::Paper)));
        let last = &jobs[6];
        assert_eq!((last.name.as_str(), last.scenario.queue_bytes), ("2", 32_000));
        assert_eq!(last.scenario.link.bits_per_sec(), 300_000_000);
    }

    #[test]
    fn errors_name_the_file_and_the_place() {
        for (text, want) in [
            ("", "plan.toml: a plan needs at least one [[run]]"),
            ("[[run]]\nflow = 3\n", "plan.toml:2: unknown field `flow`"),
            ("[[run]]\nflows = \"x\"\n", "plan.toml:2: flows: `x` is no number of flows"),
            ("[[run]]\nflows = []\n", "plan.toml:2: flows: an empty list"),
            ("[[run]]\ntime = \"soon\"\n", "plan.toml:2: time: `soon` is not a time"),
            ("[[run]]\nqueue = -1\n", "plan.toml:2: queue:"),
            ("[[run]]\nname = \"b\"\nflows = 0\n", "plan.toml: run b: flows must be 1 to 65536"),
            ("[[run]]\n[run.dcqcn]\nkmin = 9\nkmax = 8\n", "plan.toml: run 1: kmin = 9: must be at most kmax"),
            ("nonsense", "plan.toml:1:"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.starts_with(want), "{text:?}: {error}");
        }
    }
}
