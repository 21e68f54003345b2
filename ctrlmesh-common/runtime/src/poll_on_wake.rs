//! A future that is polled only after its own waker was called.
//!
//! A task that waits for a frequent and a rare event is woken for either, and polls both. Polling the rare one takes
//! locks and memory that nothing else touches. So it gets a waker of its own, and is polled only after that waker
//! fired.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::sync::lock;

pub struct PollOnWake<F> {
    future: F,
    wakes: Arc<Wakes>,
    /// Fires into `wakes`.
    waker: Waker,
    /// The task that polled last.
    task: Option<Waker>,
}

/// Remembers that the future woke, and wakes the task.
#[derive(Debug, Default)]
struct Wakes {
    fired: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl<F: Future + Unpin> PollOnWake<F> {
    /// `future` is polled once at first, and then after each time it wakes.
    pub fn new(future: F) -> Self {
        let wakes = Arc::<Wakes>::default();
        Self { future, waker: Waker::from(wakes.clone()), wakes, task: None }
    }

    fn poll_if_woken(&mut self, cx: &Context<'_>) -> Poll<F::Output> {
        if self.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            self.wakes.set(cx.waker());
        }
        if !self.wakes.fired.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // A wake from here on is not lost: the future is polled again.
        self.wakes.fired.store(false, Ordering::SeqCst);
        Pin::new(&mut self.future).poll(&mut Context::from_waker(&self.waker))
    }
}

impl<F: Future + Unpin> Future for PollOnWake<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.get_mut().poll_if_woken(cx)
    }
}

impl<F> fmt::Debug for PollOnWake<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollOnWake").field("wakes", &self.wakes).finish_non_exhaustive()
    }
}

impl Wakes {
    /// Wakes `task` from here on; it is to poll now.
    fn set(&self, task: &Waker) {
        *lock(&self.task) = Some(task.clone());
        self.fired.store(true, Ordering::SeqCst);
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.fired.store(true, Ordering::SeqCst);
        let task = lock(&self.task).clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::pin::pin;

    use tokio::sync::Notify;
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn it_is_polled_once_until_it_wakes() {
        let (notify, polls) = (Notify::new(), Cell::new(0));
        let mut notified = pin!(notify.notified());
        let future = poll_fn(|cx| {
            polls.set(polls.get() + 1);
            notified.as_mut().poll(cx)
        });
        let mut gated = PollOnWake::new(future);
        poll_fn(|cx| {
            for _ in 0..10 {
                assert!(Pin::new(&mut gated).poll(cx).is_pending());
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!(polls.get(), 1);
        notify.notify_waiters();
        gated.await;
        assert_eq!(polls.get(), 2);
    }

    #[tokio::test]
    async fn it_wakes_the_task_that_polled_last() {
        let notify = Arc::new(Notify::new());
        let signal = notify.clone();
        let mut gated = PollOnWake::new(Box::pin(async move { signal.notified().await }));
        let mut elsewhere = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut gated).poll(&mut elsewhere).is_pending());
        let mut tasks = JoinSet::new();
        tasks.spawn(gated);
        tokio::task::yield_now().await;
        notify.notify_waiters();
        tasks.join_next().await.unwrap().unwrap();
    }
}
