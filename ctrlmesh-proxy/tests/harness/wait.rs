//! Waits for states, with a deadline.

use std::future::Future;
use std::time::Duration;

use tokio::time;

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
