//! The set for software senders: every time constant, step and threshold follows the link, the packet and the delay.

use super::{
    ONE,
    params::{AlphaUpdate, Boundary, HeldBackMarks, Params, RpParams},
    presets::{LEAST_PART, part_of},
};
use crate::units::{Nanos, Rate};

/// What a set of constants is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fabric {
    /// Rate of the slowest link that flows share.
    pub line: Rate,
    /// Bytes of a full packet on the wire.
    pub packet_bytes: u32,
    /// From a mark to the first packet that leaves at the lower rate, without the time in the queue: NP, way back,
    /// controller, pacer.
    pub feedback: Nanos,
}

impl Fabric {
    /// A fabric whose feedback delay nobody measured: [`FEEDBACK`].
    pub const fn new(line: Rate, packet_bytes: u32) -> Self {
        Self { line, packet_bytes, feedback: FEEDBACK }
    }

    /// The time `packets` full packets take on the link.
    const fn packets(&self, packets: u64) -> Nanos {
        self.line.time_for(packets * if self.packet_bytes == 0 { 1 } else { self.packet_bytes as u64 })
    }
}

/// The feedback delay where none was measured: a controller in user space on a host that does other things too.
pub const FEEDBACK: Nanos = Nanos::from_micros(100);

// Chosen with the simulator (`roce sim`, benches/sim-soft.md): 50 Mb/s to 25 Gb/s, 2 to 32 flows with windows of 64 packets,
// a queue of 64, CNPs and rate changes 20 to 70 µs late. What shaped them:
//
// - A queue of 64 packets lasts for less than the feedback delay on a fast link, so marks must begin at once (Kmin) and
//   rise steeply: a gentle slope answers when the queue is full. What keeps steep marks from cutting too deep is α: small g,
//   and cuts of α/2 that are small because α decays in packet times (K), not in feedback delays.
// - With N flows the increases add up to N · R_AI, and each CNP takes only α/2 of C/N. A small F with a moderate R_AI lets
//   CNPs, which every flow hears about once per period when there are many, take the increases back before they add up.
// - T must be several feedback delays, since all flows recover in step after a common cut.
// - A flow that joins a full link is marked at once, like all others. Were its start over then, only additive steps would bring it
//   to its share (74 to 136 increase periods with two flows). So a start lasts for a while in spite of CNPs. Half of the target
//   keeps it gentle where many start together: the more there are, the less each of them has, and adds.
// - The first rate times 32 flows is half of the line rate: four times as much lost packets by hundreds before the first CNP was
//   heard.
// - Hyper increase, or a second increase by bytes, shortened nothing and overflowed the queue at 32 flows.

/// Packets per increase.
const TIMER_PACKETS: u64 = 150;
/// Feedback delays per increase, at least.
const TIMER_DELAYS: u64 = 10;
/// Packets per α timer.
const ALPHA_PACKETS: u64 = 120;
/// The shortest α timer, which only bounds the work of an update.
const ALPHA_FLOOR: Nanos = Nanos::from_micros(10);
/// Packets per CNP interval.
const CNP_PACKETS: u64 = 10;
/// Feedback delays per CNP interval, at least: a CNP before the last one was obeyed says nothing new.
const CNP_DELAYS: u64 = 1;
/// g.
const G: u32 = ONE / 50;
/// F.
const FAST_RECOVERY: u32 = 2;
/// R_AI and R_HAI are this part of the line rate.
const STEP_PART: u64 = 140;
/// Kmin and Kmax in packets.
const KMIN_PACKETS: u32 = 2;
/// As [`KMIN_PACKETS`].
const KMAX_PACKETS: u32 = 44;
/// Pmax.
const PMAX: u32 = ONE / 2;
/// The part of the line rate that a flow starts with.
const START_PART: u64 = 64;
/// The most that an increase of a start adds behind its first CNP is this part of the line rate.
const START_STEP_PART: u64 = 35;
/// Increase periods that a start lasts in spite of CNPs.
const START_PERIODS: u32 = 40;
/// The share of its rate that a flow must have used for a timer to raise it.
const USAGE: u32 = ONE / 2;
/// After this many timer periods, but not before [`IDLE_FLOOR`], an idle flow starts anew.
const IDLE_TIMERS: u64 = 400;
/// Longer than most ACK timeouts: a flow that waits for one comes back at its rate.
const IDLE_FLOOR: Nanos = Nanos::from_millis(2_000);

impl Params {
    /// A set for software senders on `fabric`.
    pub const fn soft(fabric: Fabric) -> Self {
        let line = fabric.line;
        let packet = if fabric.packet_bytes == 0 { 1 } else { fabric.packet_bytes };
        let timer = longer(fabric.packets(TIMER_PACKETS), times(fabric.feedback, TIMER_DELAYS));
        let timer = shorter(timer, super::params::MOST_PERIOD);
        let cnp_interval = longer(fabric.packets(CNP_PACKETS), times(fabric.feedback, CNP_DELAYS));
        let step = part_of(line, STEP_PART);
        Self {
            rp: RpParams {
                line,
                max_rate: Rate::from_bytes_per_sec(0),
                min_rate: part_of(line, LEAST_PART),
                g: G,
                initial_alpha: ONE,
                alpha_update: AlphaUpdate::AtCnp,
                alpha_timer: shorter(longer(fabric.packets(ALPHA_PACKETS), ALPHA_FLOOR), super::params::MOST_PERIOD),
                gd: 11,
                least_kept_percent: 50,
                // Half an interval: CNPs an interval apart arrive with jitter, and each shall cut.
                monitor: Nanos(cnp_interval.0 / 2),
                first_cnp_rate: Rate::from_bytes_per_sec(0),
                clamp_target: true,
                clamp_target_after_timer: true,
                fast_recovery: FAST_RECOVERY,
                boundary: Boundary::Below,
                timer,
                byte_period: 0,
                additive: step,
                hyper: step,
                start_rate: part_of(line, START_PART),
                start_additive: part_of(line, START_STEP_PART),
                start_periods: START_PERIODS,
                usage: USAGE,
                idle_restart: longer(times(timer, IDLE_TIMERS), IDLE_FLOOR),
            },
            cnp_interval,
            held_back_marks: HeldBackMarks::Dropped,
            kmin: packet.saturating_mul(KMIN_PACKETS),
            kmax: packet.saturating_mul(KMAX_PACKETS),
            pmax: PMAX,
        }
    }
}

const fn longer(a: Nanos, b: Nanos) -> Nanos {
    if a.0 < b.0 { b } else { a }
}

const fn shorter(a: Nanos, b: Nanos) -> Nanos {
    if a.0 < b.0 { a } else { b }
}

const fn times(time: Nanos, n: u64) -> Nanos {
    Nanos(time.0.saturating_mul(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dcqcn::params::ParamError;

    const fn mbps(n: u64) -> Rate {
        Rate::from_bits_per_sec(n * 1_000_000)
    }

    #[test]
    fn the_soft_set_follows_link_packet_and_delay() {
        // From 50 Mb/s to 25 Gb/s every set is valid, and what is slower in one way is slower in every time constant.
        let mut last = Nanos(u64::MAX);
        for rate in [50, 100, 1_000, 2_500, 10_000, 25_000] {
            for packet in [300, 1_100, 4_200] {
                let mut slowest = Nanos(0);
                for us in [4, 20, 100, 1_000, 5_000] {
                    let fabric = Fabric { line: mbps(rate), packet_bytes: packet, feedback: Nanos::from_micros(us) };
                    let p = Params::soft(fabric);
                    assert_eq!(p.validate(), Ok(()), "{fabric:?}");
                    // A loop that is cut or raised faster than it answers does not settle.
                    assert!(p.rp.timer > fabric.feedback && p.cnp_interval >= fabric.feedback, "{fabric:?}");
                    assert!(p.rp.monitor < p.cnp_interval && p.rp.idle_restart > p.rp.timer, "{fabric:?}");
                    assert!(p.kmin >= packet && p.rp.start_rate < fabric.line, "{fabric:?}");
                    assert!(p.rp.timer >= slowest, "{fabric:?}");
                    slowest = p.rp.timer;
                }
            }
            let p = Params::soft(Fabric::new(mbps(rate), 1_100));
            assert!(p.rp.timer <= last);
            last = p.rp.timer;
        }
    }

    #[test]
    fn absurd_paths_are_refused_and_overflow_nothing() {
        assert_eq!(Params::soft(Fabric::new(Rate::from_bytes_per_sec(0), 0)).validate(), Err(ParamError::Line));
        assert_eq!(Params::soft(Fabric::new(Rate::from_bytes_per_sec(1), u32::MAX)).validate(), Ok(()));
        let fabric = Fabric { line: mbps(100), packet_bytes: u32::MAX, feedback: Nanos(u64::MAX) };
        assert_eq!(Params::soft(fabric).validate(), Ok(()));
    }
}
