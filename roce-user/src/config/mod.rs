//! Settings: the defaults, a TOML file, and the command line on top.
//!
//! A file may set any key of [`FileConfig`] and nothing else; an error names the file, the place and the key. The command
//! line fills another [`FileConfig`] and wins. [`Settings::new`] merges the two, derives what follows from the link rate,
//! and checks that the whole makes sense.

mod choices;
mod cp;
mod dcqcn;
mod quantity;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use roce_common::{
    dcqcn::{Params, params::HeldBackMarks},
    units::{Dscp, Nanos, Rate},
};
use serde::Deserialize;

pub use choices::{AlphaUpdate, Boundary, CpAt, Guard, Ingress, Pacer, Policy, Preset, Role};
pub use cp::{CpClassText, CpClasses};
pub(crate) use cp::{depth, queue_rate};
pub use dcqcn::Dcqcn;
pub use quantity::{MegabitRate, MicroTime, RateText, Switch, TimeText, parse_rate, parse_time};

use crate::control::CoreConfig;

/// Bytes of a full packet on the wire where nothing else is known: PMTU 1024 with WRITE FIRST's headers.
pub const DEFAULT_PACKET_BYTES: u32 = 1_098;

/// Keys of former versions, and where their values stand now.
const MOVED: [(&str, &str); 9] = [
    ("cnp_priority", "`cnp_802p_prio`"),
    ("cnp_interval", "`min_time_between_cnps` in the table [dcqcn]"),
    ("g", "`dce_tcp_g` in the table [dcqcn], as 1024 * (1 - g)"),
    ("timer", "`rpg_time_reset` in the table [dcqcn]"),
    ("alpha_timer", "`dce_tcp_rtt` in the table [dcqcn]"),
    ("byte_period", "`rpg_byte_reset` in the table [dcqcn]"),
    ("additive_rate", "`rpg_ai_rate` in the table [dcqcn]"),
    ("hyper_rate", "`rpg_hai_rate` in the table [dcqcn]"),
    ("min_rate", "`rpg_min_rate` in the table [dcqcn]"),
];

macro_rules! file_config {
    ($($(#[$doc:meta])* $field:ident: $type:ty,)*) => {
        /// What a configuration file may set; the command line fills another one.
        #[derive(Clone, PartialEq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct FileConfig {
            $($(#[$doc])* pub $field: Option<$type>,)*
            /// The DCQCN constants.
            pub dcqcn: Dcqcn,
        }

        impl FileConfig {
            /// `self`, and `below` where `self` says nothing.
            pub fn over(self, below: Self) -> Self {
                Self { $($field: self.$field.or(below.$field),)* dcqcn: self.dcqcn.over(below.dcqcn) }
            }

            /// The keys a file may set at its top, besides the table of DCQCN constants.
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
    /// Bytes of a full packet on the wire; the soft preset follows it.
    packet_bytes: u32,
    /// DSCP of data, ACKs and READ responses.
    data_dscp: u8,
    /// DSCP of CNPs.
    cnp_dscp: u8,
    /// skb->priority of data.
    data_priority: u32,
    /// skb->priority of CNPs.
    cnp_802p_prio: u32,
    /// When DSCP and priority are set.
    dscp_policy: Policy,
    /// When ECT(0) is set.
    ecn_policy: Policy,
    /// What the virtual queue holds, bytes.
    queue_bytes: u32,
    /// `egress` or `ingress`: where a congestion point marks.
    cp_at: CpAt,
    /// DSCPs with a virtual queue or with thresholds of their own.
    cp_class: Vec<CpClassText>,
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
        if let Some(hint) = misplaced(key, error.message()) {
            bail!("{}:{line}: {hint}", path.display());
        }
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
    /// Where a congestion point marks.
    pub cp_at: CpAt,
    /// Its classes.
    pub cp_classes: CpClasses,
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
        let preset = c.dcqcn.preset.unwrap_or(Preset::Soft);
        let params = c.dcqcn.params(link_rate, packet_bytes)?;
        ensure!(
            params.held_back_marks == HeldBackMarks::Dropped,
            "held_back_marks = \"answered\": the kernel's NP forgets marks within the interval, only `roce sim` answers them"
        );

        let queue_bytes = c.queue_bytes.unwrap_or_else(|| params.kmax.saturating_mul(2));
        ensure!(
            queue_bytes > params.kmax,
            "queue_bytes ({queue_bytes}) must be above kmax ({}): a fuller queue is never marked otherwise",
            params.kmax
        );
        let texts = c.cp_class.unwrap_or_default();
        ensure!(texts.is_empty() || role == Role::Cp, "cp_class is for role cp, not for role {role}");
        let cp_at = c.cp_at.unwrap_or(CpAt::Egress);
        ensure!(cp_at == CpAt::Egress || role == Role::Cp, "cp_at is for role cp, not for role {role}");
        let cp_classes = CpClasses::new(&texts, link_rate, &params, queue_bytes)?;
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
            cnp_priority: c.cnp_802p_prio.unwrap_or(6),
            dscp_policy: c.dscp_policy.unwrap_or(Policy::Fill),
            ecn_policy: c.ecn_policy.unwrap_or(Policy::Fill),
            queue_bytes,
            cp_at,
            cp_classes,
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

/// What to say of a key that is not known where it stands, but once was or is elsewhere.
fn misplaced(key: &str, message: &str) -> Option<String> {
    if !message.starts_with("unknown field") {
        return None;
    }
    if let Some((_, now)) = MOVED.iter().find(|(old, _)| *old == key) {
        return Some(format!("`{key}` is now {now}"));
    }
    if Dcqcn::KEYS.contains(&key) {
        return Some(format!("`{key}` belongs into the table [dcqcn]"));
    }
    FileConfig::KEYS.contains(&key).then(|| format!("`{key}` belongs to the top of the file, not into a table"))
}

fn dscp(name: &str, value: u8) -> Result<Dscp> {
    Dscp::new(value).with_context(|| format!("{name} must be 0 to 63, not {value}"))
}

#[cfg(test)]
mod tests;
