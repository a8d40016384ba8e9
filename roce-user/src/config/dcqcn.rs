//! The DCQCN constants under the names that operators of adapters know, as a TOML table and as options.
//!
//! [`Dcqcn`] is both: the table `[dcqcn]` of a configuration file, and a group of command-line options. [`Dcqcn::params`]
//! makes of it what the algorithms need; [`Dcqcn::of`] and [`Dcqcn::to_toml`] go the other way, and what they print
//! reads back as the same constants.

use std::fmt::Write as _;

use anyhow::{Result, anyhow, bail, ensure};
use roce_common::{
    dcqcn::{Fabric, ONE, Params, params::ParamError},
    units::{Nanos, Rate},
};
use serde::Deserialize;

use super::{
    choices::{AlphaUpdate, Boundary, HeldBackMarks, Preset},
    quantity::{MegabitRate, MicroTime, Switch, rate_text, time_text},
};

/// One step of the weights that adapters give in 10 bits.
const TEN_BITS: f64 = 1_024.0;
/// 1/1024 in the fixed point of α.
const TENTH_BIT: f64 = (ONE / 1_024) as f64;

/// A value as TOML has it.
trait ToToml {
    fn to_toml(&self) -> String;
}

macro_rules! to_toml {
    ($($type:ty: $value:ident => $text:expr;)*) => {
        $(impl ToToml for $type {
            fn to_toml(&self) -> String {
                let $value = self;
                $text
            }
        })*
    };
}

to_toml! {
    u32: n => n.to_string();
    u64: n => n.to_string();
    // With a point, and as many digits as it takes to read the same number back.
    f64: n => format!("{n:?}");
    Switch: s => s.0.to_string();
    MegabitRate: r => format!("\"{}\"", rate_text(r.0));
    MicroTime: t => format!("\"{}\"", time_text(t.0));
    Preset: p => format!("\"{p}\"");
    AlphaUpdate: a => format!("\"{a}\"");
    Boundary: b => format!("\"{b}\"");
    HeldBackMarks: m => format!("\"{m}\"");
}

macro_rules! dcqcn {
    ($($(#[$doc:meta])* $field:ident: $type:ty, $unit:literal;)*) => {
        /// DCQCN constants: a preset, and what differs from it. Numbers without a unit are in the units of adapters: µs, Mb/s,
        /// bytes, per cent, 1/1024.
        #[derive(clap::Args, Clone, PartialEq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Dcqcn {
            /// DCQCN constants to start from [default: soft]
            #[arg(long)]
            pub preset: Option<Preset>,
            $(
                $(#[$doc])*
                #[arg(long, value_name = $unit, help_heading = "DCQCN constants", hide_short_help = true)]
                pub $field: Option<$type>,
            )*
        }

        impl Dcqcn {
            /// The keys of the table.
            pub const KEYS: &'static [&'static str] = &["preset", $(stringify!($field),)*];

            /// `self`, and `below` where `self` says nothing.
            pub fn over(self, below: Self) -> Self {
                Self { preset: self.preset.or(below.preset), $($field: self.$field.or(below.$field),)* }
            }

            /// The table `[dcqcn]` with what is set, to paste at the end of a configuration file.
            pub fn to_toml(&self) -> String {
                let mut out = String::from("[dcqcn]\n");
                let mut line = |key: &str, value: Option<String>| {
                    if let Some(value) = value {
                        // Writing into a String cannot fail.
                        let _ = writeln!(out, "{key} = {value}");
                    }
                };
                line("preset", self.preset.as_ref().map(ToToml::to_toml));
                $(line(stringify!($field), self.$field.as_ref().map(ToToml::to_toml));)*
                out
            }
        }
    };
}

dcqcn! {
    /// From a mark to the first packet at the lower rate, without queueing: the soft preset follows it [default: 100us]
    feedback_delay: MicroTime, "T";
    /// T: time per rate increase
    rpg_time_reset: MicroTime, "T";
    /// B: bytes sent per rate increase; 0 = by time alone
    rpg_byte_reset: u64, "BYTES";
    /// F: the stage at which fast recovery ends
    rpg_threshold: u32, "N";
    /// Whether stage F itself is fast recovery
    threshold_boundary: Boundary, "WHICH";
    /// A limiter that reaches this has recovered; 0 = the link rate
    rpg_max_rate: MegabitRate, "R";
    /// No cut goes below this
    rpg_min_rate: MegabitRate, "R";
    /// R_AI: additive increase of the target rate
    rpg_ai_rate: MegabitRate, "R";
    /// R_HAI: unit of the hyper increase
    rpg_hai_rate: MegabitRate, "R";
    /// A cut takes alpha (in 1/1024) / 2^N of the rate: 11 is alpha/2
    rpg_gd: u32, "N";
    /// A cut leaves at least this many per cent
    rpg_min_dec_fac: u32, "PERCENT";
    /// What the first CNP sets the rate to; 0 = it cuts like any other
    rate_to_set_on_first_cnp: MegabitRate, "R";
    /// Every cut sets the target to the rate before it
    clamp_tgt_rate: Switch, "BOOL";
    /// A cut behind an increase by the timer sets the target
    #[serde(alias = "clamp_tgt_rate_ati")]
    clamp_tgt_rate_after_time_inc: Switch, "BOOL";
    /// What is kept of alpha per update, in 1/1024: g = 1 - N/1024
    dce_tcp_g: f64, "N";
    /// K: the period of alpha
    dce_tcp_rtt: MicroTime, "T";
    /// When alpha changes
    alpha_update: AlphaUpdate, "WHEN";
    /// Alpha at the first CNP, in 1/1024
    initial_alpha_value: f64, "N";
    /// Least time between two cuts [default: the preset's, at most half of min_time_between_cnps where that is given]
    rate_reduce_monitor_period: MicroTime, "T";
    /// N: least time between two CNPs to one queue pair
    min_time_between_cnps: MicroTime, "T";
    /// What becomes of marks within that time of the last CNP
    held_back_marks: HeldBackMarks, "WHAT";
    /// Marking starts above this queue depth
    kmin: u32, "BYTES";
    /// Marking is certain above this depth
    kmax: u32, "BYTES";
    /// Marking probability at kmax, 0 to 1
    pmax: f64, "P";
    /// The first rate of a flow; 0 = the link rate
    start_rate: MegabitRate, "R";
    /// The most that an increase of a start adds behind a CNP; 0 = half of the target, however much
    start_ai_rate: MegabitRate, "R";
    /// How long a start lasts in spite of CNPs, in increase periods
    start_periods: u32, "N";
    /// Share of its rate, 0 to 1, that a flow must have used for a timer to raise it; 0 = timers raise idle flows too
    least_usage: f64, "P";
    /// A flow that sent nothing for this long starts anew; 0 = never
    idle_restart: MicroTime, "T";
}

impl Dcqcn {
    /// The constants on a link of rate `link` with packets of `packet_bytes` on the wire. An error names the key, the value
    /// and the reason.
    pub fn params(&self, link: Rate, packet_bytes: u32) -> Result<Params> {
        let preset = self.preset.unwrap_or(Preset::Soft);
        if let Some(delay) = self.feedback_delay.filter(|_| preset != Preset::Soft) {
            bail!("feedback_delay = {}: the preset {preset} does not follow it, only soft does", delay.to_toml());
        }
        let mut p = match preset {
            Preset::Soft => {
                let mut fabric = Fabric::new(link, packet_bytes);
                set(&mut fabric.feedback, self.feedback_delay.map(|t| t.0));
                Params::soft(fabric)
            }
            Preset::Paper => Params::paper(link),
            Preset::Nvidia => Params::nvidia(link),
        };
        let rp = &mut p.rp;
        set(&mut rp.timer, self.rpg_time_reset.map(|t| t.0));
        set(&mut rp.byte_period, self.rpg_byte_reset);
        set(&mut rp.fast_recovery, self.rpg_threshold);
        set(&mut rp.boundary, self.threshold_boundary.map(Into::into));
        set(&mut rp.max_rate, self.rpg_max_rate.map(|r| r.0));
        set(&mut rp.min_rate, self.rpg_min_rate.map(|r| r.0));
        set(&mut rp.additive, self.rpg_ai_rate.map(|r| r.0));
        set(&mut rp.hyper, self.rpg_hai_rate.map(|r| r.0));
        set(&mut rp.gd, self.rpg_gd);
        set(&mut rp.least_kept_percent, self.rpg_min_dec_fac);
        set(&mut rp.first_cnp_rate, self.rate_to_set_on_first_cnp.map(|r| r.0));
        set(&mut rp.clamp_target, self.clamp_tgt_rate.map(|s| s.0));
        set(&mut rp.clamp_target_after_timer, self.clamp_tgt_rate_after_time_inc.map(|s| s.0));
        let kept = self.dce_tcp_g.map(|n| ten_bits("dce_tcp_g", n)).transpose()?;
        set(&mut rp.g, kept.map(|kept| ONE - kept));
        set(&mut rp.alpha_timer, self.dce_tcp_rtt.map(|t| t.0));
        set(&mut rp.alpha_update, self.alpha_update.map(Into::into));
        set(&mut rp.initial_alpha, self.initial_alpha_value.map(|n| ten_bits("initial_alpha_value", n)).transpose()?);
        set(&mut rp.start_rate, self.start_rate.map(|r| r.0));
        set(&mut rp.start_additive, self.start_ai_rate.map(|r| r.0));
        set(&mut rp.start_periods, self.start_periods);
        set(&mut rp.usage, self.least_usage.map(|p| fraction("least_usage", p)).transpose()?);
        set(&mut rp.idle_restart, self.idle_restart.map(|t| t.0));
        if let Some(interval) = self.min_time_between_cnps {
            p.cnp_interval = interval.0;
            // A longer monitor period would ignore CNPs that came in time.
            if interval.0.0 > 0 {
                p.rp.monitor = p.rp.monitor.min(Nanos(interval.0.0 / 2));
            }
        }
        set(&mut p.rp.monitor, self.rate_reduce_monitor_period.map(|t| t.0));
        set(&mut p.held_back_marks, self.held_back_marks.map(Into::into));
        set(&mut p.kmin, self.kmin);
        set(&mut p.kmax, self.kmax);
        set(&mut p.pmax, self.pmax.map(|p| fraction("pmax", p)).transpose()?);
        self.fit_defaults(&mut p);
        p.validate().map_err(|e| refusal(e, &p))?;
        Ok(p)
    }

    /// Keeps what the preset chose within the bounds that were given: only what somebody wrote can contradict.
    fn fit_defaults(&self, p: &mut Params) {
        let most = p.rp.ceiling();
        if self.rpg_min_rate.is_none() {
            p.rp.min_rate = p.rp.min_rate.min(most);
        }
        if self.start_rate.is_none() && p.rp.start_rate.bytes_per_sec() > 0 {
            p.rp.start_rate = p.rp.start_rate.max(p.rp.min_rate).min(most);
        }
        if self.rpg_hai_rate.is_none() {
            p.rp.hyper = p.rp.hyper.max(p.rp.additive);
        }
        if self.start_ai_rate.is_none() && p.rp.start_additive.bytes_per_sec() > 0 {
            p.rp.start_additive = p.rp.start_additive.max(p.rp.additive);
        }
        if self.idle_restart.is_none() && p.rp.usage == 0 {
            p.rp.idle_restart = Nanos(0);
        }
    }

    /// Every constant of `params`, written out; `preset` is what they were made from.
    pub fn of(preset: Preset, params: &Params) -> Self {
        let rp = &params.rp;
        let (rate, time) = (|r| Some(MegabitRate(r)), |t| Some(MicroTime(t)));
        Self {
            preset: Some(preset),
            feedback_delay: None,
            rpg_time_reset: time(rp.timer),
            rpg_byte_reset: Some(rp.byte_period),
            rpg_threshold: Some(rp.fast_recovery),
            threshold_boundary: Some(rp.boundary.into()),
            rpg_max_rate: rate(rp.max_rate),
            rpg_min_rate: rate(rp.min_rate),
            rpg_ai_rate: rate(rp.additive),
            rpg_hai_rate: rate(rp.hyper),
            rpg_gd: Some(rp.gd),
            rpg_min_dec_fac: Some(rp.least_kept_percent),
            rate_to_set_on_first_cnp: rate(rp.first_cnp_rate),
            clamp_tgt_rate: Some(Switch(rp.clamp_target)),
            clamp_tgt_rate_after_time_inc: Some(Switch(rp.clamp_target_after_timer)),
            dce_tcp_g: Some(TEN_BITS - f64::from(rp.g) / TENTH_BIT),
            dce_tcp_rtt: time(rp.alpha_timer),
            alpha_update: Some(rp.alpha_update.into()),
            initial_alpha_value: Some(f64::from(rp.initial_alpha) / TENTH_BIT),
            rate_reduce_monitor_period: time(rp.monitor),
            min_time_between_cnps: time(params.cnp_interval),
            held_back_marks: Some(params.held_back_marks.into()),
            kmin: Some(params.kmin),
            kmax: Some(params.kmax),
            pmax: Some(f64::from(params.pmax) / f64::from(ONE)),
            start_rate: rate(rp.start_rate),
            start_ai_rate: rate(rp.start_additive),
            start_periods: Some(rp.start_periods),
            least_usage: Some(f64::from(rp.usage) / f64::from(ONE)),
            idle_restart: time(rp.idle_restart),
        }
    }
}

/// A refusal with the key, the value and the reason.
fn refusal(error: ParamError, p: &Params) -> anyhow::Error {
    let key = error.key();
    let whole = if error == ParamError::Line {
        format!("link_rate = \"{}\"", rate_text(p.rp.line))
    } else {
        let all = Dcqcn::of(Preset::Soft, p).to_toml();
        all.lines().find(|l| l.split(" = ").next() == Some(key)).unwrap_or(key).to_owned()
    };
    anyhow!("{whole}: {}", error.reason())
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// A part of one, in 1/65536.
fn fraction(key: &str, value: f64) -> Result<u32> {
    ensure!((0.0..=1.0).contains(&value), "{key} = {value}: must be 0 to 1");
    Ok((value * f64::from(ONE)).round() as u32)
}

/// A number of 1024ths, in 1/65536.
fn ten_bits(key: &str, value: f64) -> Result<u32> {
    ensure!((0.0..=TEN_BITS).contains(&value), "{key} = {value}: must be 0 to 1024 (1/1024ths)");
    Ok((value * TENTH_BIT).round() as u32)
}

#[cfg(test)]
#[path = "dcqcn_tests.rs"]
mod tests;
