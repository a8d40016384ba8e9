//! The `roce` program.

fn main() {}
