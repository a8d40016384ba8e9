//! The congestion point: a virtual queue of the configured rate, RED on its depth.

use aya_ebpf::{
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::TcContext,
};
use roce_common::{
    abi::{Config, Counter},
    units::Ecn,
    wire::Packet,
};

use crate::{count::Tally, mark};

/// One packet joins the virtual queue; an ECT packet may leave it as CE.
#[inline(always)]
pub(crate) fn pass(_ctx: &TcContext, _cfg: &Config, _tally: Tally, _packet: &mut Packet, _is_cnp: bool) {}
