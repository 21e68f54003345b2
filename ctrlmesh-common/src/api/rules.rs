//! Patterns and CEL rules that several kinds share.

/// Pattern of a label's key.
pub(super) const LABEL_KEY: &str = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// Pattern of an API group: a lower-case DNS subdomain, nothing for the core group, or the wildcard.
pub(super) const API_GROUP: &str = r"^(\*|([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?)$";

/// Pattern of a label's value.
pub(super) const LABEL_VALUE: &str = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";

/// Rule of a selector that has to restrict something.
pub(super) const HAS_REQUIREMENT: &str = "has(self.matchLabels) && size(self.matchLabels) > 0 \
     || has(self.matchExpressions) && size(self.matchExpressions) > 0";

/// What [`HAS_REQUIREMENT`] says where it does not hold.
pub(super) const HAS_REQUIREMENT_MESSAGE: &str =
    "must have at least one requirement in matchLabels or matchExpressions";

/// Rule of a root: who has each slot. A rule that is off divides nothing.
pub(super) const EVERY_SLOT_ONCE: &str = "has(self.disable) && self.disable || !has(self.manual) || size(self.manual) == 0 || \
     ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '10', '11', '12', '13', '14', '15', '16', '17', '18', '19', '20', '21', \
     '22', '23', '24', '25', '26', '27', '28', '29', '30', '31'].all(hash, \
     has(self.canary) && has(self.canary.inShardHash) && hash in self.canary.inShardHash \
     ? !self.manual.exists(shard, hash in shard.hashes) : self.manual.exists_one(shard, hash in shard.hashes))";

/// Rule of a time: whether any of its days is in any of its months, in a leap year.
pub(super) const SOME_DAY: &str = "!has(self.months) || size(self.months) == 0 || !has(self.daysOfMonth) || size(self.daysOfMonth) == 0 || \
     self.daysOfMonth.exists(day, self.months.exists(month, day <= (month == 2 ? 29 : month in [4, 6, 9, 11] ? 30 : 31)))";

/// Pattern of a slot, which is written as a label's value is.
pub(super) const SLOT: &str = "^([0-9]|[12][0-9]|3[01])$";

/// Pattern of a duration, as Go writes it.
pub(super) const DURATION: &str = r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$";

/// Rule of a duration that is not zero. The pattern again: without it CEL fails, and does not say which field it was.
pub(super) const POSITIVE_DURATION: &str =
    "self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') && duration(self) > duration('0s')";

/// What [`POSITIVE_DURATION`] says where it does not hold.
pub(super) const POSITIVE_DURATION_MESSAGE: &str = "must be a duration greater than zero, such as 500ms, 10s or 1h30m";

/// Rule of the age of a state that a list is answered from. An API server keeps 75 s of events, whatever happens
/// (`eventFreshDuration` in `watch_cache.go`): a watch from a state that is older could be too old for it.
pub(super) const STATE_AGE: &str = "self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') \
     && duration(self) >= duration('1s') && duration(self) <= duration('1m')";

/// What [`STATE_AGE`] says where it does not hold.
pub(super) const STATE_AGE_MESSAGE: &str = "must be a duration from 1s to 1m";

/// Rule of the interval of an analysis. Proxies report what they have seen every 10 s.
pub(super) const ANALYSIS_INTERVAL: &str = "self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') \
     && duration(self) >= duration('10s') && duration(self) <= duration('10m')";

/// What [`ANALYSIS_INTERVAL`] says where it does not hold.
pub(super) const ANALYSIS_INTERVAL_MESSAGE: &str = "must be a duration from 10s to 10m";

/// Rule of the time that a pod has to be back for.
pub(super) const SETTLE: &str =
    "self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') && duration(self) <= duration('10m')";

/// What [`SETTLE`] says where it does not hold.
pub(super) const SETTLE_MESSAGE: &str = "must be a duration from 0s to 10m";

/// Rule of the steps of a root's rollout: all percent come last.
pub(super) const EVERYTHING_LAST: &str = "!has(self.rollout) || !has(self.rollout.steps) || !self.rollout.steps.exists(step, has(step.percent) && \
     step.percent == 100) || self.rollout.steps.filter(step, has(step.percent) && step.percent == 100).size() == \
     1 && has(self.rollout.steps[size(self.rollout.steps) - 1].percent) && \
     self.rollout.steps[size(self.rollout.steps) - 1].percent == 100";

/// Rule of the steps of a root's rollout: a shadow comes first.
pub(super) const SHADOW_FIRST: &str = "!has(self.rollout) || !has(self.rollout.steps) || self.rollout.steps.filter(step, has(step.shadow) && \
     step.shadow).size() <= (self.rollout.steps.size() > 0 && has(self.rollout.steps[0].shadow) && \
     self.rollout.steps[0].shadow ? 1 : 0)";

/// Rule of the address of a Prometheus server.
pub(super) const METRIC_ADDRESS: &str =
    r"self.matches('^http://([-A-Za-z0-9.]+|[[][0-9A-Fa-f:.]+[]])(:[0-9]{1,5})?(/[-A-Za-z0-9._~/%]*)?$')";

/// What [`METRIC_ADDRESS`] says where it does not hold.
pub(super) const METRIC_ADDRESS_MESSAGE: &str =
    "must be an http URL without user, query and fragment, such as http://prometheus.monitoring.svc:9090";

/// Rule of a query: whatever begins with two braces is a placeholder that is replaced.
pub(super) const METRIC_QUERY: &str =
    "self.matches('^([^{]|[{]([^{]|$)|[{][{](revision|promoted|namespace|root|pods)[}][}])*$')";

/// What [`METRIC_QUERY`] says where it does not hold.
pub(super) const METRIC_QUERY_MESSAGE: &str =
    "may have the placeholders {{revision}}, {{promoted}}, {{namespace}}, {{root}} and {{pods}}, and no others";

/// Pattern of a decimal number.
pub(super) const DECIMAL: &str = r"^-?[0-9]+(\.[0-9]+)?$";

/// Rule of a range of numbers that restricts something.
pub(super) const HAS_BOUND: &str = "has(self.min) || has(self.max)";

/// What [`HAS_BOUND`] says where it does not hold.
pub(super) const HAS_BOUND_MESSAGE: &str = "min: at least one of min and max is required";

/// Rule of a range of numbers that any number can be in. What is no number breaks [`DECIMAL`].
pub(super) const ORDERED_RANGE: &str = "!has(self.min) || !has(self.max) \
     || !self.min.matches('^-?[0-9]+([.][0-9]+)?$') || !self.max.matches('^-?[0-9]+([.][0-9]+)?$') \
     || double(self.min) <= double(self.max)";

/// What [`ORDERED_RANGE`] says where it does not hold.
pub(super) const ORDERED_RANGE_MESSAGE: &str = "min: must not be greater than max";

/// Pattern of a file's name: no folder, and neither `.` nor `..`.
pub(super) const FILE_NAME: &str = r"^([^/.]|\.[^/.]|\.\.[^/])[^/]*$";

/// Pattern of a share of a hundred.
pub(super) const PERCENT: &str = r"^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)$";

/// Pattern of an HTTP method, or of all of them.
pub(super) const METHOD: &str = r"^(\*|[A-Z]+)$";

/// Pattern of a time of the day.
pub(super) const TIME_OF_DAY: &str = "^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$";

/// Pattern of a header's name.
pub(super) const HEADER_NAME: &str = "^[-!#$%&'*+.^_`|~0-9A-Za-z]+$";

/// Pattern of a time zone's name.
pub(super) const TIME_ZONE: &str = "^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$";

/// Pattern of most objects' names: a lower-case DNS subdomain.
pub(super) const SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
