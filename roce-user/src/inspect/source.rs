//! Where captures come from: a file or stdin, packed with gzip or not, as one stream of bytes.
//!
//! A thread of its own reads and unpacks ahead into a few buffers that go round, so that memory stays bounded and the
//! analysis does not wait for the disk. Every buffer has room before its content for what was left of the one before: a
//! record that lies across two buffers is made whole by copying that rest, and nothing else is ever copied.

use std::{
    fs::File,
    io::{self, BufReader, ErrorKind, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use flate2::bufread::MultiGzDecoder;

/// The most bytes that [`Source::take`] gives at once.
pub(super) const MOST_AT_ONCE: usize = 1 << 20;
/// Bytes read at a time: small enough to stay in a CPU's cache on the way from the reader to the analysis.
const READ: usize = 256 << 10;
/// Buffers that go round.
const BUFFERS: usize = 4;
/// After Ctrl-C what the writer at the other end of a pipe still flushes is read: until it is silent for this long …
const SILENCE: Duration = Duration::from_millis(300);
/// … or for this long at most.
const GRACE: Duration = Duration::from_secs(2);
/// How often the interrupt flag is looked at while nothing comes.
const LOOK: Duration = Duration::from_millis(50);
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Whoever waits for what a source gives.
pub(super) trait Idle {
    /// Nothing has come for now: what was made of the bytes so far should be shown.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    fn idle(&mut self) -> Result<()>;
}

/// How far the reading is, for a progress bar: bytes of the file as it lies on disk.
pub(super) type Progress = Arc<AtomicU64>;

struct Buffer {
    /// [`MOST_AT_ONCE`] bytes of room, then [`READ`] bytes of content.
    data: Box<[u8]>,
    start: usize,
    end: usize,
}

/// A stream of bytes.
pub(super) struct Source {
    filled: Receiver<io::Result<Buffer>>,
    empty: Sender<Buffer>,
    buffer: Buffer,
    /// Offset of the next byte in the (unpacked) stream.
    position: u64,
    ended: bool,
    failure: Option<io::Error>,
    interrupt: Option<Arc<AtomicBool>>,
    interrupted_at: Option<Instant>,
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    ///
    /// It cannot be opened.
    pub(super) fn open(path: &Path, progress: Progress) -> Result<Self> {
        let file = File::open(path)?;
        Self::start(file, true, progress, None)
    }

    /// Reads `input`, a pipe: what comes is passed on at once. When `interrupt` becomes true the stream ends.
    ///
    /// # Errors
    ///
    /// No thread can be started.
    pub(super) fn pipe(
        input: impl Read + Send + 'static,
        progress: Progress,
        interrupt: Arc<AtomicBool>,
    ) -> Result<Self> {
        Self::start(input, false, progress, Some(interrupt))
    }

    fn start(
        input: impl Read + Send + 'static,
        fill: bool,
        progress: Progress,
        interrupt: Option<Arc<AtomicBool>>,
    ) -> Result<Self> {
        let (give_filled, filled) = channel();
        let (empty, take_empty) = channel::<Buffer>();
        for _ in 1..BUFFERS {
            // The receiver is in scope.
            let _ = empty.send(Buffer { data: vec![0; MOST_AT_ONCE + READ].into(), start: 0, end: 0 });
        }
        thread::Builder::new()
            .name("capture reader".to_owned())
            .spawn(move || {
                let mut input = match unpacked(Counted { input, progress }) {
                    Ok(input) => input,
                    Err(error) => {
                        // Whoever waited is gone.
                        let _ = give_filled.send(Err(error));
                        return;
                    }
                };
                for mut buffer in take_empty {
                    let read = read_some(&mut input, &mut buffer.data[MOST_AT_ONCE..], fill);
                    let (n, error) = match read {
                        Ok(0) => return,
                        Ok(n) => (n, None),
                        Err((n, error)) => (n, Some(error)),
                    };
                    buffer.start = MOST_AT_ONCE;
                    buffer.end = MOST_AT_ONCE + n;
                    let more = give_filled.send(Ok(buffer)).is_ok();
                    if let Some(error) = error {
                        let _ = give_filled.send(Err(error));
                        return;
                    }
                    if !more {
                        return;
                    }
                }
            })
            .context("cannot start a thread")?;
        let first = Buffer { data: vec![0; MOST_AT_ONCE + READ].into(), start: MOST_AT_ONCE, end: MOST_AT_ONCE };
        Ok(Self {
            filled,
            empty,
            buffer: first,
            position: 0,
            ended: false,
            failure: None,
            interrupt,
            interrupted_at: None,
        })
    }

    /// Offset of the next byte in the unpacked stream.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// Bytes at hand.
    pub(super) const fn available(&self) -> usize {
        self.buffer.end - self.buffer.start
    }

    /// What ended the stream before its end: an error of the disk or of the packing.
    pub(super) const fn failure(&self) -> Option<&io::Error> {
        self.failure.as_ref()
    }

    /// Whether the stream ended because a person said so.
    pub(super) const fn was_interrupted(&self) -> bool {
        self.interrupted_at.is_some()
    }

    /// Makes `n` bytes available; false where the stream has fewer left.
    ///
    /// # Errors
    ///
    /// More than [`MOST_AT_ONCE`] are asked for, or `idle` fails.
    pub(super) fn has(&mut self, n: usize, idle: &mut impl Idle) -> Result<bool> {
        while self.available() < n {
            if n > MOST_AT_ONCE {
                bail!("{n} bytes of a capture are too many at once");
            }
            if self.ended || !self.next_buffer(idle)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The next `n` bytes, without taking them; `None` where the stream has fewer left.
    ///
    /// # Errors
    ///
    /// See [`Source::has`].
    pub(super) fn peek(&mut self, n: usize, idle: &mut impl Idle) -> Result<Option<&[u8]>> {
        Ok(if self.has(n, idle)? { Some(&self.buffer.data[self.buffer.start..][..n]) } else { None })
    }

    /// Takes the next `n` bytes; `None` where the stream has fewer left, and they stay.
    ///
    /// # Errors
    ///
    /// See [`Source::has`].
    pub(super) fn take(&mut self, n: usize, idle: &mut impl Idle) -> Result<Option<&[u8]>> {
        if !self.has(n, idle)? {
            return Ok(None);
        }
        let start = self.buffer.start;
        self.buffer.start += n;
        self.position += n as u64;
        Ok(Some(&self.buffer.data[start..][..n]))
    }

    /// Takes the next `N` bytes as an array.
    ///
    /// # Errors
    ///
    /// See [`Source::has`].
    pub(super) fn array<const N: usize>(&mut self, idle: &mut impl Idle) -> Result<Option<[u8; N]>> {
        Ok(self.take(N, idle)?.and_then(|bytes| bytes.first_chunk().copied()))
    }

    /// Leaves out `n` bytes; false where the stream has fewer left.
    ///
    /// # Errors
    ///
    /// `idle` fails.
    pub(super) fn skip(&mut self, mut n: u64, idle: &mut impl Idle) -> Result<bool> {
        loop {
            let step = usize::try_from(n).unwrap_or(usize::MAX).min(self.available());
            self.buffer.start += step;
            self.position += step as u64;
            n -= step as u64;
            if n == 0 {
                return Ok(true);
            }
            if self.ended || !self.next_buffer(idle)? {
                return Ok(false);
            }
        }
    }

    /// Goes on to the next buffer, with the rest of this one before it; false at the end.
    fn next_buffer(&mut self, idle: &mut impl Idle) -> Result<bool> {
        let mut next = match self.receive(idle)? {
            Some(Ok(next)) => next,
            Some(Err(error)) => {
                self.failure = Some(error);
                self.ended = true;
                return Ok(false);
            }
            None => {
                self.ended = true;
                return Ok(false);
            }
        };
        let rest = self.available();
        next.start -= rest;
        next.data[next.start..][..rest].copy_from_slice(&self.buffer.data[self.buffer.start..self.buffer.end]);
        let done = std::mem::replace(&mut self.buffer, next);
        // The reader has come to its end.
        let _ = self.empty.send(done);
        Ok(true)
    }

    /// Whether the stream was interrupted, and what may still come after that has had its time.
    fn is_over(&mut self) -> bool {
        if self.interrupted_at.is_none() && self.interrupt.as_ref().is_some_and(|i| i.load(Relaxed)) {
            self.interrupted_at = Some(Instant::now());
        }
        self.interrupted_at.is_some_and(|at| at.elapsed() >= GRACE)
    }

    /// The next buffer; `None` at the end.
    fn receive(&mut self, idle: &mut impl Idle) -> Result<Option<io::Result<Buffer>>> {
        if self.is_over() {
            return Ok(None);
        }
        match self.filled.try_recv() {
            Ok(next) => return Ok(Some(next)),
            Err(TryRecvError::Disconnected) => return Ok(None),
            Err(TryRecvError::Empty) => {}
        }
        if self.interrupt.is_none() {
            return Ok(self.filled.recv().ok());
        }
        idle.idle()?;
        let mut silent = Duration::ZERO;
        loop {
            if self.is_over() || self.was_interrupted() && silent >= SILENCE {
                return Ok(None);
            }
            match self.filled.recv_timeout(LOOK) {
                Ok(next) => return Ok(Some(next)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => silent += LOOK,
            }
        }
    }
}

/// Counts what is read, for the progress bar.
struct Counted<R> {
    input: R,
    progress: Progress,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.progress.fetch_add(n as u64, Relaxed);
        Ok(n)
    }
}

/// The stream behind a gzip packing, if there is one.
fn unpacked(mut input: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let mut magic = Vec::new();
    input.by_ref().take(GZIP.len() as u64).read_to_end(&mut magic)?;
    let packed = magic == GZIP;
    let input = io::Cursor::new(magic).chain(input);
    Ok(if packed { Box::new(MultiGzDecoder::new(BufReader::with_capacity(READ, input))) } else { Box::new(input) })
}

/// Reads at least one byte, and where `fill` as many as there is room for; 0 at the end. An error comes with the number
/// of bytes read before it.
fn read_some(input: &mut impl Read, buffer: &mut [u8], fill: bool) -> Result<usize, (usize, io::Error)> {
    let mut n = 0;
    while n < buffer.len() {
        match input.read(&mut buffer[n..]) {
            Ok(0) => break,
            Ok(more) => {
                n += more;
                if !fill {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((n, error)),
        }
    }
    Ok(n)
}
