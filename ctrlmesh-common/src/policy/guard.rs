//! The limits on how often a pod may ask the API server for something.

use serde::{Deserialize, Serialize};

/// One limit: a rule of a `CircuitBreaker`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Guard {
    /// The `CircuitBreaker`, as `NAMESPACE/NAME`.
    pub breaker: String,
    /// The name of the rule in it.
    pub rule: String,
    /// How much is allowed. Absent: nothing is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<Bucket>,
    /// The pod's part of the bucket. Absent: the whole bucket is the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// When the breaker opens.
    #[serde(default, skip_serializing_if = "Trigger::is_normal")]
    pub trigger: Trigger,
    /// For how long a breaker that opened refuses requests, in nanoseconds. Absent: until it is reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleeping_window_nanoseconds: Option<u64>,
    /// The requests that count: those that any of these matches.
    pub requests: Vec<RequestMatch>,
    /// What the annotation says that resets the rule. Another value than the last one closes the
    /// breaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<String>,
    /// Whether a request that an open breaker refuses is held for a while first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub holds: bool,
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bucket {
    /// How many requests the bucket holds.
    pub burst: u32,
    /// How many requests flow in during `interval_nanoseconds`. 0: none.
    pub limit: u32,
    /// In nanoseconds.
    pub interval_nanoseconds: u64,
}

/// One pod's part of a bucket that several pods share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Part {
    /// Who shares the bucket.
    pub group: String,
    /// Which division of it this is: of two, the greater is newer.
    pub generation: u64,
    /// Among how many pods the bucket is divided.
    pub of: u32,
    /// The pod's number among them, from 0. Absent: it waits for a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
}

/// When a breaker opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Trigger {
    /// When a request finds the bucket empty.
    #[default]
    Normal,
    /// Never: requests that find the bucket empty are refused one by one.
    LimiterOnly,
    /// It is open, whatever the bucket holds.
    ForceOpened,
    /// It is closed, whatever the bucket holds.
    ForceClosed,
}

/// Some requests for resources. In each list, `*` stands for everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RequestMatch {
    /// API groups; `""` is the core group.
    pub api_groups: Vec<String>,
    /// `pods`, `pods/eviction`, `pods/*`, `*/status`; `*` is every resource and subresource.
    pub resources: Vec<String>,
    /// `get`, `list`, `watch`, `create`, …
    pub verbs: Vec<String>,
    /// Only `*` matches requests without a namespace.
    pub namespaces: Vec<String>,
}

/// A guard that no proxy can apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// Its trigger needs a bucket.
    #[error("bucket: is needed, as the trigger is {trigger:?}")]
    NoBucket {
        /// The trigger.
        trigger: Trigger,
    },
    /// The bucket never lets a request pass.
    #[error("bucket.burst: must be at least 1")]
    Burst,
    /// Nothing can flow in within no time.
    #[error("bucket.intervalNanoseconds: must be at least 1")]
    Interval,
    /// The pod has no place among those that share the bucket.
    #[error("part: of must be at least 1, and number less than that")]
    Part,
    /// A pod that shares a bucket begins with an empty one.
    #[error("bucket.limit: must be at least 1, as pods share the bucket")]
    PartOfBudget,
    /// Another guard has the same breaker and rule.
    #[error("rule {rule:?} of {breaker} is another guard's, too")]
    Repeated {
        /// The breaker.
        breaker: String,
        /// The rule.
        rule: String,
    },
}

impl Guard {
    /// What of the bucket is this pod's own. All parts together hold `burst`, and `limit` flows into them.
    ///
    /// A pod whose number is not below `burst` has none: its bucket would hold less than one request.
    pub fn own_bucket(&self) -> Option<Bucket> {
        let bucket = self.bucket?;
        let Some(Part { of, number, .. }) = self.part else { return Some(bucket) };
        let sharing = of.min(bucket.burst).max(1);
        let burst = match number {
            Some(number) if number < sharing => bucket.burst / of + u32::from(number < bucket.burst % of),
            _ => 0,
        };
        // Each gets the same: what flows in during one interval takes as many times longer as there are parts.
        Some(match bucket.interval_nanoseconds.checked_mul(u64::from(sharing)) {
            Some(interval_nanoseconds) => Bucket { burst, interval_nanoseconds, ..bucket },
            None => Bucket { burst, limit: bucket.limit / sharing, ..bucket },
        })
    }

    /// Whether both are the same rule with the same fields; `reset`, `part` and `holds` do not count.
    pub fn means_the_same(&self, other: &Self) -> bool {
        let fields = |one: &Self| (one.trigger, one.bucket, one.sleeping_window_nanoseconds);
        self.is_rule(&other.breaker, &other.rule) && fields(self) == fields(other) && self.requests == other.requests
    }

    /// Whether it is this rule of this breaker.
    pub fn is_rule(&self, breaker: &str, rule: &str) -> bool {
        self.rule == rule && self.breaker == breaker
    }

    /// Whether a proxy can apply it.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), GuardError> {
        match self.bucket {
            None if matches!(self.trigger, Trigger::Normal | Trigger::LimiterOnly) => {
                Err(GuardError::NoBucket { trigger: self.trigger })
            }
            Some(Bucket { burst: 0, .. }) => Err(GuardError::Burst),
            Some(Bucket { interval_nanoseconds: 0, .. }) => Err(GuardError::Interval),
            bucket => self.part.as_ref().map_or(Ok(()), |part| part.check(bucket)),
        }
    }
}

impl Part {
    /// Whether it is of an earlier division among the same pods than `other`.
    pub fn is_older(&self, other: &Self) -> bool {
        self.group == other.group && self.generation < other.generation
    }

    fn check(&self, bucket: Option<Bucket>) -> Result<(), GuardError> {
        if self.of == 0 || self.number.is_some_and(|number| number >= self.of) {
            return Err(GuardError::Part);
        }
        if bucket.is_some_and(|bucket| bucket.limit == 0) {
            return Err(GuardError::PartOfBudget);
        }
        Ok(())
    }
}

impl Trigger {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(of: u32, number: Option<u32>) -> Part {
        Part { group: "ops/op".to_owned(), generation: 1, of, number }
    }

    fn shared(burst: u32, part: Part) -> Guard {
        Guard {
            breaker: "ops/wild".to_owned(),
            rule: "creates".to_owned(),
            bucket: Some(Bucket { burst, limit: 2, interval_nanoseconds: 10 }),
            part: Some(part),
            trigger: Trigger::Normal,
            sleeping_window_nanoseconds: None,
            requests: Vec::new(),
            reset: None,
            holds: false,
        }
    }

    #[test]
    fn parts_make_up_the_bucket() {
        for burst in 1..20 {
            for of in 1..20 {
                let own = |number| shared(burst, part(of, Some(number))).own_bucket().unwrap();
                let parts: Vec<Bucket> = (0..of).map(own).collect();
                assert_eq!(parts.iter().map(|part| part.burst).sum::<u32>(), burst);
                let with_some = parts.iter().filter(|part| part.burst > 0);
                let intervals: Vec<u64> = with_some.map(|part| part.interval_nanoseconds).collect();
                assert!(intervals.iter().all(|interval| *interval == 10 * u64::from(of.min(burst))));
                assert_eq!(intervals.len(), usize::try_from(of.min(burst)).unwrap());
                // Nobody has more when there is one part more.
                let next = |number| shared(burst, part(of + 1, Some(number))).own_bucket().unwrap();
                assert!((0..of).all(|number| next(number).burst <= own(number).burst), "{burst} of {of}");
            }
        }
        assert_eq!(shared(5, part(3, None)).own_bucket().unwrap().burst, 0);
    }

    #[test]
    fn an_interval_that_grows_too_long_lets_less_flow_in() {
        let mut guard = shared(4, part(2, Some(0)));
        guard.bucket = Some(Bucket { burst: 4, limit: 5, interval_nanoseconds: u64::MAX });
        assert_eq!(guard.own_bucket().unwrap(), Bucket { burst: 2, limit: 2, interval_nanoseconds: u64::MAX });
    }

    #[test]
    fn a_part_that_cannot_be_is_refused() {
        for part in [part(0, None), part(2, Some(2))] {
            assert_eq!(shared(5, part).check(), Err(GuardError::Part));
        }
        let mut budget = shared(5, part(2, Some(1)));
        assert_eq!(budget.check(), Ok(()));
        budget.bucket = Some(Bucket { burst: 5, limit: 0, interval_nanoseconds: 1 });
        assert_eq!(budget.check(), Err(GuardError::PartOfBudget));
    }
}
