//! Directories below the target directory, which are made and removed at will.

use std::{fs, path::Path};

use anyhow::Context as _;

/// Makes a directory, and those that it stands in.
pub(super) fn make(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))
}

/// Removes a directory with all that is in it, if it is there.
pub(super) fn remove(dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    Ok(())
}

/// Makes a directory that is empty.
pub(super) fn empty(dir: &Path) -> anyhow::Result<()> {
    remove(dir)?;
    make(dir)
}
