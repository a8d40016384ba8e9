//! The kernel side: entry points, contexts, maps and the glue that calls `roce-common`.
//!
//! | program | hook | does |
//! |---|---|---|
//! | `roce_xdp` | XDP | counts and tracks the ingress tap, hands CNPs to the controller, guards rxe |
//! | `roce_tc_ingress` | tc ingress | the NP; with `Flags::TC_INGRESS` also all that `roce_xdp` does |
//! | `roce_tc_egress` | tc egress | CNP jobs, marking, virtual queue, egress tap, EDT pacing |
//! | `roce_htb` | filter of our HTB root | steers limited queue pairs to their class |
#![no_std]
#![no_main]
#![feature(core_intrinsics)]
#![expect(
    unreachable_pub,
    missing_docs,
    clippy::needless_pass_by_value,
    reason = "the entry points are exported by the macros, which give them their context by value"
)]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "a map key passed by value is copied to the stack once more"
)]
#![expect(internal_features, reason = "AtomicU32 does not build for the BPF target; the intrinsics behind it do")]

mod atomic;
mod baseline;
mod capture;
mod count;
mod ctx;
mod egress;
mod event;
mod ingress;
mod mad;
mod maps;
mod mark;
mod np;
mod pace;
mod queue;
mod track;
mod turn;

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action},
    helpers::generated::bpf_redirect,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

use crate::ingress::Fate;

/// XDP ingress. Aware of fragments; packets with an empty linear part are read through the helper.
#[xdp(frags)]
pub fn roce_xdp(ctx: XdpContext) -> u32 {
    match ingress::xdp(&ctx) {
        Fate::Pass => xdp_action::XDP_PASS,
        Fate::Drop => xdp_action::XDP_DROP,
    }
}

/// tc ingress. Never ends the chain of programs, except for what the guard drops.
#[classifier]
pub fn roce_tc_ingress(ctx: TcContext) -> i32 {
    match ingress::tc(&ctx) {
        Fate::Pass => TC_ACT_UNSPEC,
        Fate::Drop => TC_ACT_SHOT,
    }
}

/// tc egress. Never ends the chain of programs, and drops nothing except while the root qdisc is replaced.
#[classifier]
pub fn roce_tc_egress(ctx: TcContext) -> i32 {
    match egress::tc(&ctx) {
        Fate::Pass => TC_ACT_UNSPEC,
        // To an interface that does not exist: of all verdicts only a redirect drops and lets the sender believe that it sent.
        // TC_ACT_STOLEN would too, but TCX takes it for TC_ACT_UNSPEC.
        // SAFETY: the helper takes numbers.
        Fate::Drop => (unsafe { bpf_redirect(0, 0) }) as i32,
    }
}

/// Filter of the HTB root qdisc: the class of a limited queue pair, or nothing.
#[classifier]
pub fn roce_htb(ctx: TcContext) -> i32 {
    match pace::htb_class(&ctx) {
        Some(classid) => {
            ctx::set_classid(&ctx, classid);
            TC_ACT_OK
        }
        None => TC_ACT_UNSPEC,
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
