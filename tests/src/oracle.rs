//! What other programs read in the same packets.

use std::{
    io::ErrorKind,
    path::Path,
    process::{Command, Output},
};

use anyhow::{Context, Result, bail};
use roce_common::wire::IpVersion;

use crate::capture::{Seen, save};

/// Runs a tool; `None`, with a line that says so, where it is missing.
fn tool(command: &mut Command) -> Result<Option<Output>> {
    match command.output() {
        Ok(output) => Ok(Some(output)),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            println!("SKIP {} is not installed", command.get_program().display());
            Ok(None)
        }
        Err(e) => Err(e).with_context(|| format!("{command:?}")),
    }
}

const FIELDS: [&str; 7] = [
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "ip.dsfield.dscp",
    "ip.dsfield.ecn",
    "ipv6.tclass.dscp",
    "ipv6.tclass.ecn",
];

/// Compares opcode, destination QPN, PSN, DSCP and ECN of every packet; the number compared, or `None` without tshark.
///
/// # Errors
/// Names the first packet that tshark reads differently.
pub fn tshark_agrees(seen: &[Seen], dir: &Path) -> Result<Option<usize>> {
    let path = dir.join("seen.pcap");
    save(seen, &path)?;
    let mut command = Command::new("tshark");
    command.args(["-n", "-T", "fields", "-E", "separator=;", "-r"]).arg(&path);
    for field in FIELDS {
        command.args(["-e", field]);
    }
    let Some(output) = tool(&mut command)? else { return Ok(None) };
    if !output.status.success() {
        bail!("tshark: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    if text.lines().count() != seen.len() {
        bail!("tshark read {} of {} packets", text.lines().count(), seen.len());
    }
    for (i, (line, s)) in text.lines().zip(seen).enumerate() {
        let theirs: Vec<Option<u32>> = line.split(';').map(number).collect();
        let p = &s.packet;
        let v4 = p.ip == IpVersion::V4;
        let (dscp, ecn) = (u32::from(p.dscp().get()), p.ecn() as u32);
        let ours = [
            Some(u32::from(p.bth.opcode.get())),
            Some(p.bth.dest_qp.get()),
            Some(p.bth.psn.get()),
            v4.then_some(dscp),
            v4.then_some(ecn),
            (!v4).then_some(dscp),
            (!v4).then_some(ecn),
        ];
        if theirs != ours {
            bail!("packet {i}: tshark reads {theirs:?} where we read {ours:?}: {p:?}");
        }
    }
    Ok(Some(seen.len()))
}

/// What tshark reads in the messages of connection management among packets: the fields of [`CM_FIELDS`], of each message.
/// `None` without tshark.
///
/// # Errors
/// When it cannot read the file.
pub fn tshark_management(seen: &[Seen], dir: &Path) -> Result<Option<Vec<Vec<Option<u32>>>>> {
    let path = dir.join("seen.pcap");
    save(seen, &path)?;
    let mut command = Command::new("tshark");
    command.args(["-n", "-T", "fields", "-E", "separator=;", "-Y", "infiniband.mad.mgmtclass==7", "-r"]).arg(&path);
    for field in CM_FIELDS {
        command.args(["-e", field]);
    }
    let Some(output) = tool(&mut command)? else { return Ok(None) };
    if !output.status.success() {
        bail!("tshark: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    Ok(Some(text.lines().map(|line| line.split(';').map(number).collect()).collect()))
}

/// The fields of a REQ, then those of a REP, a REJ and a DREQ; the path MTU is its code, 1 to 5.
pub const CM_FIELDS: [&str; 11] = [
    "infiniband.cm.req.localqpn",
    "infiniband.cm.req.startpsn",
    "infiniband.cm.req.pppmtu",
    "infiniband.cm.req.prim_localacktout",
    "infiniband.cm.req.retrcount",
    "infiniband.cm.req.rnrretrcount",
    "infiniband.cm.rep.localqpn",
    "infiniband.cm.rep.startpsn",
    "infiniband.cm.rep.rnrretrcount",
    "infiniband.cm.rej.reason",
    "infiniband.cm.req.remoteqpneecn",
];

/// A field as tshark prints it: decimal or hexadecimal.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Takes the ICRC of every frame away, lets scapy compute it, and compares all bytes.
const SCAPY: &str = r#"
import sys
from scapy.utils import rdpcap
from scapy.layers.l2 import Ether
import scapy.layers.inet, scapy.layers.inet6
from scapy.contrib.roce import BTH
n = 0
for frame in rdpcap(sys.argv[1]):
    raw = bytes(frame)
    p = Ether(raw)
    p[BTH].icrc = None
    again = bytes(p)
    if again != raw:
        sys.exit("packet %d: %s became %s" % (n, raw.hex(), again.hex()))
    n += 1
print(n)
"#;

/// Compares the ICRC of every packet; the number compared, or `None` without scapy.
///
/// # Errors
/// Names the first packet whose ICRC scapy computes differently.
pub fn scapy_agrees<'a>(seen: impl IntoIterator<Item = &'a Seen>, dir: &Path) -> Result<Option<usize>> {
    let path = dir.join("icrc.pcap");
    save(seen, &path)?;
    let Some(probe) = tool(Command::new("python3").args(["-c", "import scapy.contrib.roce"]))? else { return Ok(None) };
    if !probe.status.success() {
        println!("SKIP python3 has no scapy with scapy.contrib.roce");
        return Ok(None);
    }
    let Some(output) = tool(Command::new("python3").args(["-c", SCAPY]).arg(&path))? else { return Ok(None) };
    if !output.status.success() {
        bail!("scapy: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(Some(String::from_utf8(output.stdout)?.trim().parse().context("scapy's count")?))
}
