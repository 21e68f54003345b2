//! Slows a response down or cuts it, as faults say.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::policy::fault::ApiFaultKind;
use ctrlmesh_runtime::drain::Drain;
use hyper::body::Frame;
use tokio::time;
use tokio::time::{Instant, Sleep};

use crate::fault::{MAX_DELAY, MetFaults};
use crate::net::body::BodyError;
use crate::net::memory_budget::{MemoryBudget, Reservation};
use crate::serve::reply::Content;
use crate::session::Session;

/// What is read ahead of a client while its events are delayed, in bytes. Each byte counts as unread.
const MAX_DELAYED_BYTES: usize = 256 << 10;

/// A slow body comes in so many parts a second.
const PARTS_PER_SECOND: u32 = 10;

/// So much is missing where a watch is cut: the end of an event in any encoding.
const MISSING_BYTES: usize = 2;

/// Between the last bytes of a watch that is cut and its end: a reset overtakes what is not sent yet.
const FLUSH: Duration = Duration::from_millis(100);

/// By how much a slow body may catch up.
const SLACK: Duration = Duration::from_millis(100);

/// A body, and what is done to it.
#[derive(Debug)]
pub(super) struct Shaped {
    content: Content,
    /// `None` once nothing more is done.
    lifted: Option<Lifted>,
    delay: Option<DelayLine>,
    cut: Option<Cut>,
    bytes_per_second: Option<u32>,
    /// Of a part that is sent slowly.
    rest: Option<Rest>,
    budget: Arc<MemoryBudget>,
    /// No part is sent before.
    next: Instant,
    timer: Timer,
}

#[derive(Debug)]
struct Rest {
    bytes: Bytes,
    reservation: Reservation,
}

/// Ready once the faults are no more in the policy.
struct Lifted(Pin<Box<dyn Future<Output = ()>>>);

/// The frames of a watch that are not due yet.
#[derive(Debug)]
struct DelayLine {
    delay: Duration,
    frames: VecDeque<Delayed>,
    bytes: usize,
    has_ended: bool,
    budget: Arc<MemoryBudget>,
}

#[derive(Debug)]
struct Delayed {
    due: Instant,
    /// As it was polled.
    frame: Option<Result<Frame<Bytes>, BodyError>>,
    reservation: Option<Reservation>,
}

/// Where a watch is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// In the first part after this.
    After(Instant),
    Now,
}

#[derive(Debug, Default)]
struct Timer(Option<Pin<Box<Sleep>>>);

impl Shaped {
    /// `content` itself, if nothing is done to it.
    pub(super) fn of(content: Content, is_ok: bool, met: MetFaults, session: &Session) -> Content {
        Self::within(content, is_ok, met, session.resources.unread.budget(), session.server.drain.clone())
    }

    fn within(content: Content, is_ok: bool, met: MetFaults, budget: &Arc<MemoryBudget>, drain: Drain) -> Content {
        let now = Instant::now();
        let (mut delay, mut cut, mut bytes_per_second) = (None, None, None);
        for fault in met.on_answer() {
            match *fault {
                // An error has no events.
                ApiFaultKind::DelayEvents { nanoseconds } if is_ok => {
                    delay = delay.max(Some(Duration::from_nanos(nanoseconds)));
                }
                ApiFaultKind::CutWatch { after_nanoseconds } if is_ok => {
                    let at = now + Duration::from_nanos(after_nanoseconds).min(MAX_DELAY);
                    cut = Some(cut.map_or(at, |other: Instant| other.min(at)));
                }
                ApiFaultKind::SlowBody { bytes_per_second: speed } => {
                    bytes_per_second = Some(bytes_per_second.map_or(speed, |other: u32| other.min(speed)));
                }
                _ => {}
            }
        }
        if (delay, bytes_per_second) == (None, None) && cut.is_none() || content.is_end_stream() {
            return content;
        }
        let delay = delay.map(|delay| DelayLine::new(delay, budget.clone()));
        let (lifted, cut) = (Some(Lifted(met.into_lifted(drain))), cut.map(Cut::After));
        let (budget, rest, next, timer) = (budget.clone(), None, now, Timer::default());
        Content::Shaped(Box::new(Self { content, lifted, delay, cut, bytes_per_second, rest, budget, next, timer }))
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if let Some(Cut::Now) = self.cut {
            ready!(self.timer.poll(self.next, cx));
            return Poll::Ready(Some(Err(BodyError::GivenUp)));
        }
        if self.lifted.as_mut().is_some_and(|lifted| lifted.0.as_mut().poll(cx).is_ready()) {
            self.lift();
        }
        ready!(self.timer.poll(self.next, cx));
        let (data, reservation) = match self.rest.take() {
            Some(Rest { bytes, reservation }) => (bytes, Some(reservation)),
            None => match ready!(self.poll_content(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => (data, None),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                ended => return Poll::Ready(ended),
            },
        };
        let data = self.cut_off(data);
        match self.cut {
            Some(Cut::Now) if data.is_empty() => self.poll_frame(cx),
            Some(Cut::Now) => Poll::Ready(Some(Ok(Frame::data(data)))),
            _ => Poll::Ready(Some(self.part_of(data, reservation).map(Frame::data))),
        }
    }

    /// Sends at once what waits, and then the rest as it comes.
    fn lift(&mut self) {
        (self.lifted, self.cut, self.bytes_per_second) = (None, None, None);
        self.next = Instant::now();
        if let Some(line) = &mut self.delay {
            line.delay = Duration::ZERO;
            line.frames.iter_mut().for_each(|delayed| delayed.due = self.next);
        }
    }

    fn poll_content(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.delay {
            Some(line) => line.poll_frame(&mut self.content, &mut self.timer, cx),
            None => self.content.poll_frame(cx),
        }
    }

    /// Leaves the end of an event away, where the watch is to be cut.
    fn cut_off(&mut self, mut data: Bytes) -> Bytes {
        if let Some(Cut::After(_)) = self.cut.filter(|cut| matches!(cut, Cut::After(at) if *at <= Instant::now())) {
            self.cut = Some(Cut::Now);
            self.next = Instant::now() + FLUSH;
            data.truncate(data.len().saturating_sub(MISSING_BYTES));
        }
        data
    }

    /// As much as may be sent now; the rest is kept.
    fn part_of(&mut self, mut data: Bytes, reservation: Option<Reservation>) -> Result<Bytes, BodyError> {
        let Some(speed) = self.bytes_per_second else { return Ok(data) };
        let most = usize::try_from(speed / PARTS_PER_SECOND).unwrap_or(usize::MAX).max(1);
        let part = data.split_to(most.min(data.len()));
        if !data.is_empty() {
            let reservation = reservation.or_else(|| self.budget.reserve(data.len())).ok_or(BodyError::Unread)?;
            self.rest = Some(Rest { bytes: data, reservation });
        }
        let nanoseconds = part.len() as u64 * 1_000_000_000 / u64::from(speed.max(1));
        // Counted from when it was due, so that timers that are late do not slow it down.
        let due = Instant::now().checked_sub(SLACK).map_or(self.next, |earliest| self.next.max(earliest));
        self.next = due + Duration::from_nanos(nanoseconds);
        Ok(part)
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let waits = self.rest.is_some() || self.cut.is_some();
        let has_ended = match &self.delay {
            Some(line) => line.frames.is_empty() && (line.has_ended || self.content.is_end_stream()),
            None => self.content.is_end_stream(),
        };
        has_ended && !waits
    }
}

impl fmt::Debug for Lifted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lifted").finish_non_exhaustive()
    }
}

impl DelayLine {
    fn new(delay: Duration, budget: Arc<MemoryBudget>) -> Self {
        Self { delay, frames: VecDeque::new(), bytes: 0, has_ended: false, budget }
    }

    fn poll_frame(
        &mut self,
        content: &mut Content,
        timer: &mut Timer,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.delay.is_zero() && self.frames.is_empty() {
            return if self.has_ended { Poll::Ready(None) } else { content.poll_frame(cx) };
        }
        // Without a delay, what waits goes first: a watch that is being led over has to be polled until it is done.
        while !self.delay.is_zero() && !self.has_ended && self.bytes < MAX_DELAYED_BYTES {
            let Poll::Ready(frame) = content.poll_frame(cx) else { break };
            self.push(frame);
        }
        let Some(first) = self.frames.front() else {
            return if self.has_ended { Poll::Ready(None) } else { Poll::Pending };
        };
        ready!(timer.poll(first.due, cx));
        let Some(Delayed { frame, reservation, .. }) = self.frames.pop_front() else { return Poll::Pending };
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        self.bytes -= data.map_or(0, Bytes::len);
        drop(reservation);
        Poll::Ready(frame)
    }

    fn push(&mut self, frame: Option<Result<Frame<Bytes>, BodyError>>) {
        let length = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()).map_or(0, Bytes::len);
        let (frame, reservation) = match self.budget.reserve(length) {
            Some(reservation) => (frame, Some(reservation)),
            None => (Some(Err(BodyError::Unread)), None),
        };
        self.has_ended = !matches!(frame, Some(Ok(_)));
        self.bytes += reservation.as_ref().map_or(0, |_| length);
        self.frames.push_back(Delayed { due: Instant::now() + self.delay, frame, reservation });
    }
}

impl Timer {
    /// Ready once `until` has come.
    fn poll(&mut self, until: Instant, cx: &mut Context<'_>) -> Poll<()> {
        if until <= Instant::now() {
            return Poll::Ready(());
        }
        let sleep = self.0.get_or_insert_with(|| Box::pin(time::sleep_until(until)));
        if sleep.deadline() != until {
            sleep.as_mut().reset(until);
        }
        sleep.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests;
