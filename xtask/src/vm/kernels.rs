//! Debian's kernels: which there are, and of one the image and the modules that guests use.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fs::{self, File},
    io::BufWriter,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{apt::Apt, cpio::Archive, dirs, modules};
use crate::exec::say;

/// The series that `--all` runs. 6.1 is the oldest of Debian's archive that has what the programs call: they read packets by
/// `bpf_xdp_load_bytes`, which Linux 5.18 has first, and the release before, bullseye, has 5.10.
pub(super) const SERIES: [&str; 3] = ["6.1", "6.12", NEWEST];
/// Stands for the newest kernel of the archive.
pub(super) const NEWEST: &str = "newest";

/// A kernel, ready to boot.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    /// As it was asked for: a series, or `newest`.
    pub(super) name: String,
    /// Its release, as `uname -r` gives it.
    pub(super) release: String,
    /// Image.
    pub(super) image: PathBuf,
    /// The part of the initramfs that holds its modules.
    pub(super) modules: PathBuf,
}

impl Kernel {
    /// From the cache; `None` where it is not complete.
    fn cached(dir: &Path, name: &str, release: &str) -> Option<Self> {
        let dir = dir.join(release);
        let kernel = Self {
            name: name.to_owned(),
            release: release.to_owned(),
            image: dir.join("vmlinuz"),
            modules: dir.join(format!("modules-{}.cpio", modules::VERSION)),
        };
        (kernel.image.is_file() && kernel.modules.is_file()).then_some(kernel)
    }

    /// Fetches it where it is not in the cache below `dir`.
    fn fetch(apt: &Apt, dir: &Path, name: &str, package: &Package) -> anyhow::Result<Self> {
        let release = &package.release;
        if let Some(kernel) = Self::cached(dir, name, release) {
            return Ok(kernel);
        }
        say(format_args!("fetching Linux {release}"));
        let (root, ready) = (dir.join(format!(".{release}")), dir.join(release));
        dirs::remove(&root)?;
        dirs::remove(&ready)?;
        apt.unpack(&package.parts(), &root)?;
        let tree =
            modules::tree(&root, release).with_context(|| format!("{} has no modules of {release}", root.display()))?;
        let images = [root.join(format!("boot/vmlinuz-{release}")), tree.join("vmlinuz")];
        let Some(image) = images.iter().find(|i| i.is_file()) else {
            bail!("the packages of Linux {release} hold no image");
        };
        dirs::make(&ready)?;
        fs::copy(image, ready.join("vmlinuz")).context("copying a kernel image")?;
        let path = ready.join(format!("modules-{}.cpio", modules::VERSION));
        let unfinished = path.with_extension("part");
        let file = File::create(&unfinished).with_context(|| format!("writing {}", unfinished.display()))?;
        modules::pack(&tree, release, &mut Archive::new(BufWriter::new(file)))?;
        fs::rename(&unfinished, &path).context("renaming an initramfs")?;
        dirs::remove(&root)?;
        Self::cached(dir, name, release).context("the kernel was fetched but is not there")
    }
}

/// The kernels of these names: from the cache below `dir`, or fetched, `apt` being opened only then.
pub(super) fn get(
    names: &[String],
    dir: &Path,
    refresh: bool,
    apt: &mut dyn FnMut() -> anyhow::Result<Apt>,
) -> anyhow::Result<Vec<Kernel>> {
    let index = dir.join("index.json");
    let mut known: BTreeMap<String, String> = match fs::read(&index) {
        Ok(text) if !refresh => {
            let value: Value = serde_json::from_slice(&text).with_context(|| format!("reading {}", index.display()))?;
            let entries = value.as_object().into_iter().flatten();
            entries.filter_map(|(name, release)| Some((name.clone(), release.as_str()?.to_owned()))).collect()
        }
        _ => BTreeMap::new(),
    };
    let mut kernels = Vec::new();
    let mut opened = None;
    for name in names {
        if let Some(kernel) = known.get(name).and_then(|release| Kernel::cached(dir, name, release)) {
            kernels.push(kernel);
            continue;
        }
        let (apt, packages) = match &opened {
            Some(opened) => opened,
            None => {
                let apt = apt()?;
                let packages = Package::all(&apt)?;
                opened.insert((apt, packages))
            }
        };
        let Some(package) = Package::choose(packages, name) else {
            bail!("Debian's archive has no kernel `{name}` with soft-RoCE: there are {}", list(packages));
        };
        let kernel = Kernel::fetch(apt, dir, name, package)?;
        known.insert(name.clone(), kernel.release.clone());
        fs::write(&index, json!(known).to_string()).with_context(|| format!("writing {}", index.display()))?;
        kernels.push(kernel);
    }
    Ok(kernels)
}

/// A kernel in the archive.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Package {
    release: String,
    /// Since 6.19 image and modules are packages of their own.
    split: bool,
}

impl Package {
    /// All of the archive, oldest first.
    fn all(apt: &Apt) -> anyhow::Result<Vec<Self>> {
        let mut all = Vec::new();
        for (prefix, split) in [("linux-image-", false), ("linux-modules-", true)] {
            let names = apt.names(prefix)?;
            let releases =
                names.iter().filter_map(|name| name.strip_prefix(prefix)).filter(|release| is_plain(release));
            all.extend(releases.map(|release| Self { release: release.to_owned(), split }));
        }
        // Where both name one release, the split package is its real one.
        all.sort_by(|a, b| by_version(&a.release, &b.release).then(b.split.cmp(&a.split)));
        all.dedup_by(|a, b| a.release == b.release);
        Ok(all)
    }

    /// The newest of a series, of all, or the one of this release.
    fn choose<'a>(all: &'a [Self], name: &str) -> Option<&'a Self> {
        let series = |p: &&Self| p.release.strip_prefix(name).is_some_and(|rest| rest.starts_with(['.', '-', '+']));
        match name {
            NEWEST => all.last(),
            _ => all.iter().find(|p| p.release == name).or_else(|| all.iter().rev().find(series)),
        }
    }

    fn parts(&self) -> Vec<String> {
        let release = &self.release;
        if self.split {
            ["modules", "binary", "base"].map(|part| format!("linux-{part}-{release}")).to_vec()
        } else {
            vec![format!("linux-image-{release}")]
        }
    }
}

/// Whether a release is an ordinary kernel: the cloud kernels lack rdma_rxe, and the others are not what users boot.
fn is_plain(release: &str) -> bool {
    release.starts_with(|c: char| c.is_ascii_digit())
        && release
            .strip_suffix("-amd64")
            .is_some_and(|version| !["cloud", "rt", "dbg"].iter().any(|f| version.contains(f)))
}

/// Numbers by their value, everything else as it is written.
fn by_version(a: &str, b: &str) -> Ordering {
    let parts = |text: &str| -> Vec<(u64, String)> {
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let word_end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
            let (word, tail) = rest.split_at(word_end);
            let number_end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
            let (number, tail) = tail.split_at(number_end);
            parts.push((number.parse().unwrap_or(0), word.to_owned()));
            rest = tail;
        }
        parts
    };
    let key = |text| parts(text).into_iter().map(|(number, word)| (word, number)).collect::<Vec<_>>();
    key(a).cmp(&key(b))
}

fn list(packages: &[Package]) -> String {
    packages.iter().map(|p| p.release.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages(names: &[&str]) -> Vec<Package> {
        names.iter().map(|n| Package { release: (*n).to_owned(), split: false }).collect()
    }

    #[test]
    fn kernels_are_chosen_by_series_release_and_age() {
        let all = packages(&["6.1.0-9-amd64", "6.1.0-40-amd64", "6.12.57+deb13-amd64", "7.3.1+deb14-amd64"]);
        let chosen = |name| Package::choose(&all, name).map(|p| p.release.as_str());
        assert_eq!(chosen("6.1"), Some("6.1.0-40-amd64"));
        assert_eq!(chosen("6.12"), Some("6.12.57+deb13-amd64"));
        assert_eq!(chosen("6.1.0-9-amd64"), Some("6.1.0-9-amd64"));
        assert_eq!(chosen(NEWEST), Some("7.3.1+deb14-amd64"));
        assert_eq!(chosen("6"), Some("6.12.57+deb13-amd64"));
        assert_eq!(chosen("5.10"), None);
    }

    #[test]
    fn releases_are_ordered_as_numbers() {
        let mut releases = vec!["6.1.0-40-amd64", "7.2.3-amd64", "6.1.0-9-amd64", "6.12.57+deb13-amd64", "6.9.1-amd64"];
        releases.sort_by(|a, b| by_version(a, b));
        assert_eq!(releases, ["6.1.0-9-amd64", "6.1.0-40-amd64", "6.9.1-amd64", "6.12.57+deb13-amd64", "7.2.3-amd64"]);
    }

    #[test]
    fn only_ordinary_kernels_count() {
        for release in ["6.1.0-40-amd64", "7.3.1+deb14-amd64"] {
            assert!(is_plain(release), "{release}");
        }
        for release in [
            "amd64",
            "6.1.0-40-cloud-amd64",
            "6.1.0-40-rt-amd64",
            "6.1.0-40-amd64-unsigned",
            "6.1.0-40-686",
            "6.1.0-40-amd64-dbg",
        ] {
            assert!(!is_plain(release), "{release}");
        }
    }
}
