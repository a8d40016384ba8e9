//! `roce inspect` against tshark: both read the same generated capture, whole frames with valid ICRCs, and print the same
//! fields. Time is from start to end of the process, output thrown away, the file in the page cache.

use std::{
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
    wire::{Aeth, Bth, Opcode, Reth, emit},
};
use serde::Serialize;

/// Payload of a data packet, that is, the path MTU.
const PMTU: usize = 1_024;
/// Packets of a message.
const MESSAGE: u32 = 64;
/// Queue pairs that send, in turn.
const QPS: usize = 64;
/// One packet in so many is lost before the tap, and everything from it on sent again after [`GO_BACK`] more.
const LOSS: u64 = 2_000;
const GO_BACK: u32 = 4;
/// One packet in so many carries CE.
const CE: u64 = 100;
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// The fields that tshark prints: those that the counters of `roce inspect` are made of.
const FIELDS: [&str; 9] = [
    "ip.src",
    "ip.dst",
    "ip.dsfield",
    "udp.srcport",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "infiniband.aeth.syndrome",
    "infiniband.reth.dmalen",
];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `roce` program.
    pub roce: PathBuf,
    /// Where captures are made, and removed.
    pub dir: PathBuf,
    /// Size of the smaller capture in bytes; the larger one has four times that.
    pub bytes: u64,
    /// Runs of `roce inspect` per capture; the median counts. tshark runs once.
    pub rounds: u32,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this contract.
    pub schema: u32,
    /// What the captures hold.
    pub traffic: String,
    /// tshark's version; empty where there is none.
    pub tshark: String,
    /// One per capture, the smaller first.
    pub captures: Vec<Compared>,
}

/// Both programs on one capture.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Packets in it.
    pub packets: u64,
    /// `roce inspect --json`.
    pub roce: Run,
    /// `roce inspect --json --no-icrc`.
    pub roce_without_icrc: Run,
    /// `tshark -T fields`; absent where there is no tshark.
    pub tshark: Option<Run>,
    /// How many times the time of roce tshark takes.
    pub ratio: Option<f64>,
}

/// A run of a program.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Run {
    /// Seconds from start to end.
    pub seconds: f64,
    /// Packets per second.
    pub packets_per_s: f64,
    /// Largest resident memory in bytes.
    pub peak_rss: u64,
}

impl Report {
    /// The report for people.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n{}\n\n", self.traffic, self.tshark);
        text += &format!(
            "{:>8} {:>9} {:<24} {:>8} {:>12} {:>9} {:>7}\n",
            "file", "packets", "program", "seconds", "packets/s", "peak RSS", "ratio"
        );
        for c in &self.captures {
            let runs = [
                ("roce inspect --json", Some(c.roce)),
                ("… --no-icrc", Some(c.roce_without_icrc)),
                ("tshark -T fields", c.tshark),
            ];
            for (name, run) in runs {
                let Some(run) = run else { continue };
                text += &format!(
                    "{:>5.2} GB {:>9} {name:<24} {:>8.3} {:>12.0} {:>6.1} MB {:>7.1}\n",
                    c.bytes as f64 / 1e9,
                    c.packets,
                    run.seconds,
                    run.packets_per_s,
                    run.peak_rss as f64 / 1e6,
                    run.seconds / c.roce.seconds,
                );
            }
        }
        text
    }
}

/// Makes the captures and runs both programs on them.
///
/// # Errors
///
/// A capture cannot be written, or a program cannot be run or reads other packets than were written.
pub fn run(options: &Options) -> Result<Report> {
    let tshark = tshark_version();
    let mut captures = Vec::new();
    for bytes in [options.bytes, options.bytes * 4] {
        let path = options.dir.join("roce-bench-inspect.pcap");
        let made = Made { path: path.clone() };
        let (bytes, packets) = generate(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        let roce = |extra: &[&str]| -> Result<Run> {
            let mut runs = Vec::new();
            for _ in 0..options.rounds.max(1) {
                let mut command = Command::new(&options.roce);
                runs.push(time(command.args(["inspect", "--json"]).args(extra).arg(&path), packets)?);
            }
            runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
            Ok(runs[runs.len() / 2])
        };
        check(&options.roce, &path, packets)?;
        let (with, without) = (roce(&[])?, roce(&["--no-icrc"])?);
        let theirs = match &tshark {
            None => None,
            Some(_) => {
                let mut command = Command::new("tshark");
                command.args(["-n", "-T", "fields"]).args(FIELDS.iter().flat_map(|f| ["-e", f])).arg("-r").arg(&path);
                Some(time(&mut command, packets)?)
            }
        };
        captures.push(Compared {
            bytes,
            packets,
            roce: with,
            roce_without_icrc: without,
            tshark: theirs,
            ratio: theirs.map(|t| t.seconds / with.seconds),
        });
        drop(made);
    }
    Ok(Report {
        schema: 1,
        traffic: format!(
            "pcap, whole frames: {QPS} queue pairs, WRITEs of {MESSAGE} packets of {PMTU} bytes, an ACK each; 1 in {LOSS} \
             packets lost (NAK, go-back-N), 1 in {CE} CE, 1 CNP in 8 of these; valid ICRCs"
        ),
        tshark: tshark.unwrap_or_else(|| "tshark is not installed: nothing to compare with".to_owned()),
        captures,
    })
}

/// Removes a capture when it is done with.
struct Made {
    path: PathBuf,
}

impl Drop for Made {
    fn drop(&mut self) {
        // It may never have been written.
        let _ = fs::remove_file(&self.path);
    }
}

fn tshark_version() -> Option<String> {
    let output = Command::new("tshark").arg("--version").output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

/// What roce reads must be what was written.
fn check(roce: &Path, capture: &Path, packets: u64) -> Result<()> {
    let output = Command::new(roce).args(["inspect", "--json"]).arg(capture).output().context("cannot run roce")?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("roce inspect printed no JSON")?;
    let read = (report["rocev2"].as_u64(), report["icrc"]["valid"].as_u64());
    ensure!(read == (Some(packets), Some(packets)), "{packets} packets were written, and roce inspect says {report}");
    Ok(())
}

/// Runs a program to its end.
fn time(command: &mut Command, packets: u64) -> Result<Run> {
    let name = command.get_program().to_string_lossy().into_owned();
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {name}"))?;
    let status = Path::new("/proc").join(child.id().to_string()).join("status");
    let mut peak_rss = 0;
    let code = loop {
        peak_rss = peak_rss.max(high_water(&status).unwrap_or(0));
        if let Some(code) = child.try_wait()? {
            break code;
        }
        thread::sleep(LOOK);
    };
    let seconds = start.elapsed().as_secs_f64();
    // Losses are findings.
    if !matches!(code.code(), Some(0 | 1)) {
        bail!("{name} ended with {code}");
    }
    Ok(Run { seconds, packets_per_s: packets as f64 / seconds, peak_rss })
}

/// VmHWM of a process, in bytes.
fn high_water(status: &Path) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}

/// A sender of the generated traffic.
struct Sender {
    path: emit::Path,
    back: emit::Path,
    to: Qpn,
    from: Qpn,
    next: u32,
    /// Lost, and to be sent again when the PSN behind it has come.
    lost: Option<(u32, u32)>,
}

/// Writes a capture of at least `bytes` bytes; its size and its packets.
fn generate(path: &Path, bytes: u64) -> Result<(u64, u64)> {
    let mut out = Capture::create(path)?;
    let mut senders: Vec<Sender> = (0..QPS).map(sender).collect();
    let payload = [0x5a; PMTU];
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut one_in = move |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.is_multiple_of(n)
    };
    let mut marked = 0u32;
    'all: loop {
        for sender in &mut senders {
            for _ in 0..16 {
                if out.bytes >= bytes {
                    break 'all;
                }
                let psn = sender.next;
                sender.next = (psn + 1) & 0xff_ffff;
                if let Some((lost, at)) = sender.lost
                    && psn == at
                {
                    out.answer(sender, lost, 0x60)?;
                    (sender.lost, sender.next) = (None, lost);
                    continue;
                }
                if sender.lost.is_none() && one_in(LOSS) {
                    sender.lost = Some((psn, (psn + 1 + GO_BACK) & 0xff_ffff));
                    continue;
                }
                let ce = one_in(CE);
                out.data(sender, psn, &payload, ce)?;
                if ce {
                    marked += 1;
                    if marked.is_multiple_of(8) {
                        out.cnp(sender)?;
                    }
                }
                if psn % MESSAGE == MESSAGE - 1 && sender.lost.is_none() {
                    out.answer(sender, psn, 0x1f)?;
                }
            }
        }
    }
    out.file.flush()?;
    Ok((out.bytes, out.packets))
}

fn sender(number: usize) -> Sender {
    let n = number as u8;
    let path = emit::Path {
        src_mac: [2, 0, 0, 0, 0, n],
        dst_mac: [4, 0, 0, 0, 0, n],
        src: Addr::v4([10, 1, 0, 1 + n % 8]),
        dst: Addr::v4([10, 2, 0, 1 + n % 4]),
        tos: 26 << 2 | 2,
        ttl: 64,
        ip_id: 1,
        src_port: 49_152 + number as u16,
    };
    let back = emit::Path { src: path.dst, dst: path.src, src_mac: path.dst_mac, dst_mac: path.src_mac, ..path };
    let number = number as u32;
    Sender {
        path,
        back,
        to: Qpn::new(0x100 + number),
        from: Qpn::new(0x4_0000 + 7 * number),
        // All of messages of 64 packets, far from each other.
        next: number * 0x2_0000,
        lost: None,
    }
}

/// The file in the making.
struct Capture {
    file: BufWriter<File>,
    bytes: u64,
    packets: u64,
    frame: [u8; 2_048],
}

impl Capture {
    fn create(path: &Path) -> Result<Self> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        for n in [0xa1b2_3c4d_u32, 0x0004_0002, 0, 0, 65_535, 1] {
            file.write_all(&n.to_le_bytes())?;
        }
        Ok(Self { file, bytes: 24, packets: 0, frame: [0; 2_048] })
    }

    fn record(&mut self, len: usize) -> Result<()> {
        // 100 Gb/s, about.
        let time = self.packets * 90;
        let header = [1_700_000_000 + time / 1_000_000_000, time % 1_000_000_000, len as u64, len as u64];
        for n in header {
            self.file.write_all(&(n as u32).to_le_bytes())?;
        }
        self.file.write_all(&self.frame[..len])?;
        self.bytes += 16 + len as u64;
        self.packets += 1;
        Ok(())
    }

    fn data(&mut self, sender: &Sender, psn: u32, payload: &[u8], ce: bool) -> Result<()> {
        let (opcode, reth) = match psn % MESSAGE {
            0 => (Opcode::WRITE_FIRST, Some(Reth { va: 0, rkey: 1, dma_len: MESSAGE * PMTU as u32 })),
            n if n == MESSAGE - 1 => (Opcode::WRITE_LAST, None),
            _ => (Opcode::WRITE_MIDDLE, None),
        };
        let path = emit::Path { tos: sender.path.tos | u8::from(ce), ..sender.path };
        let bth = Bth::new(opcode, sender.to, Psn::new(psn));
        let len = emit::frame(&path, &bth, &emit::Ext { reth, ..emit::Ext::default() }, payload, &mut self.frame)?;
        self.record(len)
    }

    fn answer(&mut self, sender: &Sender, psn: u32, raw_syndrome: u8) -> Result<()> {
        let bth = Bth::new(Opcode::ACKNOWLEDGE, sender.from, Psn::new(psn));
        let ext = emit::Ext { aeth: Some(Aeth { raw_syndrome, msn: psn / MESSAGE }), ..emit::Ext::default() };
        let len = emit::frame(&sender.back, &bth, &ext, &[], &mut self.frame)?;
        self.record(len)
    }

    fn cnp(&mut self, sender: &Sender) -> Result<()> {
        let mut frame = [0; emit::CNP_FRAME_V6];
        let path = emit::Path { tos: 48 << 2 | 2, ..sender.back };
        let len = emit::cnp(&path, roce_common::wire::IpVersion::V4, sender.from, &mut frame);
        self.frame[..len].copy_from_slice(&frame[..len]);
        self.record(len)
    }
}

#[cfg(test)]
mod tests {
    use roce_user::inspect;

    use super::*;

    #[test]
    fn the_generated_capture_is_what_it_claims_to_be() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("x.pcap");
        let (bytes, packets) = generate(&path, 10_000_000).expect("a capture");
        assert_eq!(fs::metadata(&path).expect("the file").len(), bytes);
        let report = inspect::report(&path).expect("report");
        assert_eq!((report.rocev2, report.icrc.valid, report.flows.len()), (packets, packets, 2 * QPS));
        let c = report.counters;
        assert!(c.lost > 0 && c.retransmitted > c.lost && c.discontinuities == 0, "{c:?}");
        assert!(report.ecn.ce > 50 && report.cnp > 5);
    }
}
