//! `--write-findings`: the packets that show what was found, with a few of the same two hosts around each, as pcapng with
//! comments that Wireshark shows.
//!
//! What is evidence is known at the end, so the capture is read twice more: once to learn which packets stand around the
//! evidence, once to write them. What came by stdin was kept in a temporary file for that.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fs::File,
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use roce_common::{units::Addr, wire::Verdict};
use tempfile::NamedTempFile;

use super::{
    capture::{self, Frame, Interfaces, Sink},
    session::STDIN,
    source::{Idle, Progress, Source},
    tunnels::Tunnels,
};
use crate::{
    export::CaptureReport,
    pcapng::{Packet, Writer},
};

/// Packets of the same hosts kept before and behind each piece of evidence.
const AROUND: usize = 8;

/// A copy of what stdin gives.
pub(super) struct Spool(NamedTempFile);

impl Spool {
    /// An empty one.
    ///
    /// # Errors
    ///
    /// There is no room for temporary files.
    pub(super) fn new() -> Result<Self> {
        Ok(Self(NamedTempFile::new().context("cannot make a temporary file for what stdin gives")?))
    }

    /// `input`, with everything that is read from it written down.
    ///
    /// # Errors
    ///
    /// The temporary file cannot be opened again.
    pub(super) fn copying<R: Read>(&self, input: R) -> Result<impl Read + use<R>> {
        Ok(Copying { input, copy: self.0.reopen().context("cannot open a temporary file")? })
    }
}

struct Copying<R> {
    input: R,
    copy: File,
}

impl<R: Read> Read for Copying<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.copy.write_all(&buffer[..n])?;
        Ok(n)
    }
}

/// The file that findings are written to.
pub(super) struct Extract {
    path: PathBuf,
    out: Writer<BufWriter<File>>,
    /// Interfaces described so far, by capture and number.
    interfaces: HashMap<(usize, u32), u32>,
    captures: usize,
}

impl Extract {
    /// Makes the file.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| cannot_write(path))?;
        let out = Writer::new(BufWriter::new(file), "").with_context(|| cannot_write(path))?;
        Ok(Self { path: path.to_owned(), out, interfaces: HashMap::new(), captures: 0 })
    }

    /// Adds the evidence of one capture, which was read from `files`.
    ///
    /// # Errors
    ///
    /// The capture cannot be read again, or the packets cannot be written.
    pub(super) fn add(
        &mut self,
        report: &CaptureReport,
        files: &[PathBuf],
        spool: Option<&Spool>,
        decap: bool,
    ) -> Result<()> {
        let comments = comments(report);
        if !comments.is_empty() {
            let mut around = Around::new(report, decap);
            read_again(files, spool, &mut around, |_, _| {})?;
            let mut writing =
                Writing { extract: self, wanted: &around.wanted, comments: &comments, file: String::new(), before: 0 };
            read_again(files, spool, &mut writing, |writing, (file, before)| {
                (writing.file, writing.before) = (file, before);
            })?;
        }
        self.captures += 1;
        Ok(())
    }

    /// Everything has been added.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub(super) fn finish(self) -> Result<()> {
        self.out.finish().with_context(|| cannot_write(&self.path))?;
        Ok(())
    }

    /// The number of the frame's interface in our file, described if it is new.
    fn interface(&mut self, frame: &Frame<'_>) -> Result<u32> {
        let key = (self.captures, frame.interface);
        if let Some(&number) = self.interfaces.get(&key) {
            return Ok(number);
        }
        // What captures say of their snap lengths is not known here: no limit.
        let number = self
            .out
            .interface(frame.link.number(), frame.interface_name, 0)
            .with_context(|| cannot_write(&self.path))?;
        self.interfaces.insert(key, number);
        Ok(number)
    }

    fn packet(&mut self, frame: &Frame<'_>, comments: &[String]) -> Result<()> {
        let interface = self.interface(frame)?;
        let packet = Packet {
            interface,
            unix_ns: frame.time.0,
            wire_len: u32::try_from(frame.wire_len).unwrap_or(u32::MAX),
            bytes: frame.bytes,
            comments,
            ..Packet::default()
        };
        self.out.packet(&packet).with_context(|| cannot_write(&self.path))
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// The comments of every frame that is evidence.
fn comments(report: &CaptureReport) -> BTreeMap<u64, Vec<String>> {
    let mut comments = BTreeMap::<u64, Vec<String>>::new();
    for finding in &report.findings {
        for evidence in &finding.evidence {
            let Some(frame) = evidence.frame else { continue };
            let psn = evidence.psn.map(|psn| format!(", PSN {psn}")).unwrap_or_default();
            let text = format!("{}: {}{psn}. {}. Check: {}", finding.code, evidence.what, finding.seen, finding.check);
            comments.entry(frame).or_default().push(text);
        }
    }
    comments
}

/// Gives every frame of the capture to `sink` once more; `next_file` hears the name of each file and how many frames were
/// before it.
fn read_again<S: Sink>(
    files: &[PathBuf],
    spool: Option<&Spool>,
    sink: &mut S,
    next_file: impl Fn(&mut S, (String, u64)),
) -> Result<()> {
    let mut interfaces = Interfaces::default();
    let mut packets = 0;
    for file in files {
        next_file(sink, (file.display().to_string(), packets));
        let path = match spool {
            Some(spool) if file == Path::new(STDIN) => spool.0.path(),
            _ => file,
        };
        // What is damaged was told when it was read first.
        Source::open(path, Progress::default())
            .and_then(|mut source| capture::read(&mut source, &mut interfaces, &mut packets, sink))
            .with_context(|| format!("cannot read {} once more", file.display()))?;
    }
    Ok(())
}

/// Finds out which frames stand around the evidence.
struct Around {
    /// By the two hosts, the smaller first.
    pairs: HashMap<(Addr, Addr), Neighbours>,
    /// Of all frames.
    all: Neighbours,
    wanted: BTreeSet<u64>,
    tunnels: Option<Tunnels>,
}

#[derive(Default)]
struct Neighbours {
    evidence: BTreeSet<u64>,
    recent: VecDeque<u64>,
    still_wanted: usize,
}

impl Neighbours {
    fn frame(&mut self, number: u64, wanted: &mut BTreeSet<u64>) {
        if self.evidence.contains(&number) {
            wanted.extend(&self.recent);
            wanted.insert(number);
            self.still_wanted = AROUND;
        } else if self.still_wanted > 0 {
            self.still_wanted -= 1;
            wanted.insert(number);
        }
        if self.recent.len() == AROUND {
            self.recent.pop_front();
        }
        self.recent.push_back(number);
    }
}

fn pair(a: Addr, b: Addr) -> (Addr, Addr) {
    if a <= b { (a, b) } else { (b, a) }
}

impl Around {
    fn new(report: &CaptureReport, decap: bool) -> Self {
        let mut around = Self {
            pairs: HashMap::new(),
            all: Neighbours::default(),
            wanted: BTreeSet::new(),
            tunnels: decap.then(Tunnels::default),
        };
        for evidence in report.findings.iter().flat_map(|f| &f.evidence) {
            let Some(frame) = evidence.frame else { continue };
            let neighbours = match (evidence.at.src, evidence.at.dst) {
                (Some(src), Some(dst)) => around.pairs.entry(pair(src.into(), dst.into())).or_default(),
                _ => &mut around.all,
            };
            neighbours.evidence.insert(frame);
            around.wanted.insert(frame);
        }
        around
    }
}

impl Idle for Around {
    fn idle(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Sink for Around {
    fn frame(&mut self, frame: &Frame<'_>) -> Result<bool> {
        let number = frame.number;
        self.all.frame(number, &mut self.wanted);
        let inner = self.tunnels.as_mut().and_then(|t| t.inner(frame));
        let frame = inner.as_ref().unwrap_or(frame);
        if let Verdict::Roce(packet) = frame.link.parse(&(frame.bytes, frame.wire_len))
            && let Some(neighbours) = self.pairs.get_mut(&pair(packet.src, packet.dst))
        {
            neighbours.frame(number, &mut self.wanted);
        }
        Ok(true)
    }
}

/// Writes the frames that are wanted.
struct Writing<'a> {
    extract: &'a mut Extract,
    wanted: &'a BTreeSet<u64>,
    comments: &'a BTreeMap<u64, Vec<String>>,
    file: String,
    before: u64,
}

impl Idle for Writing<'_> {
    fn idle(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Sink for Writing<'_> {
    fn frame(&mut self, frame: &Frame<'_>) -> Result<bool> {
        if self.wanted.contains(&frame.number) {
            // Its number in the file it comes from, which is not the one in the file that is written.
            let of_file = format!("packet {} of {}", frame.number - self.before, self.file);
            let comments = match self.comments.get(&frame.number) {
                Some(comments) => comments.iter().map(|c| format!("{c} ({of_file})")).collect(),
                None => Vec::new(),
            };
            self.extract.packet(frame, &comments)?;
        }
        Ok(self.wanted.last().is_some_and(|&last| frame.number < last))
    }
}
