//! The options of `cargo xtask vm`.

use std::ffi::OsString;

use super::kernels::SERIES;

/// What is run where nothing else is asked for.
const DEFAULT: &str = "6.12";

/// What was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Options {
    /// Names of kernels.
    pub(super) kernels: Vec<String>,
    /// Names of scenarios; none = all.
    pub(super) scenarios: Vec<String>,
    /// An interactive guest instead of scenarios.
    pub(super) shell: bool,
    /// List the scenarios and run nothing.
    pub(super) list: bool,
    pub(super) json: bool,
    /// Look for newer kernels and packages than those in the cache.
    pub(super) refresh: bool,
    pub(super) mirror: Option<String>,
    /// Guests at once; `None` = as many as there are CPUs for.
    pub(super) jobs: Option<usize>,
}

impl Options {
    /// Reads the arguments behind `vm`. The error is one line for the person who typed them.
    pub(crate) fn parse(args: &[OsString]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter().map(|a| a.to_string_lossy().into_owned());
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (arg, None),
            };
            let flag = match name.as_str() {
                "--all" => {
                    options.kernels.extend(SERIES.map(str::to_owned));
                    true
                }
                "--shell" => set(&mut options.shell),
                "--list" => set(&mut options.list),
                "--json" => set(&mut options.json),
                "--refresh" => set(&mut options.refresh),
                _ => false,
            };
            if flag {
                if inline.is_some() {
                    return Err(format!("{name} takes no value"));
                }
                continue;
            }
            if !["--kernel", "--scenario", "--mirror", "--jobs"].contains(&name.as_str()) {
                return Err(format!("`{name}` is no option of vm"));
            }
            let Some(value) = inline.or_else(|| args.next()).filter(|v| !v.is_empty()) else {
                return Err(format!("{name} needs a value"));
            };
            let names = || value.split(',').map(str::to_owned);
            match name.as_str() {
                "--kernel" => options.kernels.extend(names()),
                "--scenario" => options.scenarios.extend(names()),
                "--mirror" => options.mirror = Some(value),
                _ => {
                    let jobs = value.parse().ok().filter(|jobs| (1..=64).contains(jobs));
                    options.jobs =
                        Some(jobs.ok_or_else(|| format!("--jobs wants a number from 1 to 64, not `{value}`"))?);
                }
            }
        }
        if options.kernels.is_empty() {
            options.kernels.push(DEFAULT.to_owned());
        }
        let mut seen = std::collections::BTreeSet::new();
        options.kernels.retain(|kernel| seen.insert(kernel.clone()));
        if options.shell && (options.kernels.len() > 1 || !options.scenarios.is_empty() || options.json) {
            return Err("--shell takes one --kernel, no --scenario and no --json".into());
        }
        Ok(options)
    }
}

fn set(flag: &mut bool) -> bool {
    *flag = true;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, String> {
        Options::parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn kernels_and_scenarios_may_be_repeated_and_listed() {
        let o = parse(&["--kernel", "6.1,newest", "--kernel=6.1", "--scenario", "loss", "--json", "--jobs", "2"])
            .expect("valid");
        assert_eq!(o.kernels, ["6.1", "newest"]);
        assert_eq!(o.scenarios, ["loss"]);
        assert!(o.json && !o.shell && o.jobs == Some(2));
        assert_eq!(parse(&[]).expect("valid").kernels, [DEFAULT]);
        assert_eq!(parse(&["--all"]).expect("valid").kernels, SERIES);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (args, said) in [
            (&["--kernels"][..], "--kernels"),
            (&["--kernel"], "needs a value"),
            (&["--json=yes"], "takes no value"),
            (&["--jobs", "0"], "`0`"),
            (&["--shell", "--all"], "--shell"),
            (&["loss"], "`loss`"),
        ] {
            let e = parse(args).expect_err("invalid");
            assert!(e.contains(said), "{args:?}: {e}");
        }
    }
}
