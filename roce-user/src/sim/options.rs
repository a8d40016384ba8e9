//! What a user may say about a simulation, on the command line or in a plan, and the scenarios that come of it.

use std::{fmt::Display, str::FromStr};

use anyhow::{Result, anyhow, bail, ensure};
use roce_common::units::{Nanos, Rate};
use serde::{Deserialize, Deserializer, de::Error as _};

use super::engine::{Marking, Pfc, Scenario, Shaper, Workload};
use crate::config::{Dcqcn, MicroTime, Preset, RateText, parse_time};

/// One value, or several of which each makes a run of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct List<T>(pub Vec<T>);

impl<T: FromStr<Err: Display>> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value = |t: &str| t.trim().parse().map_err(|e: T::Err| format!("`{t}`: {e}"));
        text.split(',').map(value).collect::<Result<_, _>>().map(Self)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, bound = "T: Deserialize<'de>")]
        enum OneOrMany<T> {
            Many(Vec<T>),
            One(T),
        }
        // The untagged error says nothing of the cause; name what is expected instead.
        match OneOrMany::deserialize(d) {
            Ok(OneOrMany::Many(values)) if values.is_empty() => Err(D::Error::custom("an empty list makes no run")),
            Ok(OneOrMany::Many(values)) => Ok(Self(values)),
            Ok(OneOrMany::One(value)) => Ok(Self(vec![value])),
            Err(_) => Err(D::Error::custom("not a value of this key, nor a list of such")),
        }
    }
}

/// Numbers of flows: one, a list, or a range `2..64` of the powers of two between its ends, which belong to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counts(pub Vec<u32>);

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no number of flows: write for example 8, 2,4,8 or 2..64");
        let number = |t: &str| t.trim().parse::<u32>().map_err(|_| wrong());
        let Some((from, to)) = text.split_once("..") else {
            return text.split(',').map(number).collect::<Result<_, _>>().map(Self);
        };
        let (from, to) = (number(from)?, number(to)?);
        if from > to {
            return Err(wrong());
        }
        let mut counts = vec![from];
        counts.extend((0..u32::BITS).map(|e| 1 << e).filter(|n| (from..to).contains(n) && *n > from));
        if to > from {
            counts.push(to);
        }
        Ok(Self(counts))
    }
}

impl<'de> Deserialize<'de> for Counts {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            One(u32),
            Many(Vec<u32>),
            Text(String),
        }
        match Written::deserialize(d) {
            Ok(Written::One(n)) => Ok(Self(vec![n])),
            Ok(Written::Many(all)) if all.is_empty() => Err(D::Error::custom("an empty list makes no run")),
            Ok(Written::Many(all)) => Ok(Self(all)),
            Ok(Written::Text(text)) => text.parse().map_err(D::Error::custom),
            Err(_) => Err(D::Error::custom("not a number of flows, nor a list or range of them")),
        }
    }
}

/// A time; zero is fine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span(pub Nanos);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "0" {
            return Ok(Self(Nanos(0)));
        }
        parse_time(text).map(Self)
    }
}

/// A length of a queue: a bare number of packets, or bytes with `b`, `k`, `m` or `g` (powers of 1000).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// Full packets.
    Packets(u64),
    /// Bytes.
    Bytes(u64),
}

impl Size {
    const fn bytes(self, packet: u32) -> u64 {
        match self {
            Self::Packets(n) => n.saturating_mul(packet as u64),
            Self::Bytes(n) => n,
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_ascii_lowercase();
        let wrong = || format!("`{text}` is not a size: write for example 64 (packets), 1000b, 200k or 4m (bytes)");
        let (number, factor) = match lower.strip_suffix(['b', 'k', 'm', 'g']) {
            None => return lower.parse().map(Self::Packets).map_err(|_| wrong()),
            Some(number) if lower.ends_with('b') => (number, 1.0),
            Some(number) if lower.ends_with('k') => (number, 1e3),
            Some(number) if lower.ends_with('m') => (number, 1e6),
            Some(number) => (number, 1e9),
        };
        let plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let value: f64 = number.parse().ok().filter(|_| plain).ok_or_else(wrong)?;
        Ok(Self::Bytes((value * factor).round() as u64))
    }
}

macro_rules! from_text_or_number {
    ($($type:ty),*) => {
        $(impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum TextOrNumber {
                    Text(String),
                    Number(u64),
                }
                let text = match TextOrNumber::deserialize(d)? {
                    TextOrNumber::Text(text) => text,
                    TextOrNumber::Number(n) => n.to_string(),
                };
                text.parse().map_err(D::Error::custom)
            }
        })*
    };
}

from_text_or_number!(Span, Size);

macro_rules! options {
    ($($(#[$attr:meta])* $field:ident: $type:ty,)*) => {
        /// The options of a run; in a plan each is a key of the same name, with `_` for `-`.
        #[derive(clap::Args, Clone, PartialEq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Options { $($(#[$attr])* pub $field: Option<$type>,)* }

        impl Options {
            /// `self`, and `below` where `self` says nothing; of the constants, key by key.
            pub fn over(self, below: Self) -> Self {
                let constants = match (self.dcqcn.clone(), below.dcqcn.clone()) {
                    (Some(ours), Some(theirs)) => Some(ours.over(theirs)),
                    (ours, theirs) => ours.or(theirs),
                };
                Self { dcqcn: constants, ..Self { $($field: self.$field.or(below.$field),)* } }
            }
        }
    };
}

options! {
    /// In a plan: the name of the run
    #[arg(skip)]
    name: String,
    /// In a plan: constants that differ from the preset's
    #[arg(skip)]
    dcqcn: Dcqcn,
    /// Rate of every switch port [default: 10g]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    link: List<RateText>,
    /// Rate of the hosts' ports [default: the link's]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    host_link: RateText,
    /// Flows [default: 8]; several, as 2,4,8 or 2..64, make several runs (lists also for --link, --delay and --window)
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    flows: Counts,
    /// Sending hosts, for incast [default: one per flow]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    hosts: u32,
    /// In a plan: presets, each a run of its own
    #[arg(skip)]
    preset: List<Preset>,
    /// Who sends what to whom [default: incast]
    #[arg(long)]
    workload: Workload,
    /// Bytes of a message: a step of the ring [default: 1m], the mean of RPCs [default: 64k]
    #[arg(long, value_name = "SIZE")]
    message: Size,
    /// Share of the port that RPCs ask for [default: 0.6]
    #[arg(long, value_name = "SHARE", allow_hyphen_values = true)]
    load: f64,
    /// Bytes of every packet on the wire [default: 1000]
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    packet: u32,
    /// What a port holds: a number of packets, or bytes as 200k [default: soft 64, others 12m]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    queue: Size,
    /// Packets a flow leaves unacknowledged; 0 = no window [default: soft 64, others 0]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    window: List<u32>,
    /// Packets per acknowledgement [default: 16, at most the window]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    ack_every: u32,
    /// ACK timeout [default: 67ms, or four times what all windows and the queue take on the link]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    timeout: Span,
    /// Feedback delay of a flow without queueing: from the mark to the receiver, back to the sender and to the port
    /// [default: soft 20us, others 4us]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    delay: List<Span>,
    /// Latency of the controller, evenly distributed from zero to this [default: soft 50us, others 0]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    jitter: Span,
    /// The controller raises a flow no more often than this [default: 0]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    tick: Span,
    /// When packets are marked [default: soft virtual, others departure]
    #[arg(long)]
    marking: Marking,
    /// When a new rate takes effect [default: immediate]
    #[arg(long)]
    shaper: Shaper,
    /// Pause instead of drop
    #[arg(long, num_args = 0, default_missing_value = "true")]
    pfc: bool,
    /// Pause a link above this [default: half of the queue]
    #[arg(long, value_name = "SIZE")]
    pfc_xoff: Size,
    /// Let it go on at this [default: half of --pfc-xoff]
    #[arg(long, value_name = "SIZE")]
    pfc_xon: Size,
    /// Mark nothing and cut nothing: the same network without the loop
    #[arg(long, num_args = 0, default_missing_value = "true")]
    no_loop: bool,
    /// Spread the starts of the flows over this [default: 0]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    stagger: Span,
    /// The last flow joins only now
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    join: Span,
    /// Length of a run [default: 200ms, or 600 increase periods where that is longer]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    time: Span,
    /// Measure nothing before this [default: half of --time]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    warmup: Span,
    /// Seed of every random number [default: 1]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    seed: u64,
    /// Seeds, counted from --seed, each a run of its own in parallel; means are shown [default: 1]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    seeds: u32,
}

/// A scenario, what it is called, and how many seeds it runs with.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name in tables.
    pub name: String,
    /// Of its first seed.
    pub scenario: Scenario,
    /// The preset its constants came from.
    pub preset: Option<Preset>,
    /// Seeds from the scenario's on.
    pub seeds: u32,
}

/// Most seeds.
const MAX_SEEDS: u32 = 1_000;
/// Most runs of one call, seeds counted apart.
const MAX_JOBS: usize = 1_000;
/// The default length, in increase periods.
const PERIODS: u64 = 600;

impl Options {
    /// Every combination of the values that are lists.
    ///
    /// # Errors
    /// Names the option, the value and what is allowed.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let name = self.name.as_deref().unwrap_or("");
        let dcqcn = &self.dcqcn.clone().unwrap_or_default();
        let links = self
            .link
            .as_ref()
            .map_or(vec![Rate::from_bits_per_sec(10_000_000_000)], |l| l.0.iter().map(|r| r.0).collect());
        let flows = self.flows.as_ref().map_or(vec![8], |l| l.0.clone());
        let presets = self.preset.as_ref().map_or(vec![dcqcn.preset.unwrap_or(Preset::Soft)], |l| l.0.clone());
        let delays = self.delay.as_ref().map_or(vec![None], |l| l.0.iter().map(|s| Some(s.0)).collect());
        let windows = self.window.as_ref().map_or(vec![None], |l| l.0.iter().copied().map(Some).collect());
        let mut jobs = Vec::new();
        for &link in &links {
            for &n in &flows {
                for &preset in &presets {
                    for &delay in &delays {
                        for &window in &windows {
                            ensure!(jobs.len() < MAX_JOBS, "more than {MAX_JOBS} runs: say less with lists");
                            jobs.push(self.job(name, dcqcn, link, n, preset, delay, window)?);
                        }
                    }
                }
            }
        }
        Ok(jobs)
    }

    #[expect(clippy::too_many_arguments, reason = "one caller; one of each list")]
    fn job(
        &self,
        name: &str,
        dcqcn: &Dcqcn,
        link: Rate,
        flows: u32,
        preset: Preset,
        delay: Option<Nanos>,
        window: Option<u32>,
    ) -> Result<Job> {
        let soft = preset == Preset::Soft;
        let choose = |given: Option<Span>, software: u64, hardware: u64| {
            given.map_or(Nanos::from_micros(if soft { software } else { hardware }), |s| s.0)
        };
        let delay = choose(delay.map(Span), 20, 4);
        let jitter = choose(self.jitter, 50, 0);
        let packet = self.packet.unwrap_or(1_000);
        let window = window.unwrap_or(if soft { 64 } else { 0 });
        let no_loop = self.no_loop.unwrap_or(false);
        let mut constants = Dcqcn { preset: Some(preset), ..dcqcn.clone() };
        if soft && constants.feedback_delay.is_none() {
            constants.feedback_delay = Some(MicroTime(Nanos((delay.0 + jitter.0).max(1))));
        }
        let params = if no_loop { None } else { Some(constants.params(link, packet)?) };
        let queue = self.queue.unwrap_or(if soft { Size::Packets(64) } else { Size::Bytes(12_000_000) }).bytes(packet);
        let periods = params.map_or(0, |p| p.rp.timer.0.saturating_mul(PERIODS));
        let time = self.time.map_or(Nanos(periods.clamp(200_000_000, 3_600_000_000_000)), |s| s.0);
        let message = match self.workload {
            Some(Workload::Ring) => Size::Bytes(1_000_000),
            _ => Size::Bytes(64_000),
        };
        let pfc = self.pfc()?.then(|| {
            let xoff = self.pfc_xoff.map_or(queue / 2, |s| s.bytes(packet));
            Pfc { xoff, xon: self.pfc_xon.map_or(xoff / 2, |s| s.bytes(packet)) }
        });
        let scenario = Scenario {
            link,
            host_link: self.host_link.map_or(link, |r| r.0),
            flows,
            hosts: self.hosts.unwrap_or(flows).min(flows.max(1)),
            packet,
            params,
            queue_bytes: queue,
            window,
            ack_every: self.ack_every.unwrap_or(if window == 0 { 16 } else { window.min(16) }),
            delay,
            jitter,
            tick: self.tick.map_or(Nanos(0), |s| s.0),
            timeout: self.timeout.map_or_else(|| timeout(link, flows, window, queue, packet), |s| s.0),
            pfc,
            marking: self.marking.unwrap_or(if soft { Marking::Virtual } else { Marking::Departure }),
            shaper: self.shaper.unwrap_or(Shaper::Immediate),
            workload: self.workload.unwrap_or(Workload::Incast),
            message: self.message.unwrap_or(message).bytes(packet),
            load: self.load.unwrap_or(0.6),
            stagger: self.stagger.map_or(Nanos(0), |s| s.0),
            join: self.join.map(|s| s.0),
            time,
            warmup: self.warmup.map_or(Nanos(time.0 / 2), |s| s.0),
            seed: self.seed.unwrap_or(1),
        };
        let seeds = self.seeds.unwrap_or(1);
        if !(1..=MAX_SEEDS).contains(&seeds) {
            bail!("seeds = {seeds}: must be 1 to {MAX_SEEDS}");
        }
        scenario.check().map_err(|e| anyhow!("{e}"))?;
        Ok(Job { name: name.to_owned(), scenario, preset: (!no_loop).then_some(preset), seeds })
    }

    fn pfc(&self) -> Result<bool> {
        let on = self.pfc.unwrap_or(false);
        if !on && (self.pfc_xoff.is_some() || self.pfc_xon.is_some()) {
            bail!("pfc_xoff and pfc_xon need pfc");
        }
        Ok(on)
    }
}

/// The smallest ACK timeout from rxe's usual exponent, 14, on whose time is four times what every window and the queue take
/// on the link: pacing must not look like loss.
fn timeout(link: Rate, flows: u32, window: u32, queue: u64, packet: u32) -> Nanos {
    let window = if window == 0 { 64 } else { u64::from(window) };
    let bytes = u64::from(flows).saturating_mul(window).saturating_mul(u64::from(packet)).saturating_add(queue);
    let drain = bytes as f64 / link.bytes_per_sec().max(1) as f64 * 1e9;
    let fits = |t: &Nanos| t.0 as f64 >= 4.0 * drain;
    (14..=31).map(|t| Nanos(4_096 << t)).find(fits).unwrap_or(Nanos(4_096 << 31))
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
