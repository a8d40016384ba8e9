//! The BPF programs run by hand: packets in, verdict, packets, maps and events out (`BPF_PROG_TEST_RUN`).

use anyhow::{Context as _, Result};
use aya::{
    maps::{MapData, RingBuf},
    programs::{TestRun as _, TestRunOptions},
};
use roce_common::abi::{Config, Counter, Direction, Flags, MarkPolicy, Pacer, Role};
use roce_user::dataplane::{self, Maps, Object};

/// Bytes of `struct __sk_buff`, and the offsets of the fields the programs write.
const SKB_CONTEXT: usize = 192;
const SKB_PRIORITY: usize = 32;
const SKB_TSTAMP: usize = 152;
/// Bytes of `struct xdp_md`.
const XDP_CONTEXT: usize = 24;

/// Every program of the object, loaded, with its maps.
pub struct Programs {
    /// The object; its ring buffers can be taken from it.
    pub object: Object,
    /// The maps.
    pub maps: Maps,
}

/// What a program made of a packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Return value.
    pub verdict: i32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
    /// `skb->priority` afterwards (tc only).
    pub priority: u32,
    /// `skb->tstamp` afterwards (tc only).
    pub tstamp: u64,
    /// Nanoseconds per run.
    pub nanos: u64,
}

/// A configuration that marks, paces and guards as `roce run` would, with round numbers.
pub fn config(role: Role) -> Config {
    Config {
        failsafe_ns: 1_000_000_000,
        cnp_interval_ns: 50_000,
        vq_bytes_per_sec: 0,
        start_bytes_per_sec: 0,
        swap_until_ns: 0,
        role: role as u32,
        flags: Flags::CONSUME_CNP | Flags::GUARD,
        dscp_policy: MarkPolicy::Fill as u32,
        ecn_policy: MarkPolicy::Fill as u32,
        data_dscp: 26,
        cnp_dscp: 48,
        data_priority: 3,
        cnp_priority: 6,
        pacer: Pacer::Off as u32,
        sample_every: 64,
        kmin_bytes: 4_000,
        kmax_bytes: 32_000,
        pmax: 13_107,
        vq_limit_bytes: 64_000,
        ifindex: 1,
        events_per_tick: 1_000,
        capture_bytes: 0,
        reserved: 0,
    }
}

impl Programs {
    /// Loads them.
    ///
    /// # Errors
    /// Not root, or the kernel refuses.
    pub fn load() -> Result<Self> {
        let mut object = Object::load()?;
        let maps = Maps::take(&mut object.ebpf)?;
        Ok(Self { object, maps })
    }

    /// Loads the benchmark's programs besides.
    ///
    /// # Errors
    /// As [`Programs::load`].
    pub fn load_for_benchmark() -> Result<Self> {
        let mut object = Object::load_for_benchmark()?;
        let maps = Maps::take(&mut object.ebpf)?;
        Ok(Self { object, maps })
    }

    /// Runs an XDP program on a frame.
    ///
    /// # Errors
    /// The kernel refuses the frame (shorter than an Ethernet header, or longer than a page).
    pub fn xdp(&mut self, program: &str, frame: &[u8], repeat: u32) -> Result<Run> {
        let mut out = vec![0; frame.len() + 256];
        let result = self
            .object
            .xdp(program)?
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                repeat,
                ..TestRunOptions::new()
            })
            .context("BPF_PROG_TEST_RUN")?;
        out.truncate(result.data_size_out as usize);
        Ok(Run {
            verdict: result.return_value as i32,
            packet: out,
            priority: 0,
            tstamp: 0,
            nanos: result.duration.as_nanos() as u64,
        })
    }

    /// Runs `roce_xdp` with only the first `linear` bytes of the frame in the linear part.
    ///
    /// # Errors
    /// As [`Programs::xdp`].
    pub fn xdp_linear(&mut self, frame: &[u8], linear: u32) -> Result<Run> {
        let mut context = [0u8; XDP_CONTEXT];
        context[4..8].copy_from_slice(&linear.to_ne_bytes());
        let mut out = vec![0; frame.len() + 256];
        let result = self
            .object
            .xdp("roce_xdp")?
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                ctx_in: Some(&context),
                ..TestRunOptions::new()
            })
            .context("BPF_PROG_TEST_RUN")?;
        out.truncate(result.data_size_out as usize);
        Ok(Run { verdict: result.return_value as i32, packet: out, priority: 0, tstamp: 0, nanos: 0 })
    }

    /// Runs a tc program on a frame that enters with this priority.
    ///
    /// # Errors
    /// The kernel refuses the frame.
    pub fn tc(&mut self, program: &str, frame: &[u8], priority: u32, repeat: u32) -> Result<Run> {
        let mut context = [0u8; SKB_CONTEXT];
        context[SKB_PRIORITY..SKB_PRIORITY + 4].copy_from_slice(&priority.to_ne_bytes());
        let mut context_out = [0u8; SKB_CONTEXT];
        let mut out = vec![0; frame.len() + 256];
        let result = self
            .object
            .tc(program)?
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut out),
                ctx_in: Some(&context),
                ctx_out: Some(&mut context_out),
                repeat,
                ..TestRunOptions::new()
            })
            .context("BPF_PROG_TEST_RUN")?;
        out.truncate(result.data_size_out as usize);
        let word = |at: usize| u32::from_ne_bytes(context_out[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_ne_bytes(context_out[at..at + 8].try_into().expect("eight bytes"));
        Ok(Run {
            verdict: result.return_value as i32,
            packet: out,
            priority: word(SKB_PRIORITY),
            tstamp: long(SKB_TSTAMP),
            nanos: result.duration.as_nanos() as u64,
        })
    }

    /// Takes a ring buffer.
    ///
    /// # Errors
    /// There is none of that name, or it was taken before.
    pub fn ring(&mut self, name: &str) -> Result<RingBuf<MapData>> {
        dataplane::ring(&mut self.object.ebpf, name)
    }

    /// A counter of one direction.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn count(&self, direction: Direction, counter: Counter) -> Result<u64> {
        Ok(self.maps.counters(direction)?[counter as usize])
    }
}

/// CLOCK_MONOTONIC, as the programs read it.
pub fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
