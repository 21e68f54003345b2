//! Which conditions of a ShardingConfig say that something is wrong.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Types of conditions that are True where all is well.
const GOOD: [&str; 6] = ["Accepted", "Labelled", "Owned", "Programmed", "Settled", "WebhookRouted"];

/// Types of conditions that are True where something is wrong.
const BAD: [&str; 2] = ["Degraded", "RolledBack"];

/// Reasons of `Fenced` by which the API server does not refuse what it should. Others are what the root asks for.
const UNFENCED: [&str; 3] = ["NotProved", "NotWritten", "Unsupported"];

/// Reasons of `Progressing` by which a version goes no further.
const STUCK: [&str; 2] = ["StrategyCannotHold", "Held"];

/// Whether a condition of a `ShardingConfig` says that something is wrong. One of an unknown type does not.
pub fn is_problem(condition: &Condition) -> bool {
    let Condition { type_, status, reason, .. } = condition;
    let is_true = status == "True";
    match type_.as_str() {
        "Fenced" => UNFENCED.contains(&reason.as_str()),
        "Progressing" => STUCK.contains(&reason.as_str()),
        kind if BAD.contains(&kind) => is_true,
        kind => GOOD.contains(&kind) && !is_true,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    #[test]
    fn each_type_of_condition_has_its_own_bad_side() {
        for (kind, status, reason, is_bad) in [
            ("Accepted", "True", "Valid", false),
            ("Accepted", "False", "Invalid", true),
            ("Settled", "Unknown", "Unknown", true),
            ("Owned", "True", "EveryObject", false),
            ("Owned", "False", "Unowned", true),
            ("Degraded", "True", "ProxyAway", true),
            ("Degraded", "False", "AsExpected", false),
            ("RolledBack", "True", "Failed", true),
            ("RolledBack", "False", "NotNeeded", false),
            ("Promoted", "False", "OnTrial", false),
            ("Analysing", "False", "Idle", false),
            ("Fenced", "False", "ProxyOnly", false),
            ("Fenced", "False", "NotProved", true),
            ("Progressing", "False", "Idle", false),
            ("Progressing", "False", "Held", true),
            ("Unheard", "False", "Of", false),
        ] {
            let condition = Condition {
                type_: kind.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message: String::new(),
                observed_generation: None,
                last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
            };
            assert_eq!(is_problem(&condition), is_bad, "{kind} {status} {reason}");
        }
    }
}
