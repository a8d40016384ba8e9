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
    dcqcn::{Fabric, ONE, Params},
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
        /// What NVIDIA's adapters start with
        Nvidia,
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
    /// The control thread polls for CNPs without sleeping, on a CPU of its own.
    busy_poll: bool,
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
    /// The control thread polls for CNPs without sleeping.
    pub busy_poll: bool,
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
            Preset::Soft => Params::soft(Fabric::new(link_rate, packet_bytes)),
            Preset::Paper => Params::paper(link_rate),
            Preset::Nvidia => Params::nvidia(link_rate),
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
            busy_poll: c.busy_poll.unwrap_or(false),
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
#[path = "config_tests.rs"]
mod tests;
