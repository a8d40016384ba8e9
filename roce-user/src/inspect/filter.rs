//! What of a capture is asked for: flows by pattern, frames by time.

use std::{net::IpAddr, str::FromStr};

use roce_common::{
    abi::{FlowKey, Space, Tap},
    units::{Addr, Nanos},
};

use crate::{export::FlowReport, facts::PathReport, findings::Subject};

/// A pattern of flows, from `--flow`: every part that is given must fit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FlowPattern {
    tap: Option<String>,
    host: Option<Prefix>,
    src: Option<Prefix>,
    dst: Option<Prefix>,
    qpn: Option<(u32, u32)>,
    space: Option<Space>,
}

/// An address and how many of its leading bits count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Prefix {
    addr: Addr,
    bits: u32,
}

impl Prefix {
    fn holds(self, addr: Addr) -> bool {
        let (a, b) = (u128::from_be_bytes(self.addr.0), u128::from_be_bytes(addr.0));
        self.bits == 0 || (a ^ b) >> (128 - self.bits) == 0
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (addr, bits) = text.split_once('/').map_or((text, None), |(addr, bits)| (addr, Some(bits)));
        let ip: IpAddr = addr.parse().map_err(|_| format!("`{addr}` is no IP address"))?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => most,
            Some(bits) => bits
                .parse()
                .ok()
                .filter(|&bits: &u32| bits <= most)
                .ok_or_else(|| format!("`/{bits}` is no prefix length from 0 to {most}"))?,
        };
        Ok(Self { addr: ip.into(), bits: 128 - most + bits })
    }
}

impl FromStr for FlowPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut pattern = Self::default();
        for part in text.split(',') {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` is no NAME=VALUE; names are tap, host, src, dst, qpn and space"))?;
            match name.trim() {
                "tap" => pattern.tap = Some(value.to_owned()),
                "host" => pattern.host = Some(value.parse()?),
                "src" => pattern.src = Some(value.parse()?),
                "dst" => pattern.dst = Some(value.parse()?),
                "qpn" => pattern.qpn = Some(qpns(value)?),
                "space" => {
                    pattern.space = Some(match value {
                        "request" => Space::Request,
                        "response" => Space::Response,
                        _ => return Err(format!("`{value}` is no space: request or response")),
                    });
                }
                other => return Err(format!("there is no `{other}`: use tap, host, src, dst, qpn or space")),
            }
        }
        Ok(pattern)
    }
}

/// A QPN or a range of them, `17`, `0x11` or `17-24`.
fn qpns(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| {
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => text.parse(),
        };
        parsed.ok().filter(|&n| n < 1 << 24).ok_or_else(|| format!("`{text}` is no queue pair number"))
    };
    match text.split_once('-') {
        None => number(text).map(|n| (n, n)),
        Some((a, b)) => match (number(a)?, number(b)?) {
            (a, b) if a <= b => Ok((a, b)),
            _ => Err(format!("`{text}`: the smaller number stands first")),
        },
    }
}

impl FlowPattern {
    /// Whether what has these properties is meant. What it has not is of every kind: a CNP of both PSN spaces, a path of all
    /// queue pairs, a host of all destinations.
    fn fits(&self, tap: &str, src: Addr, dst: Option<Addr>, qpn: Option<u32>, space: Option<Space>) -> bool {
        self.tap.as_deref().is_none_or(|t| t == tap)
            && self.host.is_none_or(|p| p.holds(src) || dst.is_none_or(|dst| p.holds(dst)))
            && self.src.is_none_or(|p| p.holds(src))
            && self.dst.is_none_or(|p| dst.is_none_or(|dst| p.holds(dst)))
            && self.qpn.is_none_or(|(from, to)| qpn.is_none_or(|qpn| (from..=to).contains(&qpn)))
            && self.space.is_none_or(|s| space.is_none_or(|of| of == s))
    }
}

/// The flows asked for: those that fit any pattern, or all where there is none.
#[derive(Clone, Copy)]
pub(super) struct Flows<'a>(pub(super) &'a [FlowPattern]);

impl Flows<'_> {
    /// Whether everything is asked for.
    pub(super) const fn all(self) -> bool {
        self.0.is_empty()
    }

    /// Whether a packet is.
    pub(super) fn packet(self, tap: &str, src: Addr, dst: Addr, qpn: u32, space: Option<Space>) -> bool {
        self.fit(tap, src, Some(dst), Some(qpn), space)
    }

    /// Whether a flow is.
    pub(super) fn key(self, tap: &str, key: &FlowKey) -> bool {
        self.packet(tap, key.src, key.dst, key.dest_qp().get(), Some(key.space()))
    }

    /// Whether what is found of `subject` is. What concerns the whole capture concerns every flow.
    pub(super) fn subject<'t>(self, subject: Subject, tap_name: impl Fn(Tap) -> &'t str) -> bool {
        match subject {
            Subject::Flow(key) => self.key(tap_name(key.tap), &key),
            Subject::Path(tap, src, dst) => self.fit(tap_name(tap), src, Some(dst), None, None),
            Subject::Host(tap, src) => self.fit(tap_name(tap), src, None, None, None),
            Subject::Capture => true,
        }
    }

    /// Whether a path of a report is.
    pub(super) fn path(self, path: &PathReport) -> bool {
        self.fit(&path.tap, path.src.into(), Some(path.dst.into()), None, None)
    }

    fn fit(self, tap: &str, src: Addr, dst: Option<Addr>, qpn: Option<u32>, space: Option<Space>) -> bool {
        self.all() || self.0.iter().any(|p| p.fits(tap, src, dst, qpn, space))
    }

    /// Whether the flow of a report is.
    pub(super) fn report(self, flow: &FlowReport) -> bool {
        let space = if flow.space == Space::Request.name() { Space::Request } else { Space::Response };
        self.packet(&flow.tap, flow.src.into(), flow.dst.into(), flow.dest_qp, Some(space))
    }
}

/// A point in time, from `--from` and `--to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimePoint {
    /// After the first frame of the capture.
    AfterStart(Nanos),
    /// Since 1970.
    Absolute(Nanos),
}

impl FromStr for TimePoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no time: +1.5s, +200ms or +30us behind the first frame, seconds since 1970, or a date like \
                 2026-11-29T12:00:00Z"
            )
        };
        if let Some(after) = text.strip_prefix('+') {
            let unit = after.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(after.len());
            let (number, unit) = after.split_at(unit);
            let digits = match unit {
                "" | "s" => 9,
                "ms" => 6,
                "us" | "µs" => 3,
                "ns" => 0,
                _ => return Err(wrong()),
            };
            return decimal(number, digits).map(Self::AfterStart).ok_or_else(wrong);
        }
        if let Some(time) = decimal(text, 9) {
            return Ok(Self::Absolute(time));
        }
        let date: jiff::Timestamp = text.parse().map_err(|_| wrong())?;
        u64::try_from(date.as_nanosecond()).map(|n| Self::Absolute(Nanos(n))).map_err(|_| wrong())
    }
}

/// A decimal number, as a multiple of 10^-`digits`; digits beyond are cut off.
fn decimal(text: &str, digits: usize) -> Option<Nanos> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !plain(whole) || !plain(fraction) {
        return None;
    }
    let scale = 10u64.pow(digits as u32);
    let fraction: String = fraction.chars().chain(std::iter::repeat('0')).take(digits).collect();
    let fraction = if digits == 0 { 0 } else { fraction.parse().ok()? };
    whole.parse::<u64>().ok()?.checked_mul(scale)?.checked_add(fraction).map(Nanos)
}

/// The frames asked for: from a time on, and before another.
#[derive(Clone, Copy, Default)]
pub(super) struct Span {
    /// Not before.
    pub(super) from: Option<TimePoint>,
    /// Before.
    pub(super) to: Option<TimePoint>,
}

impl Span {
    /// Whether a frame of `time` is asked for, in a capture whose first frame is of `start`.
    #[inline]
    pub(super) fn holds(self, time: Nanos, start: Nanos) -> bool {
        let at = |point| match point {
            TimePoint::AfterStart(after) => Nanos(start.0.saturating_add(after.0)),
            TimePoint::Absolute(time) => time,
        };
        self.from.is_none_or(|p| time >= at(p)) && self.to.is_none_or(|p| time < at(p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(pattern: &str, src: &str, qpn: u32) -> bool {
        let addr = |text: &str| -> Addr { text.parse::<IpAddr>().expect("an address").into() };
        let pattern = [pattern.parse().expect("a pattern")];
        Flows(&pattern).packet("eth0", addr(src), addr("10.0.0.2"), qpn, Some(Space::Request))
    }

    #[test]
    fn every_part_of_a_pattern_must_fit() {
        for good in [
            "src=10.0.0.1",
            "src=10.0.0.0/24,dst=10.0.0.2",
            "host=10.0.0.2,qpn=17",
            "host=10.0.0.1,qpn=0x11",
            "qpn=16-18,space=request",
            "tap=eth0",
            "src=::ffff:10.0.0.1",
            "src=0.0.0.0/0",
        ] {
            assert!(fits(good, "10.0.0.1", 17), "{good}");
        }
        for bad in [
            "src=10.0.0.2",
            "dst=10.0.0.2,qpn=18",
            "host=10.0.1.0/24",
            "qpn=18-20",
            "space=response",
            "tap=eth1",
            "src=fd00::/8",
        ] {
            assert!(!fits(bad, "10.0.0.1", 17), "{bad}");
        }
        assert!(fits("src=fd00::/8", "fd00::1", 17) && !fits("src=0.0.0.0/0", "fd00::1", 17));
    }

    #[test]
    fn findings_of_paths_and_hosts_are_those_of_all_their_queue_pairs() {
        let [a, b, c] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|t| Addr::from(t.parse::<IpAddr>().expect("address")));
        let tap = Tap::new(3, roce_common::abi::Direction::Ingress);
        let asked = |pattern: &str, subject| Flows(&[pattern.parse().expect("a pattern")]).subject(subject, |_| "eth0");
        for (subject, fits, not) in [
            (Subject::Path(tap, a, b), ["src=10.0.0.1,qpn=17", "host=10.0.0.2,space=response"], "src=10.0.0.2"),
            (Subject::Host(tap, c), ["src=10.0.0.3", "dst=10.0.0.9,tap=eth0"], "src=10.0.0.1"),
            (Subject::Capture, ["src=10.0.0.3", "tap=eth9"], ""),
        ] {
            assert!(fits.iter().all(|p| asked(p, subject)), "{subject:?}");
            assert!(not.is_empty() || !asked(not, subject), "{subject:?}");
        }
    }

    #[test]
    fn a_wrong_pattern_is_explained() {
        for (text, says) in [
            ("17", "NAME=VALUE"),
            ("qp=17", "`qp`"),
            ("qpn=0x1000000", "queue pair"),
            ("qpn=9-3", "smaller"),
            ("src=10.0.0", "IP address"),
            ("src=10.0.0.1/33", "prefix"),
            ("space=both", "request or response"),
        ] {
            let error = text.parse::<FlowPattern>().expect_err(text);
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn times_are_read_in_every_form() {
        use TimePoint::{Absolute, AfterStart};
        for (text, want) in [
            ("+1.5s", AfterStart(Nanos(1_500_000_000))),
            ("+1.5", AfterStart(Nanos(1_500_000_000))),
            ("+20ms", AfterStart(Nanos(20_000_000))),
            ("+0.5us", AfterStart(Nanos(500))),
            ("+7ns", AfterStart(Nanos(7))),
            ("1700000000.25", Absolute(Nanos(1_700_000_000_250_000_000))),
            ("2023-11-14T22:13:20.25Z", Absolute(Nanos(1_700_000_000_250_000_000))),
            ("2023-11-14T23:13:20+01:00", Absolute(Nanos(1_700_000_000_000_000_000))),
        ] {
            assert_eq!(text.parse(), Ok(want), "{text}");
        }
        for text in ["", "+", "+1h", "yesterday", "1.2.3", "-5", "99999999999999", "1969-01-01T00:00:00Z"] {
            assert!(text.parse::<TimePoint>().is_err(), "{text}");
        }
        let span = Span { from: Some(AfterStart(Nanos(5))), to: Some(Absolute(Nanos(120))) };
        assert_eq!([104, 105, 119, 120].map(|t| span.holds(Nanos(t), Nanos(100))), [false, true, true, false]);
    }
}
