//! The knowledge of the project, written once: the RoCEv2 wire format, the PSN tracker, DCQCN, the pairing of queue
//! pairs and the memory layout shared between the kernel and user space.
//!
//! Everything here is `no_std`, allocates nothing, reads no clock and does no I/O, so that the same code is linked by
//! the BPF programs, the controller, the offline inspector and the tests.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod dcqcn;
pub mod facts;
pub mod flow;
pub mod pairing;
pub mod psn;
pub mod units;
pub mod wire;
