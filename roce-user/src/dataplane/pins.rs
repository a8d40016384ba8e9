//! Where maps and links are pinned: `<bpffs>/roce/v<abi>/<netns inode>-<interface index>/`, mode 0700.

use std::{
    fs,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use roce_common::abi::ABI_VERSION;

use super::instance::netns_inode;

/// Where a BPF filesystem usually is.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// Names of the pinned maps.
pub(super) const MAPS: [&str; 16] = [
    "CONFIG",
    "HEARTBEAT",
    "COUNTERS",
    "LOCAL",
    "FLOWS",
    "ROUND_TRIPS",
    "CNPS",
    "PAIRS",
    "PATH_MTUS",
    "RATES",
    "PACE",
    "START_CLASSES",
    "VQUEUE",
    "CP_CLASSES",
    "CP_DSCP",
    "CP_STATS",
];
/// Names of the pinned links, in the order of detaching: the egress program goes last.
const LINKS: [&str; 3] = [LINK_XDP, LINK_TC_INGRESS, LINK_TC_EGRESS];
/// The XDP link.
pub(super) const LINK_XDP: &str = "link_xdp";
/// The tc ingress link.
pub(super) const LINK_TC_INGRESS: &str = "link_tc_ingress";
/// The tc egress link.
pub(super) const LINK_TC_EGRESS: &str = "link_tc_egress";

/// A directory, since a BPF filesystem takes no files: the clsact qdisc is ours.
const CLSACT_IS_OURS: &str = "clsact";

/// The pin directory of one interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pins {
    dir: PathBuf,
}

impl Pins {
    /// The directory of an interface of the calling thread's network namespace.
    ///
    /// # Errors
    /// When the namespace cannot be told.
    pub fn of(bpffs: &Path, ifindex: u32) -> Result<Self> {
        Ok(Self { dir: Self::base(bpffs).join(format!("{}-{ifindex}", netns_inode()?)) })
    }

    /// Every pin directory of the calling thread's network namespace, with its interface index.
    ///
    /// # Errors
    /// When the directory cannot be read, or pins of another version are there.
    pub fn all(bpffs: &Path) -> Result<Vec<(u32, Self)>> {
        Self::refuse_other_versions(bpffs)?;
        let prefix = format!("{}-", netns_inode()?);
        let base = Self::base(bpffs);
        let entries = match fs::read_dir(&base) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", base.display())),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot read {}", base.display()))?;
            let name = entry.file_name();
            if let Some(ifindex) = name.to_str().and_then(|n| n.strip_prefix(&prefix)).and_then(|n| n.parse().ok()) {
                found.push((ifindex, Self { dir: entry.path() }));
            }
        }
        found.sort_by_key(|(ifindex, _)| *ifindex);
        Ok(found)
    }

    /// Refuses pins of another ABI version: reading them as ours would misread memory.
    ///
    /// # Errors
    /// Names the version found.
    pub fn refuse_other_versions(bpffs: &Path) -> Result<()> {
        let ours = format!("v{ABI_VERSION}");
        let Ok(entries) = fs::read_dir(bpffs.join("roce")) else { return Ok(()) };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let empty = fs::read_dir(entry.path()).is_ok_and(|mut d| d.next().is_none());
            if name.to_str() != Some(&ours) && !empty {
                bail!(
                    "{} holds pins of another version of this program (this is {ours}): use that version's `roce detach`, or remove the directory",
                    entry.path().display()
                );
            }
        }
        Ok(())
    }

    fn base(bpffs: &Path) -> PathBuf {
        bpffs.join("roce").join(format!("v{ABI_VERSION}"))
    }

    /// Creates the directory.
    ///
    /// # Errors
    /// When the BPF filesystem refuses.
    pub fn create(&self) -> Result<()> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .with_context(|| format!("cannot create {}", self.dir.display()))?;
        fs::set_permissions(&self.dir, fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot protect {}", self.dir.display()))
    }

    /// Whether anything is pinned.
    pub fn exist(&self) -> bool {
        self.dir.exists()
    }

    /// Notes, also for who comes after a crash, that the clsact qdisc is ours.
    ///
    /// # Errors
    /// When the BPF filesystem refuses.
    pub(super) fn note_clsact(&self) -> Result<()> {
        let path = self.path(CLSACT_IS_OURS);
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))
    }

    /// Whether that was noted; the note is gone then.
    ///
    /// # Errors
    /// When the BPF filesystem refuses.
    pub(super) fn take_clsact(&self) -> Result<bool> {
        let path = self.path(CLSACT_IS_OURS);
        match fs::remove_dir(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e).with_context(|| format!("cannot remove {}", path.display())),
        }
    }

    /// Path of a pin.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Removes every pin and the directories that become empty; returns how many pins there were. Links go in the order
    /// of [`LINKS`], so that the egress program outlives what relies on it.
    ///
    /// # Errors
    /// When the BPF filesystem refuses.
    pub fn remove(&self) -> Result<u32> {
        let mut removed = 0;
        for name in LINKS.iter().chain(&MAPS) {
            let path = self.path(name);
            match fs::remove_file(&path) {
                Ok(()) => removed += 1,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("cannot remove {}", path.display())),
            }
        }
        if let Err(e) = fs::remove_dir(&self.dir)
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(e).with_context(|| format!("cannot remove {}", self.dir.display()));
        }
        // The parents go with the last interface; they are not empty while others are attached.
        for parent in self.dir.ancestors().skip(1).take(2) {
            if fs::remove_dir(parent).is_err() {
                break;
            }
        }
        Ok(removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_of_a_clsact_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::of(dir.path(), 7).unwrap();
        pins.create().unwrap();
        assert!(!pins.take_clsact().unwrap(), "none was made");
        pins.note_clsact().unwrap();
        assert!(pins.take_clsact().unwrap());
        assert!(!pins.take_clsact().unwrap());
        pins.remove().unwrap();
        assert!(!pins.exist());
    }
}
