//! The harness of the tests of `run`: certificates, a scripted API server, and the program itself.
#![allow(dead_code, reason = "each test binary uses its own part of the harness")]

#[path = "../../../../ctrlmesh-proxy/tests/harness/pki.rs"]
pub(crate) mod pki;
pub(crate) mod run;
#[path = "../../../../ctrlmesh-proxy/tests/harness/upstream.rs"]
pub(crate) mod upstream;

#[path = "../../../../ctrlmesh-proxy/tests/harness/wait.rs"]
mod wait;

#[allow(unused_imports, reason = "each test binary uses its own part of the harness")]
pub(crate) use wait::{soon, until};
