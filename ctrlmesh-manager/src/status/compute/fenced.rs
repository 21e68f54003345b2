//! The condition `Fenced` of a root: whether the API server refuses writes to what a pod does not own.

use ctrlmesh_common::api::{FenceMode, ShardingConfig};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::as_before;
use crate::ownership::fence_state::{FenceState, States, Unfenced};
pub(super) use crate::rules::fenced::FENCED;
use crate::rules::fenced::UNSUPPORTED;
use crate::status::finding::{Finding, finding};

/// None for what is no root.
pub(super) fn of(config: &ShardingConfig, full_name: &str, before: &[Condition], states: &States) -> Option<Finding> {
    let rule = config.spec.root.as_ref()?;
    let found = match rule.fence_mode() {
        FenceMode::Off => finding(false, "Off", "nobody refuses writes: spec.root.fence is Off"),
        FenceMode::Proxy => finding(false, "ProxyOnly", "only the proxies refuse writes: spec.root.fence is Proxy"),
        FenceMode::Server if rule.disable == Some(true) => {
            finding(false, "Disabled", "the root is switched off, and its fence with it")
        }
        FenceMode::Server => match states.get(full_name) {
            Some(state) => by_server(state),
            // A new leader has not asked yet.
            None => as_before(before, FENCED)
                .unwrap_or_else(|| finding(false, "Pending", "the API server was not asked yet")),
        },
    };
    Some(found)
}

fn by_server(state: &FenceState) -> Finding {
    match state {
        FenceState::Enforced(proof) if proof.endpoints == 1 => {
            let message = "the API server has one address, and enforces the fence there. If several servers stand \
                behind that address, they cannot be asked one by one";
            finding(true, "SingleAddress", message)
        }
        FenceState::Enforced(proof) => {
            finding(true, "Enforced", format!("all {} endpoints of the API server enforce it", proof.endpoints))
        }
        FenceState::Open(Unfenced::Unsupported) => {
            let message = "the API server has no ValidatingAdmissionPolicy, which it has since Kubernetes 1.30: only \
                the proxies refuse writes";
            finding(false, UNSUPPORTED, message)
        }
        FenceState::Open(Unfenced::NotWritten { why }) => finding(false, "NotWritten", why),
        FenceState::Open(Unfenced::NotProved { why }) => finding(false, "NotProved", why),
        FenceState::Open(Unfenced::Removed) => finding(false, "Removed", "the root is being deleted"),
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{Root, ShardingConfigSpec};

    use super::*;
    use crate::ownership::fence_state::Proof;

    fn root(fence: Option<FenceMode>) -> ShardingConfig {
        let root = Some(Root { fence, ..Root::default() });
        ShardingConfig::new("op", ShardingConfigSpec { root, ..ShardingConfigSpec::default() })
    }

    fn said(config: &ShardingConfig, state: Option<FenceState>) -> Option<(bool, String)> {
        let states = state.into_iter().map(|state| ("ops/op".to_owned(), state)).collect();
        let found = of(config, "ops/op", &[], &states)?;
        Some((found.holds, found.reason.into_owned()))
    }

    #[test]
    fn what_the_api_server_enforces_is_a_condition() {
        let server = root(Some(FenceMode::Server));
        let enforced = |endpoints| FenceState::Enforced(Proof { revision: String::new(), epoch: 1, endpoints });
        let because = |why: &str| why.to_owned();
        for (state, holds, reason) in [
            (enforced(3), true, "Enforced"),
            (enforced(1), true, "SingleAddress"),
            (FenceState::Open(Unfenced::Unsupported), false, "Unsupported"),
            (FenceState::Open(Unfenced::NotWritten { why: because("a") }), false, "NotWritten"),
            (FenceState::Open(Unfenced::NotProved { why: because("a") }), false, "NotProved"),
            (FenceState::Open(Unfenced::Removed), false, "Removed"),
        ] {
            assert_eq!(said(&server, Some(state)), Some((holds, reason.to_owned())));
        }
    }

    #[test]
    fn a_root_says_who_fences_where_the_server_does_not() {
        for (fence, reason) in
            [(FenceMode::Off, "Off"), (FenceMode::Proxy, "ProxyOnly"), (FenceMode::Server, "Pending")]
        {
            assert_eq!(said(&root(Some(fence)), None), Some((false, reason.to_owned())));
        }
        assert_eq!(said(&root(None), None), Some((false, "Pending".to_owned())), "as with Server");
        assert_eq!(said(&ShardingConfig::new("a", ShardingConfigSpec::default()), None), None);
        let mut disabled = root(Some(FenceMode::Server));
        disabled.spec.root.as_mut().unwrap().disable = Some(true);
        assert_eq!(said(&disabled, None), Some((false, "Disabled".to_owned())));
    }
}
