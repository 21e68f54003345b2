//! Decides about a request to a member cluster. Where members are divided, a pod reads and writes all of its own, and
//! of the others single objects that it asks for by name.

use ctrlmesh_common::policy::{Members, Policy};
use ctrlmesh_common::selector::Selector;

use super::{Plan, Refusal, fence, proxied_to};
use crate::request::RequestInfo;

/// For a resource request that can be read in one way only.
pub(super) fn plan(
    policy: &Policy,
    members: &Members,
    cluster: &str,
    request: &RequestInfo<'_>,
) -> Result<Plan, Refusal> {
    if members.sees(cluster) {
        fence::check(policy, request)?;
        return Ok(Plan::default());
    }
    if let Some(to) = proxied_to(request).filter(|_| policy.forbids_proxy()) {
        return Err(Refusal::Proxied { to });
    }
    fence::check(policy, request)?;
    if request.verb().is_empty() {
        return Err(Refusal::Method);
    }
    if !request.is_collection() {
        return Ok(Plan::default());
    }
    // The member itself answers that there is nothing, with a version of its own.
    if !request.query().has_room_for(1) {
        return Err(Refusal::AmbiguousQuery);
    }
    Ok(Plan { selector: Some(Selector::nothing()), ..Plan::default() })
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Fence;
    use ctrlmesh_common::slots::{NamespaceHash, SlotSet};

    use super::*;
    use crate::decide::{Decision, decide};
    use crate::rewrite;

    const MEMBER: &str = "/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy";

    /// Owns the slot of `m-1`, and no other.
    fn policy() -> Policy {
        let slot = NamespaceHash::default().slot("m-1");
        let owner = |one| if one == slot { "a" } else { "b" };
        let slots = SlotSet::ALL.iter().map(|slot| (slot, owner(slot).to_owned())).collect();
        let fence = Fence { owner: Some("a".to_owned()), slots, ..Fence::default() };
        let paths = vec![MEMBER.parse().unwrap()];
        let members = Members { paths, sees: Some([slot].into()), ..Members::default() };
        Policy { fence: Some(fence), members: Some(members), ..Policy::default() }
    }

    fn decided(policy: &Policy, method: &str, cluster: &str, behind: &str) -> (Decision, String) {
        let target = MEMBER.replace("{cluster}", cluster) + behind;
        let paths = &policy.members.as_ref().unwrap().paths;
        let request = RequestInfo::parse(method, &target).unwrap().behind(paths).unwrap();
        assert_eq!(request.cluster(), Some(cluster));
        let decision = decide(policy, &request);
        let plan = if let Decision::Rewrite(plan) = &decision { plan.clone() } else { Plan::default() };
        (decision, rewrite::target(&request, &plan))
    }

    #[test]
    fn a_pod_does_with_its_own_members_what_it_likes() {
        for (method, behind) in [
            ("GET", "/api/v1/pods?watch=1"),
            ("POST", "/api/v1/namespaces/ns/configmaps"),
            ("DELETE", "/apis/apps/v1/namespaces/ns/deployments"),
            ("POST", "/api/v1/namespaces/ns/pods/p/exec?command=ls"),
            ("GET", "/api/v1/namespaces/ns/services/s/proxy/x"),
            ("GET", "/version"),
            ("GET", ""),
        ] {
            let (decision, target) = decided(&policy(), method, "m-1", behind);
            assert_eq!(decision, Decision::Pass, "{method} {behind}");
            assert_eq!(target, MEMBER.replace("{cluster}", "m-1") + behind);
        }
    }

    #[test]
    fn of_other_members_a_pod_reads_single_objects_only() {
        let of = |method, behind| decided(&policy(), method, "m-2", behind);
        for (method, behind) in [
            ("GET", "/api/v1/namespaces/ns/configmaps/c"),
            ("GET", "/version"),
            ("GET", "/apis"),
            ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"),
            ("POST", "/api/v1/namespaces/ns/pods/p/exec?command=ls"),
        ] {
            assert_eq!(of(method, behind).0, Decision::Pass, "{method} {behind}");
        }
        for behind in ["/api/v1/pods", "/api/v1/pods?watch=1&resourceVersion=7", "/apis/apps/v1/deployments?limit=5"] {
            let (decision, target) = of("GET", behind);
            assert!(matches!(&decision, Decision::Rewrite(plan) if plan.selector == Some(Selector::nothing())));
            let (path, query) = behind.split_once('?').unwrap_or((behind, ""));
            let path = MEMBER.replace("{cluster}", "m-2") + path;
            assert!(
                target.starts_with(&path) && target.contains("?labelSelector=") && target.ends_with(query),
                "{target}"
            );
        }
        for (method, behind) in [
            ("POST", "/api/v1/namespaces/ns/configmaps"),
            ("PUT", "/apis/apps/v1/namespaces/ns/deployments/d/status"),
            ("PATCH", "/api/v1/nodes/n"),
            ("DELETE", "/api/v1/namespaces/ns/configmaps"),
            ("POST", "/api/v1/namespaces/ns/events"),
        ] {
            let (decision, _) = of(method, behind);
            let Decision::Refuse(Refusal::Fenced(refused)) = decision else {
                panic!("{method} {behind}: {decision:?}")
            };
            assert!(refused.to_string().contains("belongs to \"b\" here"), "{refused}");
        }
        let proxied = of("GET", "/api/v1/namespaces/ns/services/s/proxy/x").0;
        assert_eq!(proxied, Decision::Refuse(Refusal::Proxied { to: "service" }));
        assert_eq!(of("FOO", "/api/v1/pods").0, Decision::Refuse(Refusal::Method));
    }

    #[test]
    fn to_anothers_member_nothing_is_written_without_a_fence_either() {
        let policy = Policy { fence: None, ..policy() };
        let of = |cluster| decided(&policy, "DELETE", cluster, "/api/v1/namespaces/ns/configmaps/c").0;
        assert_eq!(of("m-1"), Decision::Pass);
        assert!(matches!(of("m-2"), Decision::Refuse(Refusal::Fenced(_))));
    }

    #[test]
    fn members_that_are_not_divided_are_everybodys() {
        let mut policy = policy();
        policy.members.as_mut().unwrap().sees = None;
        for (method, behind) in [("GET", "/api/v1/pods"), ("POST", "/api/v1/namespaces/ns/configmaps")] {
            assert_eq!(decided(&policy, method, "m-2", behind).0, Decision::Pass, "{method} {behind}");
        }
    }

    #[test]
    fn what_is_behind_can_be_read_in_one_way_only() {
        for behind in ["/api/v1//pods", "/api/v1/namespaces/a%2fb/pods", "/api/v1/./pods"] {
            let target = MEMBER.replace("{cluster}", "m-1") + behind;
            let paths = policy().members.unwrap().paths;
            let read = RequestInfo::parse("GET", &target).unwrap().behind(&paths);
            let is_refused = match &read {
                Ok(request) => matches!(decide(&policy(), request), Decision::Refuse(Refusal::AmbiguousPath { .. })),
                Err(_) => true,
            };
            assert!(is_refused, "{behind}: {read:?}");
        }
    }
}
