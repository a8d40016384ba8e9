//! A queue pair that does not always have something to send, while CNPs keep coming.

use roce_common::dcqcn::{Fabric, Params};

use super::{
    tests::{Harness, P, cnp, local},
    *,
};

const LINE: Rate = Rate::from_bits_per_sec(20_000_000);
const PACKET: u64 = 1_098;
/// Packets that the queue pair hands to its shaper at once, and which leave at its rate.
const MESSAGE: u64 = 60;
const MS: u64 = 1_000_000;

/// A queue pair whose requester sends a message and then waits as long as that took, for the peer's answer: half of its time.
struct HalfBusy {
    /// Bytes handed to the shaper in all, as the egress program counts them.
    counter: u64,
    /// Of these, bytes that wait.
    waiting: f64,
    /// When the message was handed over, and when the next one will be.
    since: u64,
    next: u64,
}

impl HalfBusy {
    /// A millisecond at `rate` passes, up to `now`. Says how long the message took that has left by then.
    fn pass(&mut self, now: u64, rate: Rate) -> Option<u64> {
        if self.waiting > 0.0 {
            self.waiting -= rate.bytes_per_sec() as f64 / 1e3;
            if self.waiting <= 0.0 {
                self.next = now + (now - self.since);
                return Some(now - self.since);
            }
        } else if now >= self.next {
            self.waiting = (MESSAGE * PACKET) as f64;
            self.counter += MESSAGE * PACKET;
            self.since = now;
        }
        None
    }
}

/// The rate and the longest message of the last 20 of 80 s in which a CNP comes every `gap_ms`.
fn under_cnps(gap_ms: u64) -> (Rate, u64) {
    let soft = Params::soft(Fabric::new(LINE, PACKET as u32)).rp;
    let rp = RpParams { start_rate: Rate::from_bytes_per_sec(0), ..soft };
    let mut h = Harness::new(CoreConfig::new(rp, PACKET as u32));
    h.pair(17, 42);
    let mut qp = HalfBusy { counter: 0, waiting: 0.0, since: 0, next: 0 };
    let mut longest = 0;
    for ms in 0..80_000 {
        h.now += MS;
        let now = Nanos(h.now);
        let counter = qp.counter;
        // The cell is made with the limiter.
        let bytes_sent = move |_: &PeerQp| Some(counter);
        if ms % gap_ms == 0 {
            h.core.on_event(&cnp(P, 17), now, &bytes_sent, &mut h.out);
        }
        if h.core.next_deadline().is_some_and(|at| at <= now) {
            h.core.advance(now, &bytes_sent, &mut h.out);
        }
        h.out.clear();
        let took = qp.pass(h.now, h.core.rate(local(17)).unwrap_or(LINE)).unwrap_or(0);
        if ms >= 60_000 {
            longest = longest.max(took);
        }
    }
    (h.core.rate(local(17)).unwrap_or(LINE), longest)
}

#[test]
fn cnps_that_come_more_often_than_looks_do_not_hold_a_flow_at_its_minimum() {
    // Some increase periods each, of 66 ms; the minimum is a thousandth of the link.
    for gap_ms in [300, 700, 1_100] {
        let (rate, longest) = under_cnps(gap_ms);
        println!("a CNP every {gap_ms} ms: {} b/s, the longest message took {} ms", rate.bits_per_sec(), longest / MS);
        assert!(rate.bits_per_sec() * 20 >= LINE.bits_per_sec(), "{gap_ms} ms: {rate:?}");
        assert!(longest < 2_000 * MS, "{gap_ms} ms: {longest}");
    }
}
