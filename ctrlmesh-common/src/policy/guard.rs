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
    /// Whether both are the same rule with the same fields; `reset` does not count.
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
            _ => Ok(()),
        }
    }
}

impl Trigger {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}
