//! The limits on how often a pod may ask the API server, or another server, for something.

use serde::{Deserialize, Serialize};

use super::egress::UrlRequest;

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
    /// How much is allowed of the pod's share, in place of a bucket. Absent: the bucket says how much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// The pod's part of the bucket. Absent: the whole bucket is the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// When the breaker opens.
    #[serde(default, skip_serializing_if = "Trigger::is_normal")]
    pub trigger: Trigger,
    /// For how long a breaker that opened refuses requests, in nanoseconds. Absent: until it is reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleeping_window_nanoseconds: Option<u64>,
    /// The requests to the API server that count: those that any of these matches.
    pub requests: Vec<RequestMatch>,
    /// The requests to other servers that count: those that any of these matches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<UrlRequest>,
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

/// How many requests a pod may make in any time of an interval, by the size of its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Budget {
    /// 1 to 100.
    pub percent: u32,
    /// In nanoseconds.
    pub interval_nanoseconds: u64,
    /// How many objects are in the share. Absent: they are not counted yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objects: Option<u64>,
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
    /// Member clusters; `member-*` is each whose name begins so. None at all: the API server itself, and no member.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clusters: Vec<String>,
}

/// A guard that no proxy can apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// Its trigger needs a bucket.
    #[error("bucket or budget: one of them is needed, as the trigger is {trigger:?}")]
    NoBucket {
        /// The trigger.
        trigger: Trigger,
    },
    /// The bucket never lets a request pass.
    #[error("bucket.burst: must be at least 1")]
    Burst,
    /// Nothing can flow in within no time.
    #[error("intervalNanoseconds: must be at least 1")]
    Interval,
    /// The pod has no place among those that share the bucket, or a budget is shared.
    #[error("part: of must be at least 1, and number less than that; a budget has none")]
    Part,
    /// A pod that shares a bucket begins with an empty one.
    #[error("bucket.limit: must be at least 1, as pods share the bucket")]
    PartOfBudget,
    /// Nobody knows which of the two counts.
    #[error("bucket, budget: only one of them is allowed")]
    Both,
    /// A budget of this share is none.
    #[error("budget.percent: must be 1 to 100")]
    Percent,
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

    /// Whether both are the same rule with the same fields; `reset`, `part`, `holds` and how many objects a share has
    /// do not count.
    pub fn means_the_same(&self, other: &Self) -> bool {
        let budget = |one: &Self| one.budget.map(|budget| (budget.percent, budget.interval_nanoseconds));
        let fields = |one: &Self| (one.trigger, one.bucket, budget(one), one.sleeping_window_nanoseconds);
        self.is_rule(&other.breaker, &other.rule)
            && fields(self) == fields(other)
            && self.requests == other.requests
            && self.urls == other.urls
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
        if let Some(budget) = self.budget {
            return if self.part.is_some() { Err(GuardError::Part) } else { budget.check(self.bucket) };
        }
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

impl Budget {
    /// How many requests are allowed in any time of the interval: at least one. None while the objects are not counted.
    pub fn requests(&self) -> Option<u64> {
        let of = |objects| u128::from(objects) * u128::from(self.percent) / 100;
        self.objects.map(|objects| u64::try_from(of(objects)).unwrap_or(u64::MAX).max(1))
    }

    fn check(&self, bucket: Option<Bucket>) -> Result<(), GuardError> {
        match self {
            _ if bucket.is_some() => Err(GuardError::Both),
            Self { percent: 0 | 101.., .. } => Err(GuardError::Percent),
            Self { interval_nanoseconds: 0, .. } => Err(GuardError::Interval),
            _ => Ok(()),
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
            budget: None,
            part: Some(part),
            trigger: Trigger::Normal,
            sleeping_window_nanoseconds: None,
            requests: Vec::new(),
            urls: Vec::new(),
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
    fn a_budget_is_a_part_of_the_share_and_never_nothing() {
        let requests = |percent, objects| Budget { percent, interval_nanoseconds: 1, objects }.requests();
        for (percent, objects, expected) in
            [(2, 0, 1), (2, 49, 1), (2, 99, 1), (2, 100, 2), (100, 7, 7), (1, u64::MAX, u64::MAX / 100)]
        {
            assert_eq!(requests(percent, Some(objects)), Some(expected), "{percent} % of {objects}");
        }
        assert_eq!(requests(2, None), None);
    }

    #[test]
    fn a_budget_that_cannot_be_is_refused() {
        let budget = |percent, interval_nanoseconds| Some(Budget { percent, interval_nanoseconds, objects: None });
        let guard = Guard { bucket: None, budget: budget(2, 1), part: None, ..shared(1, part(1, None)) };
        assert_eq!(guard.check(), Ok(()));
        assert_eq!(Guard { budget: budget(0, 1), ..guard.clone() }.check(), Err(GuardError::Percent));
        assert_eq!(Guard { budget: budget(101, 1), ..guard.clone() }.check(), Err(GuardError::Percent));
        assert_eq!(Guard { budget: budget(1, 0), ..guard.clone() }.check(), Err(GuardError::Interval));
        let both = Guard { bucket: shared(1, part(1, None)).bucket, ..guard.clone() };
        assert_eq!(both.check(), Err(GuardError::Both));
        assert_eq!(Guard { part: Some(part(1, None)), ..guard }.check(), Err(GuardError::Part));
    }

    #[test]
    fn a_share_that_grows_does_not_change_the_rule() {
        let budget = |percent, objects| Some(Budget { percent, interval_nanoseconds: 1, objects });
        let guard = Guard { bucket: None, budget: budget(2, None), part: None, ..shared(1, part(1, None)) };
        assert!(guard.means_the_same(&Guard { budget: budget(2, Some(9)), ..guard.clone() }));
        assert!(!guard.means_the_same(&Guard { budget: budget(3, None), ..guard.clone() }));
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
