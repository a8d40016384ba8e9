//! CNPs without a congestion point, to make a reaction point cut.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;
use roce_common::{
    units::{Addr, Qpn},
    wire::{IpVersion, emit},
};

use super::Sender;
use crate::lab::HostPort;

/// Sends CNPs from one host to a queue pair of another until it is dropped.
#[derive(Debug)]
pub struct CnpFlood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl CnpFlood {
    /// One CNP with this ToS to `qpn` at `to` every `interval`, over IPv4.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn start(from: &HostPort, to: &HostPort, qpn: u32, tos: u8, interval: Duration) -> Result<Self> {
        let path = emit::Path {
            src_mac: from.port.mac,
            dst_mac: from.next_hop_mac,
            src: Addr::from(from.address(false)),
            dst: Addr::from(to.address(false)),
            tos,
            ttl: 64,
            ip_id: 7,
            src_port: 0xc123,
        };
        let mut frame = [0; emit::CNP_FRAME_V6];
        let n = emit::cnp(&path, IpVersion::V4, Qpn::new(qpn), &mut frame);
        let sender = from.port.ns.run(|| Ok(Sender::open(from.port.index, n)?))?;
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let thread = thread::Builder::new().name("cnp-flood".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if sender.send(&frame[..n]) == super::Sent::Taken {
                    count.fetch_add(1, Ordering::Relaxed);
                }
                thread::sleep(interval);
            }
        })?;
        Ok(Self { stop, sent, thread: Some(thread) })
    }

    /// CNPs sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Drop for CnpFlood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic; there is nothing to add.
            let _ = thread.join();
        }
    }
}
