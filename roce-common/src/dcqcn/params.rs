//! The constants of DCQCN, and which of them make sense together.

use super::ONE;
use crate::units::{Nanos, Rate};

/// When α changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AlphaUpdate {
    /// α rises with every CNP that cuts, and decays after each `alpha_timer` without one (SIGCOMM'15 equations 1 and 2).
    AtCnp,
    /// α changes once per `alpha_timer`: up when a CNP came within it, down when none did (`dce_tcp_rtt`).
    EveryPeriod,
}

/// Which increase is the last of fast recovery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Boundary {
    /// A stage below F is fast recovery: the increase with number F is the first additive one (SIGCOMM'15 §3).
    Below,
    /// A stage up to F is fast recovery: F increases of it come before the first additive one. This is what counting an
    /// increase behind the comparison, instead of before it, comes to.
    UpTo,
}

/// What becomes of marks within an interval of the last CNP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeldBackMarks {
    /// Nothing: only marks behind the interval are answered.
    Dropped,
    /// One CNP answers them at the end of the interval (SIGCOMM'15 §3).
    Answered,
}

/// Everything the reaction point needs to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RpParams {
    /// Rate of the link.
    pub line: Rate,
    /// `rpg_max_rate`: no limiter goes above this, and one that reaches it recovered; 0 = `line`.
    pub max_rate: Rate,
    /// `rpg_min_rate`: no cut goes below this.
    pub min_rate: Rate,
    /// g, the weight of a CNP in α, in 1/65536 (`dce_tcp_g` is 1 − g in 1/1024).
    pub g: u32,
    /// α at the first CNP, in 1/65536 (`initial_alpha_value` in 1/1024).
    pub initial_alpha: u32,
    /// When α changes.
    pub alpha_update: AlphaUpdate,
    /// K, `dce_tcp_rtt`: the period of α.
    pub alpha_timer: Nanos,
    /// `rpg_gd`: a cut takes α·2^10 / 2^gd of the rate; 11 is α/2.
    pub gd: u32,
    /// `rpg_min_dec_fac`: a cut leaves at least this many per cent of the rate.
    pub least_kept_percent: u32,
    /// `rate_reduce_monitor_period`: a CNP within this time of the last cut does not cut again.
    pub monitor: Nanos,
    /// `rate_to_set_on_first_cnp`: what the first CNP sets the rate to, instead of a cut; 0 = it cuts like any other.
    pub first_cnp_rate: Rate,
    /// `clamp_tgt_rate`: every cut sets the target to the rate before it. Otherwise only a cut behind an increase by the
    /// byte counter does.
    pub clamp_target: bool,
    /// `clamp_tgt_rate_after_time_inc`: a cut behind an increase by the timer sets the target too.
    pub clamp_target_after_timer: bool,
    /// F, `rpg_threshold`: the stage at which fast recovery ends.
    pub fast_recovery: u32,
    /// How a stage compares with F.
    pub boundary: Boundary,
    /// T, `rpg_time_reset`: time per increase.
    pub timer: Nanos,
    /// B, `rpg_byte_reset`: bytes sent per increase. 0 = the timer alone raises the rate; then its count is the stage, and
    /// a hyper increase is one `hyper` however high the stage.
    pub byte_period: u64,
    /// R_AI, `rpg_ai_rate`: the additive step of the target rate.
    pub additive: Rate,
    /// R_HAI, `rpg_hai_rate`: the unit of the hyper step.
    pub hyper: Rate,
    /// The first rate of a flow whose limiter exists from its first packet ([`Rp::start`](super::Rp::start)); 0 = the
    /// highest rate.
    pub start_rate: Rate,
    /// The most that an increase of a start adds to the target behind a CNP; 0 = half of it, however much.
    pub start_additive: Rate,
    /// How long a start lasts in spite of CNPs, in periods of `timer`; 0 = the first CNP ends it.
    pub start_periods: u32,
    /// The least share of its rate, in 1/65536, that a flow must have used in a timer period for that period to raise it;
    /// 0 = the timer raises idle flows too.
    pub usage: u32,
    /// A flow that sent nothing for this long has forgotten its rate and starts anew; 0 = never. Needs `usage`.
    pub idle_restart: Nanos,
}

/// A complete set: reaction, notification and congestion point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Params {
    /// Reaction point.
    pub rp: RpParams,
    /// N, `min_time_between_cnps`: least time between two CNPs to one queue pair.
    pub cnp_interval: Nanos,
    /// What becomes of marks within N of the last CNP.
    pub held_back_marks: HeldBackMarks,
    /// Marking starts above this queue depth, bytes.
    pub kmin: u32,
    /// Marking is certain above this depth, bytes.
    pub kmax: u32,
    /// Marking probability at `kmax`, in 1/65536.
    pub pmax: u32,
}

/// What is wrong with a set of constants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParamError {
    /// The line rate is zero or above 2^40 bytes per second.
    Line,
    /// The maximum rate is above the line rate.
    MaxRate,
    /// The minimum rate is zero or above the maximum.
    MinRate,
    /// The start rate is below the minimum or above the maximum.
    StartRate,
    /// The rate of the first CNP is below the minimum or above the maximum.
    FirstCnpRate,
    /// g is zero or above one.
    G,
    /// The first α is zero or above one.
    InitialAlpha,
    /// The exponent of the cut is out of range.
    Gd,
    /// A cut would have to keep everything.
    LeastKept,
    /// F is zero or too large.
    FastRecovery,
    /// The timer is zero or longer than [`MOST_PERIOD`].
    Timer,
    /// As [`Self::Timer`], for the period of α.
    AlphaTimer,
    /// R_AI is zero.
    Additive,
    /// R_HAI is below R_AI.
    Hyper,
    /// The step of a start is below R_AI.
    StartAdditive,
    /// Starts last for too long.
    StartPeriods,
    /// The usage is above one.
    Usage,
    /// Flows shall restart after idling, and nothing says when they idle.
    IdleRestart,
    /// kmin is above kmax.
    Kmin,
    /// pmax is zero or above one.
    Pmax,
}

impl ParamError {
    /// The name of the value that cannot be, as configuration files write it.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Line => "link_rate",
            Self::MaxRate => "rpg_max_rate",
            Self::MinRate => "rpg_min_rate",
            Self::StartRate => "start_rate",
            Self::FirstCnpRate => "rate_to_set_on_first_cnp",
            Self::G => "dce_tcp_g",
            Self::InitialAlpha => "initial_alpha_value",
            Self::Gd => "rpg_gd",
            Self::LeastKept => "rpg_min_dec_fac",
            Self::FastRecovery => "rpg_threshold",
            Self::Timer => "rpg_time_reset",
            Self::AlphaTimer => "dce_tcp_rtt",
            Self::Additive => "rpg_ai_rate",
            Self::Hyper => "rpg_hai_rate",
            Self::StartAdditive => "start_ai_rate",
            Self::StartPeriods => "start_periods",
            Self::Usage => "least_usage",
            Self::IdleRestart => "idle_restart",
            Self::Kmin => "kmin",
            Self::Pmax => "pmax",
        }
    }

    /// Which values it may have.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Line => "must be above 0 and at most 8 Tb/s",
            Self::MaxRate => "must be at most the link rate",
            Self::MinRate => "must be above 0 and at most rpg_max_rate and the link rate",
            Self::StartRate | Self::FirstCnpRate => "must be between rpg_min_rate and rpg_max_rate (or the link rate)",
            Self::G => "must be at least 0 and below 1024, so that g is above 0 and at most 1",
            Self::InitialAlpha => "must be above 0 and at most 1024, which is alpha = 1",
            Self::Gd => "must be 8 to 16",
            Self::LeastKept => "must be 0 to 99 per cent: with 100 no CNP would cut anything",
            Self::FastRecovery => "must be 1 to 1000",
            Self::Timer | Self::AlphaTimer => "must be above 0 and at most an hour",
            Self::Additive => "must be above 0",
            Self::Hyper => "must be at least rpg_ai_rate",
            Self::StartAdditive => "must be 0 or at least rpg_ai_rate",
            Self::StartPeriods => "must be 0 to 1000",
            Self::Usage => "must be 0 to 1",
            Self::IdleRestart => "needs least_usage above 0, which says when a flow idles",
            Self::Kmin => "must be at most kmax",
            Self::Pmax => "must be above 0 and at most 1",
        }
    }
}

impl core::fmt::Display for ParamError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} {}", self.key(), self.reason())
    }
}

/// The longest time a timer may run.
pub const MOST_PERIOD: Nanos = Nanos(3_600 * Nanos::SECOND.0);

impl Params {
    /// Whether the algorithms can work with these constants.
    pub const fn validate(&self) -> Result<(), ParamError> {
        if let Err(e) = self.rp.validate() {
            return Err(e);
        }
        if self.kmin > self.kmax {
            Err(ParamError::Kmin)
        } else if self.pmax == 0 || self.pmax > ONE {
            Err(ParamError::Pmax)
        } else {
            Ok(())
        }
    }
}

impl RpParams {
    /// The highest rate of a limiter: `max_rate`, or the line rate where there is none.
    pub const fn ceiling(&self) -> Rate {
        let (line, most) = (self.line.bytes_per_sec(), self.max_rate.bytes_per_sec());
        if most == 0 || most > line { self.line } else { self.max_rate }
    }

    /// Whether the reaction point can work with these constants.
    pub const fn validate(&self) -> Result<(), ParamError> {
        let line = self.line.bytes_per_sec();
        let (most, least) = (self.ceiling().bytes_per_sec(), self.min_rate.bytes_per_sec());
        if line == 0 || line > 1 << 40 {
            Err(ParamError::Line)
        } else if self.max_rate.bytes_per_sec() > line {
            Err(ParamError::MaxRate)
        } else if least == 0 || least > most {
            Err(ParamError::MinRate)
        } else if !is_zero_or_between(self.start_rate, least, most) {
            Err(ParamError::StartRate)
        } else if !is_zero_or_between(self.first_cnp_rate, least, most) {
            Err(ParamError::FirstCnpRate)
        } else if self.g == 0 || self.g > ONE {
            Err(ParamError::G)
        } else if self.initial_alpha == 0 || self.initial_alpha > ONE {
            Err(ParamError::InitialAlpha)
        } else if self.gd < 8 || self.gd > 16 {
            Err(ParamError::Gd)
        } else if self.least_kept_percent > 99 {
            Err(ParamError::LeastKept)
        } else if self.fast_recovery == 0 || self.fast_recovery > 1_000 {
            Err(ParamError::FastRecovery)
        } else if !is_period(self.timer) {
            Err(ParamError::Timer)
        } else if !is_period(self.alpha_timer) {
            Err(ParamError::AlphaTimer)
        } else if self.additive.bytes_per_sec() == 0 {
            Err(ParamError::Additive)
        } else if self.hyper.bytes_per_sec() < self.additive.bytes_per_sec() {
            Err(ParamError::Hyper)
        } else if self.start_additive.bytes_per_sec() > 0
            && self.start_additive.bytes_per_sec() < self.additive.bytes_per_sec()
        {
            Err(ParamError::StartAdditive)
        } else if self.start_periods > 1_000 {
            Err(ParamError::StartPeriods)
        } else if self.usage > ONE {
            Err(ParamError::Usage)
        } else if self.idle_restart.0 > 0 && self.usage == 0 {
            Err(ParamError::IdleRestart)
        } else {
            Ok(())
        }
    }
}

const fn is_period(time: Nanos) -> bool {
    time.0 > 0 && time.0 <= MOST_PERIOD.0
}

const fn is_zero_or_between(rate: Rate, least: u64, most: u64) -> bool {
    let rate = rate.bytes_per_sec();
    rate == 0 || (rate >= least && rate <= most)
}
