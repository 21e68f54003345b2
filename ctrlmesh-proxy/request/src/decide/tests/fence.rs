use ctrlmesh_common::policy::Fence;
use ctrlmesh_common::slots::{NamespaceHash, Slot};

use super::*;

fn slot(name: &str) -> Slot {
    NamespaceHash::default().slot(name)
}

/// The pod writes for `mine`, which owns the slots of `own` and `shop`, but not the pinned namespace `shop`. The slot
/// of `other` belongs to `theirs`, namespace `moving` to nobody, and so does every other slot.
fn fenced(resources: &[(&str, &str)]) -> Policy {
    let matched = |(group, resource): &(&str, &str)| ResourceMatch {
        api_groups: vec![(*group).to_owned()],
        resources: vec![(*resource).to_owned()],
    };
    let resources: Vec<ResourceMatch> = resources.iter().map(matched).collect();
    let owned = |name: &str, owner: &str| (slot(name), owner.to_owned());
    let fence = Fence {
        operator: "ops/root".to_owned(),
        owner: Some("mine".to_owned()),
        slots: [owned("own", "mine"), owned("shop", "mine"), owned("moving", "mine"), owned("other", "theirs")].into(),
        namespaces: [("shop".to_owned(), "theirs".to_owned())].into(),
        revoked: ["moving".to_owned()].into(),
        resources: resources.clone(),
        ..Fence::default()
    };
    let limit = Limit { relate_resources: resources, selector: Selector::parse("a=1").unwrap(), changed_at: None };
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    Policy { epoch: 7, limits: vec![limit], lock: Some(lock), fence: Some(fence), ..Policy::default() }
}

fn widgets() -> Policy {
    fenced(&[("example.com", "widgets")])
}

fn is_refused(policy: &Policy, method: &str, target: &str) -> bool {
    let request = RequestInfo::parse(method, target).unwrap();
    let refused = matches!(decide(policy, &request), Decision::Refuse(Refusal::Fenced(_)));
    if refused && !matches!(request.verb(), "create" | "deletecollection") {
        assert_eq!(written(policy, &request), None, "{method} {target}");
    }
    refused
}

/// Each verb that writes, for an object or a collection in `within`.
fn writes(within: &str) -> Vec<(&'static str, String)> {
    let object = format!("{within}/widgets/w");
    vec![
        ("POST", format!("{within}/widgets")),
        ("POST", format!("{object}/scale")),
        ("PUT", object.clone()),
        ("PUT", format!("{object}/status")),
        ("PATCH", object.clone()),
        ("PATCH", format!("{object}/status?dryRun=All")),
        ("DELETE", object.clone()),
        ("DELETE", format!("{within}/widgets?labelSelector=b")),
    ]
}

#[test]
fn each_verb_writes_in_owned_namespaces_only() {
    for (namespace, refused) in
        [("own", false), ("other", true), ("shop", true), ("moving", true), ("nobodys", true), ("o%74her", true)]
    {
        for (method, target) in writes(&format!("/apis/example.com/v1/namespaces/{namespace}")) {
            assert_eq!(is_refused(&widgets(), method, &target), refused, "{method} {target}");
        }
    }
}

#[test]
fn objects_of_cluster_scope_go_by_their_name() {
    let all = "/apis/example.com/v1/widgets";
    for (name, refused) in [("own", false), ("other", true), ("nobodys", true), ("shop", false), ("moving", false)] {
        for method in ["PUT", "PATCH", "DELETE"] {
            for behind in ["", "/status"] {
                let target = format!("{all}/{name}{behind}");
                assert_eq!(is_refused(&widgets(), method, &target), refused, "{method} {target}");
            }
        }
    }
    assert!(!is_refused(&widgets(), "POST", all));
    let namespaces = fenced(&[("", "namespaces")]);
    for (name, refused) in [("own", false), ("other", true), ("shop", true), ("moving", true)] {
        for behind in ["", "/status", "/finalize"] {
            let target = format!("/api/v1/namespaces/{name}{behind}");
            assert_eq!(is_refused(&namespaces, "PUT", &target), refused, "{target}");
        }
    }
}

#[test]
fn a_collection_across_slots_is_deleted_in_the_share() {
    let all = "/apis/example.com/v1/widgets";
    let narrowed = Plan { selector: Some(Selector::parse("a=1").unwrap()), ..Plan::default() };
    let request = RequestInfo::parse("DELETE", all).unwrap();
    assert_eq!(decide(&widgets(), &request), Decision::Rewrite(narrowed));
    assert_eq!(written(&widgets(), &request), Some(Written::AnySlot));
    // Nothing would keep it in the share.
    let unlimited = Policy { limits: Vec::new(), ..widgets() };
    assert!(is_refused(&unlimited, "DELETE", all));
}

#[test]
fn a_pod_that_may_write_nothing_writes_no_fenced_kind() {
    let mut policy = widgets();
    policy.fence.as_mut().unwrap().owner = None;
    for within in ["/apis/example.com/v1/namespaces/own", "/apis/example.com/v1/namespaces/nobodys"] {
        for (method, target) in writes(within) {
            assert!(is_refused(&policy, method, &target), "{method} {target}");
        }
    }
    for method in ["POST", "DELETE"] {
        assert!(is_refused(&policy, method, "/apis/example.com/v1/widgets"), "{method}");
    }
    assert!(!is_refused(&policy, "PUT", "/api/v1/namespaces/other/pods/p"));
}

#[test]
fn reads_connections_and_other_kinds_are_not_fenced() {
    let everything = fenced(&[]);
    for (method, target) in [
        ("GET", "/apis/example.com/v1/namespaces/other/widgets/w"),
        ("GET", "/apis/example.com/v1/namespaces/other/widgets?watch=1"),
        ("POST", "/api/v1/namespaces/other/pods/p/exec?command=sh"),
        ("POST", "/api/v1/namespaces/other/pods/p/portforward"),
        ("DELETE", "/api/v1/namespaces/other/services/s/proxy/x"),
        ("POST", "/api/v1/namespaces/other/events"),
        ("PATCH", "/apis/events.k8s.io/v1/namespaces/other/events/e"),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/ops/leases/op"),
        ("POST", "/apis/coordination.k8s.io/v1/namespaces/ops/leases"),
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews"),
        ("POST", "/apis/authorization.k8s.io/v1/namespaces/other/localsubjectaccessreviews"),
        ("POST", "/api/v1/namespaces/other/serviceaccounts/a/token"),
        ("POST", "/version"),
    ] {
        assert!(!is_refused(&everything, method, target), "{method} {target}");
    }
    assert!(is_refused(&everything, "PUT", "/api/v1/namespaces/other/pods/p"));
    assert!(is_refused(&everything, "POST", "/api/v1/namespaces/other/pods/p/eviction"));
    assert!(!is_refused(&widgets(), "PUT", "/api/v1/namespaces/other/pods/p"));
    let accounts = fenced(&[("", "serviceaccounts")]);
    assert!(is_refused(&accounts, "POST", "/api/v1/namespaces/other/serviceaccounts/a/token"));
}

#[test]
fn the_lock_is_not_fenced_even_of_a_fenced_kind() {
    let maps = fenced(&[("", "configmaps"), ("coordination.k8s.io", "leases")]);
    let [map, lease] = ["/api/v1/namespaces/ops/configmaps", "/apis/coordination.k8s.io/v1/namespaces/ops/leases"];
    for all in [map, lease] {
        for method in ["PUT", "PATCH", "DELETE"] {
            assert!(!is_refused(&maps, method, &format!("{all}/op")), "{method} {all}");
            assert!(is_refused(&maps, method, &format!("{all}/else")), "{method} {all}");
        }
        // Only the body tells.
        let request = RequestInfo::parse("POST", all).unwrap();
        let Decision::Rewrite(Plan { lock: Some(plan), .. }) = decide(&maps, &request) else { panic!("{all}") };
        assert!(plan.in_body && plan.unless_lock.is_some(), "{all}");
    }
    assert!(is_refused(&maps, "POST", "/api/v1/namespaces/other/configmaps"));
}

#[test]
fn a_refusal_says_slot_owner_and_epoch() {
    let refused = |target| match decide(&widgets(), &RequestInfo::parse("DELETE", target).unwrap()) {
        Decision::Refuse(refusal) => refusal.to_string(),
        other => panic!("{target}: {other:?}"),
    };
    let see = "see `kubectl get shardingconfig -n ops root -o jsonpath={.status.ownership}`";
    assert_eq!(
        refused("/apis/example.com/v1/namespaces/other/widgets/w"),
        format!("slot {} belongs to \"theirs\" here, and this pod writes for \"mine\" (epoch 7); {see}", slot("other")),
    );
    assert_eq!(
        refused("/apis/example.com/v1/namespaces/moving/widgets/w"),
        format!(
            "slot {} belongs to nobody here for now, and this pod writes for \"mine\" (epoch 7); {see}",
            slot("moving")
        ),
    );
}

#[test]
fn a_write_that_passes_tells_its_slot() {
    let told = |policy: &Policy, method, target| written(policy, &RequestInfo::parse(method, target).unwrap());
    let own = "/apis/example.com/v1/namespaces/own/widgets";
    assert_eq!(told(&widgets(), "POST", own), Some(Written::Slot(slot("own"))));
    assert_eq!(told(&widgets(), "PUT", "/api/v1/namespaces/other/pods/p"), Some(Written::Unfenced));
    assert_eq!(told(&Policy::default(), "POST", own), Some(Written::Unfenced));
    assert_eq!(told(&widgets(), "POST", "/apis/example.com/v1/widgets"), Some(Written::AnySlot));
    assert_eq!(told(&widgets(), "GET", own), None);
    assert_eq!(told(&widgets(), "POST", "/api/v1/namespaces/own/pods/p/exec"), None);
}

#[test]
fn a_policy_that_passes_everything_fences_nothing() {
    let pass = Policy { mode: Mode::Pass, ..widgets() };
    for (method, target) in writes("/apis/example.com/v1/namespaces/other") {
        assert!(!is_refused(&pass, method, &target), "{method} {target}");
        assert_eq!(written(&pass, &RequestInfo::parse(method, &target).unwrap()), Some(Written::Unfenced));
    }
}

#[test]
fn what_lapses_is_every_write_to_a_fenced_kind() {
    let mut lapsing = widgets();
    lapsing.fence.as_mut().unwrap().lapses = true;
    let asked =
        |policy: &Policy, method: &str, target: &str| lapses(policy, &RequestInfo::parse(method, target).unwrap());
    for namespace in ["own", "other", "moving", "nobodys"] {
        let within = format!("/apis/example.com/v1/namespaces/{namespace}");
        for (method, target) in writes(&within) {
            assert!(asked(&lapsing, method, &target), "{method} {target}");
            assert!(!asked(&widgets(), method, &target), "it does not lapse");
            let passing = Policy { mode: Mode::Pass, ..lapsing.clone() };
            assert!(!asked(&passing, method, &target), "nothing is enforced");
        }
        assert!(!asked(&lapsing, "GET", &format!("{within}/widgets/w")));
        assert!(!asked(&lapsing, "GET", &format!("{within}/widgets?watch=1")));
        assert!(!asked(&lapsing, "PUT", &format!("/api/v1/namespaces/{namespace}/secrets/s")));
    }
    for across in ["/apis/example.com/v1/widgets", "/apis/example.com/v1/widgets/own"] {
        assert!(asked(&lapsing, "DELETE", across), "{across}");
    }
    let mut leases = fenced(&[("coordination.k8s.io", "leases")]);
    leases.fence.as_mut().unwrap().lapses = true;
    let leases_of = "/apis/coordination.k8s.io/v1/namespaces/ops/leases";
    assert!(asked(&leases, "PUT", &format!("{leases_of}/else")));
    assert!(!asked(&leases, "PUT", &format!("{leases_of}/op")), "the lock");
}
