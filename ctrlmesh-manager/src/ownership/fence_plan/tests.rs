use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;
use crate::rules::shared::Shared;
use ctrlmesh_common::api::FenceMode;
use ctrlmesh_common::ownership::UNSHARDED;

fn plan(snapshot: &Snapshot, existing: &Existing) -> FencePlan {
    super::plan(snapshot, existing, "ctrlmesh-system")
}

const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: op, namespace: ops}\nspec:\n  \
    root: {prefix: op, targetStatefulSet: op, fence: Server, auto: {shardingSize: 2, everyShardReplicas: 1}}\n";

const POLICY: &str = "ctrlmesh-fence.ops.op";

/// A root whose table names a pod.
fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot::of_manifests(ROOT);
    snapshot.set_accounts.insert("ops/op".to_owned(), "robot".to_owned());
    let pod_uids = [("1".to_owned(), "op-1-normal".to_owned())].into();
    set(&mut snapshot, Ownership { epoch: 1, pod_uids, ..Ownership::default() });
    snapshot
}

fn set(snapshot: &mut Snapshot, table: Ownership) {
    snapshot.configs[0].status.get_or_insert_default().ownership = Some(table);
}

fn rule(snapshot: &mut Snapshot) -> &mut Root {
    snapshot.configs[0].spec.root.as_mut().unwrap()
}

/// What is there after all this was written.
fn after(plan: &FencePlan, mut existing: Existing) -> Existing {
    let name = |meta: &ObjectMeta| meta.name.clone().unwrap();
    for action in plan.actions.values().flatten().cloned() {
        match action {
            Action::WritePolicy(policy) => drop(existing.policies.insert(name(&policy.metadata), *policy)),
            Action::WriteBinding(binding) => drop(existing.bindings.insert(name(&binding.metadata), *binding)),
            Action::RemovePolicy(policy) => drop(existing.policies.remove(&name(&policy.metadata))),
            Action::RemoveBinding(binding) => drop(existing.bindings.remove(&name(&binding.metadata))),
        }
    }
    existing
}

fn written(snapshot: &Snapshot) -> Existing {
    after(&plan(snapshot, &Existing::default()), Existing::default())
}

#[test]
fn a_root_with_a_fence_gets_policy_and_binding_once() {
    let snapshot = snapshot();
    let first = plan(&snapshot, &Existing::default());
    assert_eq!(first.stages["ops/op"], Stage::Unwritten);
    let [Action::WritePolicy(informer), Action::WriteBinding(_), Action::WritePolicy(policy), Action::WriteBinding(_)] =
        &first.actions["ops/op"][..]
    else {
        panic!("{first:?}")
    };
    let name = |meta: &ObjectMeta| meta.name.clone();
    assert_eq!(name(&informer.metadata).as_deref(), Some(informer_policy::NAME), "it comes first");
    assert_eq!(name(&policy.metadata).as_deref(), Some(POLICY));
    let existing = after(&first, Existing::default());
    let second = plan(&snapshot, &existing);
    assert!(second.actions.is_empty());
    assert!(matches!(second.stages["ops/op"], Stage::Written { .. }));
}

#[test]
fn what_somebody_changed_is_written_again() {
    let snapshot = snapshot();
    let mut existing = written(&snapshot);
    let policy = existing.policies.get_mut(POLICY).unwrap();
    policy.spec.as_mut().unwrap().failure_policy = Some("Ignore".to_owned());
    policy.metadata.resource_version = Some("7".to_owned());
    let plan = plan(&snapshot, &existing);
    let [Action::WritePolicy(policy)] = &plan.actions["ops/op"][..] else { panic!("{plan:?}") };
    assert_eq!(policy.metadata.resource_version.as_deref(), Some("7"), "the version that was seen");
}

#[test]
fn what_lost_its_labels_gets_them_again_and_others_stay() {
    let snapshot = snapshot();
    let mut existing = written(&snapshot);
    existing.policies.get_mut(POLICY).unwrap().metadata.labels = None;
    let mut foreign = existing.policies[POLICY].clone();
    foreign.metadata.name = Some("foreign".to_owned());
    existing.policies.insert("foreign".to_owned(), foreign);
    let plan = plan(&snapshot, &existing);
    assert!(matches!(plan.actions["ops/op"][..], [Action::WritePolicy(_)]), "{plan:?}");
    assert_eq!(plan.actions.len(), 1);
}

#[test]
fn no_policy_is_made_before_the_table_names_a_pod() {
    let mut snapshot = snapshot();
    let existing = written(&snapshot);
    set(&mut snapshot, Ownership::default());
    let first = plan(&snapshot, &Existing::default());
    assert_eq!((first.stages["ops/op"].clone(), first.actions.len()), (Stage::WithoutPods, 0));
    assert!(matches!(plan(&snapshot, &existing).stages["ops/op"], Stage::Written { .. }), "it stays");
}

#[test]
fn a_fence_goes_with_its_root_or_its_field() {
    let fenced = snapshot();
    let existing = written(&fenced);
    let mut off = fenced.clone();
    rule(&mut off).fence = Some(FenceMode::Off);
    let mut by_proxy = fenced.clone();
    rule(&mut by_proxy).fence = Some(FenceMode::Proxy);
    let mut disabled = fenced.clone();
    rule(&mut disabled).disable = Some(true);
    let gone = Snapshot { configs: Vec::new(), ..fenced };
    for snapshot in [off, by_proxy, disabled, gone] {
        let plan = plan(&snapshot, &existing);
        let actions = &plan.actions["ops/op"][..];
        assert!(matches!(actions, [Action::RemoveBinding(_), Action::RemovePolicy(_)]), "{actions:?}");
        assert!(plan.stages.is_empty());
        let left = after(&plan, existing.clone());
        let names: Vec<&String> = left.policies.keys().chain(left.bindings.keys()).collect();
        assert_eq!(names, [informer_policy::NAME; 2], "what keeps the informer running stays");
    }
}

#[test]
fn a_fence_holds_until_a_deleted_root_has_handed_all_back() {
    let mut snapshot = snapshot();
    let existing = written(&snapshot);
    snapshot.configs[0].metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
    let slot = ctrlmesh_common::slots::Slot::try_from(7).unwrap();
    let owned_by = |owner: &str| Ownership {
        slots: [(slot, owner.to_owned())].into(),
        // A pod that could write.
        pod_uids: [("1".to_owned(), "op-1-normal".to_owned())].into(),
        ..Ownership::default()
    };
    set(&mut snapshot, owned_by("op-1-normal"));
    assert!(matches!(plan(&snapshot, &existing).stages["ops/op"], Stage::Written { .. }));
    set(&mut snapshot, owned_by(UNSHARDED));
    let going = plan(&snapshot, &existing);
    assert_eq!((going.stages["ops/op"].clone(), going.actions["ops/op"].len()), (Stage::Unwritten, 2));
    let gone = plan(&snapshot, &after(&going, existing));
    assert_eq!((gone.stages["ops/op"].clone(), gone.actions.len()), (Stage::Removed, 0));
}

#[test]
fn the_accounts_are_those_of_the_template_and_of_pods() {
    let mut snapshot = snapshot();
    let member = |name: &str, account: &str| Member {
        name: format!("ops/{name}").parse().unwrap(),
        account: account.to_owned(),
        owner: Some(crate::rules::pod::Owner { kind: "StatefulSet".to_owned(), name: "op".to_owned() }),
        ..Member::default()
    };
    let members = [member("op-0", "former"), member("op-1", "robot"), member("other-0", "foreign")];
    snapshot.members = members.map(Shared::from).into();
    let (root, rule) = fenced(&snapshot.configs[0]).unwrap();
    assert_eq!(accounts(root, rule, &snapshot), ["former", "robot"].map(str::to_owned).into());
    let before = plan(&snapshot, &Existing::default());
    let existing = after(&before, Existing::default());
    snapshot.members.remove(0);
    let plan = plan(&snapshot, &existing);
    assert!(matches!(plan.actions["ops/op"][..], [Action::WritePolicy(_)]), "it was changed");
}
