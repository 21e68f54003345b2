//! The parts of the socket tests: certificates, a scripted API server, the real proxy process, and clients.
#![allow(dead_code, reason = "each test binary uses its own part of the harness")]

pub(crate) mod client;
pub(crate) mod frames;
pub(crate) mod pki;
pub(crate) mod proxy;
#[path = "../../request/tests/harness/random.rs"]
pub(crate) mod random;
pub(crate) mod upstream;
mod wait;
pub(crate) mod watches;

#[allow(unused_imports, reason = "each test binary uses its own part of the harness")]
pub(crate) use wait::{PATIENCE, soon, until};

/// The proxy, as a target of the package that the test is in.
pub(crate) const PROGRAM: &str =
    match (option_env!("CARGO_BIN_EXE_ctrlmesh-proxy"), option_env!("CARGO_BIN_EXE_e2e-proxy")) {
        (Some(program), _) | (None, Some(program)) => program,
        (None, None) => panic!("the package has no proxy"),
    };
