//! The controller: what happened and what time it is go in, commands come out. It reads no clock, opens no socket and
//! touches no map; the agent carries the commands out by the dataplane and the pacers.
//!
//! | file | what |
//! |---|---|
//! | `core` | CNPs → one reaction point per local queue pair → rates |
//! | `pairs` | which local QPN is connected to which remote QPN, by elimination |

mod core;
mod pairs;

use roce_common::{
    abi::PeerQp,
    units::{Addr, Qpn, Rate},
};

pub use self::{
    core::{BytesSent, Core, CoreConfig, Ignored, Stats},
    pairs::{
        Change, FlowSeen, KernelList, KernelQp, KernelStats, Limits, LocalQp, Observation, Pair, PairTable, SETTLE,
        Unknown,
    },
};

/// What the shell has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Tell the kernel side of a pair: a new entry whose CNP count starts at 0.
    AddPair {
        /// The local queue pair.
        local: LocalQp,
        /// Its address.
        local_addr: Addr,
        /// The peer's address.
        peer: Addr,
        /// The peer's QPN.
        remote: Qpn,
    },
    /// A pair is contradicted, or idle for too long.
    RemovePair {
        /// The local queue pair.
        local: LocalQp,
        /// Its address.
        local_addr: Addr,
        /// The peer's address.
        peer: Addr,
        /// The peer's QPN.
        remote: Qpn,
    },
    /// Pace everything the local queue pair connected to `key` sends, requests and responses, at `rate`.
    SetRate {
        /// Where the limiter is: the peer and its QPN.
        key: PeerQp,
        /// Frame bytes per second, never 0.
        rate: Rate,
    },
    /// The egress program has limited a queue pair at the start rate: take the limiter over as it is.
    Adopt {
        /// Where the limiter is.
        key: PeerQp,
        /// Its HTB class (major:minor), 0 with another pacer.
        classid: u32,
    },
    /// The queue pair has been back at line rate for a timer period. The limiter is at line rate already; take it away
    /// once what it holds back has drained. A `SetRate` for the same key before that takes this back.
    Release {
        /// Where the limiter is.
        key: PeerQp,
    },
    /// The limiter's pair is gone: take it away now.
    ClearRate {
        /// Where the limiter is.
        key: PeerQp,
    },
    /// The queue pair has sent nothing for long, so nothing waits: take the limiter away. Its next packet starts anew.
    Forget {
        /// Where the limiter is.
        key: PeerQp,
    },
    /// Ask the kernel which queue pairs of this host are connected to which, and hand the answer to [`Core::on_kernel`].
    AskKernel,
    /// Something the user should know.
    Notice(Notice),
}

/// Something the user should know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// The minimum rates of the limited queue pairs exceed the link together: they cannot all be obeyed.
    MinRateInfeasible {
        /// The interface.
        ifindex: u32,
        /// Limited queue pairs.
        limited: usize,
        /// The minimum rate of each.
        min_rate: Rate,
        /// What the link carries.
        link: Rate,
    },
    /// There is no room for another limiter.
    LimitersFull {
        /// The bound.
        limit: usize,
    },
}

impl Notice {
    /// The name used in JSON and logs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::MinRateInfeasible { .. } => "min-rate-infeasible",
            Self::LimitersFull { .. } => "limiters-full",
        }
    }
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MinRateInfeasible { ifindex, limited, min_rate, link } => write!(
                f,
                "{limited} limited queue pairs on interface {ifindex} of at least {} bit/s each exceed the link of {} bit/s",
                min_rate.bits_per_sec(),
                link.bits_per_sec()
            ),
            Self::LimitersFull { limit } => {
                write!(f, "all {limit} limiters are in use: further queue pairs are not paced")
            }
        }
    }
}
