//! How does the process stop without cutting what it could finish?
//!
//! Two phases: every task is asked to finish, and what has not finished by the deadline is cut.

use std::future::Future;
use std::time::Duration;

use tokio::time;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Owns the tasks that must end before the process may.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    graceful: CancellationToken,
    forced: CancellationToken,
    tasks: TaskTracker,
}

impl Drain {
    /// Runs `task` until it ends or the deadline of [`Drain::finish`] passes.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let forced = self.forced.clone();
        // What is moved into a `select!` has its place in it twice, and there are thousands of these.
        let mut task = Box::pin(task);
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                // The deadline passed.
                () = forced.cancelled() => {}
                () = &mut task => {}
            }
        });
    }

    /// Runs `task` until it ends or shutdown begins: for what has nothing to finish.
    pub fn spawn_until_started(&self, task: impl Future<Output = ()> + Send + 'static) {
        let graceful = self.graceful.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                // Shutdown began.
                () = graceful.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// Completes once shutdown has begun.
    pub async fn started(&self) {
        self.graceful.cancelled().await;
    }

    /// Whether shutdown has begun.
    pub fn has_started(&self) -> bool {
        self.graceful.is_cancelled()
    }

    /// Begins shutdown; returns whether every task ended before `deadline`.
    pub async fn finish(self, deadline: Duration) -> bool {
        self.graceful.cancel();
        self.tasks.close();
        let clean = time::timeout(deadline, self.tasks.wait()).await.is_ok();
        self.forced.cancel();
        self.tasks.wait().await;
        clean
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_never_ends_is_cut_at_the_deadline() {
        let drain = Drain::default();
        drain.spawn(future::pending());
        assert!(!drain.finish(Duration::from_millis(50)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_with_nothing_to_finish_ends_at_once() {
        let drain = Drain::default();
        drain.spawn_until_started(future::pending());
        assert!(drain.finish(Duration::from_hours(1)).await);
    }
}
