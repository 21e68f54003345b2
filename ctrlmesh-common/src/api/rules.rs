//! Patterns and CEL rules that several kinds share.

/// Pattern of a label's key.
pub(super) const LABEL_KEY: &str =
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// Pattern of a label's value.
pub(super) const LABEL_VALUE: &str = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";

/// Rule of a selector that has to restrict something.
pub(super) const HAS_REQUIREMENT: &str = "has(self.matchLabels) && size(self.matchLabels) > 0 \
     || has(self.matchExpressions) && size(self.matchExpressions) > 0";

/// What [`HAS_REQUIREMENT`] says where it does not hold.
pub(super) const HAS_REQUIREMENT_MESSAGE: &str =
    "must have at least one requirement in matchLabels or matchExpressions";

/// Pattern of a slot, which is written as a label's value is.
pub(super) const SLOT: &str = "^([0-9]|[12][0-9]|3[01])$";

/// Pattern of a duration, as Go writes it.
pub(super) const DURATION: &str = r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$";

/// Rule of a duration that is not zero. The pattern again: without it CEL fails, and does not say which field it was.
pub(super) const POSITIVE_DURATION: &str =
    "self.matches('^([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$') && duration(self) > duration('0s')";

/// What [`POSITIVE_DURATION`] says where it does not hold.
pub(super) const POSITIVE_DURATION_MESSAGE: &str =
    "must be a duration greater than zero, such as 500ms, 10s or 1h30m";

/// Pattern of a share of a hundred.
pub(super) const PERCENT: &str = r"^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)$";

/// Pattern of an HTTP method, or of all of them.
pub(super) const METHOD: &str = r"^(\*|[A-Z]+)$";

/// Pattern of a time of the day.
pub(super) const TIME_OF_DAY: &str = "^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$";

/// Pattern of most objects' names: a lower-case DNS subdomain.
pub(super) const SUBDOMAIN: &str =
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
