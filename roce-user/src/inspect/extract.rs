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
use crate::export::CaptureReport;

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
    out: BufWriter<File>,
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
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut extract =
            Self { path: path.to_owned(), out: BufWriter::new(file), interfaces: HashMap::new(), captures: 0 };
        let mut body = Vec::new();
        body.extend(BYTE_ORDER.to_le_bytes());
        body.extend([1, 0, 0, 0]);
        body.extend([0xff; 8]);
        option(&mut body, SHB_USERAPPL, concat!("roce ", env!("CARGO_PKG_VERSION")).as_bytes());
        end_of_options(&mut body);
        extract.block(SECTION_HEADER, &body)?;
        Ok(extract)
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
    pub(super) fn finish(mut self) -> Result<()> {
        self.out.flush().with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn block(&mut self, kind: u32, body: &[u8]) -> Result<()> {
        let len = (body.len() as u32 + 12).to_le_bytes();
        [&kind.to_le_bytes()[..], &len, body, &len]
            .into_iter()
            .try_for_each(|part| self.out.write_all(part))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// The number of the frame's interface in our file, described if it is new.
    fn interface(&mut self, frame: &Frame<'_>) -> Result<u32> {
        let key = (self.captures, frame.interface);
        if let Some(&number) = self.interfaces.get(&key) {
            return Ok(number);
        }
        let number = self.interfaces.len() as u32;
        let mut body = Vec::new();
        body.extend(frame.link.number().to_le_bytes());
        body.extend([0; 6]);
        option(&mut body, IF_NAME, frame.interface_name.as_bytes());
        option(&mut body, IF_TSRESOL, &[NANOSECONDS]);
        end_of_options(&mut body);
        self.block(INTERFACE_DESCRIPTION, &body)?;
        self.interfaces.insert(key, number);
        Ok(number)
    }

    fn packet(&mut self, frame: &Frame<'_>, comments: &[String]) -> Result<()> {
        let interface = self.interface(frame)?;
        let mut body = Vec::new();
        let numbers = [
            interface,
            (frame.time.0 >> 32) as u32,
            frame.time.0 as u32,
            frame.bytes.len() as u32,
            u32::try_from(frame.wire_len).unwrap_or(u32::MAX),
        ];
        numbers.iter().for_each(|n| body.extend(n.to_le_bytes()));
        body.extend(frame.bytes);
        body.resize(body.len().next_multiple_of(4), 0);
        for comment in comments {
            option(&mut body, COMMENT, comment.as_bytes());
        }
        if !comments.is_empty() {
            end_of_options(&mut body);
        }
        self.block(ENHANCED_PACKET, &body)
    }
}

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const COMMENT: u16 = 1;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
/// As a negative power of ten.
const NANOSECONDS: u8 = 9;

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    body.extend(code.to_le_bytes());
    body.extend((value.len() as u16).to_le_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn end_of_options(body: &mut Vec<u8>) {
    body.extend([0; 4]);
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
