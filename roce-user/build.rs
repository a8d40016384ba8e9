//! Builds the BPF object with the toolchain of this build and embeds it.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use aya_build::{Package, Toolchain};

/// The linker that reads the bitcode of our rustc; `cargo xtask setup` builds it here, in the target directory.
const LINKER: &str = "tools/bin/bpf-linker";

fn main() -> Result<()> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().context("the crate has no parent directory")?;
    let linker = linker(root)?;
    println!("cargo:rerun-if-changed={}", linker.display());
    let tools = linker.parent().context("the linker has no directory")?.to_owned();
    let path =
        env::join_paths(std::iter::once(tools).chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())))?;
    // SAFETY: the build script has one thread.
    unsafe {
        env::set_var("PATH", path);
        // build-std is unstable; the pinned toolchain is a stable one.
        env::set_var("RUSTC_BOOTSTRAP", "1");
        // aya-build shows each line of the inner cargo as a warning, and cargo shows those again at every build. What the
        // compiler says of our code comes all the same.
        env::set_var("CARGO_TERM_QUIET", "true");
        env::remove_var("CARGO_TERM_VERBOSE");
    }
    let toolchain = env::var("RUSTUP_TOOLCHAIN").unwrap_or_else(|_| "stable".into());
    aya_build::build_ebpf(
        [Package {
            name: "roce-ebpf",
            root_dir: root.join("roce-ebpf").to_str().context("the path is not UTF-8")?,
            ..Package::default()
        }],
        Toolchain::Custom(&toolchain),
    )
}

/// Our own linker, in whichever target directory cargo was told to use, or else the one in PATH.
fn linker(root: &Path) -> Result<PathBuf> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR")?);
    let ours = out.ancestors().map(|dir| dir.join(LINKER)).chain([root.join("target").join(LINKER)]);
    let path = env::var_os("PATH").unwrap_or_default();
    let others = env::split_paths(&path).map(|dir| dir.join("bpf-linker"));
    match ours.chain(others).find(|file| file.is_file()) {
        Some(linker) => Ok(linker),
        None => bail!("bpf-linker is missing: run `cargo xtask setup`, which builds it into the target directory"),
    }
}
