//! What the analysis collects for findings while frames pass. It sees each frame when the analysis is done with it.

use roce_common::{
    abi::{FlowKey, Space},
    psn::Psn,
    wire::{Kind, Malformed},
};

use super::{
    capture::Frame,
    seen::{Seen, SeenPacket},
};
use crate::findings::{Code, Evidence, Findings, Subject, rules};

/// The collector and what it must remember of a capture.
#[derive(Default)]
pub(super) struct Watch {
    findings: Findings,
}

impl Watch {
    /// Takes the next frame and what it was.
    #[inline]
    pub(super) fn frame(&mut self, frame: &Frame<'_>, seen: &Seen) {
        match seen {
            Seen::Packet(packet) => self.packet(frame, packet),
            Seen::NotRoce => {}
            Seen::RoceV1 => self.capture_note(Code::Rocev1, frame, "RoCEv1"),
            Seen::Malformed(reason) => {
                let code = match reason {
                    Malformed::TruncatedCapture => Code::TruncatedCapture,
                    // There is no other version: these bytes are no BTH.
                    Malformed::BadVersion => Code::NotRoceOn4791,
                    Malformed::UnknownOpcode
                    | Malformed::TruncatedHeader
                    | Malformed::BadLength
                    | Malformed::PadBeyondPayload
                    | Malformed::ReadTooLong
                    | Malformed::UdpFragment => Code::MalformedOn4791,
                };
                self.capture_note(code, frame, reason.name());
            }
        }
    }

    fn packet(&mut self, frame: &Frame<'_>, seen: &SeenPacket) {
        if seen.icrc_valid == Some(false) {
            self.findings.note(Code::BadIcrc, key_of(seen), evidence(frame, Some(seen.packet.bth.psn), "wrong ICRC"));
        }
        if seen.packet.bth.opcode.kind() == Kind::Cnp {
            self.cnp(frame, seen);
        }
    }

    fn cnp(&mut self, frame: &Frame<'_>, seen: &SeenPacket) {
        let path = Subject::Path(seen.tap, seen.packet.src, seen.packet.dst);
        if !seen.packet.bth.becn {
            self.findings.note(Code::CnpBecnMissing, path, evidence(frame, None, "CNP without BECN"));
        }
        if seen.packet.dscp().get() != rules::CNP_DSCP {
            self.findings.note(Code::CnpDscpUnexpected, path, evidence(frame, None, "CNP in another DSCP"));
        }
    }

    fn capture_note(&mut self, code: Code, frame: &Frame<'_>, what: &'static str) {
        self.findings.note(code, Subject::Capture, evidence(frame, None, what));
    }

    /// The collector, for what is found at the end.
    pub(super) const fn findings(&mut self) -> &mut Findings {
        &mut self.findings
    }
}

fn evidence(frame: &Frame<'_>, psn: Option<Psn>, what: &'static str) -> Evidence {
    Evidence { frame: Some(frame.number), time: frame.time, psn, what }
}

/// The key of the packet's flow, whether or not there was room for it.
fn key_of(seen: &SeenPacket) -> FlowKey {
    let p = &seen.packet;
    let space = if p.bth.opcode.kind() == Kind::Response { Space::Response } else { Space::Request };
    FlowKey::new(seen.tap, p.src, p.dst, p.bth.dest_qp, space)
}
