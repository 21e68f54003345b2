//! How is something waited for that seldom happens, beside something that often does?
//!
//! Whoever waits for both is woken for either, and asks both; to ask what seldom happens takes locks and memory that
//! nothing else touches. So that is asked only when it has something to say: it wakes through an alarm of its own.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// A future that seldom completes, and is asked only after it has woken.
pub struct PollOnWake<F> {
    future: F,
    alarm: Arc<Alarm>,
    /// Wakes by the alarm.
    waker: Waker,
    /// Who asked last.
    task: Option<Waker>,
}

/// Says that the future is to be asked.
#[derive(Debug, Default)]
struct Alarm {
    rung: AtomicBool,
    task: Mutex<Option<Waker>>,
}

// === impl PollOnWake ===

impl<F: Future + Unpin> PollOnWake<F> {
    /// A future that is asked at first, and then after each time that it wakes.
    pub fn new(future: F) -> Self {
        let alarm = Arc::<Alarm>::default();
        let waker = Waker::from(alarm.clone());
        Self { future, alarm, waker, task: None }
    }

    fn ask(&mut self, cx: &Context<'_>) -> Poll<F::Output> {
        if self.task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            self.task = Some(cx.waker().clone());
            self.alarm.set(cx.waker());
        }
        if !self.alarm.rung.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // What rings from here on is not lost: it is asked again.
        self.alarm.rung.store(false, Ordering::SeqCst);
        Pin::new(&mut self.future).poll(&mut Context::from_waker(&self.waker))
    }
}

impl<F: Future + Unpin> Future for PollOnWake<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.get_mut().ask(cx)
    }
}

impl<F> fmt::Debug for PollOnWake<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollOnWake").field("alarm", &self.alarm).finish_non_exhaustive()
    }
}

// === impl Alarm ===

impl Alarm {
    /// From here on it wakes this task, which is to ask now.
    fn set(&self, task: &Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.clone());
        self.rung.store(true, Ordering::SeqCst);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
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
    async fn it_is_asked_once_until_it_wakes() {
        let (notify, asked) = (Notify::new(), Cell::new(0));
        let mut notified = pin!(notify.notified());
        let future = poll_fn(|cx| {
            asked.set(asked.get() + 1);
            notified.as_mut().poll(cx)
        });
        let mut seldom = PollOnWake::new(future);
        poll_fn(|cx| {
            for _ in 0..10 {
                assert!(Pin::new(&mut seldom).poll(cx).is_pending());
            }
            Poll::Ready(())
        })
        .await;
        assert_eq!(asked.get(), 1);
        notify.notify_waiters();
        seldom.await;
        assert_eq!(asked.get(), 2);
    }

    #[tokio::test]
    async fn it_wakes_whoever_asked_last() {
        let notify = Arc::new(Notify::new());
        let told = notify.clone();
        let mut seldom = PollOnWake::new(Box::pin(async move { told.notified().await }));
        let mut elsewhere = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut seldom).poll(&mut elsewhere).is_pending());
        let mut tasks = JoinSet::new();
        tasks.spawn(seldom);
        tokio::task::yield_now().await;
        notify.notify_waiters();
        tasks.join_next().await.unwrap().unwrap();
    }
}
