//! The constants of DCQCN.

use super::ONE;
use crate::units::{Nanos, Rate};

/// Everything the reaction point needs to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RpParams {
    /// Line rate: where a flow starts and what recovery ends at.
    pub line: Rate,
    /// No cut goes below this.
    pub min_rate: Rate,
    /// g, the weight of a CNP in α, in 1/65536.
    pub g: u32,
    /// F, the number of increases of fast recovery.
    pub fast_recovery: u32,
    /// B, bytes sent per increase.
    pub byte_period: u64,
    /// T, time per increase.
    pub timer: Nanos,
    /// K, time without a CNP after which α decays.
    pub alpha_timer: Nanos,
    /// R_AI, the additive step of the target rate.
    pub additive: Rate,
    /// R_HAI, the unit of the hyper-active step.
    pub hyper: Rate,
    /// A CNP within this time of the last cut does not cut again.
    pub monitor: Nanos,
}

/// A complete set: reaction, notification and congestion point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Reaction point.
    pub rp: RpParams,
    /// N, least time between two CNPs to one queue pair.
    pub cnp_interval: Nanos,
    /// Marking starts above this queue depth, bytes.
    pub kmin: u32,
    /// Marking is certain above this depth, bytes.
    pub kmax: u32,
    /// Marking probability at `kmax`, in 1/65536.
    pub pmax: u32,
}

/// What is wrong with a set of constants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParamError {
    /// The line rate is zero or above 2^40 bytes per second.
    Line,
    /// The minimum rate is zero or above the line rate.
    MinRate,
    /// g is zero or above one.
    G,
    /// A timer or the byte period is zero.
    Period,
    /// R_AI or R_HAI is zero.
    Step,
    /// kmin is above kmax, or pmax above one.
    Red,
}

impl core::fmt::Display for ParamError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Line => "the link rate must be above 0 and at most 8 Tb/s",
            Self::MinRate => "min_rate must be above 0 and at most the link rate",
            Self::G => "g must be above 0 and at most 1",
            Self::Period => "timers and the byte counter must be above 0",
            Self::Step => "the additive and hyper steps must be above 0",
            Self::Red => "kmin must be at most kmax, and pmax at most 1",
        })
    }
}

// Chosen with the packet-level model beside this file: 100 Mb/s, a 64-packet queue, feedback in 0.2 to 6 ms, 2 to 16
// senders. A CNP interval shorter than the loop (a full queue, then the controller) cuts several times for one
// congestion: with 23 packets four senders had 70 % of the link in their first two seconds, with 69 they have 97 % in
// their first five. Beyond about 30 senders on such a queue no set tried holds: their windows alone overflow it.

/// Packets per increase or α timer of the `soft` set.
const TIMER_PACKETS: u64 = 57;
/// Packets per CNP interval of the `soft` set: a queue of 64 and some.
const CNP_PACKETS: u64 = 69;
/// Timers below this drown in the jitter and latency of a user-space controller.
const TIMER_FLOOR: Nanos = Nanos::from_micros(500);
/// As [`TIMER_FLOOR`], for the CNP interval; in the same ratio.
const CNP_FLOOR: Nanos = Nanos::from_micros(600);

impl Params {
    /// The paper's deployment at 40 Gb/s (SIGCOMM'15 table 14; R_HAI from its authors' simulator). Absolute times and
    /// rates: at a tenth of a per cent of that rate they are far too fast.
    pub const fn paper(line: Rate) -> Self {
        let line_bytes = line.bytes_per_sec();
        Self {
            rp: RpParams {
                line,
                min_rate: Rate::from_bytes_per_sec(at_least_one(line_bytes / 1_000)),
                g: ONE / 256,
                fast_recovery: 5,
                byte_period: 10_000_000,
                timer: Nanos::from_micros(55),
                alpha_timer: Nanos::from_micros(55),
                additive: Rate::from_bits_per_sec(40_000_000),
                hyper: Rate::from_bits_per_sec(200_000_000),
                monitor: Nanos::from_micros(25),
            },
            cnp_interval: Nanos::from_micros(50),
            kmin: 5_000,
            kmax: 200_000,
            pmax: ONE / 100,
        }
    }

    /// A set for software senders, derived from the link rate and the size of a full packet on the wire: time constants
    /// follow the packet time, rate steps the link rate, thresholds the packet size. The floors of the time constants are
    /// reached at about 1 Gb/s; above, the loop is as slow as the controller, and no faster.
    pub const fn soft(line: Rate, packet_bytes: u32) -> Self {
        let line_bytes = line.bytes_per_sec();
        let packet = if packet_bytes == 0 { 1 } else { packet_bytes };
        let timer = at_least(line.time_for(packet as u64 * TIMER_PACKETS), TIMER_FLOOR);
        let cnp_interval = at_least(line.time_for(packet as u64 * CNP_PACKETS), CNP_FLOOR);
        let additive = at_least_one(line_bytes / 1_000);
        Self {
            rp: RpParams {
                line,
                min_rate: Rate::from_bytes_per_sec(at_least_one(line_bytes / 1_000)),
                g: ONE / 16,
                fast_recovery: 5,
                byte_period: packet as u64 * TIMER_PACKETS * 36,
                timer,
                alpha_timer: timer,
                additive: Rate::from_bytes_per_sec(additive),
                hyper: Rate::from_bytes_per_sec(additive * 5),
                // Half an interval: CNPs an interval apart arrive with jitter, and each shall cut.
                monitor: Nanos(cnp_interval.0 / 2),
            },
            cnp_interval,
            kmin: packet.saturating_mul(4),
            kmax: packet.saturating_mul(32),
            pmax: ONE / 5,
        }
    }

    /// Whether the algorithms can work with these constants.
    pub const fn validate(&self) -> Result<(), ParamError> {
        if let Err(e) = self.rp.validate() {
            return Err(e);
        }
        if self.kmin > self.kmax || self.pmax > ONE {
            return Err(ParamError::Red);
        }
        Ok(())
    }
}

impl RpParams {
    /// Whether the reaction point can work with these constants.
    pub const fn validate(&self) -> Result<(), ParamError> {
        let line = self.line.bytes_per_sec();
        if line == 0 || line > 1 << 40 {
            Err(ParamError::Line)
        } else if self.min_rate.bytes_per_sec() == 0 || self.min_rate.bytes_per_sec() > line {
            Err(ParamError::MinRate)
        } else if self.g == 0 || self.g > ONE {
            Err(ParamError::G)
        } else if self.byte_period == 0 || self.timer.0 == 0 || self.alpha_timer.0 == 0 {
            Err(ParamError::Period)
        } else if self.additive.bytes_per_sec() == 0 || self.hyper.bytes_per_sec() == 0 {
            Err(ParamError::Step)
        } else {
            Ok(())
        }
    }
}

const fn at_least(value: Nanos, floor: Nanos) -> Nanos {
    if value.0 < floor.0 { floor } else { value }
}

const fn at_least_one(value: u64) -> u64 {
    if value == 0 { 1 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_set_is_the_papers() {
        let p = Params::paper(Rate::from_bits_per_sec(40_000_000_000));
        assert_eq!((p.rp.g, p.rp.fast_recovery, p.rp.byte_period), (256, 5, 10_000_000));
        assert_eq!((p.rp.timer, p.rp.alpha_timer, p.cnp_interval), (Nanos(55_000), Nanos(55_000), Nanos(50_000)));
        assert_eq!(p.rp.additive.bits_per_sec(), 40_000_000);
        assert_eq!((p.kmin, p.kmax, p.pmax), (5_000, 200_000, 655));
        assert_eq!(p.validate(), Ok(()));
    }

    #[test]
    fn the_soft_set_follows_link_and_packet() {
        let p = Params::soft(Rate::from_bits_per_sec(100_000_000), 1_100);
        assert_eq!((p.rp.timer, p.cnp_interval), (Nanos(5_016_000), Nanos(6_072_000)));
        assert_eq!((p.rp.additive.bits_per_sec(), p.rp.hyper.bits_per_sec()), (100_000, 500_000));
        assert_eq!((p.kmin, p.kmax), (4_400, 35_200));
        // From 50 Mb/s to 25 Gb/s every value is valid, no slower than the link needs and no faster than the floors.
        let mut last = Nanos(u64::MAX);
        for mbps in [50u64, 100, 1_000, 2_500, 10_000, 25_000] {
            for packet in [300u32, 1_100, 4_200] {
                let p = Params::soft(Rate::from_bits_per_sec(mbps * 1_000_000), packet);
                assert_eq!(p.validate(), Ok(()));
                assert!(p.rp.timer >= TIMER_FLOOR && p.cnp_interval >= CNP_FLOOR);
                assert!(p.rp.monitor < p.cnp_interval && p.rp.monitor < p.rp.timer);
                if packet == 1_100 {
                    assert!(p.rp.timer <= last);
                    last = p.rp.timer;
                }
            }
        }
        assert_eq!(Params::soft(Rate::from_bits_per_sec(25_000_000_000), 1_100).rp.timer, TIMER_FLOOR);
        // Absurd input is refused by `validate`, and overflows nothing on the way.
        assert_eq!(Params::soft(Rate::from_bytes_per_sec(0), 0).validate(), Err(ParamError::Line));
        assert!(Params::soft(Rate::from_bytes_per_sec(1), u32::MAX).validate().is_ok());
    }

    #[test]
    fn nonsense_is_named() {
        let good = Params::soft(Rate::from_bits_per_sec(100_000_000), 1_100);
        let check = |f: fn(&mut Params)| {
            let mut p = good;
            f(&mut p);
            p.validate()
        };
        assert_eq!(check(|p| p.rp.min_rate = Rate::from_bytes_per_sec(0)), Err(ParamError::MinRate));
        assert_eq!(check(|p| p.rp.min_rate = Rate::from_bits_per_sec(200_000_000)), Err(ParamError::MinRate));
        assert_eq!(check(|p| p.rp.g = 0), Err(ParamError::G));
        assert_eq!(check(|p| p.rp.timer = Nanos(0)), Err(ParamError::Period));
        assert_eq!(check(|p| p.rp.hyper = Rate::from_bytes_per_sec(0)), Err(ParamError::Step));
        assert_eq!(check(|p| p.kmin = p.kmax + 1), Err(ParamError::Red));
    }
}
