//! The scenarios.

mod classify;
mod cnp;
mod incast;
mod lifecycle;
mod load;
mod loss;
mod mark;
mod neighbours;
mod pace;
mod record;
mod smp;

use super::{Part, Scenario};

/// Bytes of a message, and of one of its packets.
const MESSAGE: u64 = 65_536;
const PATH_MTU: u64 = 1_024;
/// A guest's CPU that is busy for more of the time than this is what limits transfers, not a port.
const BUSY: f64 = 0.9;
/// Bytes of a message on the wire.
const MESSAGE_ON_WIRE: u64 = on_wire(PATH_MTU);

/// Bytes of a message on the wire in packets of a path MTU: headers of 58 bytes each. What few bytes RETH and AETH add do not matter.
const fn on_wire(path_mtu: u64) -> u64 {
    MESSAGE / path_mtu * (path_mtu + 58)
}

/// All of them, in the order in which they run.
pub const ALL: &[Scenario] = &[
    classify::SCENARIO,
    mark::SCENARIO,
    loss::SCENARIO,
    cnp::SCENARIO,
    pace::EDT,
    pace::HTB,
    incast::SCENARIO,
    neighbours::SCENARIO,
    smp::SCENARIO,
    lifecycle::SCENARIO,
    record::SCENARIO,
];

/// The part `scenario/part`.
pub fn find(name: &str) -> Option<&'static Part> {
    let (scenario, part) = name.split_once('/')?;
    ALL.iter().find(|s| s.name == scenario)?.parts.iter().find(|p| p.name == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        let mut seen = std::collections::BTreeSet::new();
        for scenario in ALL {
            assert!(!scenario.parts.is_empty(), "{}", scenario.name);
            for part in scenario.parts {
                let name = format!("{}/{}", scenario.name, part.name);
                assert!(find(&name).is_some() && seen.insert(name.clone()), "{name}");
                assert!((1..=8).contains(&part.cpus) && (10..=600).contains(&part.seconds), "{name}");
            }
        }
        assert!(find("classify").is_none() && find("no/such").is_none());
    }
}
