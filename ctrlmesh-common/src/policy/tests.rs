use super::*;

fn limit(resources: &[(&str, &str)], selector: &str) -> Limit {
    let relate_resources = resources
        .iter()
        .map(|(group, resource)| ResourceMatch {
            api_groups: vec![(*group).to_owned()],
            resources: vec![(*resource).to_owned()],
        })
        .collect();
    Limit { relate_resources, selector: Selector::parse(selector).unwrap(), changed_at: None }
}

#[test]
fn all_limits_that_cover_a_resource_hold_at_once() {
    let policy = Policy {
        limits: vec![
            limit(&[("", "pods")], "a=1"),
            limit(&[("apps", "*")], "b in (x,y)"),
            limit(&[("*", "pods")], "!c"),
            limit(&[], ""),
        ],
        ..Policy::default()
    };
    let text = |group, resource| policy.selector_for(group, resource).map(|selector| selector.to_string());
    assert_eq!(text("", "pods").as_deref(), Some("a=1,!c"));
    assert_eq!(text("apps", "deployments").as_deref(), Some("b in (x,y)"));
    assert_eq!(text("", "secrets"), None);
    let pass = Policy { mode: Mode::Pass, ..policy };
    assert_eq!(pass.selector_for("", "pods"), None);
}

#[test]
fn a_limit_without_resources_covers_every_resource() {
    let policy = Policy { limits: vec![limit(&[], "a=1")], ..Policy::default() };
    assert!(policy.selector_for("example.com", "widgets").is_some());
}

#[test]
fn the_policy_of_a_pod_without_a_shard_lets_no_object_pass() {
    let policy = Policy::nothing();
    let selector = policy.selector_for("example.com", "widgets").unwrap();
    assert!(!selector.overlaps(&Selector::everything()));
    assert_eq!(Selector::parse(&selector.to_string()), Ok(selector));
}

#[test]
fn the_newest_change_of_a_resource_counts() {
    let mut policy =
        Policy { limits: vec![limit(&[("", "pods")], ""), limit(&[("", "*")], "a=1")], ..Policy::default() };
    policy.limits[0].changed_at = Some(40);
    policy.limits[1].changed_at = Some(7);
    assert_eq!(policy.changed_at("", "pods"), Some(40));
    assert_eq!(policy.changed_at("", "secrets"), Some(7));
    assert_eq!(policy.changed_at("apps", "deployments"), None);
}

#[test]
fn a_lock_reserves_every_name_that_a_shard_could_have() {
    let lock = Lock { namespace: "ns".into(), name: "op".into(), shard: "s-1".into() };
    assert_eq!(lock.per_shard(), "op---s-1");
    assert!(lock.reserves("op---s-1") && lock.reserves("op---other") && lock.reserves("op---"));
    assert!(!lock.reserves("op") && !lock.reserves("op--s") && !lock.reserves("opx---s"));
}

#[test]
fn what_limits_a_resource_must_have_room_in_a_request() {
    let part = |bytes: usize| {
        let values: Vec<String> = (0..bytes / 13).map(|at| format!("{at:010}")).collect();
        format!("a in ({})", values.join(","))
    };
    let policy = |limits: &[Limit]| Policy { limits: limits.to_vec(), ..Policy::default() };
    let (half, most) = (part(MAX_SELECTOR_BYTES / 2 - 100), part(MAX_SELECTOR_BYTES - 100));
    let (pods, all) = ([("", "pods")], [("*", "*")]);
    for fits in [
        policy(&[limit(&pods, &most)]),
        policy(&[limit(&pods, &half), limit(&pods, &half)]),
        policy(&[limit(&pods, &most), limit(&[("apps", "*")], &most)]),
    ] {
        assert_eq!(fits.check(), Ok(()));
    }
    let long = limit(&pods, &part(MAX_SELECTOR_BYTES + 100));
    for (policy, at) in [
        (policy(&[limit(&pods, "b=1"), long.clone()]), 0),
        (policy(&[limit(&[("apps", "*")], "b=1"), long]), 1),
        (policy(&[limit(&pods, &half), limit(&all, &half), limit(&[], &half)]), 0),
    ] {
        let error = policy.check().unwrap_err();
        assert!(matches!(error, PolicyError::SelectorTooLong { limit, .. } if limit == at), "{error}");
    }
}

#[test]
fn a_policy_that_cannot_be_applied_is_refused_by_field() {
    let with_lock = |namespace: &str, name: &str, shard: &str| Policy {
        lock: Some(Lock { namespace: namespace.into(), name: name.into(), shard: shard.into() }),
        ..Policy::default()
    };
    assert!(with_lock("ns", "op", "s").check().is_ok());
    for (policy, start) in [
        (with_lock("", "op", "s"), "lock.namespace"),
        (with_lock("ns", "a/b", "s"), "lock.name"),
        (with_lock("ns", "op", "S"), "lock.shard"),
        (with_lock("ns", &"a".repeat(200), &"b".repeat(60)), "lock: the name"),
        (Policy { limits: vec![limit(&[("", "")], "")], ..Policy::default() }, "limits[0].relateResources[0]"),
    ] {
        let error = policy.check().unwrap_err().to_string();
        assert!(error.starts_with(start), "{error}");
    }
}
