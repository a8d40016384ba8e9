//! What a compressed kernel image holds. A guest that boots it directly (PVH, which CONFIG_PVH of Debian's kernels is for) passes over
//! the firmware, and its emulated CPU over unpacking it: a second and more of each boot.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{elf::Elf, modules};
use crate::exec::{self, say};

/// Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header": where it says that it is one, how many sectors of 512 bytes are in
/// front of the rest, and where in the rest the payload is.
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// What the kernel's build puts behind the payload: its size when unpacked.
const SIZE: usize = 4;

/// What the image `vmlinuz` holds, unpacked once beside it; the image itself where that cannot be done.
pub(super) fn unpacked(image: &Path) -> anyhow::Result<PathBuf> {
    let to = image.with_file_name("vmlinux");
    if to.is_file() {
        return Ok(to);
    }
    let bytes = fs::read(image).with_context(|| format!("reading {}", image.display()))?;
    let Some((extension, payload)) = payload(&bytes) else { return Ok(image.to_owned()) };
    let (packed, unfinished) = (to.with_extension(extension), to.with_extension("part"));
    let Some(program) = modules::unpacker(&packed).filter(|program| exec::find(program).is_some()) else {
        say(format_args!(
            "guests boot slower without a program that unpacks .{extension}: apt-get install xz-utils zstd"
        ));
        return Ok(image.to_owned());
    };
    fs::write(&packed, payload).with_context(|| format!("writing {}", packed.display()))?;
    let kernel = exec::capture(Command::new(program).arg("-dc").arg(&packed));
    fs::remove_file(&packed).with_context(|| format!("removing {}", packed.display()))?;
    let Some(kernel) = kernel.ok().filter(|kernel| boots(kernel)) else { return Ok(image.to_owned()) };
    fs::write(&unfinished, kernel).with_context(|| format!("writing {}", unfinished.display()))?;
    fs::rename(&unfinished, &to).context("renaming a kernel")?;
    Ok(to)
}

/// What is packed in a bzImage, and what the name of such a file ends in.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    let number = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    (image.get(MAGIC.0..)?.starts_with(MAGIC.1)).then_some(())?;
    let start = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * 512 + number(PAYLOAD_OFFSET)?;
    let payload = image.get(start..start.checked_add(number(PAYLOAD_LENGTH)?.checked_sub(SIZE)?)?)?;
    let formats: [(&[u8], _); 3] = [(b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zst"), (b"\x1f\x8b", "gz")];
    let (_, extension) = formats.iter().find(|(magic, _)| payload.starts_with(magic))?;
    Some((extension, payload))
}

/// Whether a kernel says where it is entered by PVH (XEN_ELFNOTE_PHYS32_ENTRY, xen/interface/elfnote.h): without, the emulator refuses it.
fn boots(kernel: &[u8]) -> bool {
    const NOTE: &[u8] = b"\x12\0\0\0Xen\0";
    Elf::new(kernel).is_some_and(|elf| elf.section(".notes").is_some_and(|n| n.windows(NOTE.len()).any(|w| w == NOTE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x400];
        image[SETUP_SECTORS] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16u32.to_le_bytes());
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(&[0xcc; 16]);
        image.extend_from_slice(payload);
        image.extend_from_slice(b"behind");
        image
    }

    #[test]
    fn the_payload_of_an_image_is_found_without_its_size() {
        assert_eq!(payload(&image(b"\xfd7zXZ\0packedSIZE")), Some(("xz", &b"\xfd7zXZ\0packed"[..])));
        assert_eq!(payload(&image(b"\x28\xb5\x2f\xfdpackedSIZE")), Some(("zst", &b"\x28\xb5\x2f\xfdpacked"[..])));
        assert_eq!(payload(&image(b"BZh9packedSIZE")), None, "a format that nothing here unpacks");
        let whole = image(b"\xfd7zXZ\0packedSIZE");
        for end in [0, 0x200, 0x24b, 0x24f, 0x410, whole.len() - 11] {
            assert_eq!(payload(&whole[..end]), None, "torn at {end}");
        }
        assert_eq!(payload(&vec![0xff; 0x1000]), None);
    }

    #[test]
    fn an_image_that_cannot_be_unpacked_is_booted_as_it_is() {
        let dir = std::env::temp_dir().join(format!("roce-image-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join("vmlinuz"), image(b"\x1f\x8bno such thingSIZE")).expect("written");
        assert_eq!(unpacked(&dir.join("vmlinuz")).expect("no error"), dir.join("vmlinuz"));
        let left: Vec<_> = fs::read_dir(&dir).expect("readable").flatten().map(|e| e.file_name()).collect();
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(left, ["vmlinuz"]);
    }
}
