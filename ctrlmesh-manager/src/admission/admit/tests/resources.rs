use serde_json::{Value, json};

use super::*;

#[test]
fn a_resource_that_is_not_served_is_a_warning() {
    let mut object = config("b", "b", "b");
    object["spec"]["limits"][0]["relateResources"] = json!([
        {"apiGroups": ["", "apps"], "resources": ["pods", "deployments"]},
        {"apiGroups": ["apps"], "resources": ["pods", "deploymnets"]},
        {"apiGroups": ["batch"], "resources": ["*"]},
    ]);
    let response = validate(&asked("CREATE", object.clone(), None), Some(&snapshot("")), &Labelling::default());
    assert!(response.allowed, "{}", message(&response));
    let warnings = response.warnings.unwrap();
    let of_resources = warnings.iter().filter(|one| one.contains("relateResources"));
    let fields: Vec<&str> = of_resources.filter_map(|one| Some(one.split_once(": ")?.0)).collect();
    let expected = [
        "spec.limits[0].relateResources[1].resources[0]",
        "spec.limits[0].relateResources[1].resources[1]",
        "spec.limits[0].relateResources[2].resources[0]",
    ];
    assert_eq!(fields, expected, "{warnings:?}");
    let unknown = Snapshot { served: std::sync::Arc::default(), ..snapshot("") };
    let response = validate(&asked("CREATE", object, None), Some(&unknown), &Labelling::default());
    let warnings = response.warnings.unwrap_or_default();
    assert!(!warnings.iter().any(|one| one.contains("relateResources")), "{warnings:?}");
}

/// The fields of which it is said that nobody labels what they limit.
fn unlabelled(object: &Value, listed: Option<&str>) -> Vec<String> {
    let known = Snapshot { listed: listed.map(str::to_owned), ..snapshot("") };
    let response = validated(&asked("CREATE", object.clone(), None), Some(&known));
    assert!(response.allowed, "{}", message(&response));
    let warnings = response.warnings.unwrap_or_default().into_iter();
    let of_labels = warnings.filter(|one| one.contains("ctrlmesh-sharding-resource"));
    of_labels.map(|one| one.split_once(": ").unwrap().0.to_owned()).collect()
}

#[test]
fn a_limit_by_labels_that_nobody_sets_is_a_warning() {
    let resources = json!([
        {"apiGroups": ["", "apps"], "resources": ["pods", "deployments"]},
        {"apiGroups": ["*"], "resources": ["*"]},
    ]);
    let mut by_root: Value = serde_saphyr::from_str(ROOT.trim_end_matches("---\n")).unwrap();
    by_root["spec"]["root"]["resourceSelector"] = json!([{"relateResources": resources}]);
    for listed in [Some(""), None, Some("groupVersionKinds: [")] {
        assert!(unlabelled(&by_root, listed).is_empty(), "its kinds are labelled because it names them");
    }
    let mut by_hand = config("b", "b", "b");
    by_hand["spec"]["limits"][0]["relateResources"] = resources;
    assert!(unlabelled(&by_hand, Some("")).is_empty(), "their labels are the user's");
    by_hand["spec"]["limits"][0]["selector"] = json!({"matchLabels": {"ctrlmesh.kusionstack.io/namespace": "shop"}});
    let second = "spec.limits[0].relateResources[0].resources[1]";
    let listed = Some("groupVersionKinds: {v1: [Pod]}");
    assert_eq!(unlabelled(&by_hand, listed), [second]);
    for unknown in [None, Some("groupVersionKinds: [")] {
        assert!(unlabelled(&by_hand, unknown).is_empty(), "{unknown:?}");
    }
    for (operator, values, only_labelled) in [
        ("In", json!(["shop"]), true),
        ("Exists", json!([]), true),
        ("NotIn", json!(["shop"]), false),
        ("DoesNotExist", json!([]), false),
    ] {
        let key = "ctrlmesh.kusionstack.io/namespace";
        by_hand["spec"]["limits"][0]["selector"] =
            json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        assert_eq!(!unlabelled(&by_hand, listed).is_empty(), only_labelled, "{operator}");
    }
}

#[test]
fn a_limit_by_share_on_what_nobody_labels_is_refused() {
    let breaker = |group: &str, resources: &[&str], bucket: Value| {
        let rule = json!({"apiGroups": [group], "resources": resources, "verbs": ["delete"], "namespaces": ["*"]});
        json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "CircuitBreaker", "metadata": {"name": "b", "namespace": "ops"},
            "spec": {"selector": {"matchLabels": {"app": "a"}}, "rateLimitings": [{"name": "a", "bucket": bucket, "resourceRules": [rule]}]}})
    };
    let by_share = || json!({"percentOfShare": 2, "interval": "5m"});
    let known = Snapshot { listed: Some("groupVersionKinds: {v1: [Pod]}".to_owned()), ..snapshot("") };
    let refused = |object: Value| message(&validated(&asked("CREATE", object, None), Some(&known))).to_owned();
    let said = refused(breaker("apps", &["deployments/scale"], by_share()));
    let expected =
        "spec.rateLimitings[0].resourceRules[0].resources[0]: \"deployments\" of apiGroup \"apps\" cannot be counted";
    assert!(said.contains(expected), "{said}");
    for fine in [
        breaker("", &["pods", "pods/eviction", "namespaces"], by_share()),
        breaker("apps", &["deployments"], json!({"burst": 1, "limit": 1, "interval": "1s"})),
        // What is not served yet may be labelled once it is.
        breaker("example.com", &["widgets"], by_share()),
    ] {
        let response = validated(&asked("CREATE", fine.clone(), None), Some(&known));
        assert!(response.allowed, "{fine}: {}", message(&response));
    }
    // Its kinds were labelled once: it can still be reset.
    let stored = breaker("apps", &["deployments"], by_share());
    let mut reset = stored.clone();
    reset["metadata"]["annotations"] = json!({"circuitbreaker.ctrlmesh.kusionstack.io/reset": "a"});
    let response = validated(&asked("UPDATE", reset.clone(), Some(stored.clone())), Some(&known));
    assert!(response.allowed && response.warnings.unwrap()[0].contains("cannot be counted"));
    reset["spec"]["rateLimitings"][0]["bucket"]["percentOfShare"] = json!(3);
    assert!(!validated(&asked("UPDATE", reset, Some(stored)), Some(&known)).allowed);
    let unknown = Snapshot { listed: None, ..known.clone() };
    let of_apps = breaker("apps", &["deployments"], by_share());
    assert!(validated(&asked("CREATE", of_apps.clone(), None), Some(&unknown)).allowed);
    let by_root = Snapshot { configs: snapshot(ROOT).configs, ..known };
    assert!(validated(&asked("CREATE", of_apps, None), Some(&by_root)).allowed, "the root names every kind");
}
