//! The JSON line of an event (schema 1), and its text for people.

use std::{fmt, net::IpAddr};

use clap::ValueEnum;
use roce_common::{
    abi::{Direction, Event, Space, Tap},
    flow::NakKind,
    units::{Qpn, Rate},
    wire::{Aeth, Kind as PacketKind, Opcode},
};
use serde::{Deserialize, Serialize};

use super::{Record, Wall, What};
use crate::{
    export::{SCHEMA, utc},
    tui::bits,
};

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// What an event is; the discriminant is the index of its history.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, ValueEnum)]
        #[serde(rename_all = "snake_case")]
        #[value(rename_all = "snake_case")]
        pub enum Kind { $($(#[$doc])* $variant,)* }

        impl Kind {
            /// Every kind, in the order of the discriminants.
            pub const ALL: &'static [Self; [$($name),*].len()] = &[$(Self::$variant),*];

            /// The name used in JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

kinds! {
    /// PSNs were skipped
    Gap = "gap",
    /// A NAK passed
    Nak = "nak",
    /// An RNR NAK passed: the receiver was not ready, nothing is lost
    RnrNak = "rnr_nak",
    /// A flow goes on at a PSN far from where it was
    Discontinuity = "discontinuity",
    /// The first packet of a flow
    FirstSight = "first_sight",
    /// A CNP for a queue pair of this host
    Cnp = "cnp",
    /// A CNP for a queue pair that is not paired with its source
    CnpUnpaired = "cnp_unpaired",
    /// This host answered CE with a CNP
    CnpSent = "cnp_sent",
    /// The controller slows a queue pair down, lets it speed up, or lets it go
    Rate = "rate",
    /// Nothing of a connection passed for a while, and something was unanswered
    Silence = "silence",
    /// Packets were lost or repeated: why and where
    Episode = "episode",
    /// A capture wrote a file
    Capture = "capture",
    /// Something the user should know
    Notice = "notice",
}

/// One event. Which fields there are depends on the kind; all names and meanings are in `docs/events.md`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EventLine {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Always `event`.
    pub kind: String,
    /// What it is.
    pub event: Kind,
    /// Number of the event at its agent; a gap in these numbers is a filter or a loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub time_ns: u64,
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
    /// The interface.
    pub iface: String,
    /// The tap, for events of packets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Source address of the packet; of a rate, the queue pair's own is not known: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub src: Option<IpAddr>,
    /// Destination address of the packet; the peer of a limited queue pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dst: Option<IpAddr>,
    /// Destination QPN of the packet; the peer's QPN of a limited queue pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dest_qp: Option<u32>,
    /// `request` or `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<String>,
    /// Transport service of the packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// PSN of the packet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psn: Option<u32>,
    /// Raw value of the event: PSNs skipped, syndrome byte, ToS byte or local QPN, by kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<u32>,
    /// PSNs skipped (gap).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<u32>,
    /// For how long nothing had passed, nanoseconds (silence).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silence_ns: Option<u64>,
    /// What a NAK refuses, as in `nak` of a flow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nak: Option<String>,
    /// The local queue pair (cnp, cnp_sent, rate).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_qp: Option<u32>,
    /// Frame bits per second the queue pair is limited to; absent when it is let go (rate).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bps: Option<u64>,
    /// Why (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Where, seen from the tap (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Packets repeated (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packets: Option<u32>,
    /// PSNs lost before this tap (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u32>,
    /// Of the repeat, PSNs lost again (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_again: Option<u32>,
    /// Its first sign, CLOCK_MONOTONIC; `time_ns` is its end (episode).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_ns: Option<u64>,
    /// The file written (capture).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// For people (notice, capture).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Name of a tap of an interface.
pub fn tap_name(iface: &str, tap: Tap) -> String {
    format!("{iface}/{}", direction_name(tap.direction()))
}

/// Name of a direction in a tap's name.
pub const fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    }
}

impl EventLine {
    /// The line of a record of an interface.
    pub fn new(iface: &str, seq: Option<u64>, record: &Record, wall: Wall) -> Self {
        let mut line = Self {
            schema: SCHEMA,
            kind: "event".into(),
            event: record.kind(),
            seq,
            time_ns: record.time.0,
            unix_ns: wall.unix_ns(record.time),
            iface: iface.into(),
            tap: None,
            src: None,
            dst: None,
            dest_qp: None,
            space: None,
            service: None,
            psn: None,
            value: None,
            skipped: None,
            silence_ns: None,
            nak: None,
            local_qp: None,
            limit_bps: None,
            cause: None,
            location: None,
            packets: None,
            lost: None,
            lost_again: None,
            start_ns: None,
            file: None,
            text: None,
        };
        match &record.what {
            What::Packet(kind, event) => line.packet(*kind, event),
            What::Rate { peer, remote, local, limit } => {
                line.dst = Some((*peer).into());
                line.dest_qp = Some(remote.get());
                line.local_qp = local.map(Qpn::get);
                line.limit_bps = limit.map(Rate::bits_per_sec);
            }
            What::Episode { flow, episode } => {
                line.tap = Some(tap_name(iface, flow.tap));
                line.src = Some(flow.src.into());
                line.dst = Some(flow.dst.into());
                line.dest_qp = Some(flow.dest_qp().get());
                line.space = Some(flow.space().name().into());
                line.psn = Some(episode.first.get());
                line.cause = Some(episode.cause.name().into());
                line.location = Some(episode.location.name().into());
                line.packets = Some(episode.packets);
                line.lost = Some(episode.lost);
                line.lost_again = Some(episode.lost_again);
                line.start_ns = Some(episode.start.0);
            }
            What::Capture { file, why } => {
                line.file = Some(file.display().to_string());
                line.text = Some(why.clone());
            }
            What::Notice(text) => line.text = Some(text.clone()),
        }
        line
    }

    fn packet(&mut self, kind: Kind, event: &Event) {
        self.tap = Some(tap_name(&self.iface, event.tap));
        self.src = Some(event.src.into());
        self.dst = Some(event.dst.into());
        self.dest_qp = Some(event.dest_qp);
        self.psn = Some(event.psn);
        self.value = Some(event.value);
        match kind {
            Kind::Cnp | Kind::CnpUnpaired => self.local_qp = Some(event.dest_qp),
            Kind::CnpSent => self.local_qp = Some(event.value),
            _ => {
                if let Some(opcode) = Opcode::new(event.opcode) {
                    let response = opcode.kind() == PacketKind::Response;
                    self.space = Some(if response { Space::Response } else { Space::Request }.name().into());
                    self.service = Some(opcode.service().name().into());
                }
            }
        }
        match kind {
            Kind::Gap => self.skipped = Some(event.value),
            Kind::Silence => self.silence_ns = Some(u64::from(event.value) * 1_000),
            Kind::Nak => {
                let syndrome = Aeth { raw_syndrome: event.value as u8, msn: 0 }.syndrome();
                self.nak = NakKind::of(syndrome).map(|n| n.name().into());
            }
            _ => {}
        }
    }
}

/// One line: when, where, what, who.
impl fmt::Display for EventLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.tap.as_deref().unwrap_or(&self.iface);
        write!(f, "{} {place} ", utc::time_of_day(self.unix_ns))?;
        let qp = self.dest_qp.unwrap_or(0);
        let local = self.local_qp.unwrap_or(0);
        let psn = self.psn.unwrap_or(0);
        let flow = |f: &mut fmt::Formatter<'_>| {
            let (Some(src), Some(dst)) = (self.src, self.dst) else { return Ok(()) };
            write!(f, "  {src} > {dst} QP {qp} {}", self.space.as_deref().unwrap_or(""))
        };
        match self.event {
            Kind::Gap => {
                write!(f, "gap            {} PSNs missing before PSN {psn}", self.skipped.unwrap_or(0))?;
                flow(f)
            }
            Kind::Nak => {
                write!(f, "NAK            {} at PSN {psn}", self.nak.as_deref().unwrap_or("?"))?;
                flow(f)
            }
            Kind::RnrNak => {
                write!(f, "RNR NAK        receiver not ready at PSN {psn}")?;
                flow(f)
            }
            Kind::Silence => {
                let ms = self.silence_ns.unwrap_or(0) / 1_000_000;
                write!(f, "silence        {ms} ms with something unanswered, until PSN {psn}")?;
                flow(f)
            }
            Kind::Discontinuity => {
                write!(f, "discontinuity  goes on at PSN {psn}")?;
                flow(f)
            }
            Kind::FirstSight => {
                write!(f, "first sight    {} from PSN {psn}", self.service.as_deref().unwrap_or("?"))?;
                flow(f)
            }
            Kind::Cnp => {
                write!(f, "CNP            slows our QP {local}")?;
                flow(f)
            }
            Kind::CnpUnpaired => {
                write!(f, "CNP unpaired   names our QP {local}, which is not known to be its source's peer")?;
                flow(f)
            }
            Kind::CnpSent => {
                write!(f, "CNP sent       for CE on packets to our QP {local}")?;
                flow(f)
            }
            Kind::Rate => {
                match self.local_qp {
                    Some(local) => write!(f, "rate           our QP {local} to ")?,
                    None => write!(f, "rate           our QP, not known yet, to ")?,
                }
                if let Some(peer) = self.dst {
                    write!(f, "{peer} QP {qp}: ")?;
                }
                match self.limit_bps {
                    Some(limit) => write!(f, "at most {}", bits(limit)),
                    None => write!(f, "no limit any more"),
                }
            }
            Kind::Episode => {
                let (cause, place) = (self.cause.as_deref().unwrap_or("?"), self.location.as_deref().unwrap_or("?"));
                write!(f, "episode        {cause} {place} from PSN {psn}: {} lost", self.lost.unwrap_or(0))?;
                if let Some(again @ 1..) = self.lost_again {
                    write!(f, ", {again} again")?;
                }
                write!(f, ", {} packets repeated", self.packets.unwrap_or(0))?;
                flow(f)
            }
            Kind::Capture => write!(
                f,
                "capture        {} ({})",
                self.file.as_deref().unwrap_or(""),
                self.text.as_deref().unwrap_or("")
            ),
            Kind::Notice => write!(f, "notice         {}", self.text.as_deref().unwrap_or("")),
        }
    }
}
