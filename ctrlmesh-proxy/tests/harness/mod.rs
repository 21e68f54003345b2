//! The parts of the socket tests: certificates, a scripted API server, the real proxy process, and clients.
#![allow(dead_code, reason = "each test binary uses its own part of the harness")]

pub(crate) mod client;
pub(crate) mod frames;
pub(crate) mod pki;
pub(crate) mod proxy;
#[path = "../../request/tests/harness/random.rs"]
pub(crate) mod random;
pub(crate) mod upstream;
pub(crate) mod watches;

use std::future::Future;
use std::time::Duration;

use tokio::time;

/// The proxy, as a target of the package that the test is in.
pub(crate) const PROGRAM: &str =
    match (option_env!("CARGO_BIN_EXE_ctrlmesh-proxy"), option_env!("CARGO_BIN_EXE_e2e-proxy")) {
        (Some(program), _) | (None, Some(program)) => program,
        (None, None) => panic!("the package has no proxy"),
    };

/// How long a condition may take to come true before a test fails: generous, because nothing waits for it in vain.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Awaits `work`; the test fails when it takes too long.
pub(crate) async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    time::timeout(PATIENCE, work).await.unwrap_or_else(|_elapsed| panic!("waited in vain for {what}"))
}

/// Waits until `condition` holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let poll = async {
        while !condition().await {
            time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(what, poll).await;
}
