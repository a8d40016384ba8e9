//! The values in AETH syndromes: credits and RNR timers (InfiniBand's tables, as in Linux `rxe_comp.c` and `ib_verbs.h`).

use crate::units::Nanos;

/// Credits by code; code 31 carries none.
const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
];

/// RNR timers by code, in units of 10 µs.
const RNR_TIMERS: [u16; 32] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768, 49152,
];
/// The timer of code 0, in the same units: the longest.
const LONGEST_RNR_TIMER: u64 = 65_536;

/// How many receive buffers an ACK with this credit code grants; `None` for 31, no information, and above.
#[inline(always)]
pub const fn credits(code: u8) -> Option<u16> {
    if code < 31 { Some(CREDITS[code as usize]) } else { None }
}

/// How long an RNR NAK with this timer code (its low five bits) tells the requester to wait at least.
#[inline(always)]
pub const fn rnr_timer(code: u8) -> Nanos {
    let units = match code & 0x1f {
        0 => LONGEST_RNR_TIMER,
        code => RNR_TIMERS[code as usize] as u64,
    };
    Nanos::from_micros(units * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_values_of_the_tables() {
        let credit = [(0, Some(0)), (5, Some(6)), (11, Some(48)), (20, Some(1024)), (30, Some(32_768)), (31, None)];
        for (code, buffers) in credit {
            assert_eq!(credits(code), buffers, "{code}");
        }
        // In µs.
        let timers =
            [(0, 655_360), (1, 10), (5, 60), (12, 640), (14, 1_280), (20, 10_240), (25, 61_440), (31, 491_520)];
        for (code, micros) in timers {
            assert_eq!(rnr_timer(code), Nanos::from_micros(micros), "{code}");
        }
        assert_eq!(rnr_timer(0x2c), rnr_timer(12), "a whole syndrome byte works too");
    }
}
