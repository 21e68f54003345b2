//! The harness of the tests of `run`: certificates, a scripted API server, and the program itself.
#![allow(dead_code, reason = "each test binary uses its own part of the harness")]

#[path = "../../../../ctrlmesh-proxy/tests/harness/pki.rs"]
pub(crate) mod pki;
pub(crate) mod run;
#[path = "../../../../ctrlmesh-proxy/tests/harness/upstream.rs"]
pub(crate) mod upstream;

use std::future::Future;
use std::time::Duration;

use tokio::time;

/// How long a condition may take to come true before a test fails: generous, because no test waits in vain.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// The output of `work`; the test fails when it takes too long.
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
