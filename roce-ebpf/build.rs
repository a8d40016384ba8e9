//! Relinks the object when the linker changes and tells the code which architecture it is built for.

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=src");
    aya_build::emit_bpf_target_arch_cfg()
}
