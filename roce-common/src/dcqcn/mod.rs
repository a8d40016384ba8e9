//! DCQCN (Zhu et al., SIGCOMM 2015) in unsigned 64-bit fixed point: reaction point, notification point, congestion point.
//!
//! | where | what | called by |
//! |---|---|---|
//! | [`cp`] | marks ECT packets CE by the depth of a queue; the virtual queue itself, which also serves as EDT pacer | egress program |
//! | [`np`] | answers CE with a CNP, at most one per interval | ingress program |
//! | [`rp`] | turns CNPs, time and bytes into a sending rate | controller |
//! | [`params`] | the constants, and which make sense together | configuration |
//! | [`presets`] | the paper's set and NVIDIA's | configuration |
//! | [`soft`] | our set, derived from the link rate, the packet size and the feedback delay | configuration |
//!
//! Rates are bytes per second, probabilities and α are in 1/65536, times are nanoseconds of one monotonic clock that the
//! caller reads. No floats, no 128-bit and no signed division: BPF links none of them.

pub mod cp;
mod fixed;
pub mod np;
pub mod params;
pub mod presets;
pub mod rp;
pub mod soft;

pub use params::Params;
pub use rp::{Reaction, Rp};
pub use soft::Fabric;

/// One in the fixed point of probabilities and of α.
pub const ONE: u32 = 1 << 16;
