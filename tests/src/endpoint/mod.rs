//! A software RC endpoint with rxe's habits, to load the dataplane where no rxe is available.
//!
//! [`Qp`] is the protocol alone; [`Host`] gives queue pairs a network namespace, packet sockets and threads.

mod config;
mod connect;
mod flood;
mod host;
pub mod memory;
mod opcodes;
mod qp;
mod requester;
mod responder;
mod socket;
mod stats;
#[cfg(test)]
mod tests;

pub use config::{MAX_READS, MAX_UNASKED, Message, Op, QpConfig, Rnr, Traffic, WINDOW, ack_timeout, rnr_time};
pub use connect::{Connection, connect};
pub use flood::CnpFlood;
pub use host::{Clock, Host, HostStats, Lose, QpHandle};
pub use qp::Qp;
pub use socket::{Receiver, Sender, Sent, Tap};
pub use stats::{QpStats, SLOT, Series};

use roce_common::wire::Packet;

/// A hook that loses each packet with `probability` (0 … 1); the same seed loses the same packets.
pub fn loss(probability: f64, seed: u64) -> impl FnMut(&Packet) -> bool + Send {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let limit = (probability.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64;
    move |_| {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) < limit
    }
}
