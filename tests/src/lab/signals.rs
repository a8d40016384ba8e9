//! SIGINT and SIGTERM as a flag, so that what was begun is ended in order.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// Turns SIGINT and SIGTERM into [`interrupted`] for the rest of the process.
///
/// # Errors
/// Never in practice: both signals can be handled.
pub fn install() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(on_signal), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// Whether one of the signals came.
pub fn interrupted() -> bool {
    STOP.load(Ordering::Relaxed)
}
