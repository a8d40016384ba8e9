//! Packets for a capture, from the kernel.

use anyhow::Result;
use aya::maps::{MapData, RingBuf};
use roce_common::abi::{Counter, Direction};

use crate::{capture::Source, dataplane::Maps};

/// The ring buffer of captured packets, and the counter of those that did not fit.
pub(super) struct KernelSource {
    ring: RingBuf<MapData>,
    maps: Maps,
}

impl KernelSource {
    /// Reads them by handles of its own.
    pub(super) const fn new(ring: RingBuf<MapData>, maps: Maps) -> Self {
        Self { ring, maps }
    }
}

impl Source for KernelSource {
    fn drain(&mut self, take: &mut dyn FnMut(&[u8])) {
        while let Some(record) = self.ring.next() {
            take(&record);
        }
    }

    fn lost(&mut self) -> Result<u64> {
        let of = |direction| Ok::<_, anyhow::Error>(self.maps.counters(direction)?[Counter::CaptureLost as usize]);
        Ok(of(Direction::Ingress)? + of(Direction::Egress)?)
    }
}
