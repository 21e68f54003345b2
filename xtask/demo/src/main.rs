//! `cargo xtask demo` runs this.
#![forbid(unsafe_code)]

fn main() {}
