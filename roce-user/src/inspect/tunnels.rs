//! `--decap`: frames out of their VXLAN or GENEVE tunnels. What travels in a tunnel network is seen at a tap of its own,
//! named after the interface and the network, because different networks may use the same addresses.

use std::collections::HashMap;

use roce_common::{
    units::Ecn,
    wire::{Tunnel, TunnelKind},
};

use super::{
    capture::{self, Frame},
    link::LinkLayer,
};
use crate::export::TunnelCounts;

/// Taps of tunnel networks are numbered from here on; interfaces have the numbers below.
pub(super) const FIRST_TAP: u32 = capture::MOST_INTERFACES as u32;
/// Tunnel networks that are told apart; those beyond share the last tap.
const MOST: usize = 4_096;

/// What was found in tunnels.
#[derive(Default)]
pub(super) struct Tunnels {
    taps: HashMap<(u32, TunnelKind, u32), u32>,
    names: Vec<String>,
    counts: TunnelCounts,
}

impl Tunnels {
    /// The frame inside `frame`, where it is a packet of a tunnel and was kept that far.
    pub(super) fn inner<'a>(&mut self, frame: &Frame<'a>) -> Option<Frame<'a>> {
        let tunnel = frame.link.tunnel(&(frame.bytes, frame.wire_len))?;
        let bytes = frame.bytes.get(tunnel.inner_at..)?;
        match tunnel.kind {
            TunnelKind::Vxlan => self.counts.vxlan += 1,
            TunnelKind::Geneve => self.counts.geneve += 1,
        }
        self.counts.outer_ecn.count(Ecn::of_tos(tunnel.outer_tos));
        let interface = self.tap(frame, &tunnel);
        Some(Frame {
            interface,
            interface_name: "",
            link: LinkLayer::Inner(tunnel.inner_link),
            bytes,
            wire_len: frame.wire_len.saturating_sub(tunnel.inner_at),
            tunnel: Some(tunnel),
            ..*frame
        })
    }

    fn tap(&mut self, frame: &Frame<'_>, tunnel: &Tunnel) -> u32 {
        let key = (frame.interface, tunnel.kind, tunnel.vni);
        if let Some(&tap) = self.taps.get(&key) {
            return tap;
        }
        if self.names.len() < MOST {
            self.names.push(format!("{}/{} {}", frame.interface_name, tunnel.kind.name(), tunnel.vni));
            self.taps.insert(key, FIRST_TAP + self.names.len() as u32 - 1);
        }
        FIRST_TAP + self.names.len() as u32 - 1
    }

    /// The name of a tap.
    pub(super) fn name(&self, tap: u32) -> Option<&str> {
        self.names.get(tap.checked_sub(FIRST_TAP)? as usize).map(String::as_str)
    }

    /// The names of all taps, from [`FIRST_TAP`] on.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// What was counted.
    pub(super) const fn counts(&self) -> TunnelCounts {
        self.counts
    }
}
