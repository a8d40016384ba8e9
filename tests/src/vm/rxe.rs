//! rxe's own counters, as `rdma statistic` gives them: the oracle.

use std::{collections::BTreeMap, process::Command};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Fabric;

/// Counters of a device, or what they grew by.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    /// Reads them.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn read(device: &str) -> Result<Self> {
        let link = format!("{device}/1");
        let output = Command::new("rdma").args(["-j", "statistic", "show", "link", &link]).output().context("rdma")?;
        if !output.status.success() {
            bail!("rdma statistic show link {link}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let json: Value = serde_json::from_slice(&output.stdout).context("reading the answer of rdma statistic")?;
        let counters = json[0].as_object().with_context(|| format!("rdma statistic knows no {link}: {json}"))?;
        Ok(Self(counters.iter().filter_map(|(name, value)| Some((name.clone(), value.as_u64()?))).collect()))
    }

    /// Those of every host's device, in the order of the hosts.
    ///
    /// # Errors
    /// As [`Counters::read`].
    pub fn all(fabric: &Fabric) -> Result<Vec<Self>> {
        fabric.nodes.iter().map(|node| Self::read(&node.device)).collect()
    }

    /// What those of every host's device grew by since `before`, beside the device's name.
    ///
    /// # Errors
    /// As [`Counters::read`].
    pub fn grown<'a>(fabric: &'a Fabric, before: &'a [Self]) -> Result<impl Iterator<Item = (&'a str, Self)>> {
        let devices = fabric.nodes.iter().map(|node| node.device.as_str());
        Ok(devices.zip(Self::all(fabric)?).zip(before).map(|((device, now), before)| (device, now.since(before))))
    }

    /// One of them; 0 where this kernel does not count it.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// What they grew by since `before`, without those that did not.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let grown = self.0.iter().map(|(name, now)| (name.clone(), now.wrapping_sub(before.get(name))));
        Self(grown.filter(|(_, by)| *by != 0).collect())
    }

    /// Of these, those that tell of trouble, by name.
    pub fn trouble(&self) -> Vec<String> {
        const TROUBLE: [&str; 10] = [
            "out_of_seq_request",
            "duplicate_request",
            "rcvd_seq_err",
            "rcvd_rnr_err",
            "send_rnr_err",
            "ack_error",
            "completer_retry_err",
            "retry_rnr_exceeded_err",
            "retry_exceeded_err",
            "send_err",
        ];
        TROUBLE.iter().filter(|name| self.get(name) != 0).map(|name| format!("{name} {}", self.get(name))).collect()
    }
}
