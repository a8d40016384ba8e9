//! The build tier: editing roce-common rebuilds the BPF object.
//!
//! Cargo knows of no tie between the object and roce-common but roce-user's build-dependency on roce-ebpf. Without it the
//! build succeeds and embeds a stale object. So this edits a copy of the workspace and looks at the object.

use std::{
    collections::BTreeSet,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use crate::{
    exec::{self, Stop, say},
    project::{self, Project},
    tiers::failed,
};

/// The file to edit, and in it a constant that the object's code contains.
const FILE: &str = "roce-common/src/wire/mod.rs";
const BEFORE: &str = "pub const UDP_PORT: u16 = 4791;";
const AFTER: &str = "pub const UDP_PORT: u16 = 4792;";

/// The workspace's files, tracked or new, as git lists them.
pub(crate) fn files(project: &Project) -> anyhow::Result<Vec<String>> {
    let mut git = std::process::Command::new("git");
    git.current_dir(&project.root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listing = String::from_utf8(exec::capture(&mut git)?).context("a file name is not UTF-8")?;
    Ok(listing.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

/// Runs the tier on a copy of these files.
pub(crate) fn run(project: &Project, files: &[String]) -> Result<(), Stop> {
    let place = project.target.join("build-test");
    let copy = place.join("workspace");
    mirror(project, files, &copy)?;
    let edited = copy.join(FILE);
    let text = fs::read_to_string(&edited).with_context(|| format!("reading {}", edited.display()))?;
    if text.matches(BEFORE).count() != 1 {
        return Err(failed(format_args!("`{BEFORE}` is not in {FILE}: tell this test of another constant")));
    }
    let object = |step: &str| -> Result<(u64, Vec<u8>), Stop> {
        let bytes = build(&copy, &place.join("target"))?;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let hash = hasher.finish();
        say(format_args!("{step}: the object is {hash:016x}, {} bytes", bytes.len()));
        Ok((hash, bytes))
    };
    let first = object("as it is")?;
    fs::write(&edited, text.replace(BEFORE, AFTER)).context("editing the copy")?;
    let second = object("roce-common edited");
    // Restored whatever came of it, for the next run.
    fs::write(&edited, &text).context("restoring the copy")?;
    let second = second?;
    let third = object("restored")?;
    if second == first {
        return Err(failed("an edit of roce-common left the BPF object as it was: roce-user embeds a stale one"));
    }
    if third != first {
        return Err(failed("the same sources gave another BPF object than before"));
    }
    Ok(())
}

/// Makes `copy` hold the files as they are now, and no others. Files that are equal are left alone, so that cargo has
/// nothing to do for them.
fn mirror(project: &Project, files: &[String], copy: &Path) -> anyhow::Result<()> {
    let mut wanted = BTreeSet::new();
    for name in files {
        let source = project.root.join(name);
        // Deleted, and git not yet told; or a symbolic link to nothing.
        if !source.is_file() {
            continue;
        }
        let target = copy.join(name);
        let bytes = fs::read(&source).with_context(|| format!("reading {}", source.display()))?;
        if fs::read(&target).ok().as_ref() != Some(&bytes) {
            fs::create_dir_all(target.parent().unwrap_or(copy))?;
            fs::write(&target, bytes).with_context(|| format!("writing {}", target.display()))?;
        }
        wanted.insert(target);
    }
    remove_others(copy, &wanted)
}

fn remove_others(dir: &Path, wanted: &BTreeSet<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| format!("removing {}", path.display()));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Has cargo bring roce-user up to date, and returns the object that it embeds. A check is enough: it runs the build
/// script, which builds the object.
fn build(workspace: &Path, target: &Path) -> Result<Vec<u8>, Stop> {
    let mut cargo = project::cargo_in(workspace);
    cargo
        .args(["check", "--quiet", "-p", "roce-user", "--lib", "--message-format=json-render-diagnostics"])
        .env("CARGO_TARGET_DIR", target);
    let output = exec::must_output(&mut cargo)?;
    let dir = output
        .split(|&b| b == b'\n')
        .filter_map(|line| serde_json::from_slice::<Value>(line).ok())
        .find_map(|message| out_dir(&message))
        .ok_or_else(|| anyhow!("cargo does not say where roce-user's build script puts the object"))?;
    let object = dir.join("roce-ebpf");
    Ok(fs::read(&object).with_context(|| format!("reading {}", object.display()))?)
}

/// The output directory of roce-user's build script, when this message names it.
fn out_dir(message: &Value) -> Option<PathBuf> {
    let ours = message["package_id"].as_str()?.contains("/roce-user#");
    (message["reason"] == "build-script-executed" && ours).then(|| message["out_dir"].as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constant_that_the_test_edits_is_there() {
        assert_eq!(include_str!("../../roce-common/src/wire/mod.rs").matches(BEFORE).count(), 1);
        assert!(FILE.ends_with("roce-common/src/wire/mod.rs"));
    }

    #[test]
    fn the_output_directory_is_that_of_roce_user() {
        let message = |package: &str| {
            serde_json::json!({"reason": "build-script-executed", "out_dir": "/o",
                "package_id": format!("path+file:///w/{package}#0.1.0")})
        };
        assert_eq!(out_dir(&message("roce-user")), Some(PathBuf::from("/o")));
        assert_eq!(out_dir(&message("roce-ebpf")), None);
        assert_eq!(out_dir(&serde_json::json!({"reason": "build-finished"})), None);
    }
}
