//! What `roce flows --json` says.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Fabric;
use crate::lab::{Netns, run_roce};

/// A flow at a tap.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FlowId {
    /// `v0/ingress`, `v0/egress`, …
    pub tap: String,
    /// Source address.
    pub src: String,
    /// Destination address.
    pub dst: String,
    /// Destination queue pair.
    pub dest_qp: u32,
    /// `request` or `response`.
    pub space: String,
}

/// Counters of a flow, or what they grew by: every number of the JSON, those below objects as `nak.psn_sequence`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// One of them.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Of the counters that tell of loss, those that are not zero.
    pub fn trouble(&self) -> Vec<String> {
        const TROUBLE: [&str; 12] = [
            "missing_psns",
            "lost",
            "lost_again",
            "open",
            "reordered",
            "duplicates",
            "retransmitted",
            "discontinuities",
            "lost_after_tap",
            "reasked",
            "rnr_nak",
            "nak.psn_sequence",
        ];
        TROUBLE.iter().filter(|name| self.get(name) != 0).map(|name| format!("{name} {}", self.get(name))).collect()
    }

    fn read(flow: &Value) -> Self {
        fn walk(into: &mut BTreeMap<String, u64>, prefix: &str, value: &Value) {
            for (name, value) in value.as_object().into_iter().flatten() {
                let name = format!("{prefix}{name}");
                match value {
                    Value::Object(_) => walk(into, &format!("{name}."), value),
                    _ => {
                        into.extend(value.as_u64().map(|n| (name, n)));
                    }
                }
            }
        }
        let mut numbers = BTreeMap::new();
        walk(&mut numbers, "", flow);
        Self(numbers)
    }
}

/// All flows that agents on the hosts of a fabric know.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Flows(BTreeMap<FlowId, Tally>);

impl Flows {
    /// Reads them.
    ///
    /// # Errors
    /// When no agent is attached, or `roce flows` fails.
    pub fn read(fabric: &Fabric) -> Result<Self> {
        let mut all = BTreeMap::new();
        let mut asked = Vec::new();
        for node in &fabric.nodes {
            let namespace = node.port.ns.inode()?;
            if !asked.contains(&namespace) {
                asked.push(namespace);
                all.extend(flows(&node.port.ns)?);
            }
        }
        Ok(Self(all))
    }

    /// What happened since `before`: flows without a packet are left out.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let grown = self.0.iter().map(|(id, now)| {
            let then = before.0.get(id);
            let by = |(name, now): (&String, &u64)| (name.clone(), now.wrapping_sub(then.map_or(0, |t| t.get(name))));
            (id.clone(), Tally(now.0.iter().map(by).collect()))
        });
        Self(grown.filter(|(_, tally)| tally.get("packets") != 0).collect())
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&FlowId, &Tally)> {
        self.0.iter()
    }

    /// Those at a tap, for instance `v0/egress`.
    pub fn at<'a>(&'a self, tap: &'a str) -> impl Iterator<Item = (&'a FlowId, &'a Tally)> {
        self.0.iter().filter(move |(id, _)| id.tap == tap)
    }

    /// A counter, summed over the flows at a tap.
    pub fn sum(&self, tap: &str, name: &str) -> u64 {
        self.at(tap).map(|(_, tally)| tally.get(name)).sum()
    }
}

fn flows(ns: &Netns) -> Result<Vec<(FlowId, Tally)>> {
    let output = run_roce(ns, &["flows", "--json"])?;
    if !output.status.success() {
        bail!("roce flows: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let json: Value = serde_json::from_slice(&output.stdout).context("reading what roce flows says")?;
    let list = json["flows"].as_array().context("roce flows lists no flows")?;
    list.iter()
        .map(|flow| Ok((id(flow).with_context(|| format!("an incomplete flow: {flow}"))?, Tally::read(flow))))
        .collect()
}

fn id(flow: &Value) -> Option<FlowId> {
    let text = |name: &str| flow[name].as_str().map(str::to_owned);
    Some(FlowId {
        tap: text("tap")?,
        src: text("src")?,
        dst: text("dst")?,
        dest_qp: flow["dest_qp"].as_u64()?.try_into().ok()?,
        space: text("space")?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counters_are_read_with_those_below_and_compared_over_time() {
        let flow = |packets: u64, naks: u64| {
            json!({"tap": "v0/egress", "src": "10.9.0.1", "dst": "10.9.0.2", "dest_qp": 17, "space": "request",
                   "packets": packets, "lost": 0, "nak": {"psn_sequence": naks}})
        };
        let flows = |flow: Value| Flows(BTreeMap::from([(id(&flow).unwrap(), Tally::read(&flow))]));
        let since = flows(flow(9, 2)).since(&flows(flow(4, 1)));
        assert_eq!((since.sum("v0/egress", "packets"), since.sum("v0/ingress", "packets")), (5, 0));
        let (_, tally) = since.iter().next().unwrap();
        assert_eq!(tally.trouble(), ["nak.psn_sequence 1"]);
        assert_eq!(flows(flow(9, 2)).since(&flows(flow(9, 2))), Flows::default());
    }
}
