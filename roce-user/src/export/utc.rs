//! Wall-clock time as text, in UTC.

use jiff::{Timestamp, fmt::strtime};

/// `HH:MM:SS.µµµµµµ` of a number of nanoseconds since 1970.
pub fn time_of_day(unix_ns: u64) -> String {
    format("%H:%M:%S.%6f", unix_ns)
}

/// `YYYYMMDDTHHMMSS.µµµµµµZ` likewise: for names of files, which sort by it.
pub fn compact(unix_ns: u64) -> String {
    format("%Y%m%dT%H%M%S.%6fZ", unix_ns)
}

/// Every number of nanoseconds that 64 bits hold is a time before 2555.
fn format(pattern: &str, unix_ns: u64) -> String {
    Timestamp::from_nanosecond(unix_ns.into())
        .ok()
        .and_then(|time| strtime::format(pattern, time).ok())
        .unwrap_or_else(|| unix_ns.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts by `date -u -d @SECONDS`.
    #[test]
    fn as_date_says() {
        for (seconds, text) in [
            (0, "19700101T000000.000000Z"),
            (951_782_400, "20000229T000000.000000Z"),
            (1_709_251_199, "20240229T235959.000000Z"),
            (1_709_251_200, "20240301T000000.000000Z"),
            (4_107_542_400, "21000301T000000.000000Z"),
        ] {
            assert_eq!(compact(seconds * 1_000_000_000), text);
        }
        assert_eq!(time_of_day(45_296_123_456_789), "12:34:56.123456");
        assert_eq!(compact(u64::MAX), "25540721T233433.709551Z");
    }
}
