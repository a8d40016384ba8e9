//! What a queue pair is told when it is made.

use std::time::Duration;

use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
};

/// Unacknowledged PSNs a requester may have (rxe's `RXE_MAX_UNACKED_PSNS`).
pub const WINDOW: u32 = 128;
/// READ requests a requester may have outstanding (perftest's default).
pub const MAX_READS: usize = 16;
/// Packets that may go unasked before one carries AckReq (rxe's `RXE_MAX_PKT_PER_ACK`).
pub const MAX_UNASKED: u32 = 64;

/// The operation of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// RDMA WRITE.
    Write,
    /// SEND.
    Send,
    /// RDMA READ.
    Read,
}

/// One message to transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// What to do.
    pub op: Op,
    /// Bytes of the whole message.
    pub len: u32,
}

impl Message {
    /// A message.
    pub const fn new(op: Op, len: u32) -> Self {
        Self { op, len }
    }
}

/// What a requester has to do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// The messages, in order; none makes a pure responder.
    pub messages: Vec<Message>,
    /// How often the whole list is worked through; `None` = until stopped.
    pub rounds: Option<u64>,
}

impl Traffic {
    /// A pure responder.
    pub const fn none() -> Self {
        Self { messages: Vec::new(), rounds: Some(0) }
    }

    /// `count` equal messages.
    pub fn times(message: Message, count: u64) -> Self {
        Self { messages: vec![message], rounds: Some(count) }
    }

    /// Equal messages until stopped.
    pub fn endless(message: Message) -> Self {
        Self { messages: vec![message], rounds: None }
    }
}

/// Receiver-not-ready injection at a responder: a SEND whose turn it is gets one RNR NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rnr {
    /// Every how manyth SEND is refused once; at least 1.
    pub every: u32,
    /// The timer code sent (InfiniBand table, 5 bits).
    pub code: u8,
}

/// A queue pair's addresses, numbers and habits.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Our queue pair number.
    pub local_qpn: Qpn,
    /// The peer's queue pair number.
    pub remote_qpn: Qpn,
    /// Our address.
    pub local: Addr,
    /// The peer's address, of the same IP version.
    pub remote: Addr,
    /// Our MAC address.
    pub local_mac: [u8; 6],
    /// MAC address of the next hop.
    pub next_hop_mac: [u8; 6],
    /// Path MTU in bytes.
    pub pmtu: u16,
    /// ToS or traffic class of everything we send.
    pub tos: u8,
    /// UDP source port of everything we send; `None` = by the kernel's rule.
    pub src_port: Option<u16>,
    /// First PSN of our send queue.
    pub send_psn: Psn,
    /// First PSN of the peer's send queue.
    pub recv_psn: Psn,
    /// ACK timeout.
    pub timeout: Duration,
    /// RNR injection at our responder.
    pub rnr: Option<Rnr>,
    /// What our requester does.
    pub traffic: Traffic,
}

/// The ACK timeout of InfiniBand's exponent `t`: 4.096 µs · 2^t.
pub const fn ack_timeout(t: u32) -> Duration {
    Duration::from_nanos(4096 << t)
}

/// The time an RNR NAK's timer code asks for (InfiniBand table 46).
pub const fn rnr_time(code: u8) -> Duration {
    /// In units of 10 µs.
    const TABLE: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * TABLE[(code & 31) as usize] as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_follow_the_tables() {
        assert_eq!(ack_timeout(14).as_millis(), 67);
        assert_eq!(rnr_time(1), Duration::from_micros(10));
        assert_eq!(rnr_time(0), Duration::from_micros(655_360));
        assert_eq!(rnr_time(25), Duration::from_micros(61_440));
        assert_eq!(rnr_time(31), Duration::from_micros(491_520));
    }
}
