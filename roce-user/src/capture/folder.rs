//! The directory of recordings: a ring of files, of which the oldest go.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, BufWriter},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::{Recording, Settings, file};
use crate::{events::Wall, export::utc};
use anyhow::{Context as _, Result, bail};

const SUFFIX: &str = ".pcapng";
/// Of a file that is being written.
const PART: &str = ".part";

/// A directory of recordings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Folder {
    settings: Settings,
}

impl Folder {
    /// Takes a directory, which is made where there is none, and tries to write there.
    ///
    /// # Errors
    /// When it is none, or cannot be written to.
    pub fn open(settings: Settings) -> Result<Self> {
        let dir = &settings.dir;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("--capture: cannot create {}", dir.display()))?;
        let probe = dir.join(format!(".roce-{}{PART}", std::process::id()));
        create(&probe)
            .and_then(|_| fs::remove_file(&probe))
            .with_context(|| format!("--capture: cannot write to {}: choose another directory", dir.display()))?;
        Ok(Self { settings })
    }

    /// What is captured.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Writes a recording, and removes the oldest files beyond the limits.
    ///
    /// # Errors
    /// When the directory takes no more; nothing of the recording is left then.
    pub fn store(&self, iface: &str, recording: &Recording) -> Result<PathBuf> {
        let wall = Wall::now();
        let time = utc::compact(wall.unix_ns(recording.trigger.time));
        let name = format!("roce-{time}-{iface}-{}{SUFFIX}", recording.trigger.reason.name());
        let path = self.settings.dir.join(&name);
        let part = self.settings.dir.join(format!(".{name}{PART}"));
        let written = create(&part).map_err(anyhow::Error::from).and_then(|out| {
            file::write(BufWriter::new(&out), iface, &self.settings, recording, wall)?;
            Ok(out.metadata()?.len())
        });
        let stored = written.and_then(|bytes| {
            self.make_room(bytes)?;
            Ok(fs::rename(&part, &path)?)
        });
        if let Err(error) = stored {
            // What is half written is of no use; if it cannot be removed either, the error says enough.
            let _gone = fs::remove_file(&part);
            return Err(error.context(format!("cannot write {}", path.display())));
        }
        Ok(path)
    }

    /// Removes the oldest files until one more, of `bytes`, is within the limits.
    fn make_room(&self, bytes: u64) -> Result<()> {
        let mut files = self.files()?;
        let mut total: u64 = files.iter().map(|(_, size)| size).sum();
        files.reverse();
        while let Some((path, size)) = files.last() {
            if files.len() < self.settings.limit_files && total + bytes <= self.settings.limit_bytes {
                break;
            }
            match fs::remove_file(path) {
                Ok(()) => {}
                // The agent of another interface was faster.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("cannot remove {}", path.display())),
            }
            total -= size;
            files.pop();
        }
        Ok(())
    }

    /// Recordings with their sizes, the oldest first. Other files are nobody's business here.
    fn files(&self) -> Result<Vec<(PathBuf, u64)>> {
        let dir = &self.settings.dir;
        let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
        let mut files: Vec<_> = entries
            .flatten()
            .filter(|e| e.file_name().to_str().is_some_and(is_recording))
            .filter_map(|e| Some((e.path(), e.metadata().ok().filter(fs::Metadata::is_file)?.len())))
            .collect();
        files.sort();
        Ok(files)
    }
}

/// Whether a file of this name is ours: `roce-YYYYMMDDTHHMMSS.µµµµµµZ-….pcapng`.
fn is_recording(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("roce-").and_then(|n| n.strip_suffix(SUFFIX)) else { return false };
    let Some((time, _)) = rest.split_once('-') else { return false };
    let shape = |c: char| if c.is_ascii_digit() { '0' } else { c };
    time.chars().map(shape).eq("00000000T000000.000000Z".chars())
}

/// A new file that only its owner may read.
fn create(path: &Path) -> io::Result<fs::File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// A number of bytes such as `64m` or `2g`.
///
/// # Errors
/// When it is none.
pub fn bytes(text: &str) -> Result<u64> {
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match lower.get(digits.len()..).unwrap_or_default() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1u64 << 30,
        _ => bail!("`{text}` is no number of bytes, such as 500k, 64m or 2g"),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(factor))
        .filter(|n| *n != 0)
        .with_context(|| format!("`{text}` is no number of bytes above 0, such as 500k, 64m or 2g"))
}
