//! Bytes that were sent again.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::psn::{Account, Outcome};

/// Payload of retransmissions: bandwidth that carried nothing new to this tap, or only because something was lost before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Repeats {
    /// Payload bytes of the packets that the tracker counts as retransmitted.
    pub bytes: u64,
    /// Payload of the run that is going on.
    run: u64,
}

impl Repeats {
    /// Takes the next packet's payload length and what the tracker said of the packet.
    #[inline(always)]
    pub fn packet(&mut self, payload_len: u16, account: Account) {
        let behind = matches!(account.outcome(), Outcome::Filled(_) | Outcome::Duplicate);
        if !behind && !account.is_notable() {
            return;
        }
        let payload = u64::from(payload_len);
        // The run that ended is the packet's own, or the one before it.
        if behind && !account.run_started() {
            self.run += payload;
        }
        self.end(account);
        if account.run_started() {
            self.run = payload;
        }
        if let Some(own) = account.own_run() {
            if own.is_retransmission() {
                self.bytes += self.run;
            }
            self.run = 0;
        }
    }

    /// Closes the run that is going on: `account` is what [`Tracker::finish`](crate::psn::Tracker::finish) said.
    #[inline(always)]
    pub const fn end(&mut self, account: Account) {
        if let Some(run) = account.ended() {
            if run.is_retransmission() {
                self.bytes += self.run;
            }
            self.run = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        psn::{Observed, Psn, Tracker},
        wire::Opcode,
    };

    /// Packets carry as many bytes as their PSN says, so that sums tell which were counted.
    fn repeated(psns: &[u32]) -> (u64, u64) {
        let (mut tracker, mut repeats) = (Tracker::default(), Repeats::default());
        for &psn in psns {
            let account = tracker.observe(&Observed::new(Opcode::WRITE_ONLY, Psn::new(psn), psn as u16, 0));
            repeats.packet(psn as u16, account);
        }
        let account = tracker.finish();
        repeats.end(account);
        (tracker.retransmitted, repeats.bytes)
    }

    #[test]
    fn the_bytes_of_runs_that_are_retransmissions() {
        assert_eq!(repeated(&[1, 2, 3, 4]), (0, 0));
        // Go-back-N to the end, and beyond.
        assert_eq!(repeated(&[10, 11, 13, 12, 13, 14]), (2, 25));
        // A single duplicate, late packets, and a repeat that the capture ends in.
        assert_eq!(repeated(&[10, 11, 12, 13, 11, 14]), (1, 11));
        assert_eq!(repeated(&[10, 12, 11, 13]), (0, 0));
        assert_eq!(repeated(&[10, 11, 12, 13, 14, 11, 12]), (2, 23));
        // One run after another.
        assert_eq!(repeated(&[10, 11, 12, 13, 14, 11, 12, 11, 12, 13, 14, 15]), (6, 73));
    }
}
