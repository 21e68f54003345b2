//! The breaker of one rule: a pure state machine over a token bucket or a budget.
//!
//! A closed breaker opens when a request finds the bucket empty, or the budget used up. Once the sleeping window is
//! over, it is half-open. Then one request passes at a time, if the bucket holds one: the probe. If the probe succeeds,
//! the breaker closes. If it fails, the breaker opens anew.

use ctrlmesh_common::policy::guard::{Guard, Trigger};

use super::refused::Cause;
use super::{Moment, TokenBucket, Window};

/// While a probe is under way, nobody knows when it ends; clients come again after this.
const PROBE_RETRY_NANOSECONDS: u64 = 1_000_000_000;

/// A pod gets its part of a shared bucket when all others have taken a smaller one, and its budget once its share is
/// counted: mostly within some seconds.
const PART_RETRY_NANOSECONDS: u64 = 1_000_000_000;

/// Tells the probes of a pod apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeId(pub u64);

/// The bucket or budget and the breaker of one rule. The default is closed, and nothing is used up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breaker {
    tokens: TokenBucket,
    /// Of a budget.
    spent: Window,
    state: State,
    /// Whether it ever let a request pass.
    is_used: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Closed,
    /// `None`: until it is reset. Once `until` is over, it is half-open.
    Open { until: Option<Moment> },
    /// Half-open since `until`, and this probe is under way.
    Probing { probe: ProbeId, until: Moment },
}

/// What a breaker says of one more request. It changes nothing yet: another rule may refuse the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    /// It may pass as the probe.
    Probe,
    Refuse {
        cause: Cause,
        /// `None` where no time will do.
        retry_at: Option<Moment>,
        /// Whether the refusal opens the breaker.
        opens: bool,
    },
}

impl Breaker {
    /// One of a rule that is new here. A part of a shared bucket is empty at first: a pod that is gone, or this pod's
    /// last process, may have used all.
    pub(super) fn new(guard: &Guard, now: Moment) -> Self {
        let bucket = guard.own_bucket().filter(|_| guard.part.is_some());
        let tokens = bucket.map(|bucket| TokenBucket::empty(&bucket, now));
        Self { tokens: tokens.unwrap_or_default(), ..Self::default() }
    }

    /// One that opened before this process began.
    pub(super) fn opened(guard: &Guard, until: Option<Moment>, now: Moment) -> Self {
        Self { state: State::Open { until }, ..Self::new(guard, now) }
    }

    /// The same, where the pod's part of the bucket has changed.
    #[must_use]
    pub(super) fn with_part_of(self, from: &Guard, to: &Guard, now: Moment) -> Self {
        match (from.own_bucket(), to.own_bucket()) {
            (Some(from), Some(to)) => {
                // A part that the pod lost and has again is empty as a new one is.
                let is_used = self.is_used && from.burst.min(to.burst) > 0;
                Self { tokens: self.tokens.resized(&from, &to, now), is_used, ..self }
            }
            _ => self,
        }
    }

    pub fn check(&self, guard: &Guard, now: Moment) -> Verdict {
        let next = self.next(guard, now);
        let has_token = next == Some(now);
        match (guard.trigger, self.state) {
            (Trigger::ForceClosed, _) => Verdict::Pass,
            (Trigger::ForceOpened, _) => Verdict::Refuse { cause: Cause::ForceOpened, retry_at: None, opens: false },
            (Trigger::LimiterOnly, _) | (Trigger::Normal, State::Closed) if has_token => Verdict::Pass,
            (Trigger::LimiterOnly, _) | (Trigger::Normal, State::Closed)
                if guard.own_bucket().is_some_and(|own| own.burst == 0) =>
            {
                without_part(guard, now)
            }
            (Trigger::LimiterOnly, _) | (Trigger::Normal, State::Closed) if is_uncounted(guard) => {
                let retry_at = Some(now.after(PART_RETRY_NANOSECONDS));
                Verdict::Refuse { cause: Cause::Uncounted, retry_at, opens: false }
            }
            (Trigger::LimiterOnly, _) => Verdict::Refuse { cause: Cause::Empty, retry_at: next, opens: false },
            // Nobody has used it up.
            (Trigger::Normal, State::Closed) if guard.part.is_some() && !self.is_used => {
                Verdict::Refuse { cause: Cause::Empty, retry_at: next, opens: false }
            }
            (Trigger::Normal, State::Closed) => refuse(opened_until(guard, now), next, true),
            (Trigger::Normal, State::Open { until: Some(until) }) if until <= now => {
                if has_token {
                    Verdict::Probe
                } else {
                    refuse(Some(until), next, false)
                }
            }
            (Trigger::Normal, State::Open { until }) => refuse(until, next, false),
            (Trigger::Normal, State::Probing { .. }) => refuse(Some(now.after(PROBE_RETRY_NANOSECONDS)), next, false),
        }
    }

    /// When a request may pass by bucket or budget: `now`, later, or never.
    fn next(&self, guard: &Guard, now: Moment) -> Option<Moment> {
        if let Some(budget) = guard.budget {
            return self.spent.next(budget.requests()?, budget.interval_nanoseconds, now);
        }
        guard.own_bucket().map_or(Some(now), |bucket| self.tokens.next(&bucket, now))
    }

    /// Charges a request that every rule lets pass, by this breaker's verdict. A probe gets this ID.
    pub fn pass(&mut self, guard: &Guard, verdict: Verdict, probe: ProbeId, now: Moment) {
        if guard.trigger == Trigger::ForceClosed {
            return;
        }
        self.is_used = true;
        match (guard.budget, guard.own_bucket()) {
            (Some(budget), _) => self.spent.take(budget.interval_nanoseconds, now),
            (None, Some(bucket)) => self.tokens.take(&bucket, now),
            (None, None) => {}
        }
        if let (Verdict::Probe, State::Open { until: Some(until) }) = (verdict, self.state) {
            self.state = State::Probing { probe, until };
        }
    }

    /// Opens the breaker, where its verdict says so.
    pub fn refuse(&mut self, guard: &Guard, verdict: Verdict, now: Moment) {
        if verdict.opens() {
            self.state = State::Open { until: opened_until(guard, now) };
        }
    }

    /// Closes after a probe that succeeded, and opens anew after one that did not. A probe from before the breaker was
    /// reset changes nothing.
    pub fn probe_ended(&mut self, guard: &Guard, probe: ProbeId, succeeded: bool, now: Moment) {
        if matches!(self.state, State::Probing { probe: under_way, .. } if under_way == probe) {
            self.state = if succeeded { State::Closed } else { State::Open { until: opened_until(guard, now) } };
        }
    }

    /// Is half-open again after a probe that was not sent.
    pub fn probe_unsent(&mut self, probe: ProbeId) {
        if let State::Probing { probe: under_way, until } = self.state
            && under_way == probe
        {
            self.state = State::Open { until: Some(until) };
        }
    }

    /// Whether requests are refused, all of them or all but a probe.
    pub fn is_open(&self, guard: &Guard) -> bool {
        match guard.trigger {
            Trigger::ForceOpened => true,
            Trigger::ForceClosed | Trigger::LimiterOnly => false,
            Trigger::Normal => self.has_opened(),
        }
    }

    /// Whether it has opened by itself.
    pub(super) fn has_opened(&self) -> bool {
        self.state != State::Closed
    }

    /// Until when an open breaker refuses everything; `None`: until it is reset.
    pub(super) fn until(&self) -> Option<Moment> {
        match self.state {
            State::Closed => None,
            State::Open { until } => until,
            State::Probing { until, .. } => Some(until),
        }
    }
}

impl Verdict {
    pub(super) fn opens(self) -> bool {
        matches!(self, Self::Refuse { opens: true, .. })
    }
}

fn refuse(until: Option<Moment>, next: Option<Moment>, opens: bool) -> Verdict {
    let cause = if until.is_some() { Cause::Open } else { Cause::OpenUntilReset };
    // At `until` the bucket may still be empty.
    Verdict::Refuse { cause, retry_at: until.zip(next).map(|(until, next)| until.max(next)), opens }
}

/// Whether nobody knows yet how much the budget is.
fn is_uncounted(guard: &Guard) -> bool {
    guard.budget.is_some_and(|budget| budget.objects.is_none())
}

/// Of a pod that has nothing of a shared bucket, now or for good.
fn without_part(guard: &Guard, now: Moment) -> Verdict {
    let waits = guard.part.as_ref().is_some_and(|part| part.number.is_none());
    let cause = if waits { Cause::PartAwaited } else { Cause::NoPart };
    Verdict::Refuse { cause, retry_at: waits.then(|| now.after(PART_RETRY_NANOSECONDS)), opens: false }
}

/// Until when a breaker is open that opens now.
fn opened_until(guard: &Guard, now: Moment) -> Option<Moment> {
    guard.sleeping_window_nanoseconds.map(|window| now.after(window))
}

#[cfg(test)]
mod tests;
