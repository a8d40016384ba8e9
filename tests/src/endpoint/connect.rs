//! Connecting queue pairs of two hosts.

use std::time::Duration;

use anyhow::Result;
use roce_common::{
    psn::Psn,
    units::{Addr, Qpn},
};

use super::{Host, QpConfig, QpHandle, Rnr, Traffic, ack_timeout};
use crate::lab::HostPort;

/// How two queue pairs are joined. `Connection::default()` is an RC connection over IPv4 with PMTU 1,024, ToS 0,
/// unlike QPNs, unlike starting PSNs and rxe's default timeout; change what a test is about.
#[derive(Clone, Debug)]
pub struct Connection {
    /// QPN at the first host.
    pub qpn_a: u32,
    /// QPN at the second host.
    pub qpn_b: u32,
    /// First PSN the first host sends.
    pub psn_a: u32,
    /// First PSN the second host sends.
    pub psn_b: u32,
    /// Over IPv6.
    pub ipv6: bool,
    /// Path MTU in bytes.
    pub pmtu: u16,
    /// ToS of both ends.
    pub tos: u8,
    /// UDP source port of both ends, where it does not follow the kernel's rule.
    pub src_port: Option<u16>,
    /// ACK timeout of both ends.
    pub timeout: Duration,
    /// RNR injection at the first host.
    pub rnr_a: Option<Rnr>,
    /// RNR injection at the second host.
    pub rnr_b: Option<Rnr>,
    /// What the first host asks for.
    pub traffic_a: Traffic,
    /// What the second host asks for.
    pub traffic_b: Traffic,
}

impl Default for Connection {
    fn default() -> Self {
        Self {
            qpn_a: 0x11,
            qpn_b: 0x2a,
            psn_a: 0x00_a5c3,
            psn_b: 0xff_ff40,
            ipv6: false,
            pmtu: 1024,
            tos: 0,
            src_port: None,
            timeout: ack_timeout(14),
            rnr_a: None,
            rnr_b: None,
            traffic_a: Traffic::none(),
            traffic_b: Traffic::none(),
        }
    }
}

impl Connection {
    /// The two ends as configurations, for hosts at `a` and `b`.
    pub fn ends(&self, a: &HostPort, b: &HostPort) -> (QpConfig, QpConfig) {
        let end_a = QpConfig {
            local_qpn: Qpn::new(self.qpn_a),
            remote_qpn: Qpn::new(self.qpn_b),
            local: Addr::from(a.address(self.ipv6)),
            remote: Addr::from(b.address(self.ipv6)),
            local_mac: a.port.mac,
            next_hop_mac: a.next_hop_mac,
            pmtu: self.pmtu,
            tos: self.tos,
            src_port: self.src_port,
            send_psn: Psn::new(self.psn_a),
            recv_psn: Psn::new(self.psn_b),
            timeout: self.timeout,
            rnr: self.rnr_a,
            traffic: self.traffic_a.clone(),
        };
        let end_b = QpConfig {
            local_qpn: end_a.remote_qpn,
            remote_qpn: end_a.local_qpn,
            local: end_a.remote,
            remote: end_a.local,
            local_mac: b.port.mac,
            next_hop_mac: b.next_hop_mac,
            send_psn: end_a.recv_psn,
            recv_psn: end_a.send_psn,
            rnr: self.rnr_b,
            traffic: self.traffic_b.clone(),
            ..end_a.clone()
        };
        (end_a, end_b)
    }
}

/// Makes both ends, then starts them.
///
/// # Errors
/// See [`Host::add`].
pub fn connect(
    (host_a, port_a): (&mut Host, &HostPort),
    (host_b, port_b): (&mut Host, &HostPort),
    connection: &Connection,
) -> Result<(QpHandle, QpHandle)> {
    let (end_a, end_b) = connection.ends(port_a, port_b);
    let (a, b) = (host_a.add(end_a)?, host_b.add(end_b)?);
    b.start();
    a.start();
    Ok((a, b))
}
