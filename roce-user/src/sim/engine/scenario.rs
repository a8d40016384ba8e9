//! What is simulated.

use roce_common::{
    dcqcn::Params,
    units::{Nanos, Rate},
};
use serde::Deserialize;

/// Who sends what to whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// Every flow sends without end through one switch port to one receiver.
    Incast,
    /// A chain of switch ports: the first flow crosses all of them, every other flow one of its own.
    ParkingLot,
    /// Host i sends to host i + 1, one message per step, and begins a step when the step before has arrived from host
    /// i − 1. The hosts stand on two switches in turn, and the trunk between them has half of the rate they could use.
    Ring,
    /// Messages of two sizes come at random times to every flow, through one switch port to one receiver.
    Rpc,
}

/// When a packet is marked, and by the depth of what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Marking {
    /// When it leaves the port, by the bytes that wait then: as switch chips and the authors' simulator do. The mark is no
    /// older than the link.
    Departure,
    /// When it reaches the port, by the bytes before it: the mark waits in the queue like its packet.
    Arrival,
    /// When it reaches the port, by a virtual queue that drains at the port's rate: `roce run --role cp`.
    Virtual,
}

/// When a new rate reaches packets that the endpoint has handed to its shaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shaper {
    /// At once: hardware, or an HTB class.
    Immediate,
    /// Not at all: a packet gets its departure time when the window lets it go, and keeps it (EDT).
    Stamped,
}

/// Priority flow control of each link into a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pfc {
    /// Bytes of a link in the switch above which it is told to pause.
    pub xoff: u64,
    /// Bytes at which it is told to go on.
    pub xon: u64,
}

/// One run. [`Scenario::check`] says whether it makes sense.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Rate of every switch port, and of trunks before their share.
    pub link: Rate,
    /// Rate of the hosts' ports.
    pub host_link: Rate,
    /// Flows.
    pub flows: u32,
    /// Sending hosts; the flows are dealt to them in turn.
    pub hosts: u32,
    /// Bytes of every packet on the wire.
    pub packet: u32,
    /// Constants of the loop; `None`: no loop, nothing is marked.
    pub params: Option<Params>,
    /// Bytes a port holds, the packet being sent included.
    pub queue_bytes: u64,
    /// Most packets a flow leaves unacknowledged; 0 = no window.
    pub window: u32,
    /// Packets per acknowledgement.
    pub ack_every: u32,
    /// Feedback delay of a flow across one switch, without queueing and serialisation: from the mark at the port to the
    /// receiver, back to the sender, and to the port again. Each link takes a quarter.
    pub delay: Nanos,
    /// Latency of the controller: evenly distributed from zero to this, for CNPs and for timers.
    pub jitter: Nanos,
    /// The controller looks at a flow no more often than this by time alone.
    pub tick: Nanos,
    /// ACK timeout.
    pub timeout: Nanos,
    /// Pause instead of drop.
    pub pfc: Option<Pfc>,
    /// When packets are marked.
    pub marking: Marking,
    /// When a new rate takes effect.
    pub shaper: Shaper,
    /// Who sends what.
    pub workload: Workload,
    /// Bytes of a message: of a step of the ring, the mean of RPCs.
    pub message: u64,
    /// Share of the port that RPCs ask for.
    pub load: f64,
    /// The flows start evenly over this time.
    pub stagger: Nanos,
    /// The last flow starts only now.
    pub join: Option<Nanos>,
    /// End.
    pub time: Nanos,
    /// Nothing before this is measured.
    pub warmup: Nanos,
    /// Of every random number.
    pub seed: u64,
}

/// Most flows and hosts.
pub const MAX_FLOWS: u32 = 65_536;

impl Scenario {
    /// Whether it can be simulated.
    ///
    /// # Errors
    /// Says which quantity is out of bounds, and what is allowed.
    pub fn check(&self) -> Result<(), String> {
        let bound = |ok: bool, what: &str| if ok { Ok(()) } else { Err(what.to_owned()) };
        bound((1..=MAX_FLOWS).contains(&self.flows), "flows must be 1 to 65536")?;
        bound((1..=self.flows).contains(&self.hosts), "hosts must be at least 1 and at most the number of flows")?;
        bound((64..=16_384).contains(&self.packet), "packet must be 64 to 16384 bytes")?;
        bound(self.link.bytes_per_sec() > 0 && self.host_link.bytes_per_sec() > 0, "the link rate must be above 0")?;
        bound(
            self.queue_bytes >= 2 * u64::from(self.packet) && self.queue_bytes <= 1 << 32,
            "the queue must hold at least two packets, and at most 4 GB",
        )?;
        bound(self.window <= 1 << 20, "the window must be at most 1048576 packets")?;
        bound(
            self.ack_every >= 1 && (self.window == 0 || self.ack_every <= self.window),
            "ack_every must be at least 1 and at most the window",
        )?;
        bound(self.time.0 > 0 && self.time.0 <= 3_600 * Nanos::SECOND.0, "time must be above 0 and at most an hour")?;
        bound(self.warmup < self.time, "warmup must be shorter than time")?;
        bound(self.stagger < self.time, "stagger must be shorter than time")?;
        bound(self.join.is_none_or(|at| at < self.time), "join must lie before the end")?;
        bound(self.delay <= Nanos::SECOND && self.jitter <= Nanos::SECOND, "delay and jitter must be at most 1s")?;
        bound(self.timeout.0 >= 1_000, "timeout must be at least 1us")?;
        bound(self.load > 0.0 && self.load <= 2.0, "load must be above 0 and at most 2")?;
        bound(
            self.message >= u64::from(self.packet) && self.message <= 1 << 30,
            "message must be at least a packet and at most 1 GiB",
        )?;
        bound(self.workload != Workload::ParkingLot || self.flows >= 3, "a parking lot needs at least 3 flows")?;
        bound(self.workload != Workload::Ring || self.flows >= 2, "a ring needs at least 2 flows")?;
        bound(
            self.workload == Workload::Incast || self.hosts == self.flows,
            "only incast can have several flows on a host",
        )?;
        bound(
            self.shaper == Shaper::Immediate || self.window > 0,
            "departure times need a window: without one a flow would stamp without end",
        )?;
        if let Some(pfc) = self.pfc {
            bound(pfc.xon <= pfc.xoff && pfc.xoff > 0, "XON must be at most XOFF, and XOFF above 0")?;
        }
        if let Some(params) = &self.params {
            params.validate().map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}
