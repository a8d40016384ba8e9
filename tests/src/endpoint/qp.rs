//! A queue pair without sockets, threads or a clock: packets and the time go in, frames come out.

use roce_common::{
    psn::Psn,
    units::Nanos,
    wire::{
        self, Bth, Kind, Opcode, Packet, Service,
        emit::{self, EmitError, Ext, Path},
    },
};

use super::{config::QpConfig, requester::Requester, responder::Responder, stats::QpStats};

/// TTL of every packet, as rxe's default.
const TTL: u8 = 64;

/// A packet to be built.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoing {
    pub(super) opcode: Opcode,
    pub(super) psn: Psn,
    pub(super) ack_req: bool,
    pub(super) ext: Ext,
    /// Payload bytes, and where in the message they stand.
    pub(super) payload: usize,
    pub(super) offset: u32,
}

impl Outgoing {
    pub(super) fn new(opcode: Opcode, psn: Psn) -> Self {
        Self { opcode, psn, ack_req: false, ext: Ext::default(), payload: 0, offset: 0 }
    }
}

/// A reliable-connection queue pair, requester and responder.
#[derive(Debug)]
pub struct Qp {
    cfg: QpConfig,
    path: Path,
    requester: Requester,
    responder: Responder,
    stats: QpStats,
    /// What every message carries: its bytes count up, so that an offset shows in a capture.
    pattern: Vec<u8>,
}

impl Qp {
    /// A queue pair ready to send.
    pub fn new(cfg: QpConfig) -> Self {
        let path = Path {
            src_mac: cfg.local_mac,
            dst_mac: cfg.next_hop_mac,
            src: cfg.local,
            dst: cfg.remote,
            tos: cfg.tos,
            ttl: TTL,
            ip_id: cfg.local_qpn.get() as u16,
            src_port: cfg.src_port.unwrap_or_else(|| wire::source_port(cfg.local_qpn, cfg.remote_qpn)),
        };
        let pattern = (0..usize::from(cfg.pmtu) + 256).map(|i| i as u8).collect();
        Self {
            path,
            requester: Requester::new(&cfg),
            responder: Responder::new(&cfg),
            stats: QpStats::default(),
            pattern,
            cfg,
        }
    }

    /// What it was made with.
    pub fn config(&self) -> &QpConfig {
        &self.cfg
    }

    /// Its counters.
    pub fn stats(&self) -> &QpStats {
        &self.stats
    }

    /// Longest frame it sends, in bytes.
    pub fn max_frame(&self) -> usize {
        // Ethernet, IPv6, UDP, BTH, RETH, payload, ICRC.
        14 + 40 + 8 + 12 + 16 + usize::from(self.cfg.pmtu) + 4
    }

    /// Whether every message asked for has completed and nothing waits to be sent.
    pub fn is_done(&self) -> bool {
        self.requester.is_done() && !self.responder.has_answers()
    }

    /// Whether [`Qp::next_frame`] may have something now.
    pub fn has_work(&self) -> bool {
        self.responder.has_answers() || self.requester.may_send()
    }

    /// Begins no further message; those under way go on.
    pub fn stop_requesting(&mut self) {
        self.requester.stop();
    }

    /// The kernel refused a frame: it is lost, as in a queue that overflowed.
    pub fn transmit_failed(&mut self) {
        self.stats.transmit_failures += 1;
    }

    /// When [`Qp::next_frame`] is worth asking again although no packet came.
    pub fn deadline(&self) -> Option<Nanos> {
        self.requester.deadline()
    }

    /// Takes a packet addressed to this queue pair, its ICRC checked.
    pub fn receive(&mut self, now: Nanos, packet: &Packet) {
        let ours = packet.src == self.cfg.remote && packet.dst == self.cfg.local;
        if !ours || packet.bth.opcode.service() != Service::Rc {
            return;
        }
        self.stats.received_packets += 1;
        match packet.bth.opcode.kind() {
            Kind::Request => self.responder.on_request(now, packet, &mut self.stats),
            Kind::Response => self.on_response(now, packet),
            // rxe ignores them.
            Kind::Cnp => {}
        }
    }

    fn on_response(&mut self, now: Nanos, packet: &Packet) {
        match (packet.bth.opcode, packet.aeth) {
            (Opcode::ACKNOWLEDGE, Some(aeth)) => {
                self.requester.on_ack(now, packet.bth.psn, aeth, &mut self.stats);
            }
            (Opcode::ATOMIC_ACKNOWLEDGE, _) => {}
            _ => self.on_read_response(now, packet),
        }
    }

    fn on_read_response(&mut self, now: Nanos, packet: &Packet) {
        if self.requester.on_read_response(now, packet, &mut self.stats) {
            let bytes = u64::from(packet.payload_len);
            self.stats.accepted_bytes += bytes;
            self.stats.accepted.add(now, bytes);
        }
    }

    /// Writes the next frame to send into `out` and returns its length; `None` where there is nothing to send now.
    ///
    /// # Errors
    /// `out` is smaller than [`Qp::max_frame`].
    pub fn next_frame(&mut self, now: Nanos, out: &mut [u8]) -> Result<Option<usize>, EmitError> {
        self.requester.on_timer(now, &mut self.stats);
        let Some(packet) = self.responder.poll().or_else(|| self.requester.poll(now, &mut self.stats)) else {
            return Ok(None);
        };
        let mut bth = Bth::new(packet.opcode, self.cfg.remote_qpn, packet.psn);
        bth.ack_req = packet.ack_req;
        self.path.ip_id = self.path.ip_id.wrapping_add(1);
        let from = packet.offset as usize % 256;
        let payload = &self.pattern[from..from + packet.payload];
        let n = emit::frame(&self.path, &bth, &packet.ext, payload, out)?;
        self.stats.sent_packets += 1;
        self.stats.sent_bytes += n as u64;
        Ok(Some(n))
    }
}
