//! `--packets`: a line for every frame, with what the analysis said of it.

use std::{
    fmt,
    io::{Result, Write},
};

use roce_common::{
    abi::Space,
    flow::{NakKind, refusal},
    psn::Outcome,
    units::{Ecn, Nanos},
    wire::{Kind, Packet, Syndrome},
};
use serde::Serialize;

use super::{
    capture::Frame,
    filter::Flows,
    seen::{Seen, SeenPacket},
};

/// Whether the frame belongs to what was asked for.
pub(super) fn is_asked_for(flows: Flows<'_>, tap: &str, seen: &Seen) -> bool {
    match seen {
        Seen::Packet(SeenPacket { packet, .. }) => {
            let space = match packet.bth.opcode.kind() {
                Kind::Request => Some(Space::Request),
                Kind::Response => Some(Space::Response),
                Kind::Cnp => None,
            };
            flows.packet(tap, packet.src, packet.dst, packet.bth.dest_qp.get(), space)
        }
        _ => flows.all(),
    }
}

/// A frame and what was said of it.
pub(super) struct Line<'a> {
    /// The frame.
    pub(super) frame: &'a Frame<'a>,
    /// Name of its tap.
    pub(super) tap: &'a str,
    /// Time of the first frame.
    pub(super) start: Nanos,
    /// What it was.
    pub(super) seen: &'a Seen,
}

/// The same in JSON. Fields that do not apply are absent.
#[derive(Serialize)]
struct Object<'a> {
    schema: u32,
    packet: u64,
    time_ns: u64,
    tap: &'a str,
    #[serde(flatten)]
    roce: Option<Fields>,
    verdict: String,
}

#[derive(Serialize)]
struct Fields {
    src: std::net::IpAddr,
    dst: std::net::IpAddr,
    dest_qp: u32,
    psn: u32,
    service: &'static str,
    opcode: u8,
    operation: &'static str,
    payload: u16,
    ecn: &'static str,
    dscp: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    syndrome: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outer_ecn: Option<&'static str>,
    icrc: &'static str,
}

impl Line<'_> {
    /// Writes the line: JSON, or for people.
    pub(super) fn write(&self, out: &mut impl Write, json: bool) -> Result<()> {
        if !json {
            return writeln!(out, "{self}");
        }
        let roce = match self.seen {
            Seen::Packet(seen) => Some(self.fields(seen)),
            _ => None,
        };
        let object = Object {
            schema: crate::export::SCHEMA,
            packet: self.frame.number,
            time_ns: self.frame.time.0,
            tap: self.tap,
            roce,
            verdict: Verdict(self.seen).to_string(),
        };
        serde_json::to_writer(&mut *out, &object)?;
        writeln!(out)
    }

    fn outer_ecn(&self) -> Option<Ecn> {
        self.frame.tunnel.map(|t| Ecn::of_tos(t.outer_tos))
    }

    fn fields(&self, seen: &SeenPacket) -> Fields {
        let packet = &seen.packet;
        Fields {
            src: packet.src.into(),
            dst: packet.dst.into(),
            dest_qp: packet.bth.dest_qp.get(),
            psn: packet.bth.psn.get(),
            service: packet.bth.opcode.service().name(),
            opcode: packet.bth.opcode.get(),
            operation: operation(packet),
            payload: packet.payload_len,
            ecn: ecn_key(packet.ecn()),
            dscp: packet.dscp().get(),
            syndrome: packet.aeth.map(|a| a.raw_syndrome),
            outer_ecn: self.outer_ecn().map(ecn_key),
            icrc: match seen.icrc_valid {
                Some(true) => "valid",
                Some(false) => "invalid",
                None => "unchecked",
            },
        }
    }
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.frame.time.since(self.start).0 / 1_000;
        write!(f, "{:>7} {:>5}.{:06} {}", self.frame.number, micros / 1_000_000, micros % 1_000_000, self.tap)?;
        if let Seen::Packet(SeenPacket { packet, .. }) = self.seen {
            let (src, dst): (std::net::IpAddr, std::net::IpAddr) = (packet.src.into(), packet.dst.into());
            write!(
                f,
                " {src} > {dst} QP {} PSN {} {} {}",
                packet.bth.dest_qp.get(),
                packet.bth.psn.get(),
                packet.bth.opcode.service(),
                operation(packet),
            )?;
            if packet.bth.opcode.may_carry_payload() {
                write!(f, " {} B", packet.payload_len)?;
            } else if let Some(reth) = packet.reth {
                write!(f, " for {} B", reth.dma_len)?;
            }
            write!(f, " {} DSCP {}", ecn(packet.ecn()), packet.dscp().get())?;
            if let Some(outer) = self.outer_ecn() {
                write!(f, " outer {}", ecn(outer))?;
            }
        }
        write!(f, ": {}", Verdict(self.seen))
    }
}

/// What was said of a frame, in words.
struct Verdict<'a>(&'a Seen);

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = match self.0 {
            Seen::Packet(seen) => seen,
            Seen::RoceV1 => return f.write_str("RoCEv1"),
            Seen::NotRoce => return f.write_str("not RoCE"),
            Seen::Malformed(reason) => return write!(f, "malformed: {}", reason.name()),
        };
        match (seen.packet.bth.opcode.kind(), seen.flow, seen.outcome) {
            (Kind::Cnp, ..) => f.write_str("CNP")?,
            (_, None, _) => f.write_str("not tracked: no room for another flow")?,
            (.., Outcome::NotTracked) => untracked(f, &seen.packet)?,
            (.., Outcome::First) => f.write_str("first of its flow")?,
            (.., Outcome::InOrder) => f.write_str("in order")?,
            (.., Outcome::Gap(1)) => f.write_str("gap: 1 PSN before it is missing")?,
            (.., Outcome::Gap(n)) => write!(f, "gap: {n} PSNs before it are missing")?,
            (.., Outcome::Filled(1)) => f.write_str("fills a gap")?,
            (.., Outcome::Filled(n)) => write!(f, "fills a gap of {n} PSNs")?,
            (.., Outcome::Duplicate) => f.write_str("duplicate")?,
            (.., Outcome::Far) => f.write_str("far from its flow's place, and not confirmed")?,
            (.., Outcome::Discontinuity) => f.write_str("discontinuity: the flow goes on from here")?,
        }
        if seen.icrc_valid == Some(false) {
            f.write_str(", wrong ICRC")?;
        }
        Ok(())
    }
}

/// A packet that takes no part in the sequence of its flow.
fn untracked(f: &mut fmt::Formatter<'_>, packet: &Packet) -> fmt::Result {
    match refusal(packet) {
        Some(Syndrome::RnrNak(_)) => f.write_str("RNR NAK"),
        Some(syndrome) => {
            let kind = NakKind::of(syndrome).map_or("", NakKind::name).replace('_', " ");
            write!(f, "NAK: {kind}")
        }
        None if packet.bth.opcode.is_acknowledge() => f.write_str("ACK"),
        None if packet.bth.dest_qp.get() <= 1 => f.write_str("management"),
        None => f.write_str("not tracked: datagrams have no sequence per flow"),
    }
}

/// The operation of an opcode, as the specification calls it.
fn operation(packet: &Packet) -> &'static str {
    const NAMES: [&str; 32] = [
        "SEND_FIRST",
        "SEND_MIDDLE",
        "SEND_LAST",
        "SEND_LAST_IMM",
        "SEND_ONLY",
        "SEND_ONLY_IMM",
        "WRITE_FIRST",
        "WRITE_MIDDLE",
        "WRITE_LAST",
        "WRITE_LAST_IMM",
        "WRITE_ONLY",
        "WRITE_ONLY_IMM",
        "READ_REQUEST",
        "READ_RESPONSE_FIRST",
        "READ_RESPONSE_MIDDLE",
        "READ_RESPONSE_LAST",
        "READ_RESPONSE_ONLY",
        "ACKNOWLEDGE",
        "ATOMIC_ACKNOWLEDGE",
        "COMPARE_SWAP",
        "FETCH_ADD",
        "RESYNC",
        "SEND_LAST_INV",
        "SEND_ONLY_INV",
        "?",
        "?",
        "?",
        "?",
        "FLUSH",
        "ATOMIC_WRITE",
        "?",
        "?",
    ];
    if packet.bth.opcode.kind() == Kind::Cnp { "CNP" } else { NAMES[usize::from(packet.bth.opcode.get() & 0x1f)] }
}

/// The codepoint as people write it.
const fn ecn(ecn: Ecn) -> &'static str {
    match ecn {
        Ecn::NotEct => "Not-ECT",
        Ecn::Ect0 => "ECT(0)",
        Ecn::Ect1 => "ECT(1)",
        Ecn::Ce => "CE",
    }
}

/// The codepoint as JSON calls it.
const fn ecn_key(ecn: Ecn) -> &'static str {
    match ecn {
        Ecn::NotEct => "not_ect",
        Ecn::Ect0 => "ect0",
        Ecn::Ect1 => "ect1",
        Ecn::Ce => "ce",
    }
}
