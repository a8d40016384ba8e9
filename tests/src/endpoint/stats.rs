//! What a queue pair counts.

use roce_common::units::Nanos;
use serde::Serialize;

/// Width of one slot of [`Series`].
pub const SLOT: Nanos = Nanos::from_millis(100);

/// Bytes per slot of [`SLOT`] since time zero of the endpoint clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Series(Vec<u64>);

impl Series {
    /// Adds `bytes` at `now`.
    pub fn add(&mut self, now: Nanos, bytes: u64) {
        let slot = (now.0 / SLOT.0) as usize;
        if self.0.len() <= slot {
            self.0.resize(slot + 1, 0);
        }
        self.0[slot] += bytes;
    }

    /// Bytes of the slots that begin in `from..to`.
    pub fn sum(&self, from: Nanos, to: Nanos) -> u64 {
        let first = from.0.div_ceil(SLOT.0) as usize;
        let end = to.0.div_ceil(SLOT.0) as usize;
        self.0.iter().take(end).skip(first).sum()
    }
}

/// Counters of one queue pair, both roles.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct QpStats {
    /// Frames sent.
    pub sent_packets: u64,
    /// Their bytes, Ethernet header to ICRC.
    pub sent_bytes: u64,
    /// Valid packets received for this queue pair.
    pub received_packets: u64,
    /// Request messages of ours that completed.
    pub completed: u64,
    /// Payload accepted for the first time: request payload at the responder, READ payload at the requester.
    pub accepted_bytes: u64,
    /// The same over time.
    pub accepted: Series,
    /// Request packets sent again, READ requests excluded.
    pub retransmitted: u64,
    /// READ requests sent again, whole or from the middle.
    pub reasked: u64,
    /// Sequence NAKs (0x60) received.
    pub naks: u64,
    /// Sequence NAKs sent.
    pub naks_sent: u64,
    /// RNR NAKs received.
    pub rnrs: u64,
    /// RNR NAKs sent.
    pub rnrs_sent: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Packets that repeated something already accepted.
    pub duplicates: u64,
    /// Packets ahead of the one expected; not accepted.
    pub out_of_sequence: u64,
    /// Sends the kernel refused (ENOBUFS and the like).
    pub transmit_failures: u64,
    /// Syndrome of the NAK that ended the queue pair.
    pub fatal: Option<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_sums_whole_slots() {
        let mut s = Series::default();
        for ms in [0, 99, 100, 250, 999] {
            s.add(Nanos::from_millis(ms), 10);
        }
        assert_eq!(s.sum(Nanos(0), Nanos::from_millis(100)), 20);
        assert_eq!(s.sum(Nanos::from_millis(100), Nanos::from_millis(1000)), 30);
        assert_eq!(s.sum(Nanos::from_millis(2000), Nanos::from_millis(3000)), 0);
    }
}
