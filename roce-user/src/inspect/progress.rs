//! A bar on the terminal that shows how far the reading is; nothing where stderr is no terminal.

use std::{
    io::{IsTerminal as _, stdout},
    path::PathBuf,
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{session::STDIN, source::Progress};

/// Redrawn at most so often per second.
const PER_SECOND: u8 = 10;

/// The bar.
pub(super) struct Bar {
    bar: ProgressBar,
    progress: Progress,
}

impl Bar {
    /// A bar over the bytes of all files; `lines`: stdout gets a line per packet, and if it is a terminal there is no bar.
    pub(super) fn new(files: &[PathBuf], progress: Progress, lines: bool) -> Self {
        let hidden = lines && stdout().is_terminal();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(PER_SECOND) };
        let whole: Option<u64> = files
            .iter()
            .map(|f| {
                if f.as_os_str() == STDIN {
                    None
                } else {
                    f.metadata().ok().filter(std::fs::Metadata::is_file).map(|m| m.len())
                }
            })
            .sum();
        let bar = ProgressBar::with_draw_target(whole, target);
        let template = match whole {
            Some(_) => "{bar:30} {bytes}/{total_bytes} {bytes_per_sec}, {msg} frames, {eta} left",
            None => "{spinner} {bytes} {bytes_per_sec}, {msg} frames",
        };
        // The templates are ours: if they were wrong the default is still a bar.
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, progress }
    }

    /// Shows the state after `frames` frames.
    pub(super) fn show(&self, frames: u64) {
        if self.bar.is_hidden() || self.bar.elapsed() < Duration::from_millis(300) {
            return;
        }
        self.bar.set_message(frames.to_string());
        self.bar.set_position(self.progress.load(Relaxed));
    }

    /// Takes the bar away.
    pub(super) fn done(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.done();
    }
}
