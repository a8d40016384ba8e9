//! Empty on purpose: the programs are in the binary target. See `Cargo.toml`.
#![no_std]
