//! Who works out what takes long?
//!
//! A few threads of their own, so that neither proxies nor other questions wait for it.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task;
use tracing::error;

/// How many may be at work at once.
const AT_ONCE: usize = 2;

/// Those who work out what takes long.
#[derive(Clone, Debug)]
pub struct Judges(Arc<Semaphore>);

// === impl Judges ===

impl Default for Judges {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

impl Judges {
    /// What `work` comes to, on a thread of its own, once there is room; none where it panicked, which is logged.
    pub async fn judge<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        // It is never closed.
        let permit = self.0.clone().acquire_owned().await;
        let judged = task::spawn_blocking(move || {
            let judged = work();
            drop(permit);
            judged
        });
        judged.await.inspect_err(|error| error!(%error, "judging failed")).ok()
    }
}
