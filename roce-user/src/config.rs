//! Settings: the defaults, a TOML file, and the command line on top.
//!
//! A file may set any key of [`FileConfig`] and nothing else; an error names the file, the place and the key. The command
//! line fills another [`FileConfig`] and wins. [`Settings::new`] merges the two, derives what follows from the link rate,
//! and checks that the whole makes sense.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use roce_common::{
    abi,
    dcqcn::{ONE, Params},
    units::{Dscp, Nanos, Rate},
};
use serde::{Deserialize, Deserializer};

use crate::control::CoreConfig;

/// Bytes of a full packet on the wire where nothing else is known: PMTU 1024 with WRITE FIRST's headers.
pub const DEFAULT_PACKET_BYTES: u32 = 1_098;
/// The slowest link rate that makes sense: below, one packet takes a second.
const LEAST_LINK: u64 = 10_000;
/// The fastest.
const MOST_LINK: u64 = 1_600_000_000_000;
/// The longest time any setting may name.
const MOST_TIME: Nanos = Nanos(3_600 * Nanos::SECOND.0);

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.to_possible_value().as_ref().map_or("", |v| v.get_name()))
            }
        }
    };
}

choices! {
    /// What an attachment may do.
    Role {
        /// Mark and pace what this host sends, answer CE, consume CNPs
        Host,
        /// Congestion point: mark CE by a virtual queue; needs the link rate
        Cp,
        /// Write nothing
        Observe,
    }
}

choices! {
    /// Which hook does the ingress work.
    Ingress {
        /// Native XDP
        Xdp,
        /// Generic XDP
        XdpGeneric,
        /// tc ingress
        Tc,
    }
}

choices! {
    /// How limited queue pairs are paced.
    Pacer {
        /// Departure times, kept by the fq qdisc
        Edt,
        /// HTB classes
        Htb,
        /// Not at all
        Off,
    }
}

choices! {
    /// When a field is marked.
    Policy {
        /// Only where it is unset
        Fill,
        /// Always
        Force,
        /// Never
        Keep,
    }
}

choices! {
    /// Whether malformed packets are kept from rxe.
    Guard {
        /// Where an rxe device is on the interface
        Auto,
        /// Always
        On,
        /// Never
        Off,
    }
}

choices! {
    /// Which set of DCQCN constants to start from.
    Preset {
        /// Derived from link rate and packet size
        Soft,
        /// The SIGCOMM 2015 paper's, for 40 Gb/s
        Paper,
    }
}

impl From<Role> for abi::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Host => Self::Host,
            Role::Cp => Self::Cp,
            Role::Observe => Self::Observe,
        }
    }
}

impl From<Ingress> for abi::IngressMode {
    fn from(ingress: Ingress) -> Self {
        match ingress {
            Ingress::Xdp => Self::Xdp,
            Ingress::XdpGeneric => Self::XdpGeneric,
            Ingress::Tc => Self::Tc,
        }
    }
}

impl From<Pacer> for abi::Pacer {
    fn from(pacer: Pacer) -> Self {
        match pacer {
            Pacer::Edt => Self::Edt,
            Pacer::Htb => Self::Htb,
            Pacer::Off => Self::Off,
        }
    }
}

impl From<Policy> for abi::MarkPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Fill => Self::Fill,
            Policy::Force => Self::Force,
            Policy::Keep => Self::Keep,
        }
    }
}

/// A rate in bits per second: a number, plain or with `k`, `m`, `g` or `t` (powers of 1000), optionally followed by
/// `bit`, `bps` or `bit/s`; fractions are fine.
pub fn parse_rate(text: &str) -> Result<Rate, String> {
    let lower = text.trim().to_ascii_lowercase();
    let bare = ["bit/s", "bits", "bps", "bit", "b/s"]
        .iter()
        .find_map(|unit| lower.strip_suffix(unit))
        .unwrap_or(&lower)
        .trim_end();
    let (number, factor) = match bare.chars().last() {
        Some('k') => (&bare[..bare.len() - 1], 1e3),
        Some('m') => (&bare[..bare.len() - 1], 1e6),
        Some('g') => (&bare[..bare.len() - 1], 1e9),
        Some('t') => (&bare[..bare.len() - 1], 1e12),
        _ => (bare, 1.0),
    };
    let bits = decimal(number.trim_end()).map(|n| n * factor).ok_or_else(|| {
        format!("`{text}` is not a rate: write for example 100m, 25g, 1.5gbit or 40000000 (bits per second)")
    })?;
    if bits == 0.0 {
        return Err(format!("`{text}`: a rate of zero carries nothing"));
    }
    if bits < LEAST_LINK as f64 {
        return Err(format!("`{text}` is {bits} bit/s, below {LEAST_LINK} bit/s: is a unit (k, m, g) missing?"));
    }
    if bits > MOST_LINK as f64 {
        return Err(format!("`{text}` is above {} Tb/s: no such link exists", MOST_LINK as f64 / 1e12));
    }
    Ok(Rate::from_bits_per_sec(bits.round() as u64))
}

/// A time: a number followed by `ns`, `us`, `ms` or `s`.
pub fn parse_time(text: &str) -> Result<Nanos, String> {
    let lower = text.trim().to_ascii_lowercase();
    // The longer units first: they end in the shorter ones.
    let (number, factor) = [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)]
        .iter()
        .find_map(|(unit, factor)| lower.strip_suffix(unit).map(|n| (n.trim_end(), *factor)))
        .ok_or_else(|| format!("`{text}` is not a time: write for example 50us, 5ms or 1s"))?;
    let ns = decimal(number)
        .map(|n| n * factor)
        .ok_or_else(|| format!("`{text}` is not a time: write for example 50us, 5ms or 1s"))?;
    if ns < 1.0 {
        return Err(format!("`{text}`: a time of zero is not allowed here"));
    }
    if ns > MOST_TIME.0 as f64 {
        return Err(format!("`{text}` is more than an hour"));
    }
    Ok(Nanos(ns.round() as u64))
}

/// Digits with at most one point: no sign, no exponent, no infinity.
fn decimal(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.') && text.bytes().any(|b| b.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

/// A value that a file may write as text (`"100m"`) or as a number of base units.
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
                        $name::from_number(v).map_err(E::custom)
                    }

                    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<$name, E> {
                        let v = u64::try_from(v).map_err(|_| E::custom(format!("{v} is below zero")))?;
                        self.visit_u64(v)
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

impl RateText {
    fn from_number(bits: u64) -> Result<Self, String> {
        parse_rate(&bits.to_string()).map(Self)
    }
}

impl TimeText {
    fn from_number(number: u64) -> Result<Self, String> {
        Err(format!("a time needs a unit: write for example \"{number}us\""))
    }
}

macro_rules! file_config {
    ($($(#[$doc:meta])* $field:ident: $type:ty,)*) => {
        /// What a configuration file may set; the command line fills another one.
        #[derive(Clone, PartialEq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct FileConfig { $($(#[$doc])* pub $field: Option<$type>,)* }

        impl FileConfig {
            /// `self`, and `below` where `self` says nothing.
            pub fn over(self, below: Self) -> Self {
                Self { $($field: self.$field.or(below.$field),)* }
            }

            /// The keys a file may set.
            pub const KEYS: &'static [&'static str] = &[$(stringify!($field),)*];
        }
    };
}

file_config! {
    /// `host`, `cp` or `observe`.
    role: Role,
    /// The rate of the link: where flows start, and how fast the virtual queue of role cp drains.
    link_rate: RateText,
    /// `xdp`, `xdp-generic` or `tc`.
    ingress: Ingress,
    /// `edt`, `htb` or `off`.
    pacer: Pacer,
    /// `soft` or `paper`: the DCQCN constants that the keys below change.
    preset: Preset,
    /// Bytes of a full packet on the wire; the soft preset follows it.
    packet_bytes: u32,
    /// DSCP of data, ACKs and READ responses.
    data_dscp: u8,
    /// DSCP of CNPs.
    cnp_dscp: u8,
    /// skb->priority of data.
    data_priority: u32,
    /// skb->priority of CNPs.
    cnp_priority: u32,
    /// When DSCP and priority are set.
    dscp_policy: Policy,
    /// When ECT(0) is set.
    ecn_policy: Policy,
    /// Least time between two CNPs to one queue pair.
    cnp_interval: TimeText,
    /// Marking starts above this queue depth, bytes.
    kmin: u32,
    /// Marking is certain above this depth, bytes.
    kmax: u32,
    /// Marking probability at kmax, 0 to 1.
    pmax: f64,
    /// What the virtual queue holds, bytes.
    queue_bytes: u32,
    /// Weight of a CNP in alpha, above 0, at most 1.
    g: f64,
    /// Time per rate increase.
    timer: TimeText,
    /// Time without a CNP after which alpha decays.
    alpha_timer: TimeText,
    /// Bytes per rate increase.
    byte_period: u64,
    /// Additive increase of the target rate.
    additive_rate: RateText,
    /// Unit of the hyper increase.
    hyper_rate: RateText,
    /// No limiter goes below this.
    min_rate: RateText,
    /// The queue pairs' ACK timeout exponent (4.096 µs · 2^n), 1 to 31: bounds the rate from below.
    ack_timeout: u8,
    /// Pacing stops when the controller has been silent for this long.
    failsafe: TimeText,
    /// One packet in this many is sampled: a power of two, or 0 for none.
    sample_every: u32,
    /// `auto`, `on` or `off`.
    guard: Guard,
    /// Where maps are pinned.
    bpffs: PathBuf,
}

impl FileConfig {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text, path)
    }

    /// Parses the text of the file at `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let error = match toml::from_str(text) {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        // One line: where, which key, what. The parser's own rendering spans several.
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = text.get(..at).unwrap_or("");
        let line = before.matches('\n').count() + 1;
        let content = text.lines().nth(line - 1).unwrap_or("");
        let key = content.split_once('=').map_or("", |(key, _)| key.trim());
        let what = error.message().lines().collect::<Vec<_>>().join(" ");
        if key.is_empty() || what.contains(&format!("`{key}`")) {
            bail!("{}:{line}: {what}", path.display());
        }
        bail!("{}:{line}: {key}: {what}", path.display());
    }
}

/// Everything `roce run` works by.
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    /// What the attachment may do.
    pub role: Role,
    /// The rate of the link.
    pub link_rate: Rate,
    /// The link rate was given, not assumed.
    pub link_rate_given: bool,
    /// Which hook does the ingress work; `None`: the best that works.
    pub ingress: Option<Ingress>,
    /// How limited queue pairs are paced; `None`: the best that works.
    pub pacer: Option<Pacer>,
    /// Which set of constants was the start.
    pub preset: Preset,
    /// The DCQCN constants.
    pub params: Params,
    /// Bytes of a full packet on the wire.
    pub packet_bytes: u32,
    /// DSCP of data, ACKs and READ responses.
    pub data_dscp: Dscp,
    /// DSCP of CNPs.
    pub cnp_dscp: Dscp,
    /// skb->priority of data.
    pub data_priority: u32,
    /// skb->priority of CNPs.
    pub cnp_priority: u32,
    /// When DSCP and priority are set.
    pub dscp_policy: Policy,
    /// When ECT(0) is set.
    pub ecn_policy: Policy,
    /// What the virtual queue holds, bytes.
    pub queue_bytes: u32,
    /// The queue pairs' ACK timeout exponent, where known.
    pub ack_timeout: Option<u8>,
    /// Pacing stops when the controller has been silent for this long.
    pub failsafe: Nanos,
    /// One packet in this many is sampled; 0 = none.
    pub sample_every: u32,
    /// Whether malformed packets are kept from rxe.
    pub guard: Guard,
    /// Where maps are pinned.
    pub bpffs: PathBuf,
}

impl Settings {
    /// Merges `command_line` over `file`, and derives the rest. `detected` is the interface's own link rate, used when
    /// none is given; without either, 10 Gb/s.
    pub fn new(command_line: FileConfig, file: FileConfig, detected: Option<Rate>) -> Result<Self> {
        let c = command_line.over(file);
        let role = c.role.unwrap_or(Role::Host);
        ensure!(
            role != Role::Cp || c.link_rate.is_some(),
            "role cp needs --link-rate (or link_rate in the file): its virtual queue drains at that rate"
        );
        let given = c.link_rate.map(|r| r.0);
        let link_rate =
            given.or(detected.filter(|r| r.bytes_per_sec() > 0)).unwrap_or(Rate::from_bits_per_sec(10_000_000_000));
        let packet_bytes = c.packet_bytes.unwrap_or(DEFAULT_PACKET_BYTES);
        ensure!((64..=16_384).contains(&packet_bytes), "packet_bytes must be 64 to 16384, not {packet_bytes}");
        let preset = c.preset.unwrap_or(Preset::Soft);
        let mut params = match preset {
            Preset::Soft => Params::soft(link_rate, packet_bytes),
            Preset::Paper => Params::paper(link_rate),
        };
        if let Some(interval) = c.cnp_interval {
            params.cnp_interval = interval.0;
            params.rp.monitor = Nanos(interval.0.0 / 2);
        }
        params.kmin = c.kmin.unwrap_or(params.kmin);
        params.kmax = c.kmax.unwrap_or(params.kmax);
        if let Some(pmax) = c.pmax {
            params.pmax = fraction("pmax", pmax)?;
        }
        if let Some(g) = c.g {
            params.rp.g = fraction("g", g)?;
            ensure!(params.rp.g > 0, "g must be at least 1/65536, not {g}");
        }
        params.rp.timer = c.timer.map_or(params.rp.timer, |t| t.0);
        params.rp.alpha_timer = c.alpha_timer.map_or(params.rp.alpha_timer, |t| t.0);
        params.rp.byte_period = c.byte_period.unwrap_or(params.rp.byte_period);
        params.rp.additive = c.additive_rate.map_or(params.rp.additive, |r| r.0);
        params.rp.hyper = c.hyper_rate.map_or(params.rp.hyper, |r| r.0);
        params.rp.min_rate = c.min_rate.map_or(params.rp.min_rate, |r| r.0);
        params.validate().map_err(|e| anyhow::anyhow!("{e}"))?;

        let queue_bytes = c.queue_bytes.unwrap_or_else(|| params.kmax.saturating_mul(2));
        ensure!(
            queue_bytes > params.kmax,
            "queue_bytes ({queue_bytes}) must be above kmax ({}): a fuller queue is never marked otherwise",
            params.kmax
        );
        let ack_timeout = c.ack_timeout;
        if let Some(t) = ack_timeout {
            ensure!((1..=31).contains(&t), "ack_timeout is an exponent of 1 to 31, not {t}");
        }
        let sample_every = c.sample_every.unwrap_or(64);
        ensure!(
            sample_every == 0 || (sample_every.is_power_of_two() && sample_every <= 65_536),
            "sample_every must be 0 or a power of two up to 65536, not {sample_every}"
        );
        let failsafe = c.failsafe.map_or(Nanos::SECOND, |t| t.0);
        ensure!(
            failsafe >= Nanos::from_millis(100),
            "failsafe must be at least 100 ms: the heartbeat is slower than that"
        );
        let bpffs = c.bpffs.unwrap_or_else(|| PathBuf::from("/sys/fs/bpf"));
        ensure!(bpffs.is_absolute(), "bpffs must be an absolute path, not {}", bpffs.display());

        Ok(Self {
            role,
            link_rate,
            link_rate_given: given.is_some(),
            ingress: c.ingress,
            pacer: c.pacer,
            preset,
            params,
            packet_bytes,
            data_dscp: dscp("data_dscp", c.data_dscp.unwrap_or(26))?,
            cnp_dscp: dscp("cnp_dscp", c.cnp_dscp.unwrap_or(48))?,
            data_priority: c.data_priority.unwrap_or(3),
            cnp_priority: c.cnp_priority.unwrap_or(6),
            dscp_policy: c.dscp_policy.unwrap_or(Policy::Fill),
            ecn_policy: c.ecn_policy.unwrap_or(Policy::Fill),
            queue_bytes,
            ack_timeout,
            failsafe,
            sample_every,
            guard: c.guard.unwrap_or(Guard::Auto),
            bpffs,
        })
    }

    /// What the controller works by.
    pub fn core(&self) -> CoreConfig {
        let mut core = CoreConfig::new(self.params.rp, self.packet_bytes);
        core.ack_timeout = self.ack_timeout;
        core.pairs.sample_every = self.sample_every;
        core
    }
}

fn fraction(name: &str, value: f64) -> Result<u32> {
    ensure!((0.0..=1.0).contains(&value), "{name} must be 0 to 1, not {value}");
    Ok((value * f64::from(ONE)).round() as u32)
}

fn dscp(name: &str, value: u8) -> Result<Dscp> {
    Dscp::new(value).with_context(|| format!("{name} must be 0 to 63, not {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> Result<u64, String> {
        parse_rate(text).map(Rate::bits_per_sec)
    }

    #[test]
    fn rates() {
        for (text, bits) in [
            ("100m", 100_000_000),
            ("25g", 25_000_000_000),
            ("1.5gbit", 1_500_000_000),
            ("40000000", 40_000_000),
            ("64Kbit", 64_000),
            (" 2.5 Gbit/s ", 2_500_000_000),
            ("0.8t", 800_000_000_000),
            ("10mbps", 10_000_000),
        ] {
            assert_eq!(rate(text), Ok(bits), "{text}");
        }
        for (text, why) in [
            ("0", "zero"),
            ("0.0g", "zero"),
            ("100", "unit"),
            ("9999", "unit"),
            ("2t", "no such link"),
            ("99999999999999999999999g", "no such link"),
            ("-5m", "not a rate"),
            ("", "not a rate"),
            ("m", "not a rate"),
            (".", "not a rate"),
            ("1e9", "not a rate"),
            ("inf", "not a rate"),
            ("nan", "not a rate"),
            ("1..5g", "not a rate"),
            ("fast", "not a rate"),
            ("10µ", "not a rate"),
        ] {
            let error = rate(text).expect_err(text);
            assert!(error.contains(why) && error.contains(text.trim()), "{text}: {error}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("50us"), Ok(Nanos(50_000)));
        assert_eq!(parse_time("1.5 ms"), Ok(Nanos(1_500_000)));
        assert_eq!(parse_time("1s"), Ok(Nanos::SECOND));
        assert_eq!(parse_time("700ns"), Ok(Nanos(700)));
        for text in ["5", "0s", "s", "-1s", "2h", "4000s", "1e3s"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    fn parse(text: &str) -> Result<FileConfig> {
        FileConfig::parse(text, Path::new("roce.toml"))
    }

    #[test]
    fn an_error_names_the_file_the_line_and_the_key() {
        for (text, parts) in [
            ("role = \"host\"\ncolour = 3\n", &["roce.toml:2", "unknown field", "`colour`"][..]),
            ("role = \"router\"\n", &["roce.toml:1", "role", "`router`", "observe"]),
            ("\nlink_rate = \"0\"\n", &["roce.toml:2", "link_rate", "zero"]),
            ("link_rate = -1\n", &["roce.toml:1", "link_rate", "below zero"]),
            ("timer = 50\n", &["roce.toml:1", "timer", "50us"]),
            ("kmin = \"lots\"\n", &["roce.toml:1", "kmin"]),
            ("role = \n", &["roce.toml:1"]),
            ("role = \"host\"\nrole = \"cp\"\n", &["roce.toml:2", "duplicate key"]),
        ] {
            let error = format!("{:#}", parse(text).expect_err(text));
            assert_eq!(error.lines().count(), 1, "{error}");
            for part in parts {
                assert!(error.contains(part), "{text:?}: {error} lacks {part}");
            }
        }
        let missing = FileConfig::load(Path::new("/nonexistent/roce.toml")).expect_err("no such file");
        assert!(format!("{missing:#}").contains("/nonexistent/roce.toml"));
    }

    #[test]
    fn the_command_line_wins_over_the_file() -> Result<()> {
        let file = parse("role = \"observe\"\nlink_rate = \"1g\"\ndata_dscp = 24\n")?;
        let line = FileConfig { role: Some(Role::Host), ..FileConfig::default() };
        let s = Settings::new(line, file, Some(Rate::from_bits_per_sec(10_000_000_000)))?;
        assert_eq!((s.role, s.link_rate.bits_per_sec(), s.data_dscp.get()), (Role::Host, 1_000_000_000, 24));
        assert!(s.link_rate_given);
        Ok(())
    }

    #[test]
    fn defaults() -> Result<()> {
        let detected = Rate::from_bits_per_sec(25_000_000_000);
        let s = Settings::new(FileConfig::default(), FileConfig::default(), Some(detected))?;
        assert_eq!((s.role, s.link_rate, s.link_rate_given), (Role::Host, detected, false));
        assert_eq!((s.data_dscp.get(), s.cnp_dscp.get(), s.data_priority, s.cnp_priority), (26, 48, 3, 6));
        assert_eq!((s.dscp_policy, s.ecn_policy, s.guard), (Policy::Fill, Policy::Fill, Guard::Auto));
        assert_eq!((s.failsafe, s.sample_every, s.ack_timeout), (Nanos::SECOND, 64, None));
        assert_eq!((s.ingress, s.pacer, s.bpffs.as_path()), (None, None, Path::new("/sys/fs/bpf")));
        assert_eq!(s.params, Params::soft(detected, DEFAULT_PACKET_BYTES));
        let unknown = Settings::new(FileConfig::default(), FileConfig::default(), None)?;
        assert_eq!(unknown.link_rate.bits_per_sec(), 10_000_000_000);
        Ok(())
    }

    #[test]
    fn every_key_can_be_set() -> Result<()> {
        let text = r#"
role = "cp"
link_rate = 100_000_000
ingress = "xdp-generic"
pacer = "htb"
preset = "paper"
packet_bytes = 1082
data_dscp = 3
cnp_dscp = 46
data_priority = 4
cnp_priority = 7
dscp_policy = "force"
ecn_policy = "keep"
cnp_interval = "4ms"
kmin = 5000
kmax = 40000
pmax = 0.25
queue_bytes = 70000
g = 0.0625
timer = "6ms"
alpha_timer = "7ms"
byte_period = 1000000
additive_rate = "100k"
hyper_rate = "500k"
min_rate = "1m"
ack_timeout = 14
failsafe = "2s"
sample_every = 16
guard = "on"
bpffs = "/run/bpf"
"#;
        assert!(FileConfig::KEYS.iter().all(|key| text.contains(&format!("\n{key} = "))));
        let s = Settings::new(FileConfig::default(), parse(text)?, None)?;
        assert_eq!(
            (s.role, s.ingress, s.pacer, s.preset),
            (Role::Cp, Some(Ingress::XdpGeneric), Some(Pacer::Htb), Preset::Paper)
        );
        let p = s.params;
        assert_eq!((p.cnp_interval, p.rp.monitor), (Nanos::from_millis(4), Nanos::from_millis(2)));
        assert_eq!((p.kmin, p.kmax, p.pmax, s.queue_bytes), (5_000, 40_000, ONE / 4, 70_000));
        assert_eq!((p.rp.g, p.rp.timer, p.rp.alpha_timer), (ONE / 16, Nanos::from_millis(6), Nanos::from_millis(7)));
        assert_eq!((p.rp.additive.bits_per_sec(), p.rp.hyper.bits_per_sec()), (100_000, 500_000));
        assert_eq!((s.ack_timeout, s.core().ack_timeout, s.core().pairs.sample_every), (Some(14), Some(14), 16));
        Ok(())
    }

    #[test]
    fn nonsense_is_refused_with_its_name() -> Result<()> {
        for (text, word) in [
            ("role = \"cp\"", "link-rate"),
            ("data_dscp = 64", "data_dscp"),
            ("cnp_dscp = 200", "cnp_dscp"),
            ("pmax = 1.5", "pmax"),
            ("pmax = nan", "pmax"),
            ("g = 0.0", "g must"),
            ("kmin = 9\nkmax = 8", "kmin"),
            ("byte_period = 0", "byte"),
            ("min_rate = \"20g\"\nlink_rate = \"1g\"", "min_rate"),
            ("queue_bytes = 5", "queue_bytes"),
            ("packet_bytes = 0", "packet_bytes"),
            ("ack_timeout = 0", "ack_timeout"),
            ("ack_timeout = 32", "ack_timeout"),
            ("sample_every = 3", "sample_every"),
            ("failsafe = \"1ms\"", "failsafe"),
            ("bpffs = \"bpf\"", "bpffs"),
        ] {
            let error = Settings::new(FileConfig::default(), parse(text)?, None).expect_err(text);
            assert!(format!("{error:#}").contains(word), "{text}: {error:#}");
        }
        Ok(())
    }

    #[test]
    fn choices_have_the_same_names_everywhere() {
        assert_eq!(Ingress::XdpGeneric.to_string(), "xdp-generic");
        assert_eq!(<Role as ValueEnum>::from_str("observe", false), Ok(Role::Observe));
        assert_eq!(abi::Pacer::from(Pacer::Htb), abi::Pacer::Htb);
        assert_eq!(abi::Role::from(Role::Cp), abi::Role::Cp);
        assert_eq!(abi::IngressMode::from(Ingress::XdpGeneric), abi::IngressMode::XdpGeneric);
        assert_eq!(abi::MarkPolicy::from(Policy::Force), abi::MarkPolicy::Force);
    }
}
