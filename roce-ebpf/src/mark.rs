//! Writing DSCP, ECN and priority. The ICRC covers none of these bytes (`rxe_icrc.c`); the IPv4 header checksum does.

use aya_ebpf::programs::TcContext;
use roce_common::{
    abi::{Config, Counter, MarkPolicy},
    units::Ecn,
    wire::{IpVersion, Packet, checksum},
};

use crate::{count::Tally, ctx};

/// Whether a field whose unset value is 0 is to be written.
#[inline(always)]
fn wanted(policy: u32, field: u8) -> bool {
    policy == MarkPolicy::Force as u32 || (policy == MarkPolicy::Fill as u32 && field == 0)
}

/// DSCP by class, ECT(0), skb->priority. ACKs and READ responses are of the data class: they share one PSN order, and
/// an ACK that overtakes a READ response makes the requester ask again.
#[inline(always)]
pub(crate) fn class_of_service(ctx: &TcContext, cfg: &Config, tally: Tally, packet: &mut Packet, is_cnp: bool) {
    let (dscp, priority) = if is_cnp { (cfg.cnp_dscp, cfg.cnp_priority) } else { (cfg.data_dscp, cfg.data_priority) };
    let mut tos = packet.tos;
    if wanted(cfg.dscp_policy, tos >> 2) {
        tos = (dscp as u8 & 0x3f) << 2 | tos & 3;
    }
    if wanted(cfg.ecn_policy, tos & 3) && tos & 3 != Ecn::Ce as u8 {
        tos = tos & !3 | Ecn::Ect0 as u8;
    }
    if wanted(cfg.dscp_policy, ctx::priority(ctx) as u8) {
        ctx::set_priority(ctx, priority);
    }
    if tos != packet.tos {
        if set_tos(ctx, packet, tos) {
            tally.add(Counter::Marked);
        } else {
            tally.add(Counter::MarkFailed);
        }
    }
}

/// Rewrites the ToS or traffic-class byte; says whether it could.
#[inline(always)]
pub(crate) fn set_tos(ctx: &TcContext, packet: &mut Packet, tos: u8) -> bool {
    let at = packet.l3_offset;
    let done = match packet.ip {
        IpVersion::V4 => change::<12>(ctx, at, |h| {
            let old = u16::from_be_bytes([h[0], h[1]]);
            h[1] = tos;
            let new = u16::from_be_bytes([h[0], h[1]]);
            let sum = checksum::update(u16::from_be_bytes([h[10], h[11]]), old, new);
            [h[10], h[11]] = sum.to_be_bytes();
        }),
        IpVersion::V6 => change::<2>(ctx, at, |h| *h = [h[0] & 0xf0 | tos >> 4, h[1] & 0x0f | tos << 4]),
    };
    if done {
        packet.tos = tos;
    }
    done
}

/// Changes the first `N` bytes of the IP header.
#[inline(always)]
fn change<const N: usize>(ctx: &TcContext, at: u16, edit: impl Fn(&mut [u8; N])) -> bool {
    let Some(mut header) = ctx::load::<N>(ctx, at) else { return false };
    edit(&mut header);
    ctx::store(ctx, at, &header, 0)
}
