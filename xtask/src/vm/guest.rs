//! Our own programs for guests: linked statically, packed into an initramfs, and asked which scenarios there are.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use super::{cpio::Archive, kernels::Kernel};
use crate::{
    exec::{self, Stop},
    need,
    project::Project,
};

/// A target whose programs need no library of the guest.
const TARGET: &str = "x86_64-unknown-linux-musl";
/// The profile of Cargo.toml for them: like release, without what only debuggers read.
const PROFILE: &str = "guest";
const PROGRAMS: [&str; 2] = ["roce", "roce-guest"];

/// The programs.
#[derive(Debug)]
pub(super) struct Guest {
    dir: PathBuf,
}

/// A scenario of the guest program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Scenario {
    pub(super) name: String,
    pub(super) about: String,
    pub(super) parts: Vec<Part>,
}

/// What one guest runs of a scenario.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) cpus: usize,
    /// Percent of one of the host's CPUs that are kept for it.
    pub(super) share: usize,
    pub(super) memory_mib: u64,
    /// After this the guest is ended.
    pub(super) limit: Duration,
    /// The first release of Linux that can run it.
    pub(super) since: Option<(u64, u64)>,
}

impl Guest {
    /// Builds them.
    pub(super) fn build(project: &Project) -> Result<Self, Stop> {
        need::to_build(project)?;
        need::target(project, TARGET)?;
        let mut cargo = project.cargo();
        cargo.args(["build", "--profile", PROFILE, "--target", TARGET, "-p", "roce-user", "-p", "roce-tests"]);
        for program in PROGRAMS {
            cargo.args(["--bin", program]);
        }
        exec::must(&mut cargo)?;
        Ok(Self { dir: project.target.join(TARGET).join(PROFILE) })
    }

    /// Asks the guest program, which runs here as it does there.
    pub(super) fn scenarios(&self) -> anyhow::Result<Vec<Scenario>> {
        let text = exec::capture(Command::new(self.dir.join("roce-guest")).arg("list"))?;
        let json: Value = serde_json::from_slice(&text).context("reading the list of scenarios")?;
        let list = json.as_array().ok_or_else(|| anyhow!("the list of scenarios is none"))?;
        list.iter().map(|s| scenario(s).ok_or_else(|| anyhow!("a scenario is incomplete: {s}"))).collect()
    }

    /// The whole initramfs for a kernel: Debian's programs, the kernel's modules, ours.
    pub(super) fn initramfs(&self, userland: &Path, kernel: &Kernel, file: &Path) -> anyhow::Result<()> {
        let context = || format!("writing {}", file.display());
        let mut out = BufWriter::new(File::create(file).with_context(context)?);
        for part in [userland, &kernel.modules] {
            let mut input = File::open(part).with_context(|| format!("reading {}", part.display()))?;
            io::copy(&mut input, &mut out).with_context(context)?;
        }
        let mut archive = Archive::new(&mut out);
        for program in PROGRAMS {
            archive.copy(&self.dir.join(program), format!("usr/bin/{program}"))?;
        }
        archive.link("init", "usr/bin/roce-guest")?;
        archive.finish()?;
        out.flush().with_context(context)
    }
}

fn scenario(json: &Value) -> Option<Scenario> {
    let text = |json: &Value, key: &str| json[key].as_str().map(str::to_owned);
    let part = |json: &Value| {
        Some(Part {
            name: text(json, "name")?,
            cpus: usize::try_from(json["cpus"].as_u64()?).ok()?,
            share: usize::try_from(json["share"].as_u64()?).ok()?,
            memory_mib: json["memory_mib"].as_u64()?,
            limit: Duration::from_secs(json["seconds"].as_u64()?),
            since: json["since"][0].as_u64().zip(json["since"][1].as_u64()),
        })
    };
    Some(Scenario {
        name: text(json, "name")?,
        about: text(json, "about")?,
        parts: json["parts"].as_array()?.iter().map(part).collect::<Option<_>>()?,
    })
}

/// The first two numbers of a release of Linux.
pub(super) fn version(release: &str) -> Option<(u64, u64)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn scenarios_are_read_as_the_guest_lists_them() {
        let json = json!({
            "name": "loss", "about": "…",
            "parts": [
                {"name": "write", "cpus": 1, "share": 66, "memory_mib": 512, "seconds": 90, "since": null},
                {"name": "separate", "cpus": 2, "share": 200, "memory_mib": 512, "seconds": 90, "since": [7, 2]},
            ],
        });
        let loss = scenario(&json).expect("complete");
        assert_eq!((loss.name.as_str(), loss.parts.len()), ("loss", 2));
        assert_eq!((loss.parts[0].limit, loss.parts[0].since), (Duration::from_secs(90), None));
        assert_eq!((loss.parts[0].share, loss.parts[1].cpus, loss.parts[1].since), (66, 2, Some((7, 2))));
        assert_eq!(scenario(&json!({"name": "x", "about": "", "parts": [{"name": "y"}]})), None);
    }

    #[test]
    fn releases_have_versions() {
        assert_eq!(version("6.12.57+deb13-amd64"), Some((6, 12)));
        assert_eq!(version("7.3-amd64"), Some((7, 3)));
        assert_eq!(version("amd64"), None);
        assert!(version("6.1.0-40-amd64") < version("6.12.57+deb13-amd64"));
    }
}
