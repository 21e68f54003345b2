//! Why a guard refuses a request, and when the client may come again.

use std::fmt;

use ctrlmesh_common::names::annotation::RESET_CIRCUIT_BREAKER;
use ctrlmesh_common::policy::guard::Guard;

use super::Moment;

const NANOSECONDS: u64 = 1_000_000_000;

/// A request that a guard refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// `NAMESPACE/NAME`.
    pub breaker: String,
    pub rule: String,
    pub cause: Cause,
    /// In seconds, rounded up. `None` where no time will do.
    pub retry_after: Option<u32>,
    /// Whether the request may be held until the breaker closes.
    pub holds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The bucket is empty.
    Empty,
    /// The breaker is open for some time.
    Open,
    /// The breaker is open until somebody resets it.
    OpenUntilReset,
    /// The rule refuses everything.
    ForceOpened,
    /// The pod is new, and the bucket is being divided anew.
    PartAwaited,
    /// The manager has not counted the objects of the pod's share.
    Uncounted,
    /// More pods share the bucket than requests fit in it.
    NoPart,
}

impl Cause {
    /// Whether a breaker is open, so that it may close.
    fn is_open(self) -> bool {
        matches!(self, Self::Open | Self::OpenUntilReset | Self::ForceOpened)
    }
}

impl Refused {
    pub(super) fn new(guard: &Guard, cause: Cause, now: Moment, retry_at: Option<Moment>) -> Self {
        let seconds = retry_at.map(|at| at.0.saturating_sub(now.0).div_ceil(NANOSECONDS).max(1));
        Self {
            breaker: guard.breaker.clone(),
            rule: guard.rule.clone(),
            cause,
            retry_after: seconds.map(|seconds| u32::try_from(seconds).unwrap_or(u32::MAX)),
            holds: guard.holds && cause.is_open(),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { breaker, rule, cause, retry_after, .. } = self;
        let (namespace, name) = breaker.split_once('/').unwrap_or(("", breaker));
        write!(f, "rule {rule:?} of CircuitBreaker {breaker} ")?;
        match cause {
            Cause::Empty => f.write_str("is used up")?,
            Cause::Open => f.write_str("is open")?,
            Cause::OpenUntilReset => {
                // Each value counts once, so that it holds the time.
                let value = format!("'{} '$(date +%s)", rule.replace('\'', "'\\''"));
                write!(
                    f,
                    "is open until it is reset: kubectl annotate --overwrite circuitbreaker -n {namespace} {name} {RESET_CIRCUIT_BREAKER}={value}"
                )?;
            }
            Cause::ForceOpened => f.write_str("refuses everything: its triggerPolicy is ForceOpened")?,
            Cause::PartAwaited => f.write_str("is shared by several pods, and this one has no part of it yet")?,
            Cause::Uncounted => {
                f.write_str("is a percentage of the pod's share, whose objects are not counted yet; its condition Programmed says why")?;
            }
            Cause::NoPart => f.write_str("is shared by more pods than its burst, and this one has no part of it")?,
        }
        match (retry_after, cause) {
            (Some(seconds), _) => write!(f, "; come again in {seconds} s"),
            (None, Cause::Empty | Cause::Open) => f.write_str(", and nothing flows in"),
            (None, _) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(cause: Cause, retry_at: Option<Moment>) -> Refused {
        let guard = Guard {
            breaker: "ops/wild".to_owned(),
            rule: "creates".to_owned(),
            bucket: None,
            budget: None,
            part: None,
            trigger: ctrlmesh_common::policy::guard::Trigger::ForceOpened,
            sleeping_window_nanoseconds: None,
            requests: Vec::new(),
            urls: Vec::new(),
            reset: None,
            holds: false,
        };
        Refused::new(&guard, cause, Moment(NANOSECONDS), retry_at)
    }

    #[test]
    fn the_wait_is_rounded_up() {
        for (retry_at, seconds) in [
            (Some(NANOSECONDS + 1), Some(1)),
            (Some(2 * NANOSECONDS), Some(1)),
            (Some(2 * NANOSECONDS + 1), Some(2)),
            (Some(NANOSECONDS), Some(1)),
            (Some(u64::MAX), Some(u32::MAX)),
            (None, None),
        ] {
            let refused = refused(Cause::Empty, retry_at.map(Moment));
            assert_eq!(refused.retry_after, seconds, "{retry_at:?}");
        }
    }

    #[test]
    fn the_message_names_breaker_and_rule_and_the_way_out() {
        let text = refused(Cause::OpenUntilReset, None).to_string();
        assert!(text.contains("rule \"creates\" of CircuitBreaker ops/wild"), "{text}");
        assert!(
            text.contains("-n ops wild circuitbreaker.ctrlmesh.kusionstack.io/reset='creates '$(date +%s)"),
            "{text}"
        );
        let quoted = Refused { rule: "it's $(x)".to_owned(), ..refused(Cause::OpenUntilReset, None) };
        assert!(quoted.to_string().contains(r"/reset='it'\''s $(x) '$(date +%s)"), "{quoted}");
        let text = refused(Cause::Open, Some(Moment(3 * NANOSECONDS))).to_string();
        assert!(text.ends_with("is open; come again in 2 s"), "{text}");
    }
}
