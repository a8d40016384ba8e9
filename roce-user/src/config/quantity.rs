//! Rates and times as people write them.

use std::{fmt, str::FromStr};

use roce_common::units::{Nanos, Rate};
use serde::{Deserialize, Deserializer};

/// The slowest link rate that makes sense: below, one packet takes a second.
const LEAST_LINK: u64 = 10_000;
/// The fastest.
const MOST_LINK: u64 = 1_600_000_000_000;
/// The longest time any setting may name.
const MOST_TIME: Nanos = Nanos(3_600 * Nanos::SECOND.0);

/// A rate in bits per second: a number, plain or with `k`, `m`, `g` or `t` (powers of 1000), optionally followed by
/// `bit`, `bps` or `bit/s`; fractions are fine.
pub fn parse_rate(text: &str) -> Result<Rate, String> {
    let bits = bits_per_sec(text, 1.0).ok_or_else(|| {
        format!("`{text}` is not a rate: write for example 100m, 25g, 1.5gbit or 40000000 (bits per second)")
    })?;
    if bits == 0.0 {
        return Err(format!("`{text}`: a rate of zero carries nothing"));
    }
    if bits < LEAST_LINK as f64 {
        return Err(format!("`{text}` is {bits} bit/s, below {LEAST_LINK} bit/s: is a unit (k, m, g) missing?"));
    }
    no_faster_than_links(text, bits)
}

fn no_faster_than_links(text: &str, bits: f64) -> Result<Rate, String> {
    if bits > MOST_LINK as f64 {
        return Err(format!("`{text}` is above {} Tb/s: no such link exists", MOST_LINK as f64 / 1e12));
    }
    Ok(Rate::from_bits_per_sec(bits.round() as u64))
}

/// The number of bits per second in `text`; `bare` is the unit of a number that names none.
fn bits_per_sec(text: &str, bare: f64) -> Option<f64> {
    let lower = text.trim().to_ascii_lowercase();
    let unit = ["bit/s", "bits", "bps", "bit", "b/s"].iter().find_map(|unit| lower.strip_suffix(unit));
    let rest = unit.unwrap_or(&lower).trim_end();
    let (number, factor) = match rest.chars().last() {
        Some('k') => (&rest[..rest.len() - 1], 1e3),
        Some('m') => (&rest[..rest.len() - 1], 1e6),
        Some('g') => (&rest[..rest.len() - 1], 1e9),
        Some('t') => (&rest[..rest.len() - 1], 1e12),
        _ => (rest, if unit.is_some() { 1.0 } else { bare }),
    };
    decimal(number.trim_end()).map(|n| n * factor)
}

/// A time: a number followed by `ns`, `us`, `ms` or `s`.
pub fn parse_time(text: &str) -> Result<Nanos, String> {
    let ns =
        nanoseconds(text, None).ok_or_else(|| format!("`{text}` is not a time: write for example 50us, 5ms or 1s"))?;
    if ns < 1.0 {
        return Err(format!("`{text}`: a time of zero is not allowed here"));
    }
    no_longer_than_an_hour(text, ns)
}

fn no_longer_than_an_hour(text: &str, ns: f64) -> Result<Nanos, String> {
    if ns > MOST_TIME.0 as f64 {
        return Err(format!("`{text}` is more than an hour"));
    }
    Ok(Nanos(ns.round() as u64))
}

/// The number of nanoseconds in `text`; `bare` is the unit of a number that names none, where that is allowed.
fn nanoseconds(text: &str, bare: Option<f64>) -> Option<f64> {
    let lower = text.trim().to_lowercase();
    // The longer units first: they end in the shorter ones.
    let (number, factor) = [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("μs", 1e3), ("ms", 1e6), ("s", 1e9)]
        .iter()
        .find_map(|(unit, factor)| lower.strip_suffix(unit).map(|n| (n.trim_end(), *factor)))
        .or_else(|| bare.map(|factor| (lower.as_str(), factor)))?;
    decimal(number).map(|n| n * factor)
}

/// Digits with at most one point: no sign, no exponent, no infinity.
fn decimal(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.') && text.bytes().any(|b| b.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

/// A value that a file may write as text (`"100m"`) or as a number.
macro_rules! text_or_number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $parse:path, $unit:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name(pub $inner);

        impl FromStr for $name {
            type Err = String;

            fn from_str(s: &str) -> Result<Self, String> {
                $parse(s).map(Self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl serde::de::Visitor<'_> for Visitor {
                    type Value = $name;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($unit)
                    }

                    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<$name, E> {
                        v.parse().map_err(E::custom)
                    }

                    fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<$name, E> {
                        $name::from_number(&v.to_string()).map_err(E::custom)
                    }

                    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<$name, E> {
                        let v = u64::try_from(v).map_err(|_| E::custom(format!("{v} is below zero")))?;
                        self.visit_u64(v)
                    }

                    fn visit_bool<E: serde::de::Error>(self, v: bool) -> Result<$name, E> {
                        self.visit_str(&v.to_string())
                    }

                    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<$name, E> {
                        $name::from_number(&v.to_string()).map_err(E::custom)
                    }
                }
                d.deserialize_any(Visitor)
            }
        }
    };
}

text_or_number! {
    /// A rate as written in a file or on the command line.
    RateText(Rate), parse_rate, "a rate such as \"100m\" or a number of bits per second"
}

text_or_number! {
    /// A time as written in a file or on the command line.
    TimeText(Nanos), parse_time, "a time such as \"50us\" or \"1s\""
}

text_or_number! {
    /// A rate among the DCQCN constants: a number without a unit is Mb/s, as adapters have it; zero is fine.
    MegabitRate(Rate), parse_megabit_rate, "a rate such as \"5m\" or a number of Mb/s"
}

text_or_number! {
    /// A time among the DCQCN constants: a number without a unit is in µs, as adapters have it; zero is fine.
    MicroTime(Nanos), parse_micro_time, "a time such as \"300us\" or a number of microseconds"
}

text_or_number! {
    /// A switch among the DCQCN constants: true or false, or 1 or 0, as adapters have it.
    Switch(bool), parse_switch, "true or false"
}

impl RateText {
    fn from_number(bits: &str) -> Result<Self, String> {
        parse_rate(bits).map(Self)
    }
}

impl TimeText {
    fn from_number(number: &str) -> Result<Self, String> {
        Err(format!("a time needs a unit: write for example \"{number}us\""))
    }
}

impl MegabitRate {
    fn from_number(number: &str) -> Result<Self, String> {
        number.parse()
    }
}

impl MicroTime {
    fn from_number(number: &str) -> Result<Self, String> {
        number.parse()
    }
}

impl Switch {
    fn from_number(number: &str) -> Result<Self, String> {
        number.parse()
    }
}

fn parse_megabit_rate(text: &str) -> Result<Rate, String> {
    let bits = bits_per_sec(text, 1e6)
        .ok_or_else(|| format!("`{text}` is not a rate: write for example 5 (Mb/s), 500k or 1.5gbit"))?;
    if bits > 0.0 && bits < 8.0 {
        return Err(format!("`{text}` is less than a byte per second"));
    }
    no_faster_than_links(text, bits)
}

fn parse_micro_time(text: &str) -> Result<Nanos, String> {
    let ns = nanoseconds(text, Some(1e3))
        .ok_or_else(|| format!("`{text}` is not a time: write for example 300 (microseconds), 50us or 5ms"))?;
    no_longer_than_an_hour(text, ns)
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text.trim() {
        "true" | "1" | "on" => Ok(true),
        "false" | "0" | "off" => Ok(false),
        _ => Err(format!("`{text}` is neither true nor false")),
    }
}

/// A rate in the largest unit that leaves it whole; [`parse_rate`] and [`MegabitRate`] read the same.
pub(super) fn rate_text(rate: Rate) -> String {
    let bits = rate.bits_per_sec();
    for (factor, unit) in [(1_000_000_000, "g"), (1_000_000, "m"), (1_000, "k")] {
        if bits > 0 && bits.is_multiple_of(factor) {
            return format!("{}{unit}", bits / factor);
        }
    }
    format!("{bits}bit")
}

/// A time in the largest unit that leaves it whole; [`parse_time`] and [`MicroTime`] read the same.
pub(super) fn time_text(time: Nanos) -> String {
    for (factor, unit) in [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")] {
        if time.0 > 0 && time.0.is_multiple_of(factor) {
            return format!("{}{unit}", time.0 / factor);
        }
    }
    format!("{}ns", time.0)
}
