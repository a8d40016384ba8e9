//! As much of ELF as two questions need: which libraries a program names, and what a kernel module says of itself.

/// A little-endian 64-bit ELF file, held in memory. Nothing in it is trusted: what does not fit is absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elf<'a> {
    bytes: &'a [u8],
}

/// Entry tags of `.dynamic`.
const DT_NEEDED: u64 = 1;
/// Size of a section header, and of an entry of `.dynamic`.
const SECTION: usize = 64;
const DYNAMIC: usize = 16;

impl<'a> Elf<'a> {
    /// `None` for files of any other kind.
    pub(super) fn new(bytes: &'a [u8]) -> Option<Self> {
        (bytes.starts_with(b"\x7fELF") && bytes.get(4..6) == Some(&[2, 1])).then_some(Self { bytes })
    }

    fn number(&self, at: usize, size: usize) -> Option<usize> {
        let bytes = self.bytes.get(at..at.checked_add(size)?)?;
        let value = bytes.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        usize::try_from(value).ok()
    }

    /// Name (as an offset), start and size of section `index`.
    fn header(&self, index: usize) -> Option<(usize, &'a [u8])> {
        let at = self.number(0x28, 8)?.checked_add(index.checked_mul(SECTION)?)?;
        let (start, size) = (self.number(at + 24, 8)?, self.number(at + 32, 8)?);
        Some((self.number(at, 4)?, self.bytes.get(start..start.checked_add(size)?)?))
    }

    /// The contents of the section of this name.
    pub(super) fn section(&self, name: &str) -> Option<&'a [u8]> {
        let count = self.number(0x3c, 2)?;
        let (_, names) = self.header(self.number(0x3e, 2)?)?;
        (0..count).filter_map(|i| self.header(i)).find(|(at, _)| text(names, *at) == Some(name)).map(|(_, bytes)| bytes)
    }

    /// The libraries that it names.
    pub(super) fn needed(&self) -> Vec<&'a str> {
        let (Some(dynamic), Some(strings)) = (self.section(".dynamic"), self.section(".dynstr")) else {
            return Vec::new();
        };
        let part = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        dynamic
            .chunks_exact(DYNAMIC)
            .filter(|entry| part(&entry[..8]) == DT_NEEDED)
            .filter_map(|entry| text(strings, usize::try_from(part(&entry[8..])).ok()?))
            .collect()
    }

    /// The values that a kernel module gives for `key` in its `.modinfo`.
    pub(super) fn modinfo(&self, key: &str) -> Vec<&'a str> {
        let Some(info) = self.section(".modinfo") else { return Vec::new() };
        info.split(|&byte| byte == 0)
            .filter_map(|entry| std::str::from_utf8(entry).ok()?.strip_prefix(key)?.strip_prefix('='))
            .collect()
    }
}

/// The NUL-terminated string at `at`.
fn text(strings: &[u8], at: usize) -> Option<&str> {
    let rest = strings.get(at..)?;
    std::str::from_utf8(rest.split(|&byte| byte == 0).next()?).ok()
}

/// An ELF file with the one section `.modinfo`.
#[cfg(test)]
pub(super) fn module(info: &[u8]) -> Vec<u8> {
    let names = b"\0.modinfo\0.shstrtab\0";
    let (info_at, names_at) = (64, 64 + info.len());
    let headers = names_at + names.len();
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(64, 0);
    file[0x28..0x30].copy_from_slice(&(headers as u64).to_le_bytes());
    file[0x3c] = 2;
    file[0x3e] = 1;
    file.extend_from_slice(info);
    file.extend_from_slice(names);
    for (name, at, size) in [(1u32, info_at, info.len()), (10, names_at, names.len())] {
        let mut header = [0; SECTION];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(size as u64).to_le_bytes());
        file.extend_from_slice(&header);
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_names_its_libraries() {
        let bytes = std::fs::read(std::env::current_exe().expect("this test")).expect("readable");
        let needed = Elf::new(&bytes).expect("an ELF file").needed();
        assert!(needed.iter().any(|n| n.starts_with("libc.so")), "{needed:?}");
    }

    #[test]
    fn anything_else_and_anything_torn_names_nothing() {
        assert!(Elf::new(b"#!/bin/sh\n").is_none());
        let bytes = std::fs::read(std::env::current_exe().expect("this test")).expect("readable");
        for end in [6, 0x3f, 0x40, 1_000, bytes.len() / 2] {
            assert_eq!(Elf::new(&bytes[..end]).expect("it starts like one").needed(), [""; 0]);
        }
    }

    #[test]
    fn a_module_says_what_it_depends_on() {
        let module = module(b"\0license=GPL\0depends=ib_core,udp_tunnel\0alias=rdma-link-rxe\0alias=x\0");
        let elf = Elf::new(&module).expect("an ELF file");
        assert_eq!(elf.modinfo("depends"), ["ib_core,udp_tunnel"]);
        assert_eq!(elf.modinfo("alias"), ["rdma-link-rxe", "x"]);
        assert_eq!(elf.modinfo("lias"), [""; 0]);
    }
}
