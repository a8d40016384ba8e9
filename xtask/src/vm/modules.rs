//! The kernel modules that guests use, with what they depend on, unpacked: decompressing them in an emulated CPU is slow.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};

use super::{cpio::Archive, elf::Elf};
use crate::exec;

/// Of [`WANTED`] and of what is written into the archive: raise it when either changes, and caches are made anew.
pub(super) const VERSION: u32 = 1;

/// The modules that the guest program may ask for. One that a kernel does not have as a module is built in, or not there, which
/// the guest finds out.
const WANTED: [&str; 58] = [
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "veth",
    "dummy",
    "bridge",
    "ifb",
    "8021q",
    "vrf",
    "vxlan",
    "geneve",
    "rdma_rxe",
    "ib_uverbs",
    "ib_umad",
    "ib_cm",
    "rdma_cm",
    "rdma_ucm",
    "nvme_rdma",
    "nvmet_rdma",
    "null_blk",
    "crc32_generic",
    "crc32c_generic",
    "crc32_pclmul",
    "crc32_cryptoapi",
    "crc32c_cryptoapi",
    "crc32c_intel",
    "libcrc32c",
    "crc32",
    "sch_fq",
    "sch_fq_codel",
    "sch_netem",
    "sch_htb",
    "sch_tbf",
    "sch_prio",
    "sch_ingress",
    "sch_multiq",
    "sch_mqprio",
    "sch_red",
    "sch_codel",
    "sch_etf",
    "cls_bpf",
    "cls_flower",
    "cls_u32",
    "cls_matchall",
    "cls_fw",
    "cls_basic",
    "act_bpf",
    "act_pedit",
    "act_csum",
    "act_mirred",
    "act_gact",
    "act_police",
    "act_skbedit",
    "em_u32",
    "tcp_bbr",
    "tcp_dctcp",
    "af_packet_diag",
    "inet_diag",
];

/// Where the packages of a kernel put its modules.
pub(super) fn tree(root: &Path, release: &str) -> Option<PathBuf> {
    ["usr/lib/modules", "lib/modules"].iter().map(|dir| root.join(dir).join(release)).find(|dir| dir.is_dir())
}

/// One module, unpacked.
struct Module {
    bytes: Vec<u8>,
    depends: Vec<String>,
    aliases: Vec<String>,
}

/// Writes the wanted modules of the kernel in `tree` with the indexes that busybox's modprobe reads.
pub(super) fn pack(tree: &Path, release: &str, archive: &mut Archive<impl Write>) -> anyhow::Result<()> {
    let mut files = BTreeMap::new();
    find(&tree.join("kernel"), &mut files)?;
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let mut open: Vec<String> = WANTED.iter().map(|name| normal(name)).collect();
    while let Some(name) = open.pop() {
        let Some(file) = files.get(&name).filter(|_| !modules.contains_key(&name)) else { continue };
        let module = read(file)?;
        open.extend(module.depends.iter().cloned());
        modules.insert(name, module);
    }
    if !modules.contains_key("rdma_rxe") {
        bail!("Linux {release} has no module rdma_rxe in {}", tree.display());
    }
    let dir = Path::new("usr/lib/modules").join(release);
    let (mut dep, mut alias) = (String::new(), String::new());
    for (name, module) in &modules {
        archive.file(dir.join(format!("{name}.ko")), 0o644, &module.bytes)?;
        let closure: String = closure(&modules, name).iter().map(|d| format!(" {d}.ko")).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(dep, "{name}.ko:{closure}");
        for pattern in &module.aliases {
            let _ = writeln!(alias, "alias {pattern} {name}");
        }
    }
    archive.file(dir.join("modules.dep"), 0o644, dep.as_bytes())?;
    archive.file(dir.join("modules.alias"), 0o644, alias.as_bytes())?;
    // busybox reads it too; the guest program knows by the other what is built in.
    archive.file(dir.join("modules.symbols"), 0o644, b"")?;
    archive.copy(&tree.join("modules.builtin"), dir.join("modules.builtin"))
}

/// What must be loaded before `name`, as depmod writes it: each stands before those that it depends on itself.
fn closure(modules: &BTreeMap<String, Module>, name: &str) -> Vec<String> {
    fn visit(modules: &BTreeMap<String, Module>, name: &str, seen: &mut BTreeSet<String>, order: &mut Vec<String>) {
        for dep in modules.get(name).map_or(&[][..], |m| &m.depends) {
            if modules.contains_key(dep) && seen.insert(dep.clone()) {
                visit(modules, dep, seen, order);
                order.push(dep.clone());
            }
        }
    }
    let mut order = Vec::new();
    visit(modules, name, &mut BTreeSet::from([name.to_owned()]), &mut order);
    order.reverse();
    order
}

/// The kernel writes dashes and underscores in names of modules as it likes.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// All modules below `dir`, by name.
fn find(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some((name, rest)) = name.split_once(".ko")
            && matches!(rest, "" | ".xz" | ".zst" | ".gz")
        {
            files.insert(normal(name), path.clone());
        }
    }
    Ok(())
}

/// The program that unpacks a file of this name; `None` where nothing has to.
pub(super) fn unpacker(file: &Path) -> Option<&'static str> {
    match file.extension()?.to_str()? {
        "xz" => Some("xz"),
        "zst" => Some("zstd"),
        "gz" => Some("gzip"),
        _ => None,
    }
}

fn read(file: &Path) -> anyhow::Result<Module> {
    let bytes = match unpacker(file) {
        Some(program) => exec::capture(Command::new(program).arg("-dc").arg(file))
            .with_context(|| format!("unpacking {} with {program} (packages xz-utils, zstd, gzip)", file.display()))?,
        None => fs::read(file).with_context(|| format!("reading {}", file.display()))?,
    };
    let Some(elf) = Elf::new(&bytes) else { bail!("{} is no kernel module", file.display()) };
    let depends =
        elf.modinfo("depends").iter().flat_map(|d| d.split(',')).filter(|d| !d.is_empty()).map(normal).collect();
    let aliases = elf.modinfo("alias").iter().map(|&a| a.to_owned()).collect();
    Ok(Module { bytes, depends, aliases })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::elf;

    fn modules(graph: &[(&str, &[&str])]) -> BTreeMap<String, Module> {
        let module = |deps: &[&str]| Module {
            bytes: Vec::new(),
            depends: deps.iter().map(|d| (*d).to_owned()).collect(),
            aliases: Vec::new(),
        };
        graph.iter().map(|(name, deps)| ((*name).to_owned(), module(deps))).collect()
    }

    #[test]
    fn dependencies_stand_behind_what_needs_them() {
        let all = modules(&[("rxe", &["core", "tunnel"]), ("core", &["base"]), ("tunnel", &["base"]), ("base", &[])]);
        let order = closure(&all, "rxe");
        let at = |name: &str| order.iter().position(|n| n == name).expect("it is there");
        assert_eq!(order.len(), 3);
        assert!(at("core") < at("base") && at("tunnel") < at("base"), "{order:?}");
        assert_eq!(closure(&all, "base"), [""; 0]);
    }

    #[test]
    fn what_is_built_in_is_no_dependency_and_circles_end() {
        let all = modules(&[("a", &["b", "builtin"]), ("b", &["a"])]);
        assert_eq!(closure(&all, "a"), ["b"]);
    }

    #[test]
    fn the_archive_holds_the_module_and_its_indexes() {
        let dir = std::env::temp_dir().join(format!("xtask-modules-{}", std::process::id()));
        let kernel = dir.join("kernel/drivers");
        fs::create_dir_all(&kernel).expect("a directory");
        fs::write(kernel.join("rdma_rxe.ko"), elf::module(b"depends=ib-core,vmlinux\0alias=rdma-link-rxe\0"))
            .expect("a file");
        fs::write(kernel.join("ib_core.ko"), elf::module(b"depends=\0")).expect("a file");
        fs::write(kernel.join("other.ko"), elf::module(b"depends=\0")).expect("a file");
        fs::write(dir.join("modules.builtin"), "kernel/x.ko\n").expect("a file");
        let mut bytes = Vec::new();
        pack(&dir, "9.9", &mut Archive::new(&mut bytes)).expect("packed");
        fs::remove_dir_all(&dir).expect("removed");
        let text = String::from_utf8_lossy(&bytes);
        for part in ["usr/lib/modules/9.9/ib_core.ko", "rdma_rxe.ko: ib_core.ko\n", "alias rdma-link-rxe rdma_rxe\n"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("other.ko"));
    }
}
