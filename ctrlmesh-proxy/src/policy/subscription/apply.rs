//! Applies the manager's updates to the policies of the pods that are served.

use std::sync::Arc;

use ctrlmesh_common::policy::{PodPolicy, Policy};
use ctrlmesh_common::wire::{MAX_REASON_BYTES, PodEntry, Update, Verdict};
use ctrlmesh_runtime::telemetry;
use tracing::{debug, warn};

use crate::policy::PodPolicies;

/// Why a policy is refused.
#[derive(Debug, thiserror::Error)]
enum PolicyRefusal {
    #[error("parse the policy")]
    Parse(#[from] serde_json::Error),
    #[error("check the policy")]
    Check(#[from] ctrlmesh_common::policy::PolicyError),
}

/// The policies after `update`, and the verdicts about it. A node forgets the policy of a pod that is gone (`forgets`).
/// In a sidecar the last one stays, because a request that passes without one has escaped its shard.
pub(super) fn apply(before: &PodPolicies, update: Update, forgets: bool) -> (PodPolicies, Vec<Verdict>) {
    let mut after = before.clone();
    let mut verdicts = Vec::new();
    for gone in update.gone {
        let pod = gone.pod_name();
        if forgets {
            debug!(%pod, "nothing is said of the pod any more");
            after.remove(&pod);
        } else {
            warn!(%pod, "the manager says nothing of this pod; the last policy stays");
        }
    }
    for entry in update.policies {
        let Some(id) = entry.pod.clone() else { continue };
        let pod = id.pod_name();
        // The policy of another pod of the same name does not stay.
        after
            .remove(&pod)
            .filter(|kept| kept.uid == id.uid || kept.uid.is_empty())
            .map_or_else(|| (), |kept| drop(after.insert(pod.clone(), kept)));
        let digest = entry.digest;
        let refused = match policy(&entry) {
            Ok(policy) => {
                let pod_policy = PodPolicy {
                    namespace: id.namespace.clone(),
                    name: id.name.clone(),
                    uid: id.uid.clone(),
                    digest,
                    operator: entry.operator,
                    version: entry.version,
                    policy: Arc::new(policy),
                };
                after.insert(pod.clone(), pod_policy);
                String::new()
            }
            Err(refused) => reason(&refused),
        };
        let epoch = after.get(&pod).map_or(0, |kept| kept.policy.epoch);
        verdicts.push(Verdict { pod: Some(id), digest, epoch, refused });
    }
    (after, verdicts)
}

fn policy(entry: &PodEntry) -> Result<Policy, PolicyRefusal> {
    let policy: Policy = serde_json::from_slice(&entry.policy)?;
    policy.check()?;
    Ok(policy)
}

fn reason(refused: &PolicyRefusal) -> String {
    let mut text = telemetry::chain(refused);
    text.truncate(text.floor_char_boundary(MAX_REASON_BYTES));
    text
}

#[cfg(test)]
pub(super) mod tests {
    use ctrlmesh_common::wire::PodId;

    use super::*;

    pub(crate) fn entry(name: &str, uid: &str, policy: &str) -> PodEntry {
        let pod = PodId { namespace: "ns".to_owned(), name: name.to_owned(), uid: uid.to_owned() };
        let digest = ctrlmesh_common::wire::digest(policy.as_bytes());
        let (operator, policy) = ("ns/op".to_owned(), policy.to_owned().into());
        PodEntry { pod: Some(pod), digest, policy, operator, version: 1 }
    }

    pub(crate) fn update(policies: &[PodEntry]) -> Update {
        Update { policies: policies.to_vec(), ..Update::default() }
    }

    pub(crate) fn epochs(policies: &PodPolicies) -> Vec<(&str, u64)> {
        policies.iter().map(|(pod, kept)| (pod.name.as_str(), kept.policy.epoch)).collect()
    }

    #[test]
    fn a_wrong_policy_is_refused_with_the_reason() {
        let (policies, verdicts) = apply(&PodPolicies::new(), update(&[entry("a", "u", r#"{"epoch": 3}"#)]), true);
        assert_eq!(epochs(&policies), [("a", 3)]);
        assert_eq!((verdicts[0].epoch, verdicts[0].refused.as_str()), (3, ""));
        for (wrong, why) in [
            ("{", "EOF"),
            (r#"{"epoch": 4, "fromTomorrow": 1}"#, "fromTomorrow"),
            (r#"{"epoch": 4, "limits": [{"selector": "a in"}]}"#, "selector"),
            (r#"{"epoch": 4, "lock": {"namespace": "", "name": "n", "shard": "s"}}"#, "lock.namespace"),
        ] {
            let (after, verdicts) = apply(&policies, update(&[entry("a", "u", wrong)]), true);
            assert_eq!(after, policies, "{wrong}");
            assert_eq!(verdicts[0].epoch, 3);
            assert!(verdicts[0].refused.contains(why), "{}", verdicts[0].refused);
        }
    }

    #[test]
    fn a_wrong_policy_does_not_hold_up_another() {
        let both = update(&[entry("a", "u", "nonsense"), entry("b", "v", r#"{"epoch": 1}"#)]);
        let (policies, verdicts) = apply(&PodPolicies::new(), both, true);
        assert_eq!(epochs(&policies), [("b", 1)]);
        assert_eq!(verdicts.len(), 2);
    }

    #[test]
    fn a_node_forgets_a_gone_pods_policy_and_a_sidecar_does_not() {
        let (policies, _) = apply(&PodPolicies::new(), update(&[entry("a", "u", r#"{"epoch": 3}"#)]), true);
        let pod = PodId { namespace: "ns".to_owned(), name: "a".to_owned(), uid: "u".to_owned() };
        let gone = Update { gone: vec![pod], ..Update::default() };
        assert_eq!(apply(&policies, gone.clone(), true).0, PodPolicies::new());
        assert_eq!(apply(&policies, gone, false).0, policies);
    }

    #[test]
    fn another_incarnation_inherits_nothing() {
        let (policies, _) = apply(&PodPolicies::new(), update(&[entry("a", "u", r#"{"epoch": 3}"#)]), true);
        let (after, verdicts) = apply(&policies, update(&[entry("a", "new", "nonsense")]), true);
        assert_eq!(after, PodPolicies::new());
        assert_eq!(verdicts[0].epoch, 0);
    }

    #[test]
    fn a_reason_is_cut_where_a_letter_ends() {
        let long = serde_json::from_str::<Policy>(&format!(r#"{{"{}": 1}}"#, "\u{e4}".repeat(2000)));
        let text = reason(&long.unwrap_err().into());
        assert!(text.len() <= MAX_REASON_BYTES && text.len() > MAX_REASON_BYTES - 4);
    }
}
