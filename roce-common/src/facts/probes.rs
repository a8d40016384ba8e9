//! Passive round trips: from a request to the response that carries its PSN.

use crate::{psn::Psn, units::Nanos};

/// Requests waiting for their answers at the same time. While there are as many, further ones are not timed, so that of a
/// deep window some are measured and not none.
const WAITING: usize = 16;

/// The requests of a flow that are being timed, oldest first.
///
/// Only exact matches count: a packet is timed if its sender asks for an acknowledgement of it, or a responder must answer
/// it (READ, atomic), and the time ends with the response that carries its PSN. Responders coalesce: what a later ACK
/// covers gives no sample, since its time would hold a wait for packets after it. Repeated packets give none either
/// (Karn's rule): nobody knows which copy was answered. The round trip is that between this tap and the responder, the
/// responder's own delay included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Probes {
    waiting: [(Psn, Nanos); WAITING],
    first: u32,
    len: u32,
}

impl Probes {
    /// A request with a PSN that had not passed before, which will be answered for its own sake.
    #[inline]
    pub fn sent(&mut self, psn: Psn, now: Nanos) {
        if self.len as usize == WAITING {
            return;
        }
        self.waiting[(self.first + self.len) as usize % WAITING] = (psn, now);
        self.len += 1;
    }

    /// A packet with a PSN that had passed, or was skipped: it and what follows it will not be timed.
    pub fn repeated(&mut self, psn: Psn) {
        while self.len > 0 && self.at(self.len - 1).0.diff(psn) >= 0 {
            self.len -= 1;
        }
    }

    /// A response with this PSN; the time its request waited, if that was timed.
    #[inline]
    pub fn answered(&mut self, psn: Psn, now: Nanos) -> Option<Nanos> {
        while self.len > 0 {
            let (sent, at) = self.at(0);
            let d = sent.diff(psn);
            if d > 0 {
                return None;
            }
            self.first = (self.first + 1) % WAITING as u32;
            self.len -= 1;
            if d == 0 {
                return Some(now.since(at));
            }
        }
        None
    }

    /// Nothing is being timed any more: the flow starts anew.
    pub const fn clear(&mut self) {
        self.len = 0;
    }

    #[inline]
    const fn at(&self, number: u32) -> (Psn, Nanos) {
        self.waiting[(self.first + number) as usize % WAITING]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(n: u32) -> Psn {
        Psn::new(n)
    }

    #[test]
    fn only_the_very_psn_is_a_sample() {
        let mut probes = Probes::default();
        for (psn, at) in [(0xff_ffff, 100), (4, 110), (9, 120)] {
            probes.sent(p(psn), Nanos(at));
        }
        assert_eq!(probes.answered(p(0xff_fffe), Nanos(150)), None);
        assert_eq!(probes.answered(p(4), Nanos(200)), Some(Nanos(90)), "the one before is covered by it");
        assert_eq!(probes.answered(p(0xff_ffff), Nanos(210)), None);
        assert_eq!(probes.answered(p(8), Nanos(220)), None);
        assert_eq!(probes.answered(p(9), Nanos(230)), Some(Nanos(110)));
        assert_eq!(probes.answered(p(9), Nanos(240)), None, "the answer again");
    }

    #[test]
    fn repeated_packets_are_not_timed() {
        let mut probes = Probes::default();
        for psn in [1, 2, 3] {
            probes.sent(p(psn), Nanos(u64::from(psn)));
        }
        probes.repeated(p(2));
        assert_eq!(probes.answered(p(1), Nanos(10)), Some(Nanos(9)));
        assert_eq!(probes.answered(p(3), Nanos(10)), None);
        probes.sent(p(4), Nanos(20));
        assert_eq!(probes.answered(p(4), Nanos(30)), Some(Nanos(10)));
    }

    #[test]
    fn a_full_memory_times_the_oldest() {
        let mut probes = Probes::default();
        for psn in 0..100 {
            probes.sent(p(psn), Nanos(u64::from(psn)));
        }
        assert_eq!(probes.answered(p(15), Nanos(1_000)), Some(Nanos(985)));
        assert_eq!(probes.answered(p(50), Nanos(1_000)), None);
        for round in 0..40 {
            probes.sent(p(200 + round), Nanos(u64::from(round)));
            assert_eq!(probes.answered(p(200 + round), Nanos(u64::from(round) + 7)), Some(Nanos(7)));
        }
        probes.sent(p(400), Nanos(1));
        probes.clear();
        assert_eq!(probes.answered(p(400), Nanos(2)), None);
    }
}
