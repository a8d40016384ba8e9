//! Settings that are one of a few words.

use std::fmt;

use clap::ValueEnum;
use roce_common::{abi, dcqcn::params};
use serde::Deserialize;

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.to_possible_value().as_ref().map_or("", |v| v.get_name()))
            }
        }
    };
}

choices! {
    /// What an attachment may do.
    Role {
        /// Mark and pace what this host sends, answer CE, consume CNPs
        Host,
        /// Congestion point: mark CE by a virtual queue; needs the link rate
        Cp,
        /// Write nothing
        Observe,
    }
}

choices! {
    /// Which hook does the ingress work.
    Ingress {
        /// Native XDP
        Xdp,
        /// Generic XDP
        XdpGeneric,
        /// tc ingress
        Tc,
    }
}

choices! {
    /// How limited queue pairs are paced.
    Pacer {
        /// Departure times, kept by the fq qdisc
        Edt,
        /// HTB classes
        Htb,
        /// Not at all
        Off,
    }
}

choices! {
    /// When a field is marked.
    Policy {
        /// Only where it is unset
        Fill,
        /// Always
        Force,
        /// Never
        Keep,
    }
}

choices! {
    /// Whether malformed packets are kept from rxe.
    Guard {
        /// Where an rxe device is on the interface
        Auto,
        /// Always
        On,
        /// Never
        Off,
    }
}

choices! {
    /// Where a congestion point marks.
    CpAt {
        /// Where packets leave by the interface
        Egress,
        /// Where packets enter by it
        Ingress,
    }
}

choices! {
    /// Which set of DCQCN constants to start from.
    Preset {
        /// Derived from link rate, packet size and feedback delay
        Soft,
        /// The SIGCOMM 2015 paper's, for 40 Gb/s
        Paper,
        /// What NVIDIA's adapters start with
        Nvidia,
    }
}

impl From<Role> for abi::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Host => Self::Host,
            Role::Cp => Self::Cp,
            Role::Observe => Self::Observe,
        }
    }
}

impl From<Ingress> for abi::IngressMode {
    fn from(ingress: Ingress) -> Self {
        match ingress {
            Ingress::Xdp => Self::Xdp,
            Ingress::XdpGeneric => Self::XdpGeneric,
            Ingress::Tc => Self::Tc,
        }
    }
}

impl From<Pacer> for abi::Pacer {
    fn from(pacer: Pacer) -> Self {
        match pacer {
            Pacer::Edt => Self::Edt,
            Pacer::Htb => Self::Htb,
            Pacer::Off => Self::Off,
        }
    }
}

impl From<Policy> for abi::MarkPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Fill => Self::Fill,
            Policy::Force => Self::Force,
            Policy::Keep => Self::Keep,
        }
    }
}

choices! {
    /// When alpha changes.
    AlphaUpdate {
        /// Up with every CNP that cuts, down after every period without one
        AtCnp,
        /// Once per period: up when a CNP came within it, down when none did
        EveryPeriod,
    }
}

choices! {
    /// Which increase is the last of fast recovery.
    Boundary {
        /// The increase before rpg_threshold
        Below,
        /// The increase with the number rpg_threshold
        UpTo,
    }
}

choices! {
    /// What becomes of marks within an interval of the last CNP.
    HeldBackMarks {
        /// Nothing: only marks behind the interval are answered
        Dropped,
        /// One CNP answers them at the end of the interval
        Answered,
    }
}

impl From<AlphaUpdate> for params::AlphaUpdate {
    fn from(update: AlphaUpdate) -> Self {
        match update {
            AlphaUpdate::AtCnp => Self::AtCnp,
            AlphaUpdate::EveryPeriod => Self::EveryPeriod,
        }
    }
}

impl From<params::AlphaUpdate> for AlphaUpdate {
    fn from(update: params::AlphaUpdate) -> Self {
        match update {
            params::AlphaUpdate::AtCnp => Self::AtCnp,
            params::AlphaUpdate::EveryPeriod => Self::EveryPeriod,
        }
    }
}

impl From<Boundary> for params::Boundary {
    fn from(boundary: Boundary) -> Self {
        match boundary {
            Boundary::Below => Self::Below,
            Boundary::UpTo => Self::UpTo,
        }
    }
}

impl From<params::Boundary> for Boundary {
    fn from(boundary: params::Boundary) -> Self {
        match boundary {
            params::Boundary::Below => Self::Below,
            params::Boundary::UpTo => Self::UpTo,
        }
    }
}

impl From<HeldBackMarks> for params::HeldBackMarks {
    fn from(marks: HeldBackMarks) -> Self {
        match marks {
            HeldBackMarks::Dropped => Self::Dropped,
            HeldBackMarks::Answered => Self::Answered,
        }
    }
}

impl From<params::HeldBackMarks> for HeldBackMarks {
    fn from(marks: params::HeldBackMarks) -> Self {
        match marks {
            params::HeldBackMarks::Dropped => Self::Dropped,
            params::HeldBackMarks::Answered => Self::Answered,
        }
    }
}
