//! Formatting and clippy. Host and BPF code are checked apart: together, cargo would unify std into the BPF crate.

use crate::{
    exec::{self, Stop, say},
    need,
    project::Project,
};

/// Runs every check, also behind one that failed; 1 when any did.
pub(crate) fn run(project: &Project) -> Result<u8, Stop> {
    need::to_lint(project)?;
    let mut failed = Vec::new();

    say("formatting");
    if exec::run_aside(project.cargo().args(["fmt", "--all", "--check"]))? != 0 {
        failed.push("formatting (cargo fmt --all mends it)");
    }

    say("clippy for the host crates");
    let mut host = project.cargo();
    host.args(["clippy", "--workspace", "--exclude", "roce-ebpf", "--all-targets", "--", "-D", "warnings"]);
    if exec::run_aside(&mut host)? != 0 {
        failed.push("clippy for the host crates");
    }

    say("clippy for the BPF crate");
    let mut bpf = project.cargo();
    bpf.args(["clippy", "-p", "roce-ebpf", "--bins", "--target", "bpfel-unknown-none", "-Z", "build-std=core"])
        // Its own directory: the flags below would make cargo build the host's artefacts anew.
        .arg("--target-dir")
        .arg(project.target.join("lint-bpf"))
        .args(["--", "-D", "warnings"])
        // build-std is unstable, the pinned toolchain a stable one.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", format!("--cfg=bpf_target_arch=\"{}\"", bpf_arch()));
    if exec::run_aside(&mut bpf)? != 0 {
        failed.push("clippy for the BPF crate");
    }

    if failed.is_empty() {
        say("lint found nothing");
        return Ok(0);
    }
    say(format_args!("lint failed: {}", failed.join(", ")));
    Ok(1)
}

/// The architecture as aya names it.
fn bpf_arch() -> &'static str {
    match std::env::consts::ARCH {
        "riscv32" | "riscv64" => "riscv64",
        other => other,
    }
}
