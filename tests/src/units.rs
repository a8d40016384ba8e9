//! Rates as people write them.

/// Reads a rate in bits per second: a number with an optional `k`, `m` or `g` (thousands), optionally followed by
/// `bit` or `bit/s`: `100m`, `1g`, `2.5gbit`, `100000000`.
///
/// # Errors
/// A sentence that names the text.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let number = lower.trim_end_matches("/s").trim_end_matches("bit");
    let (digits, factor) = match number.as_bytes().last() {
        Some(b'k') => (&number[..number.len() - 1], 1e3),
        Some(b'm') => (&number[..number.len() - 1], 1e6),
        Some(b'g') => (&number[..number.len() - 1], 1e9),
        _ => (number, 1.0),
    };
    match digits.parse::<f64>() {
        Ok(v) if v.is_finite() && v >= 0.0 && digits.starts_with(|c: char| c.is_ascii_digit()) => {
            Ok((v * factor).round() as u64)
        }
        _ => Err(format!("{text:?} is not a rate (examples: 100m, 2.5g, 100000000)")),
    }
}

/// A rate with three significant digits and a unit: `93.9 Mb/s`.
pub fn format_rate(bits_per_sec: f64) -> String {
    let (value, unit) = match bits_per_sec {
        v if v >= 1e9 => (v / 1e9, "Gb/s"),
        v if v >= 1e6 => (v / 1e6, "Mb/s"),
        v if v >= 1e3 => (v / 1e3, "kb/s"),
        v => return format!("{v:.0} b/s"),
    };
    let digits = if value >= 100.0 { 0 } else { 1 + usize::from(value < 10.0) };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written() {
        for (text, want) in
            [("100m", 100_000_000), ("2.5g", 2_500_000_000), ("64kbit", 64_000), ("1Gbit/s", 1_000_000_000), ("7", 7)]
        {
            assert_eq!(parse_rate(text), Ok(want), "{text}");
        }
        for text in ["", "m", "-1m", "fast", "nan", "inf", "1x", "1e400m"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
        assert_eq!(format_rate(93_870_000.0), "93.9 Mb/s");
        assert_eq!(format_rate(5_640_000.0), "5.64 Mb/s");
        assert_eq!(format_rate(12.0), "12 b/s");
    }
}
