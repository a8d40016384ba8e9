//! Where things are: the workspace, its target directory, and cargo.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use crate::exec;

/// The workspace.
#[derive(Clone, Debug)]
pub(crate) struct Project {
    /// The directory of the workspace's Cargo.toml.
    pub(crate) root: PathBuf,
    /// Cargo's target directory, from wherever it is configured.
    pub(crate) target: PathBuf,
}

impl Project {
    /// Asks cargo.
    pub(crate) fn find() -> anyhow::Result<Self> {
        // Cargo sets it when it runs us; the one of the build is for a binary started by hand.
        let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest).parent().context("xtask stands in no workspace")?.to_owned();
        let mut metadata = cargo_in(&root);
        metadata.args(["metadata", "--no-deps", "--format-version", "1"]);
        let json: Value = serde_json::from_slice(&exec::capture(&mut metadata)?).context("reading cargo metadata")?;
        let target = json["target_directory"].as_str().ok_or_else(|| anyhow!("cargo names no target directory"))?;
        Ok(Self { root, target: target.into() })
    }

    /// A cargo command in the workspace.
    pub(crate) fn cargo(&self) -> Command {
        cargo_in(&self.root)
    }

    /// Where the tools we build are installed. roce-user's build script looks there too.
    pub(crate) fn tools(&self) -> PathBuf {
        self.target.join("tools")
    }

    /// A program built with the release profile.
    pub(crate) fn release(&self, program: &str) -> PathBuf {
        self.target.join("release").join(program)
    }
}

/// The cargo that runs us, in `dir`, free of what it told us about our own package.
pub(crate) fn cargo_in(dir: &Path) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(dir);
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}
