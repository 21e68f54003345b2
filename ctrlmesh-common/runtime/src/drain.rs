//! Stops the process without cutting what it could finish.
//!
//! Shutdown has two phases: every task is asked to finish, and what has not finished by the deadline is cut.

use std::future::Future;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::time;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::poll_on_wake::PollOnWake;

/// Owns the tasks that must end before the process may.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    graceful: CancellationToken,
    forced: CancellationToken,
    tasks: TaskTracker,
}

impl Drain {
    /// Runs `task` on any thread until it ends or the deadline of [`Drain::finish`] passes.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let forced = self.forced.clone();
        // A future that is moved into `select!` takes its room twice, and there are thousands of these.
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

    /// Runs `task` until it ends or shutdown begins: for a task with nothing to finish.
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

    /// Runs `task` on this thread until it ends or the deadline of [`Drain::finish`] passes.
    pub fn spawn_local(&self, task: impl Future<Output = ()> + 'static) {
        let mut forced = PollOnWake::new(Box::pin(self.forced.clone().cancelled_owned()));
        self.tasks.spawn_local(async move {
            tokio::select! {
                biased;
                // The deadline passed.
                () = &mut forced => {}
                () = task => {}
            }
        });
    }

    /// Runs `task` on this thread: a part of a connection that ends when its connection does.
    ///
    /// Shutdown waits for the task, but never cuts it. This spares each request a lock that all threads share.
    pub fn spawn_part(&self, task: impl Future<Output = ()> + 'static) {
        self.tasks.spawn_local(task);
    }

    /// The same shutdown for one thread: its tasks wait without a lock that other threads share.
    #[must_use]
    pub fn for_thread(&self) -> Self {
        Self { graceful: self.graceful.child_token(), forced: self.forced.child_token(), tasks: self.tasks.clone() }
    }

    /// Completes once shutdown has begun.
    pub async fn started(&self) {
        self.graceful.cancelled().await;
    }

    pub fn has_started(&self) -> bool {
        self.graceful.is_cancelled()
    }

    /// Completes once shutdown has begun and every task has ended.
    pub async fn ended(&self) {
        self.tasks.wait().await;
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

/// Spawns the tasks of hyper's connections.
impl<F: Future + Send + 'static> Executor<F> for Drain {
    fn execute(&self, task: F) {
        self.spawn(async move { drop(task.await) });
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
    async fn a_task_that_listens_ends_before_the_deadline() {
        let drain = Drain::default();
        let asked = drain.clone();
        drain.spawn(async move { asked.started().await });
        assert!(drain.finish(Duration::from_hours(1)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_with_nothing_to_finish_ends_at_once() {
        let drain = Drain::default();
        drain.spawn_until_started(future::pending());
        assert!(drain.finish(Duration::from_hours(1)).await);
    }
}
