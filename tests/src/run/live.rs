//! What is shown while a pass runs: a table that redraws itself on a terminal, a line per second elsewhere. On stderr.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use crossterm::{
    cursor::MoveUp,
    queue,
    style::{Attribute, Print, SetAttribute},
    terminal::{Clear, ClearType},
};

use super::traffic::Pass;
use crate::units::format_rate;

/// Flows shown one by one; more are summed.
const ROWS: usize = 16;
const BAR: usize = 24;

/// Counters of the loop while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoopCounts {
    /// Packets the congestion point marked, where its agent says so while running.
    pub(super) ce: Option<u64>,
    /// CNPs that came back to the senders, where their agents say so while running.
    pub(super) cnp: Option<u64>,
}

/// A moment of a pass.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) pass: Pass,
    pub(super) elapsed: Duration,
    pub(super) total: Duration,
    /// Payload accepted per flow, bits per second.
    pub(super) rates: Vec<f64>,
    pub(super) queue_packets: u32,
    pub(super) queue_limit: u32,
    pub(super) drops: u32,
    pub(super) retransmitted: u64,
    pub(super) loop_counts: Option<LoopCounts>,
}

/// Draws snapshots.
#[derive(Debug)]
pub(super) struct Live {
    terminal: bool,
    /// Lines of the table on the screen.
    drawn: u16,
    /// Second of the last plain line.
    second: Option<u64>,
}

impl Live {
    pub(super) fn new() -> Self {
        Self { terminal: io::stderr().is_terminal(), drawn: 0, second: None }
    }

    /// A line that stays.
    pub(super) fn note(&mut self, text: &str) {
        self.drawn = 0;
        self.second = None;
        // Nobody may be reading; the result counts, not the progress.
        let _ = writeln!(io::stderr(), "{text}");
    }

    pub(super) fn draw(&mut self, s: &Snapshot) {
        let _ = if self.terminal { self.table(s) } else { self.line(s) };
    }

    fn line(&mut self, s: &Snapshot) -> io::Result<()> {
        let second = s.elapsed.as_secs();
        if self.second == Some(second) {
            return Ok(());
        }
        self.second = Some(second);
        writeln!(io::stderr(), "{}", summary_line(s))
    }

    fn table(&mut self, s: &Snapshot) -> io::Result<()> {
        let mut out = io::stderr().lock();
        if self.drawn > 0 {
            queue!(out, MoveUp(self.drawn), Clear(ClearType::FromCursorDown))?;
        }
        queue!(
            out,
            SetAttribute(Attribute::Bold),
            Print(summary_line(s)),
            SetAttribute(Attribute::Reset),
            Print("\n")
        )?;
        let most = s.rates.iter().copied().fold(1.0, f64::max);
        for (i, rate) in s.rates.iter().take(ROWS).enumerate() {
            let bar = "█".repeat((rate / most * BAR as f64).round() as usize);
            queue!(out, Print(format!("  flow {:<3} {:>10}  {bar}\n", i + 1, format_rate(*rate))))?;
        }
        let mut lines = 1 + s.rates.len().min(ROWS);
        if s.rates.len() > ROWS {
            let rest = s.rates[ROWS..].iter().sum();
            queue!(out, Print(format!("  and {} more {:>8}\n", s.rates.len() - ROWS, format_rate(rest))))?;
            lines += 1;
        }
        self.drawn = lines as u16;
        out.flush()
    }
}

fn summary_line(s: &Snapshot) -> String {
    let name = match s.pass {
        Pass::Without => "without",
        Pass::With => "with",
    };
    let mut line = format!(
        "{name:<7} {:>4.1}/{:.0} s  goodput {:>9}  queue {:>3}/{}  drops {}  retransmitted {}",
        s.elapsed.as_secs_f64(),
        s.total.as_secs_f64(),
        format_rate(s.rates.iter().sum()),
        s.queue_packets,
        s.queue_limit,
        s.drops,
        s.retransmitted
    );
    let counts = s.loop_counts.unwrap_or_default();
    for (name, value) in [("CE", counts.ce), ("CNP", counts.cnp)] {
        if let Some(value) = value {
            line.push_str(&format!("  {name} {value}"));
        }
    }
    line
}
