//! Wall-clock time as text, in UTC.

/// Nanoseconds of a day.
const DAY: u64 = 86_400 * SECOND;
const SECOND: u64 = 1_000_000_000;

/// `HH:MM:SS.µµµµµµ` of a number of nanoseconds since 1970.
pub fn time_of_day(unix_ns: u64) -> String {
    let ns = unix_ns % DAY;
    let s = ns / SECOND;
    format!("{:02}:{:02}:{:02}.{:06}", s / 3600, s / 60 % 60, s % 60, ns % SECOND / 1_000)
}

/// `YYYYMMDDTHHMMSS.µµµµµµZ` likewise: for names of files, which sort by it.
pub fn compact(unix_ns: u64) -> String {
    let (year, month, day) = date(unix_ns / DAY);
    let time = time_of_day(unix_ns).replace(':', "");
    format!("{year:04}{month:02}{day:02}T{time}Z")
}

/// Year, month and day of a number of days since 1970. Counts the days of 400, 100, 4 and 1 years from a first of March,
/// so that the leap day is the last of a year.
const fn date(days: u64) -> (u64, u64, u64) {
    /// Days from 0000-03-01 to 1970-01-01.
    const TO_1970: u64 = 719_468;
    let days = days + TO_1970;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + (month <= 2) as u64;
    (year, month, day)
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
            assert_eq!(compact(seconds * SECOND), text);
        }
        assert_eq!(time_of_day(45_296_123_456_789), "12:34:56.123456");
    }
}
