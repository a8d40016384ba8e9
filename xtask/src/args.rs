//! The command line: what was asked for, and what is wrong with it.

use std::{collections::BTreeSet, ffi::OsString};

use crate::vm::Options;

/// What a person may type, printed by `help`.
pub(crate) const HELP: &str = "\
usage: cargo xtask VERB [OPTIONS]

Every verb first makes sure of what it needs, says what it installs, and names with its command what it cannot install.

  setup                     install what building, running and testing need
  build [--release]         build the roce program and the lab
  run [LAB OPTIONS]         build all, then run the lab on this machine: senders, a software switch, a receiver;
                            RDMA traffic without the control loop and with it, and a side-by-side summary
  run -- --iface IF …       build all, then `roce run --iface IF …` on a real interface
  test [unit|build|bpf|lab]…
                            the named test tiers; without a name all four
  vm [VM OPTIONS]           real soft-RoCE: scenarios in guests that run Debian's kernels, and a table of what came of them
  lint                      formatting, and clippy for host and BPF code apart
  bench packet [OPTIONS]    cost per packet of each BPF program
  bench reaction [--cnps N] [--json]
                            from a CNP to the rate of the next packet, from a CE mark to its CNP, on real packets
  bench scale [--qps N] [--json]
                            CPU and memory of the controller with very many limited queue pairs
  bench inspect [--megabytes N] [--rounds N] [--json]
                            speed and memory of `roce inspect` against tshark on generated captures (room for 5 N MB)
  help                      this text

lab options (their meaning and defaults: cargo xtask run --help)
  --senders N  --qps N  --link RATE  --queue N  --time S  --pmtu N  --timeout N  --pacer P  --ipv6
  --json

vm options
  --kernel NAME,…           a series, `newest` or a release (uname -r); may be repeated [default: 6.12]
  --all                     the kernels 6.1, 6.12 and newest
  --scenario NAME,…         only these; may be repeated [default: all]
  --list                    name the scenarios and run none
  --shell                   an interactive guest instead
  --json                    the results as one JSON object
  --mirror URL              the Debian archive to fetch from [default: the one in this machine's apt sources]
  --refresh                 fetch newer kernels and programs than those fetched before
  --jobs N                  CPUs that guests share [default: the CPUs of this machine]

exit codes: those of the program that was run; 1 a test or check failed; 2 wrong usage or environment
";

/// Options of the lab that take a value.
const LAB_VALUES: [&str; 9] =
    ["--senders", "--qps", "--link", "--queue", "--time", "--pmtu", "--timeout", "--pacer", "--ingress"];
/// Options of the lab that take none.
const LAB_FLAGS: [&str; 4] = ["--json", "--ipv6", "--help", "-h"];

/// A test tier of `cargo xtask test`, in the order in which they run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Tier {
    /// Tests that need nothing.
    Unit,
    /// Editing roce-common rebuilds the BPF object.
    Build,
    /// BPF programs in the running kernel.
    Bpf,
    /// Network namespaces and real packets.
    Lab,
}

impl Tier {
    /// Every tier, in the order in which they run.
    pub(crate) const ALL: [Self; 4] = [Self::Unit, Self::Build, Self::Bpf, Self::Lab];

    /// The name on the command line and in the table.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Build => "build",
            Self::Bpf => "bpf",
            Self::Lab => "lab",
        }
    }
}

/// What was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    /// Print [`HELP`].
    Help,
    /// Install what is missing.
    Setup,
    /// Build the programs.
    Build {
        /// With the release profile.
        release: bool,
    },
    /// Run the lab with these options.
    Lab(Vec<OsString>),
    /// Run `roce run` with these options.
    Roce(Vec<OsString>),
    /// Run these tiers.
    Test(BTreeSet<Tier>),
    /// Scenarios in guests.
    Vm(Options),
    /// Formatting and clippy.
    Lint,
    /// Compare `roce inspect` with tshark, with these options.
    BenchInspect(Vec<OsString>),
    /// Run the packet benchmark with these options.
    BenchPacket(Vec<OsString>),
    /// Run another benchmark that needs root: its name and options.
    BenchLoop(&'static str, Vec<OsString>),
}

/// Reads the arguments behind the program's name. The error is one line for the person who typed them.
pub(crate) fn parse(args: &[OsString]) -> Result<Verb, String> {
    let Some((verb, rest)) = args.split_first() else {
        return Err("a verb is missing: setup, build, run, test, vm, lint, bench or help".into());
    };
    let wants_help = |rest: &[OsString]| rest.iter().any(|a| a == "--help" || a == "-h");
    match verb.to_str() {
        Some("help" | "--help" | "-h") => Ok(Verb::Help),
        Some("run") => run(rest),
        Some("bench") => bench(rest),
        Some("setup" | "build" | "test" | "vm" | "lint") if wants_help(rest) => Ok(Verb::Help),
        Some("setup") => nothing_more("setup", rest).map(|()| Verb::Setup),
        Some("lint") => nothing_more("lint", rest).map(|()| Verb::Lint),
        Some("build") => match rest {
            [] => Ok(Verb::Build { release: false }),
            [flag] if flag == "--release" => Ok(Verb::Build { release: true }),
            _ => Err(format!("build takes --release and nothing else, not `{}`", join(rest))),
        },
        Some("test") => test(rest),
        Some("vm") => Options::parse(rest).map(Verb::Vm),
        _ => Err(format!(
            "there is no verb `{}`: use setup, build, run, test, vm, lint, bench or help",
            verb.to_string_lossy()
        )),
    }
}

fn run(rest: &[OsString]) -> Result<Verb, String> {
    if let Some((first, options)) = rest.split_first()
        && first == "--"
    {
        return if options.is_empty() {
            Err("behind `--` stand the options of `roce run`, for instance --iface eth0".into())
        } else {
            Ok(Verb::Roce(options.to_vec()))
        };
    }
    let mut args = rest.iter();
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        let (name, inline) = match text.split_once('=') {
            Some((name, _)) => (name, true),
            None => (&*text, false),
        };
        if LAB_VALUES.contains(&name) {
            if !inline && args.next().is_none() {
                return Err(format!("{name} needs a value"));
            }
        } else if !LAB_FLAGS.contains(&&*text) {
            return Err(format!(
                "`{text}` is no option of the lab ({} {}); options of `roce run` stand behind `--`",
                LAB_VALUES.join(" "),
                LAB_FLAGS[..2].join(" ")
            ));
        }
    }
    Ok(Verb::Lab(rest.to_vec()))
}

fn test(rest: &[OsString]) -> Result<Verb, String> {
    let mut tiers = BTreeSet::new();
    for arg in rest {
        let tier = Tier::ALL.into_iter().find(|tier| arg == tier.name());
        tiers.insert(tier.ok_or_else(|| {
            format!("there is no test tier `{}`: use unit, build, bpf or lab", arg.to_string_lossy())
        })?);
    }
    if tiers.is_empty() {
        tiers.extend(Tier::ALL);
    }
    Ok(Verb::Test(tiers))
}

fn bench(rest: &[OsString]) -> Result<Verb, String> {
    match rest.split_first() {
        Some((what, options)) if what == "inspect" => Ok(Verb::BenchInspect(options.to_vec())),
        Some((what, options)) if what == "packet" => Ok(Verb::BenchPacket(options.to_vec())),
        Some((what, _)) if what == "--help" || what == "-h" => Ok(Verb::Help),
        Some((what, options)) if what == "reaction" => Ok(Verb::BenchLoop("reaction", options.to_vec())),
        Some((what, options)) if what == "scale" => Ok(Verb::BenchLoop("scale", options.to_vec())),
        Some((what, _)) => {
            Err(format!("there is no benchmark `{}`: use packet, reaction, scale or inspect", what.to_string_lossy()))
        }
        None => Err("bench needs the name of a benchmark: packet, reaction, scale or inspect".into()),
    }
}

fn nothing_more(verb: &str, rest: &[OsString]) -> Result<(), String> {
    if rest.is_empty() { Ok(()) } else { Err(format!("{verb} takes no arguments, not `{}`", join(rest))) }
}

fn join(args: &[OsString]) -> String {
    args.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn os(args: &[&str]) -> Vec<OsString> {
        args.iter().map(OsString::from).collect()
    }

    fn ok(args: &[&str]) -> Verb {
        parse(&os(args)).unwrap_or_else(|e| panic!("{args:?}: {e}"))
    }

    fn err(args: &[&str]) -> String {
        match parse(&os(args)) {
            Ok(verb) => panic!("{args:?} became {verb:?}"),
            Err(e) => e,
        }
    }

    #[test]
    fn run_without_arguments_is_the_lab() {
        assert_eq!(ok(&["run"]), Verb::Lab(vec![]));
    }

    #[test]
    fn lab_options_reach_the_lab_as_they_were_typed() {
        let typed = ["--senders", "8", "--link=50mbit", "--json", "--queue", "32", "--time", "5", "--qps", "2"];
        assert_eq!(ok(&[&["run"][..], &typed[..]].concat()), Verb::Lab(os(&typed)));
    }

    #[test]
    fn a_value_is_taken_whatever_it_looks_like() {
        // The lab judges values; a negative number must not be mistaken for an option here.
        assert_eq!(ok(&["run", "--senders", "-1"]), Verb::Lab(os(&["--senders", "-1"])));
    }

    #[test]
    fn options_behind_two_dashes_are_those_of_roce() {
        let behind = ["--iface", "eth0", "--json", "--", "--odd"];
        assert_eq!(ok(&[&["run", "--"][..], &behind[..]].concat()), Verb::Roce(os(&behind)));
        assert!(err(&["run", "--"]).contains("--iface"));
    }

    #[test]
    fn a_roce_option_without_the_dashes_is_explained() {
        let e = err(&["run", "--iface", "eth0"]);
        assert!(e.contains("`--iface`") && e.contains("behind `--`"), "{e}");
        assert!(err(&["run", "--json=yes"]).contains("--json=yes"));
        assert_eq!(err(&["run", "--senders"]), "--senders needs a value");
    }

    #[test]
    fn tiers_are_run_once_and_in_their_order() {
        assert_eq!(ok(&["test"]), Verb::Test(Tier::ALL.into()));
        assert_eq!(ok(&["test", "lab", "unit", "lab"]), Verb::Test([Tier::Unit, Tier::Lab].into()));
        assert!(err(&["test", "vm"]).contains("unit, build, bpf or lab"));
    }

    #[test]
    fn build_knows_one_option() {
        assert_eq!(ok(&["build"]), Verb::Build { release: false });
        assert_eq!(ok(&["build", "--release"]), Verb::Build { release: true });
        assert!(err(&["build", "--debug"]).contains("--debug"));
    }

    #[test]
    fn bench_names_what_it_measures() {
        assert_eq!(ok(&["bench", "packet", "--rounds", "3"]), Verb::BenchPacket(os(&["--rounds", "3"])));
        assert_eq!(ok(&["bench", "inspect", "--json"]), Verb::BenchInspect(os(&["--json"])));
        assert_eq!(ok(&["bench", "reaction"]), Verb::BenchLoop("reaction", vec![]));
        assert_eq!(ok(&["bench", "scale", "--qps", "9"]), Verb::BenchLoop("scale", os(&["--qps", "9"])));
        assert!(err(&["bench"]).contains("packet"));
        assert!(err(&["bench", "disk"]).contains("`disk`"));
    }

    #[test]
    fn help_is_found_everywhere() {
        for args in [&["help"][..], &["--help"], &["-h"], &["test", "--help"], &["lint", "-h"], &["bench", "-h"]] {
            assert_eq!(ok(args), Verb::Help, "{args:?}");
        }
        // The lab documents its own options.
        assert_eq!(ok(&["run", "--help"]), Verb::Lab(os(&["--help"])));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        assert!(err(&[]).contains("verb"));
        assert!(err(&["biuld"]).contains("`biuld`"));
        assert!(err(&["lint", "--fix"]).contains("--fix"));
        assert!(err(&["setup", "now"]).contains("now"));
    }
}
