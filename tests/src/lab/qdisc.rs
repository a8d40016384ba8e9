//! The depth and drops of a queue, read through netlink, and a thread that samples them.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcMessage, TcStats2},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike},
};

use super::netns::Netns;

/// How often the sampler looks.
const PERIOD: Duration = Duration::from_millis(1);

/// What a queue tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueStats {
    /// Bytes waiting.
    pub backlog: u32,
    /// Packets waiting.
    pub packets: u32,
    /// Packets dropped since it was made.
    pub drops: u32,
}

/// A netlink socket that asks for one qdisc's statistics. It belongs to the namespace of the thread that opened it.
#[derive(Debug)]
pub struct QueueReader {
    socket: Socket,
    index: u32,
    handle: u16,
}

impl QueueReader {
    /// For the qdisc `handle:` of interface `index`, in the calling thread's namespace.
    ///
    /// # Errors
    /// When no netlink socket can be opened.
    pub fn open(index: u32, handle: u16) -> Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE).context("netlink socket")?;
        socket.bind_auto().context("netlink bind")?;
        socket.connect(&SocketAddr::new(0, 0)).context("netlink connect")?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(1)).context("netlink timeout")?;
        Ok(Self { socket, index, handle })
    }

    /// Reads the statistics now.
    ///
    /// # Errors
    /// When there is no such qdisc.
    pub fn read(&self) -> Result<QueueStats> {
        // A dump: asked for one qdisc alone, kernel 6.18 gives no answer. Queues without a qdisc are not in it.
        let mut request =
            NetlinkMessage::from(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(self.index as i32)));
        request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        request.finalize();
        let mut buffer = vec![0; request.buffer_len()];
        request.serialize(&mut buffer);
        self.socket.send(&buffer, 0).context("netlink send")?;
        let mut found = None;
        loop {
            let (answer, _) = self.socket.recv_from_full().context("netlink receive")?;
            let mut rest = &answer[..];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).context("netlink answer")?;
                let length = (message.header.length as usize).next_multiple_of(4).clamp(16, rest.len().max(16));
                rest = rest.get(length..).unwrap_or_default();
                match message.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewQueueDiscipline(qdisc)) => {
                        if qdisc.header.index == self.index as i32 && qdisc.header.handle.major == self.handle {
                            found = queue_stats(&qdisc);
                        }
                    }
                    NetlinkPayload::Done(_) => {
                        return found
                            .with_context(|| format!("no qdisc {:x}: on interface {}", self.handle, self.index));
                    }
                    NetlinkPayload::Error(e) => bail!("cannot read qdiscs: {e}"),
                    other => bail!("unexpected netlink answer {other:?}"),
                }
            }
        }
    }
}

fn queue_stats(qdisc: &TcMessage) -> Option<QueueStats> {
    let lists = qdisc.attributes.iter().filter_map(|a| match a {
        TcAttribute::Stats2(list) => Some(list),
        _ => None,
    });
    lists.flatten().find_map(|stat| match stat {
        TcStats2::Queue(q) => Some(QueueStats { backlog: q.backlog, packets: q.qlen, drops: q.drops }),
        _ => None,
    })
}

/// One sample.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    stats: QueueStats,
}

/// What a sampled queue did between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSummary {
    /// Mean of the samples' backlogs in bytes.
    pub mean: u32,
    /// Median backlog in bytes.
    pub p50: u32,
    /// 99th percentile of the backlog in bytes.
    pub p99: u32,
    /// Packets dropped.
    pub drops: u32,
    /// Samples taken.
    pub samples: usize,
}

/// A thread that reads a queue again and again, every millisecond unless told otherwise.
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts sampling qdisc `handle:` of interface `index` in `ns`.
    ///
    /// # Errors
    /// When there is no such qdisc.
    pub fn start(ns: &Netns, index: u32, handle: u16) -> Result<Self> {
        Self::every(PERIOD, ns, index, handle)
    }

    /// The same with another period: asking takes a slow machine a while.
    ///
    /// # Errors
    /// When there is no such qdisc.
    pub fn every(period: Duration, ns: &Netns, index: u32, handle: u16) -> Result<Self> {
        let reader = ns.run(|| {
            let reader = QueueReader::open(index, handle)?;
            reader.read()?;
            Ok(reader)
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let samples = Arc::new(Mutex::new(Vec::new()));
        let thread = thread::Builder::new().name("lab-queue".into()).spawn({
            let (stop, samples) = (Arc::clone(&stop), Arc::clone(&samples));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    // A dump that a change interrupted is not worth more than a missing sample.
                    if let Ok(stats) = reader.read() {
                        let sample = Sample { at: Instant::now(), stats };
                        samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
                    }
                    thread::sleep(period);
                }
            }
        })?;
        Ok(Self { stop, samples, thread: Some(thread) })
    }

    /// The newest sample.
    pub fn latest(&self) -> QueueStats {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).last().map_or_else(Default::default, |s| s.stats)
    }

    /// The times in `from..to` for which packets waited all the time, as far as two samples in a row can tell.
    pub fn backlogged(&self, from: Instant, to: Instant) -> Vec<(Instant, Instant)> {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = samples.windows(2).filter(|pair| pair[0].at >= from && pair[1].at < to);
        pairs.filter(|pair| pair.iter().all(|s| s.stats.packets > 0)).map(|pair| (pair[0].at, pair[1].at)).collect()
    }

    /// All samples, a line each: milliseconds since `zero`, bytes that wait, drops so far.
    pub fn table(&self, zero: Instant) -> String {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = "ms,backlog_bytes,drops\n".to_owned();
        for sample in samples.iter().filter(|s| s.at >= zero) {
            let QueueStats { backlog, drops, .. } = sample.stats;
            table += &format!("{},{backlog},{drops}\n", (sample.at - zero).as_millis());
        }
        table
    }

    /// What happened in `from..to`.
    pub fn summary(&self, from: Instant, to: Instant) -> QueueSummary {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let drops_at = |t: Instant| samples.iter().rev().find(|s| s.at <= t).map_or(0, |s| s.stats.drops);
        let drops = drops_at(to).wrapping_sub(drops_at(from));
        let mut depth: Vec<u32> =
            samples.iter().filter(|s| s.at >= from && s.at < to).map(|s| s.stats.backlog).collect();
        depth.sort_unstable();
        let quantile = |percent: usize| depth.get((depth.len() * percent / 100).min(depth.len().max(1) - 1)).copied();
        let sum: u64 = depth.iter().copied().map(u64::from).sum();
        QueueSummary {
            // A mean of u32s is one.
            mean: (sum / (depth.len() as u64).max(1)) as u32,
            p50: quantile(50).unwrap_or(0),
            p99: quantile(99).unwrap_or(0),
            drops,
            samples: depth.len(),
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}
