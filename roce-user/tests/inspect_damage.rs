//! Damaged captures: whatever bytes a file holds, the inspector neither panics nor takes memory that the file does not
//! justify, and where it stops it names the packet.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use pcap_file::pcap::PcapReader;
use roce_user::inspect;

/// Counts what is allocated.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came; counting touches no memory of its.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `ptr` is of `alloc` above, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What reading a small file may take at most: the buffers that go round, and room for flows.
const MOST_MEMORY: usize = 24 << 20;

fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures").join(name)
}

/// xorshift64*: the same damage in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

fn frames(name: &str) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(fs::File::open(capture(name)).expect("capture")).expect("header");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.expect("packet").data.into_owned());
    }
    frames
}

fn pcap(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = fs::read(capture("fact-psn-wrap.pcap")).expect("capture")[..24].to_vec();
    for (i, frame) in frames.iter().enumerate() {
        for n in [1_000, i, frame.len(), frame.len()] {
            out.extend((n as u32).to_le_bytes());
        }
        out.extend(frame);
    }
    out
}

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let len = (padded as u32 + 12).to_be_bytes();
    let mut out = [&kind.to_be_bytes()[..], &len, body].concat();
    out.resize(8 + padded, 0);
    out.extend(len);
    out
}

fn pcapng(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for part in frames.chunks(frames.len() / 2) {
        out.extend(block(0x0a0d_0d0a, &[0x1a, 0x2b, 0x3c, 0x4d, 0, 1, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]));
        out.extend(block(1, &[0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3, b'e', b't', b'h', 0, 0, 9, 0, 1, 9, 0, 0, 0]));
        for (i, frame) in part.iter().enumerate() {
            let len = (frame.len() as u32).to_be_bytes();
            let body = match i % 3 {
                0 => [&[0; 12][..], &len, &len, frame].concat(),
                1 => [&len[..], frame].concat(),
                _ => block(5, &[0; 12]),
            };
            out.extend(match i % 3 {
                0 => block(6, &body),
                1 => block(3, &body),
                _ => body,
            });
        }
    }
    out
}

/// One to four things that go wrong with a file.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    const LENGTHS: [u32; 10] =
        [0, 1, 3, 12, 0x7fff_ffff, 0xffff_ffff, 0xffff_fffc, 0x0010_0000, 0x0004_0001, 0x0a0d_0d0a];
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] = random.below(256) as u8,
            1 => bytes.truncate(at),
            2 => {
                let n = LENGTHS[random.below(LENGTHS.len())];
                let n = if random.below(2) == 0 { n.to_le_bytes() } else { n.to_be_bytes() };
                let at = at & !3;
                let end = bytes.len().min(at + 4);
                bytes[at..end].copy_from_slice(&n[..end - at]);
            }
            3 => _ = bytes.drain(at..bytes.len().min(at + 1 + random.below(40))),
            4 => {
                let copy = bytes[at..bytes.len().min(at + 100)].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            _ => bytes[at] ^= 1 << random.below(8),
        }
    }
}

#[test]
fn damage_is_survived_in_bounded_memory() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("damaged");
    let all: Vec<_> = ["fact-rxe-dup-read.pcap", "fact-enizaksoy-ce-cnp.pcap", "fact-port4791-not-roce.pcap"]
        .iter()
        .flat_map(|name| frames(name))
        .map(|mut frame| {
            frame.truncate(300);
            frame
        })
        .collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut read, mut stopped, mut refused) = (0, 0, 0);
    for base in [pcap(&all), pcapng(&all)] {
        for _ in 0..400 {
            let mut bytes = base.clone();
            damage(&mut bytes, &mut random);
            fs::write(&path, &bytes).expect("write");
            PEAK.store(LIVE.load(Relaxed), Relaxed);
            let before = LIVE.load(Relaxed);
            match inspect::report(&path) {
                Ok(report) => {
                    let malformed: u64 = report.malformed.values().sum();
                    assert_eq!(report.frames, report.rocev2 + report.rocev1 + report.not_roce + malformed);
                    read += 1;
                    if let Some(reason) = report.incomplete {
                        assert!(reason.contains("packet "), "{reason}");
                        assert_eq!(reason.lines().count(), 1, "{reason}");
                        stopped += 1;
                    }
                }
                Err(error) => {
                    assert!(format!("{error:#}").contains("damaged"), "the file is named: {error:#}");
                    refused += 1;
                }
            }
            let taken = PEAK.load(Relaxed).saturating_sub(before);
            assert!(taken < MOST_MEMORY, "{taken} bytes for a file of {}", bytes.len());
        }
    }
    assert!(read > 500 && stopped > 200 && refused > 3, "{read} read, {stopped} of them in part, {refused} refused");
}

#[test]
fn what_is_before_the_damage_counts_and_the_packet_is_named() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("damaged");
    let frames = frames("fact-psn-wrap.pcap");
    let mut at = 24;
    for (i, frame) in frames.iter().enumerate() {
        let whole = pcap(&frames);
        let number = i + 1;
        // Cut inside its header and inside its bytes; lengths of 4 GB and of slightly too much.
        let mut cases = vec![whole[..at + 7].to_vec(), whole[..at + 16 + frame.len() - 1].to_vec()];
        for length in [u32::MAX, 262_145, 0x8000_0000] {
            let mut bytes = whole.clone();
            bytes[at + 8..at + 12].copy_from_slice(&length.to_le_bytes());
            cases.push(bytes);
        }
        for bytes in cases {
            fs::write(&path, &bytes).expect("write");
            let report = inspect::report(&path).expect("report");
            assert_eq!(report.rocev2, i as u64);
            let reason = report.incomplete.expect("a reason");
            assert!(
                reason.contains(&format!("packet {number} ")) && reason.contains(&format!("byte {at}")),
                "{reason}"
            );
        }
        // An original length that lies downwards is no reason to stop.
        let mut bytes = whole.clone();
        bytes[at + 12..at + 16].copy_from_slice(&1u32.to_le_bytes());
        fs::write(&path, &bytes).expect("write");
        let report = inspect::report(&path).expect("report");
        assert_eq!((report.rocev2, report.incomplete), (frames.len() as u64, None));
        at += 16 + frame.len();
    }
}
