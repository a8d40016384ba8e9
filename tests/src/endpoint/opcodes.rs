//! Opcode by operation and position in the message.

use roce_common::wire::{Opcode, Position};

use super::config::Op;

/// Position of packet `index` of `count`.
pub(super) const fn position(index: u32, count: u32) -> Position {
    match (index, count) {
        (_, 0 | 1) => Position::Only,
        (0, _) => Position::First,
        (i, n) if i + 1 == n => Position::Last,
        _ => Position::Middle,
    }
}

/// The request opcode; a READ has one only.
pub(super) const fn request(op: Op, position: Position) -> Opcode {
    match (op, position) {
        (Op::Write, Position::First) => Opcode::WRITE_FIRST,
        (Op::Write, Position::Middle) => Opcode::WRITE_MIDDLE,
        (Op::Write, Position::Last) => Opcode::WRITE_LAST,
        (Op::Write, Position::Only) => Opcode::WRITE_ONLY,
        (Op::Send, Position::First) => Opcode::SEND_FIRST,
        (Op::Send, Position::Middle) => Opcode::SEND_MIDDLE,
        (Op::Send, Position::Last) => Opcode::SEND_LAST,
        (Op::Send, Position::Only) => Opcode::SEND_ONLY,
        (Op::Read, _) => Opcode::READ_REQUEST,
    }
}

/// The READ response opcode.
pub(super) const fn read_response(position: Position) -> Opcode {
    match position {
        Position::First => Opcode::READ_RESPONSE_FIRST,
        Position::Middle => Opcode::READ_RESPONSE_MIDDLE,
        Position::Last => Opcode::READ_RESPONSE_LAST,
        Position::Only => Opcode::READ_RESPONSE_ONLY,
    }
}

/// The operation of a request opcode the responder serves.
pub(super) fn operation(opcode: Opcode) -> Option<Op> {
    match opcode {
        Opcode::WRITE_FIRST | Opcode::WRITE_MIDDLE | Opcode::WRITE_LAST | Opcode::WRITE_ONLY => Some(Op::Write),
        Opcode::SEND_FIRST | Opcode::SEND_MIDDLE | Opcode::SEND_LAST | Opcode::SEND_ONLY => Some(Op::Send),
        Opcode::READ_REQUEST => Some(Op::Read),
        _ => None,
    }
}
