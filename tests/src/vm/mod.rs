//! Scenarios on real soft-RoCE, run in disposable guests by `cargo xtask vm` through the program `roce-guest`.
//!
//! # How a scenario is added
//!
//! 1. A module below `scenarios` with `pub(super) const SCENARIO: Scenario`, named in [`scenarios::ALL`]. xtask asks the guest
//!    program which there are; nothing else has to know.
//! 2. A scenario has parts, and each part is one boot: a function that takes a [`Report`]. Whatever may kill or hang a kernel is a
//!    part of its own, as is what wants another topology. A part has a limit, after which the host ends the guest.
//! 3. The part builds a [`Fabric`], attaches agents by [`Fabric::agent`], runs perftest by [`Perf`], and reads what it
//!    compares: our flows by [`Flows`], rxe's own counters by [`Counters`], the wire by [`Wire`], which shares no code with what
//!    it judges.
//! 4. [`Report::case`] runs one comparison; a case that fails does not end the part. [`Report::figure`] gives numbers for the
//!    table, [`skip`] says what a kernel lacks.
//! 5. Files for the host go into [`share`]: captures by [`Wire::save`].
//!
//! Traps, seen on these kernels:
//! - One CPU where nothing may be lost: with two, several queue pairs are reordered inside the guest.
//! - perftest's default timeout (`-u 14`) fires without a loss on 6.1, and below 50 Mb/s everywhere: [`Perf`] sets 19. rxe takes a
//!   retry count of 7 for infinite, so a dead path hangs perftest; [`Perf`] ends it.
//! - Ending perftest while its packets wait in a queue has hung 6.1 and panicked 6.12: after that, end the part.
//! - A capture that needs no payload keeps headers ([`Wire::headers`]): frames of 4 KiB, a page each, cost an emulated CPU a quarter of its
//!   time.
//! - Emulated CPUs carry 3,500 to 4,500 packets/s beside an agent and a capture (AMD EPYC, QEMU 10.0): what else runs meanwhile
//!   counts. Agents there report every ten seconds, captures let packets gather.

mod boot;
mod fabric;
mod flows;
mod modules;
mod perftest;
mod report;
mod rxe;
pub mod scenarios;
mod wire;

use std::path::PathBuf;

use anyhow::Result;

pub use boot::init;
pub use fabric::{Fabric, JUMBO, Node, Placement};
pub use flows::{FlowId, Flows, Tally};
pub use modules::{kernel_release, load};
pub use perftest::{Perf, PerfResult, Running, Served, rping};
pub use report::{Case, Report, Skip, skip};
pub use rxe::Counters;
pub use wire::{Header, Passed, Wire, WireFlows, count};

/// Something to show on real soft-RoCE.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in one line.
    pub about: &'static str,
    /// What is booted for it.
    pub parts: &'static [Part],
}

/// One boot of a scenario.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its name within the scenario.
    pub name: &'static str,
    /// CPUs of the guest.
    pub cpus: u8,
    /// Percent of one of the host's CPUs that are kept for it.
    pub share: u16,
    /// Its memory.
    pub memory_mib: u32,
    /// Seconds after which the host ends it.
    pub seconds: u32,
    /// The first release of Linux that can run it.
    pub since: Option<(u32, u32)>,
    /// Does it.
    pub run: fn(&mut Report) -> Result<()>,
}

impl Part {
    /// For a guest with one CPU on any kernel, ended by the host after `seconds`.
    pub const fn new(name: &'static str, seconds: u32, run: fn(&mut Report) -> Result<()>) -> Self {
        Self { name, cpus: 1, share: 100, memory_mib: 512, seconds, since: None, run }
    }

    /// With more CPUs, each of which the host keeps for it.
    #[must_use]
    pub const fn cpus(self, cpus: u8) -> Self {
        Self { cpus, share: cpus as u16 * 100, ..self }
    }

    /// What it asks does not depend on how fast its CPUs are: the host keeps so much percent of one for it, which is what an emulated
    /// guest uses of the time, and runs others meanwhile.
    #[must_use]
    pub const fn share(self, share: u16) -> Self {
        Self { share, ..self }
    }

    /// With more memory.
    #[must_use]
    pub const fn memory(self, memory_mib: u32) -> Self {
        Self { memory_mib, ..self }
    }

    /// Only where Linux is not older.
    #[must_use]
    pub const fn since(self, major: u32, minor: u32) -> Self {
        Self { since: Some((major, minor)), ..self }
    }
}

/// The directory that guest and host share.
pub fn share() -> PathBuf {
    PathBuf::from(boot::SHARE)
}
