//! Where captures come from: a file or stdin, packed with gzip or not, as one stream of bytes.
//!
//! A plain file is mapped, a window at a time: nothing is copied, and of the payload only what the ICRC asks for is read.
//! What must be unpacked or waited for is read by a thread of its own, into a few buffers that go round. Memory is bounded
//! either way. Every buffer has room before its content for what was left of the one before: a record that lies across two
//! buffers is made whole by copying that rest.

use std::{
    fs::File,
    io::{self, BufReader, ErrorKind, Read},
    ops::Deref,
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
use memmap2::{Mmap, MmapOptions};

/// The most bytes that [`Source::take`] gives at once.
pub(super) const MOST_AT_ONCE: usize = 1 << 20;
/// Bytes read at a time: small enough to stay in a CPU's cache on the way from the reader to the analysis.
const READ: usize = 256 << 10;
/// Buffers that go round.
const BUFFERS: usize = 4;
/// Bytes of a file mapped at a time; more than [`MOST_AT_ONCE`] and a page.
const WINDOW: u64 = 4 << 20;
/// Windows begin at multiples of this, which is a multiple of every page size in use.
const PAGE: u64 = 64 << 10;
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

/// Who gives the bytes.
enum Feed {
    /// A file, mapped window by window.
    Mapped(File, Progress),
    /// A thread.
    Thread { filled: Receiver<io::Result<Buffer>>, empty: Sender<Buffer> },
}

/// The bytes at hand.
enum Hand {
    Window(Mmap),
    Buffer(Box<[u8]>),
}

impl Deref for Hand {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Window(window) => window,
            Self::Buffer(buffer) => buffer,
        }
    }
}

/// A stream of bytes.
pub(super) struct Source {
    feed: Feed,
    hand: Hand,
    /// The part of [`Source::hand`] that was not taken yet.
    start: usize,
    end: usize,
    /// Offset of the next byte in the (unpacked) stream.
    position: u64,
    ended: bool,
    failure: Option<io::Error>,
    interrupt: Option<Arc<AtomicBool>>,
    interrupted_at: Option<Instant>,
}

impl Buffer {
    fn new() -> Self {
        Self { data: vec![0; MOST_AT_ONCE + READ].into(), start: MOST_AT_ONCE, end: MOST_AT_ONCE }
    }

    /// Reads into it; false at the end. An error leaves what was read before it.
    fn fill(&mut self, input: &mut impl Read, whole: bool) -> (bool, Option<io::Error>) {
        let (n, error) = match read_some(input, &mut self.data[MOST_AT_ONCE..], whole) {
            Ok(n) => (n, None),
            Err((n, error)) => (n, Some(error)),
        };
        self.start = MOST_AT_ONCE;
        self.end = MOST_AT_ONCE + n;
        (n > 0, error)
    }
}

impl Source {
    /// Opens a file.
    ///
    /// # Errors
    ///
    /// It cannot be opened.
    pub(super) fn open(path: &Path, progress: Progress) -> Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let magic = magic(&mut file)?;
        if magic != GZIP && metadata.is_file() && metadata.len() > 0 {
            return Ok(Self::new(Feed::Mapped(file, progress), None));
        }
        let input = Counted { input: file, progress };
        Self::threaded(move || Ok(unpacked(magic, input)), true, None)
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
        let mut input = Counted { input, progress };
        let open = move || magic(&mut input).map(|magic| unpacked(magic, input));
        Self::threaded(open, false, Some(interrupt))
    }

    fn new(feed: Feed, interrupt: Option<Arc<AtomicBool>>) -> Self {
        Self {
            feed,
            hand: Hand::Buffer(Box::default()),
            start: 0,
            end: 0,
            position: 0,
            ended: false,
            failure: None,
            interrupt,
            interrupted_at: None,
        }
    }

    /// Reads what `open` gives in a thread; `whole`: fills each buffer before it is passed on.
    fn threaded(
        open: impl FnOnce() -> io::Result<Box<dyn Read>> + Send + 'static,
        whole: bool,
        interrupt: Option<Arc<AtomicBool>>,
    ) -> Result<Self> {
        let (give_filled, filled) = channel();
        let (empty, take_empty) = channel::<Buffer>();
        for _ in 0..BUFFERS {
            // The receiver is in scope.
            let _ = empty.send(Buffer::new());
        }
        // Where nobody takes what is sent, the source is gone and so is the reason to read on.
        let read = move || -> Option<()> {
            let mut input = match open() {
                Ok(input) => input,
                Err(error) => return give_filled.send(Err(error)).ok(),
            };
            for mut buffer in take_empty {
                let (more, error) = buffer.fill(&mut input, whole);
                if more {
                    give_filled.send(Ok(buffer)).ok()?;
                }
                match error {
                    Some(error) => return give_filled.send(Err(error)).ok(),
                    None if !more => return None,
                    None => {}
                }
            }
            None
        };
        thread::Builder::new()
            .name("capture reader".to_owned())
            .spawn(move || _ = read())
            .context("cannot start a thread")?;
        Ok(Self::new(Feed::Thread { filled, empty }, interrupt))
    }

    /// Offset of the next byte in the unpacked stream.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// Bytes at hand.
    pub(super) const fn available(&self) -> usize {
        self.end - self.start
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
            if self.ended || !self.go_on(idle)? {
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
        Ok(if self.has(n, idle)? { Some(&self.hand[self.start..][..n]) } else { None })
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
        let start = self.start;
        self.start += n;
        self.position += n as u64;
        Ok(Some(&self.hand[start..][..n]))
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
            self.start += step;
            self.position += step as u64;
            n -= step as u64;
            if n == 0 {
                return Ok(true);
            }
            if self.ended || !self.go_on(idle)? {
                return Ok(false);
            }
        }
    }

    /// Takes more bytes in hand, behind those that are; false at the end.
    fn go_on(&mut self, idle: &mut impl Idle) -> Result<bool> {
        let more = match &self.feed {
            Feed::Mapped(..) => self.next_window(),
            Feed::Thread { .. } => match self.receive(idle)? {
                Some(next) => next.map(|next| {
                    self.next_buffer(next);
                    true
                }),
                None => Ok(false),
            },
        };
        Ok(more.unwrap_or_else(|error| {
            self.failure = Some(error);
            false
        }) || {
            self.ended = true;
            false
        })
    }

    /// Maps the window that begins with the next byte; false where the file has no more than is in hand.
    fn next_window(&mut self) -> io::Result<bool> {
        let Feed::Mapped(file, progress) = &self.feed else { return Ok(false) };
        // Asked for each window: a file that is being written grows, and one that is overwritten may shrink.
        let size = file.metadata()?.len();
        let from = self.position - self.position % PAGE;
        let len = size.saturating_sub(from).min(WINDOW);
        let begin = self.position - from;
        if begin + self.available() as u64 >= len {
            return Ok(false);
        }
        let mut options = MmapOptions::new();
        options.offset(from).len(len as usize).populate();
        // SAFETY: the mapping is private and only read. Whoever shortens the file while a window of it is mapped makes the
        // kernel end this process, and whoever writes into it changes what is read here: no invariant depends on the bytes,
        // each of them is judged when it is read. Files that such things may happen to can be given by stdin.
        let window = unsafe { options.map(file)? };
        progress.fetch_add(len - begin - self.available() as u64, Relaxed);
        self.hand = Hand::Window(window);
        (self.start, self.end) = (begin as usize, len as usize);
        Ok(true)
    }

    /// Goes on to `next`, with the rest of the buffer in hand before it.
    fn next_buffer(&mut self, mut next: Buffer) {
        let rest = self.available();
        next.start -= rest;
        next.data[next.start..][..rest].copy_from_slice(&self.hand[self.start..self.end]);
        let done = std::mem::replace(&mut self.hand, Hand::Buffer(next.data));
        (self.start, self.end) = (next.start, next.end);
        if let (Feed::Thread { empty, .. }, Hand::Buffer(data)) = (&self.feed, done)
            && !data.is_empty()
        {
            // The reader may have come to its end.
            let _ = empty.send(Buffer { data, start: 0, end: 0 });
        }
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
        let Feed::Thread { filled, .. } = &self.feed else { return Ok(None) };
        match filled.try_recv() {
            Ok(next) => return Ok(Some(next)),
            Err(TryRecvError::Disconnected) => return Ok(None),
            Err(TryRecvError::Empty) => {}
        }
        if self.interrupt.is_none() {
            return Ok(filled.recv().ok());
        }
        idle.idle()?;
        let mut silent = Duration::ZERO;
        loop {
            if self.is_over() || self.was_interrupted() && silent >= SILENCE {
                return Ok(None);
            }
            let Feed::Thread { filled, .. } = &self.feed else { return Ok(None) };
            match filled.recv_timeout(LOOK) {
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

/// The first two bytes of a stream, or fewer where there are no more.
fn magic(input: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut magic = Vec::new();
    input.take(GZIP.len() as u64).read_to_end(&mut magic)?;
    Ok(magic)
}

/// The stream in `input`, of which `magic` has been read.
fn unpacked(magic: Vec<u8>, input: impl Read + 'static) -> Box<dyn Read> {
    let packed = magic == GZIP;
    let input = io::Cursor::new(magic).chain(input);
    if packed { Box::new(MultiGzDecoder::new(BufReader::with_capacity(READ, input))) } else { Box::new(input) }
}

/// Reads at least one byte, and where `whole` as many as there is room for; 0 at the end. An error comes with the number
/// of bytes read before it.
fn read_some(input: &mut impl Read, buffer: &mut [u8], whole: bool) -> Result<usize, (usize, io::Error)> {
    let mut n = 0;
    while n < buffer.len() {
        match input.read(&mut buffer[n..]) {
            Ok(0) => break,
            Ok(more) => {
                n += more;
                if !whole {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((n, error)),
        }
    }
    Ok(n)
}
