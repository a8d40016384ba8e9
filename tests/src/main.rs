//! `roce-lab`.

fn main() {}
