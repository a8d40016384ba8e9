//! Classes of a congestion point: DSCPs with a queue or with thresholds of their own.

use anyhow::{Result, ensure};
use roce_common::{
    abi::{self, CP_CLASSES, CpClass},
    dcqcn::{ONE, Params},
    units::{Nanos, Rate},
};
use serde::Deserialize;

/// One `[[cp_class]]` of a configuration file.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CpClassText {
    /// The DSCPs it is for.
    pub dscp: Vec<u8>,
    /// Its part of the link, above 0 and below 1: it has a virtual queue of its own, which drains at that part of the link
    /// rate. Without it the class shares the port's queue, and only its thresholds are its own.
    pub share: Option<f64>,
    /// Marking starts above this depth, bytes; the port's where it is not given, like the two below.
    pub kmin: Option<u32>,
    /// Marking is certain above this depth, bytes.
    pub kmax: Option<u32>,
    /// Marking probability at kmax.
    pub pmax: Option<f64>,
    /// What its own queue holds, bytes; twice kmax where it is not given.
    pub queue_bytes: Option<u32>,
}

/// The classes as the programs hold them.
#[derive(Clone, PartialEq, Debug)]
pub struct CpClasses {
    /// Class 1 and following.
    pub classes: Vec<CpClass>,
    /// The class of each DSCP; 0 is the port's.
    pub of_dscp: [u32; 64],
    /// What drains the port's own queue.
    pub rest: Rate,
}

impl CpClasses {
    /// Checks `texts` for a link of rate `link` whose port marks by `params` and holds `queue_bytes`.
    pub(super) fn new(texts: &[CpClassText], link: Rate, params: &Params, queue_bytes: u32) -> Result<Self> {
        ensure!(
            texts.len() < CP_CLASSES as usize,
            "cp_class: {} classes, but beside the port's own at most {} fit",
            texts.len(),
            CP_CLASSES - 1
        );
        let mut of_dscp = [0; 64];
        let mut classes = Vec::new();
        let mut shares = 0.0;
        for (number, text) in (1u32..).zip(texts) {
            ensure!(!text.dscp.is_empty(), "cp_class {number}: dscp is missing: which packets is it for?");
            for dscp in &text.dscp {
                ensure!(*dscp < 64, "cp_class {number}: dscp must be 0 to 63, not {dscp}");
                if let Some(of) = of_dscp.get_mut(usize::from(*dscp)) {
                    ensure!(*of == 0, "cp_class {number}: dscp {dscp} belongs to class {of} already");
                    *of = number;
                }
            }
            let kmin_bytes = text.kmin.unwrap_or(params.kmin);
            let kmax_bytes = text.kmax.unwrap_or(params.kmax);
            ensure!(kmin_bytes <= kmax_bytes, "cp_class {number}: kmin must be at most kmax ({kmax_bytes})");
            let pmax = match text.pmax {
                Some(p) => {
                    ensure!(p > 0.0 && p <= 1.0, "cp_class {number}: pmax must be above 0 and at most 1, not {p}");
                    (p * f64::from(ONE)).round() as u32
                }
                None => params.pmax,
            };
            let (bytes_per_sec, limit_bytes) = match text.share {
                Some(share) => {
                    ensure!(
                        share > 0.0 && share < 1.0,
                        "cp_class {number}: share must be between 0 and 1, not {share}"
                    );
                    shares += share;
                    let limit = text.queue_bytes.unwrap_or_else(|| kmax_bytes.saturating_mul(2));
                    ((link.bytes_per_sec() as f64 * share) as u64, limit)
                }
                None => {
                    ensure!(
                        text.queue_bytes.is_none(),
                        "cp_class {number}: queue_bytes needs share: without it the class has no queue of its own"
                    );
                    (0, queue_bytes)
                }
            };
            ensure!(
                limit_bytes > kmax_bytes,
                "cp_class {number}: its queue ({limit_bytes} bytes) must be above kmax ({kmax_bytes})"
            );
            let limit_bytes = if bytes_per_sec == 0 { 0 } else { limit_bytes };
            classes.push(CpClass { bytes_per_sec, limit_bytes, kmin_bytes, kmax_bytes, pmax });
        }
        ensure!(
            shares < 1.0,
            "cp_class: the shares add up to {shares}: something must be left for packets of no class"
        );
        let rest = Rate::from_bytes_per_sec(((link.bytes_per_sec() as f64) * (1.0 - shares)) as u64);
        Ok(Self { classes, of_dscp, rest })
    }
}

/// The virtual queue of a class, for reports.
pub(crate) fn queue_rate(config: &abi::Config, class: Option<&CpClass>) -> u64 {
    class.map(|c| c.bytes_per_sec).filter(|rate| *rate != 0).unwrap_or(config.vq_bytes_per_sec)
}

/// Bytes that wait in a virtual queue of this rate that will be empty at `empty_at`.
pub(crate) fn depth(empty_at: Nanos, now: Nanos, bytes_per_sec: u64) -> u64 {
    let bytes = u128::from(empty_at.since(now).0) * u128::from(bytes_per_sec) / u128::from(Nanos::SECOND.0);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce_common::dcqcn::Fabric;

    const LINK: Rate = Rate::from_bits_per_sec(100_000_000);

    fn classes(text: &str) -> Result<CpClasses> {
        #[derive(Deserialize)]
        struct File {
            cp_class: Vec<CpClassText>,
        }
        let file: File = toml::from_str(text)?;
        let params = Params::soft(Fabric::new(LINK, 1_000));
        CpClasses::new(&file.cp_class, LINK, &params, 64_000)
    }

    #[test]
    fn a_class_has_a_queue_of_its_own_or_shares_the_ports() {
        let c = classes(
            "[[cp_class]]\ndscp = [26, 24]\nshare = 0.6\nkmin = 3000\nkmax = 20000\npmax = 0.5\n\
             [[cp_class]]\ndscp = [0]\nkmax = 60000\n",
        )
        .unwrap();
        let own = CpClass {
            bytes_per_sec: 7_500_000,
            limit_bytes: 40_000,
            kmin_bytes: 3_000,
            kmax_bytes: 20_000,
            pmax: ONE / 2,
        };
        let shared = CpClass { bytes_per_sec: 0, limit_bytes: 0, kmin_bytes: 2_000, kmax_bytes: 60_000, pmax: ONE / 2 };
        assert_eq!(c.classes, [own, shared]);
        assert_eq!((c.of_dscp[26], c.of_dscp[24], c.of_dscp[0], c.of_dscp[48]), (1, 1, 2, 0));
        assert_eq!(c.rest.bytes_per_sec(), 5_000_000);
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (text, named) in [
            ("[[cp_class]]\nshare = 0.5", "dscp is missing"),
            ("[[cp_class]]\ndscp = [64]", "0 to 63"),
            ("[[cp_class]]\ndscp = [1]\n[[cp_class]]\ndscp = [1]", "dscp 1 belongs to class 1"),
            ("[[cp_class]]\ndscp = [1]\nshare = 1.0", "share must be"),
            ("[[cp_class]]\ndscp = [1]\nshare = 0.6\n[[cp_class]]\ndscp = [2]\nshare = 0.4", "add up"),
            ("[[cp_class]]\ndscp = [1]\nkmin = 99000", "at most kmax"),
            ("[[cp_class]]\ndscp = [1]\nkmax = 99000", "above kmax"),
            ("[[cp_class]]\ndscp = [1]\npmax = 0", "pmax must be"),
            ("[[cp_class]]\ndscp = [1]\nqueue_bytes = 90000", "needs share"),
            ("[[cp_class]]\ndscp = [1]\nkmni = 1", "kmni"),
        ] {
            let error = format!("{:#}", classes(text).unwrap_err());
            assert!(error.contains(named), "{text}: {error}");
        }
        let many = "[[cp_class]]\ndscp = [1]\n".repeat(8);
        assert!(classes(&many).unwrap_err().to_string().contains("at most 7"));
    }

    #[test]
    fn a_depth_is_what_has_not_drained_yet() {
        assert_eq!(depth(Nanos(2_000_000_000), Nanos(1_000_000_000), 5_000), 5_000);
        assert_eq!(depth(Nanos(1), Nanos(2), 5_000), 0);
        assert_eq!(depth(Nanos(u64::MAX), Nanos(0), u64::MAX), u64::MAX);
    }
}
