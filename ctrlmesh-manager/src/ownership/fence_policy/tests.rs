use ctrlmesh_common::names::label;
use serde_json::{Value, json, to_value};

use super::*;

fn kinds(group: &str, plurals: &[&str]) -> RelatedResources {
    let resources = plurals.iter().map(|plural| (*plural).to_owned()).collect();
    RelatedResources { api_groups: vec![group.to_owned()], resources }
}

fn fence() -> Fence {
    Fence {
        home: "ctrlmesh-system".to_owned(),
        namespace: "ops".to_owned(),
        root: "op".to_owned(),
        uid: "u".to_owned(),
        workload: Workload::StatefulSet("op".to_owned()),
        accounts: ["robot".to_owned()].into(),
        limited: vec![kinds("apps", &["deployments"])],
        lock: Some("lock".to_owned()),
        hash_key: label::SHARDING_HASH.to_owned(),
    }
}

fn spec(fence: &Fence) -> Value {
    to_value(fence.objects().policy.spec).unwrap()
}

fn condition(fence: &Fence) -> String {
    spec(fence)["matchConditions"][0]["expression"].as_str().unwrap().to_owned()
}

const PROBE: &str = "request.resource.resource == 'shardingconfigs' \
    && request.resource.group == 'ctrlmesh.kusionstack.io' && request.operation == 'UPDATE' \
    && request.?dryRun.orValue(false) && request.?subResource.orValue('') == '' \
    && request.?name.orValue('') == 'op' && request.?namespace.orValue('') == 'ops' \
    && object.metadata.?annotations[?'ctrlmesh.kusionstack.io/fence-probe'].hasValue()";

const SLOT: &str = "(namespaceObject != null \
    ? namespaceObject.metadata.?labels[?'ctrlmesh.kusionstack.io/sharding-hash'].orValue('32') \
    : (oldObject != null ? oldObject : object).metadata.?labels[?'ctrlmesh.kusionstack.io/sharding-hash'].orValue('32'))";

#[test]
fn the_policy_asks_for_the_owner_of_pod_and_object() {
    let fence = fence();
    let spec = spec(&fence);
    assert_eq!(spec["failurePolicy"], "Fail");
    assert_eq!(spec["paramKind"], json!({"apiVersion": "v1", "kind": "ConfigMap"}));
    let operator = "request.userInfo.username == 'system:serviceaccount:ops:robot' \
        && !request.?dryRun.orValue(false) \
        && request.userInfo.?extra[?'authentication.kubernetes.io/pod-name'][?0].orValue('').matches('^op-[0-9]+$') \
        && request.resource.resource != 'shardingconfigs'";
    assert_eq!(condition(&fence), format!("({operator}) || ({PROBE})"));
    let owner = "('revoked.' + request.?namespace.orValue('') in params.data ? '' \
        : params.data[?'namespace.' + request.?namespace.orValue('')].orValue(params.data.slots.split(',')[int(";
    let owner = format!("{owner}{SLOT})]))");
    let uid = "' ' + request.userInfo.?extra[?'authentication.kubernetes.io/pod-uid'][?0].orValue('') + ' '";
    let is_owner = format!("params.data[?'pods.' + {owner}].orValue('').contains({uid})");
    let validation = &spec["validations"][0];
    assert_eq!(validation["expression"], is_owner);
    assert_eq!(validation["reason"], "Forbidden");
    let message = validation["messageExpression"].as_str().unwrap();
    let revision = fence.objects().revision;
    let hash = revision.strip_suffix(".u").unwrap();
    let says =
        format!("{is_owner} ? '' : {PROBE} ? 'fence {hash}.' + params.data.uid + ' epoch ' + params.data.epoch : ");
    assert!(message.starts_with(&says), "{message}");
}

#[test]
fn the_parameter_is_the_table_in_the_managers_namespace() {
    let binding = to_value(fence().objects().binding).unwrap();
    assert_eq!(
        binding["spec"],
        json!({
            "policyName": "ctrlmesh-fence.ops.op",
            "paramRef": {"name": "ctrlmesh-fence.ops.op", "namespace": "ctrlmesh-system",
                "parameterNotFoundAction": "Allow"},
            "validationActions": ["Deny"],
        })
    );
    assert_eq!(binding["metadata"]["name"], "ctrlmesh-fence.ops.op");
    assert_eq!(binding["metadata"]["labels"][label::FENCE_NAMESPACE], "ops");
    assert_eq!(binding["metadata"]["labels"][label::FENCE_ROOT], "op");
}

#[test]
fn only_limited_kinds_and_the_root_itself_are_matched() {
    let spec = spec(&fence());
    let rules = &spec["matchConstraints"]["resourceRules"];
    assert_eq!(
        *rules,
        json!([
            {"apiGroups": ["apps"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE", "DELETE"],
                "resources": ["deployments", "deployments/*"], "scope": "*"},
            {"apiGroups": ["ctrlmesh.kusionstack.io"], "apiVersions": ["v1alpha1"], "operations": ["UPDATE"],
                "resourceNames": ["op"], "resources": ["shardingconfigs"], "scope": "*"},
        ])
    );
    assert_eq!(spec["matchConstraints"]["excludeResourceRules"], Value::Null);
}

#[test]
fn of_every_kind_those_are_left_out_that_are_no_share() {
    let every = Fence { limited: Vec::new(), ..fence() };
    let constraints = &spec(&every)["matchConstraints"];
    assert_eq!(constraints["resourceRules"][0]["resources"], json!(["*/*"]));
    let excluded: Vec<String> = constraints["excludeResourceRules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| format!("{} {}", rule["apiGroups"], rule["resources"]))
        .collect();
    let expected = [
        r#"["coordination.k8s.io"] ["leases"]"#,
        r#"[""] ["events"]"#,
        r#"["events.k8s.io"] ["events"]"#,
        r#"[""] ["serviceaccounts/token"]"#,
        r#"["authentication.k8s.io","authorization.k8s.io"] ["*/*"]"#,
    ];
    assert_eq!(excluded, expected);
    assert!(!condition(&every).contains("!= 'shardingconfigs'"), "they are divided, too");
    let named = vec![kinds("*", &["*"]), kinds("coordination.k8s.io", &["leases"])];
    let excluded = spec(&Fence { limited: named, ..fence() })["matchConstraints"]["excludeResourceRules"].clone();
    assert!(!excluded.to_string().contains("leases"), "{excluded}");
}

#[test]
fn the_lock_is_written_by_every_pod() {
    let maps = Fence { limited: vec![kinds("", &["configmaps"])], ..fence() };
    let lock = " && !(request.resource.resource in ['configmaps'] && request.?namespace.orValue('') == 'ops' \
        && (request.?name.orValue('') == 'lock' || request.?name.orValue('').startsWith('lock---')))) ||";
    assert!(condition(&maps).contains(lock), "{}", condition(&maps));
    assert!(!condition(&Fence { lock: None, ..maps }).contains("'configmaps'"));
}

#[test]
fn several_accounts_are_listed_and_none_fences_nobody() {
    let accounts = |all: &[&str]| Fence { accounts: all.iter().map(|one| (*one).to_owned()).collect(), ..fence() };
    let two = "(request.userInfo.username in ['system:serviceaccount:ops:a', 'system:serviceaccount:ops:b'] &&";
    assert!(condition(&accounts(&["a", "b"])).starts_with(two));
    assert_eq!(condition(&accounts(&[])), format!("(false) || ({PROBE})"));
}

#[test]
fn a_namespace_belongs_to_where_its_objects_do() {
    let fence = Fence { limited: vec![kinds("", &["namespaces"])], ..fence() };
    let expression = spec(&fence)["validations"][0]["expression"].to_string();
    let own_name = "request.resource.resource == 'namespaces' ? request.?name.orValue('')";
    assert!(expression.contains(own_name), "{expression}");
}

#[test]
fn the_revision_follows_what_the_policy_says() {
    let revision = fence().objects().revision;
    assert_eq!(fence().objects().revision, revision);
    let others = [
        Fence { accounts: ["other".to_owned()].into(), ..fence() },
        Fence { limited: Vec::new(), ..fence() },
        Fence { hash_key: label::SHARD_HASH.to_owned(), ..fence() },
        Fence { workload: Workload::Deployment("op".to_owned()), ..fence() },
        Fence { uid: "v".to_owned(), ..fence() },
    ];
    assert!(others.iter().all(|other| other.objects().revision != revision));
}

#[test]
fn texts_are_quoted() {
    assert_eq!(quoted(r"a'b\c"), r"'a\'b\\c'");
}
