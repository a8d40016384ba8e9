//! What a congestion point shows: for the port and each class the depth of its virtual queue and how likely it marks.

use anyhow::Result;
use roce_common::{
    abi::{CP_CLASSES, Role},
    dcqcn::{ONE, cp::probability},
    units::Nanos,
};
use serde::Serialize;

use crate::{
    config::{depth, queue_rate},
    dataplane::Maps,
};

/// One class of a congestion point; class 0 is the port's own.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CongestionLine {
    /// Number of the class.
    pub class: u32,
    /// Its DSCPs; empty for the port, which takes all others.
    pub dscp: Vec<u8>,
    /// Rate of its virtual queue, bits per second.
    pub queue_bps: u64,
    /// It shares the port's queue.
    pub shared: bool,
    /// Bytes in the virtual queue now.
    pub depth_bytes: u64,
    /// The most in the newest second with packets.
    pub peak_bytes: u64,
    /// What packets found on average since the start.
    pub mean_bytes: u64,
    /// How likely a packet is marked now, 0 to 1.
    pub mark_probability: f64,
    /// Packets, RoCE or not.
    pub packets: u64,
    /// Frame bytes.
    pub bytes: u64,
    /// Packets made CE.
    pub marked: u64,
}

/// The classes of an attachment; none where it is no congestion point.
///
/// # Errors
/// When a map cannot be read.
pub fn congestion_lines(maps: &Maps, now: Nanos) -> Result<Vec<CongestionLine>> {
    let config = maps.config()?;
    if config.role != Role::Cp as u32 {
        return Ok(Vec::new());
    }
    let of_dscp = maps.cp_dscp()?;
    let mut lines = Vec::new();
    for number in 0..CP_CLASSES {
        let class = maps.cp_class(number).filter(|_| number != 0);
        if number != 0 && class.is_none() {
            continue;
        }
        let own = number == 0 || class.is_some_and(|c| c.bytes_per_sec != 0);
        let rate = queue_rate(&config, class.as_ref());
        let queue = maps.virtual_queue(if own { number } else { 0 })?;
        let depth_bytes = depth(Nanos(queue.empty_at_ns), now, rate);
        let (kmin, kmax, pmax) =
            class.map_or((config.kmin_bytes, config.kmax_bytes, config.pmax), |c| (c.kmin_bytes, c.kmax_bytes, c.pmax));
        let stats = maps.cp_stats(number)?;
        lines.push(CongestionLine {
            class: number,
            dscp: (0u8..).zip(&of_dscp).filter(|(_, of)| number != 0 && **of == number).map(|(d, _)| d).collect(),
            queue_bps: rate.saturating_mul(8),
            shared: !own,
            depth_bytes,
            peak_bytes: stats.peak_bytes,
            mean_bytes: stats.depth_sum.checked_div(stats.packets).unwrap_or(0),
            mark_probability: f64::from(probability(depth_bytes, kmin, kmax, pmax)) / f64::from(ONE),
            packets: stats.packets,
            bytes: stats.bytes,
            marked: stats.marked,
        });
    }
    Ok(lines)
}

impl std::fmt::Display for CongestionLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self.class {
            0 => "port".to_owned(),
            n => format!("class {n}, DSCP {}", self.dscp.iter().map(u8::to_string).collect::<Vec<_>>().join(" ")),
        };
        write!(
            f,
            "virtual queue of {name}: {} bytes now, peak {}, mean {}; marks {:.1} % now, {} of {} packets marked",
            self.depth_bytes,
            self.peak_bytes,
            self.mean_bytes,
            100.0 * self.mark_probability,
            self.marked,
            self.packets
        )
    }
}
