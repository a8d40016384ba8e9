//! Builds the BPF object with the toolchain of this build and embeds it.

use std::{env, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use aya_build::{Package, Toolchain};

/// The linker that reads the bitcode of our rustc; `cargo xtask setup` builds it here.
const TOOLS_DIR: &str = "target/tools/bin";

fn main() -> Result<()> {
    println!("cargo:rerun-if-env-changed=PATH");
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().context("the crate has no parent directory")?;
    let tools = root.join(TOOLS_DIR);
    let path =
        env::join_paths(std::iter::once(tools).chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())))?;
    if !env::split_paths(&path).any(|dir| dir.join("bpf-linker").is_file()) {
        bail!("bpf-linker is missing: run `cargo xtask setup`, which builds it into {TOOLS_DIR}");
    }
    // SAFETY: the build script has one thread.
    unsafe {
        env::set_var("PATH", path);
        // build-std is unstable; the pinned toolchain is a stable one.
        env::set_var("RUSTC_BOOTSTRAP", "1");
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
