//! The embedded BPF object.

use anyhow::{Context as _, Result, anyhow};
use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, RingBuf},
    programs::{ProgramError, SchedClassifier, Xdp},
    util::KernelVersion,
};

use roce_common::abi::CAPTURE_RING_UNUSED;

use super::pins::{MAPS, Pins};

/// The BPF object this program was built with.
pub static OBJECT_BYTES: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/roce-ebpf"));

/// `bpf_skb_set_tstamp`, which also says which clock a departure time is on, came with Linux 5.18.
const SET_TSTAMP_SINCE: KernelVersion = KernelVersion::new(5, 18, 0);

/// The object, its maps created and its programs in the kernel.
pub struct Object {
    /// aya's handle; dropping it unloads what is neither attached nor pinned.
    pub ebpf: Ebpf,
}

impl Object {
    /// Creates the maps and loads every program; nothing can be captured.
    ///
    /// # Errors
    /// The verifier's complaint, or what is missing.
    pub fn load() -> Result<Self> {
        Self::load_with(CAPTURE_RING_UNUSED, true)
    }

    /// The same with this many bytes for captured packets, and without the XDP program unless told so: the verifier needs
    /// as long for it as for tc ingress, which on an emulated CPU is many seconds.
    ///
    /// # Errors
    /// As [`Object::load`].
    pub fn load_with(capture_ring: u32, xdp: bool) -> Result<Self> {
        let set_tstamp =
            u8::from(KernelVersion::current().context("cannot tell the kernel's version")? >= SET_TSTAMP_SINCE);
        let mut ebpf = EbpfLoader::new()
            .map_max_entries("CAPTURE", capture_ring)
            .override_global("HAS_SET_TSTAMP", &set_tstamp, true)
            .load(OBJECT_BYTES)
            .context("cannot create the BPF maps")?;
        for name in ["roce_tc_egress", "roce_tc_ingress", "roce_htb"] {
            tc_program(&mut ebpf, name)?.load().map_err(|e| load_error(name, e))?;
        }
        if xdp {
            xdp_program(&mut ebpf, "roce_xdp")?.load().map_err(|e| load_error("roce_xdp", e))?;
        }
        Ok(Self { ebpf })
    }

    /// Creates the maps and loads the benchmark's programs besides.
    ///
    /// # Errors
    /// As [`Object::load`].
    pub fn load_for_benchmark() -> Result<Self> {
        let Self { mut ebpf } = Self::load()?;
        for name in ["baseline_empty", "baseline_count", "bench_xdp"] {
            xdp_program(&mut ebpf, name)?.load().map_err(|e| load_error(name, e))?;
        }
        for name in ["baseline_tc_empty", "baseline_tc_count", "bench_tc_egress"] {
            tc_program(&mut ebpf, name)?.load().map_err(|e| load_error(name, e))?;
        }
        Ok(Self { ebpf })
    }

    /// Pins every map that another process may want.
    ///
    /// # Errors
    /// When the BPF filesystem refuses.
    pub fn pin_maps(&self, pins: &Pins) -> Result<()> {
        for name in MAPS {
            let map = self.ebpf.map(name).ok_or_else(|| anyhow!("the BPF object has no map {name}"))?;
            let path = pins.path(name);
            map.pin(&path).with_context(|| format!("cannot pin {}", path.display()))?;
        }
        Ok(())
    }

    /// A tc program.
    ///
    /// # Errors
    /// When the object has no such program.
    pub fn tc(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        tc_program(&mut self.ebpf, name)
    }

    /// An XDP program.
    ///
    /// # Errors
    /// When the object has no such program.
    pub fn xdp(&mut self, name: &str) -> Result<&mut Xdp> {
        xdp_program(&mut self.ebpf, name)
    }
}

/// Takes a ring buffer of the object.
///
/// # Errors
/// It has none of that name, or it was taken before.
pub fn ring(ebpf: &mut Ebpf, name: &str) -> Result<RingBuf<MapData>> {
    let map = ebpf.take_map(name).ok_or_else(|| anyhow!("the BPF object has no map {name}"))?;
    RingBuf::try_from(map).with_context(|| format!("{name} is not a ring buffer"))
}

fn tc_program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    ebpf.program_mut(name)
        .ok_or_else(|| anyhow!("the BPF object has no program {name}"))?
        .try_into()
        .with_context(|| format!("{name} is not a tc program"))
}

fn xdp_program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    ebpf.program_mut(name)
        .ok_or_else(|| anyhow!("the BPF object has no program {name}"))?
        .try_into()
        .with_context(|| format!("{name} is not an XDP program"))
}

/// One line for people; the verifier's log goes to the development log.
fn load_error(name: &str, error: ProgramError) -> anyhow::Error {
    if let ProgramError::LoadError { io_error, verifier_log } = &error {
        log::debug!("verifier log of {name}:\n{verifier_log}");
        return anyhow!(
            "the kernel refuses the BPF program {name}: {io_error} (the oldest kernel it was seen to load on is 6.1; RUST_LOG=debug shows the verifier's log)"
        );
    }
    anyhow::Error::new(error).context(format!("cannot load the BPF program {name}"))
}
