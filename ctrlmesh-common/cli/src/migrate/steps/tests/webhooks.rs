//! Which webhook configurations go.

use super::*;

#[test]
fn only_the_predecessors_webhooks_are_deleted() {
    let mut snapshot = snapshot();
    snapshot.our_manager = Some(deployment("ctrlmesh-system", "ctrlmesh-manager", json!([])));
    let planned = plan(Step::Webhooks, &snapshot);
    assert_eq!(said(&planned), ["delete MutatingWebhookConfiguration theirs"]);
    let Some(Change { action: Action::Create(before), .. }) = &planned.changes[0].inverse else {
        panic!("{planned:?}")
    };
    assert_eq!(before["metadata"], json!({"name": "theirs"}));
    assert_eq!(before["webhooks"][0]["clientConfig"]["service"]["namespace"], "ctrlmesh");
}

#[test]
fn webhooks_that_cannot_be_made_again_are_a_problem() {
    for (effects, problems) in [("Unknown", 1), ("Some", 1), ("None", 0), ("NoneOnDryRun", 0)] {
        let mut snapshot = snapshot();
        snapshot.webhooks[0].data["webhooks"][0]["sideEffects"] = json!(effects);
        assert_eq!(plan(Step::Guard, &snapshot).problems.len(), problems, "{effects}, before anything is changed");
    }
}

#[test]
fn our_webhooks_that_nobody_answers_go_until_managers_run() {
    let mut snapshot = snapshot();
    let named = |planned: &Planned| -> Vec<String> {
        planned.changes.iter().map(|one| one.change.object.name.clone()).collect()
    };
    let mut ours = deployment("ctrlmesh-system", "ctrlmesh-manager", json!([]));
    snapshot.our_manager = Some(ours.clone());
    assert_eq!(named(&plan(Step::Webhooks, &snapshot)), ["theirs"], "our managers answer");
    ours.data["spec"]["replicas"] = json!(0);
    for manager in [Some(ours), None] {
        snapshot.our_manager = manager;
        let planned = plan(Step::Webhooks, &snapshot);
        assert_eq!(named(&planned), ["theirs", "ctrlmesh"]);
        let [Change { object, action: Action::Create(content) }] = &planned.resumed[..] else { panic!("{planned:?}") };
        assert_eq!((object.name.as_str(), content["webhooks"].is_array()), ("ctrlmesh", true));
        assert_eq!(planned.changes[1].inverse, None, "an undo leaves them to a later run");
    }
}

#[test]
fn webhooks_that_name_the_predecessor_by_url_are_found() {
    let mut snapshot = snapshot();
    for (url, is_found) in [
        ("https://ctrlmesh-webhook.ctrlmesh.svc:9443/mutate-pod", true),
        ("https://ctrlmesh-webhook.ctrlmesh.svc/mutate-pod", true),
        ("https://Ctrlmesh-Webhook.ctrlmesh.svc.cluster.local/mutate-pod", true),
        ("https://ctrlmesh-webhook.ctrlmesh.svc.corp.example.", true),
        ("https://ctrlmesh-webhook.other.svc/mutate-pod", false),
        ("https://ctrlmesh-webhook.ctrlmesh.example.org/mutate-pod", false),
        ("https://192.0.2.1/ctrlmesh.svc", false),
    ] {
        snapshot.webhooks.truncate(1);
        snapshot.webhooks[0].data = json!({"webhooks": [{"clientConfig": {"url": url}}]});
        assert_eq!(plan(Step::Webhooks, &snapshot).changes.len(), usize::from(is_found), "{url}");
    }
}

#[test]
fn webhooks_of_a_neighbour_in_the_namespace_stay() {
    let mut snapshot = snapshot();
    let service = |selector: Value| {
        object(json!({"metadata": {"name": "x", "namespace": "ctrlmesh"}, "spec": {"selector": selector}}))
    };
    snapshot.webhooks.truncate(1);
    let mut manager = deployment("ctrlmesh", "ctrlmesh", json!([]));
    manager.data["spec"]["template"]["metadata"] = json!({"labels": {"app": "theirs", "tier": "1"}});
    snapshot.manager = Some(manager);
    for (selector, is_theirs) in
        [(json!({"app": "theirs"}), true), (json!({"app": "neighbour"}), false), (Value::Null, false)]
    {
        snapshot.services = vec![service(selector.clone())];
        let planned = plan(Step::Webhooks, &snapshot);
        assert_eq!((planned.changes.len(), planned.notes.len()), if is_theirs { (1, 0) } else { (0, 1) }, "{selector}");
    }
}
