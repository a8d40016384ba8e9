//! Two queue pairs joined in memory, without sockets and with a clock of our own: every run is the same.

use roce_common::{
    units::Nanos,
    wire::{self, Packet, Verdict, icrc},
};

use super::Qp;

/// Which of the two sent a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The first queue pair.
    A,
    /// The second queue pair.
    B,
}

/// Lets the two talk until both are done, frame by frame in turn; `wire` sees every frame and says whether it arrives.
/// Where nothing is in flight the clock jumps to the next timer. Returns false after `max_frames` frames.
///
/// # Panics
/// When a queue pair emits a frame that does not parse or whose ICRC is wrong.
pub fn converse(a: &mut Qp, b: &mut Qp, max_frames: usize, mut wire: impl FnMut(Side, &[u8], &Packet) -> bool) -> bool {
    let mut now = Nanos(0);
    let mut buffer = vec![0; a.max_frame().max(b.max_frame())];
    let mut frames = 0;
    while frames < max_frames {
        let mut idle = true;
        for side in [Side::A, Side::B] {
            let (from, to) = if side == Side::A { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            let Some(n) = from.next_frame(now, &mut buffer).expect("the buffer fits") else { continue };
            idle = false;
            frames += 1;
            now.0 += 1_000;
            let Verdict::Roce(packet) = wire::parse(&buffer[..n]) else { panic!("not RoCEv2: {:02x?}", &buffer[..n]) };
            assert_eq!(icrc::is_valid(&buffer[..n], &packet), Some(true), "ICRC of {packet:?}");
            assert_eq!(packet.bth.dest_qp, to.config().local_qpn, "destination queue pair");
            if wire(side, &buffer[..n], &packet) {
                to.receive(now, &packet);
            }
        }
        if idle {
            if a.is_done() && b.is_done() {
                return true;
            }
            let Some(next) = a.deadline().into_iter().chain(b.deadline()).min() else { return false };
            now = now.max(next);
        }
    }
    false
}
