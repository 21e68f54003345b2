//! Runs slow computations on a few threads of their own, so that neither proxies nor other requests wait.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task;
use tracing::error;

const AT_ONCE: usize = 2;

#[derive(Clone, Debug)]
pub struct BlockingPool(Arc<Semaphore>);

impl Default for BlockingPool {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

impl BlockingPool {
    /// Runs `work` on a thread of its own, once one is free. None where it panicked, which is logged.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        // The semaphore is never closed.
        let permit = self.0.clone().acquire_owned().await;
        let finished = task::spawn_blocking(move || {
            let finished = work();
            drop(permit);
            finished
        });
        finished.await.inspect_err(|error| error!(%error, "a blocking task failed")).ok()
    }
}
