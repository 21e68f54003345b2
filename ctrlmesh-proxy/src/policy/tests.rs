//! Policies from files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ctrlmesh_runtime::telemetry;

use super::*;

fn policy_file(text: &str) -> (tempfile::TempDir, Source) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    fs::write(&file, text).unwrap();
    (folder, Source::Policy(file))
}

fn whole(error: &LoadError) -> String {
    telemetry::chain(error)
}

fn with_epoch(epoch: u64) -> String {
    format!(
        "epoch: {epoch}\nlimits:\n- relateResources: [{{apiGroups: [\"\"], resources: [pods]}}]\n  selector: a in (1,2)\n"
    )
}

fn following(source: &Source) -> Current {
    let (sender, receiver) = watch::channel(Arc::new(load(source).unwrap()));
    #[expect(clippy::disallowed_methods, reason = "ends with the test's runtime")]
    tokio::spawn(follow(source.clone(), sender));
    receiver
}

async fn epoch_becomes(current: &mut Current, epoch: u64) {
    current.wait_for(|policy| policy.epoch == epoch).await.unwrap();
}

#[test]
fn a_policy_is_read_from_yaml_and_from_json() {
    let (_folder, yaml) = policy_file(&with_epoch(3));
    let yaml = load(&yaml).unwrap();
    assert_eq!(yaml.epoch, 3);
    assert_eq!(yaml.selector_for("", "pods").unwrap().to_string(), "a in (1,2)");
    let (_folder, json) = policy_file(&serde_json::to_string_pretty(&yaml).unwrap());
    assert_eq!(load(&json).unwrap(), yaml);
}

#[test]
fn a_file_that_cannot_be_meant_is_refused_with_line_or_reason() {
    for (text, wanted) in [
        ("epoch: 1\nlimits:\n- selector: a in (\n", "line 3"),
        ("epoch: 1\nlimits:\n- selector: a in (\n", "a in ("),
        ("epoch: 1\nlimit: []\n", "line 2"),
        ("epoch: 1\nlimit: []\n", "limit"),
        ("{\"epoch\": 1,\n \"mode\": \"enforced\"}", "line 2"),
        ("epoch: 1\nlock: {namespace: ns, name: op, shard: \"\"}\n", "lock.shard"),
        (&with_epoch(1).replace("a in (1,2)", "a in (1),a notin (1)"), "selects nothing"),
        ("limits: [{selector: a}, {selector: ''}]", "limits[1].selector has no requirement"),
    ] {
        let (_folder, source) = policy_file(text);
        let error = whole(&load(&source).unwrap_err());
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn a_policy_of_nothing_at_all_is_meant() {
    let (_folder, source) = policy_file(&serde_json::to_string(&Policy::nothing()).unwrap());
    assert_eq!(load(&source).unwrap(), Policy::nothing());
}

#[tokio::test(start_paused = true)]
async fn a_file_is_read_again_when_it_is_written_or_replaced() {
    let (folder, source) = policy_file(&with_epoch(1));
    let mut current = following(&source);
    fs::write(source.file(), with_epoch(2)).unwrap();
    epoch_becomes(&mut current, 2).await;
    let beside = folder.path().join("new");
    fs::write(&beside, with_epoch(3)).unwrap();
    fs::rename(&beside, source.file()).unwrap();
    epoch_becomes(&mut current, 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_mounted_config_map_is_read_again_when_it_is_swapped() {
    let folder = tempfile::tempdir().unwrap();
    let generation = |name: &str, epoch| {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("policy"), with_epoch(epoch)).unwrap();
    };
    generation("..1", 1);
    generation("..2", 2);
    symlink("..1", folder.path().join("..data")).unwrap();
    symlink("..data/policy", folder.path().join("policy")).unwrap();
    let source = Source::Policy(folder.path().join("policy"));
    let mut current = following(&source);
    symlink("..2", folder.path().join("..new")).unwrap();
    fs::rename(folder.path().join("..new"), folder.path().join("..data")).unwrap();
    epoch_becomes(&mut current, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_broken_or_missing_file_leaves_the_last_policy() {
    let (_folder, source) = policy_file(&with_epoch(1));
    let mut current = following(&source);
    fs::write(source.file(), "limits: [").unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert!(!current.has_changed().unwrap());
    fs::remove_file(source.file()).unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert_eq!(current.borrow().epoch, 1);
    fs::write(source.file(), with_epoch(2)).unwrap();
    epoch_becomes(&mut current, 2).await;
}

#[test]
fn a_file_that_limits_nothing_is_refused_unless_it_says_so() {
    for text in ["", "\n", "{}", "epoch: 7\n", "limits: []\n", "---\n# limits:\n", "mode: enforce\n"] {
        let (_folder, source) = policy_file(text);
        assert!(load(&source).is_err(), "{text:?}");
    }
    let (_folder, source) = policy_file("mode: pass\n");
    assert!(load(&source).unwrap().passes_everything());
    let (_folder, source) = policy_file("lock: {namespace: ns, name: op, shard: s}\n");
    assert!(!load(&source).unwrap().passes_everything());
    let unlimited = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
                     metadata: {namespace: ops, name: s}\nspec:\n  selector: {matchLabels: {app: op}}\n  limits:\n";
    for (limits, wanted) in [
        ("limits:\n", "spec.limits is empty"),
        ("limits: []\n  controller: {leaderElectionName: op}\n", "spec.limits is empty"),
        ("limits: [{selector: {}}]\n", "spec.limits[0].selector has no requirement"),
        ("limts: [{selector: {matchLabels: {a: b}}}]\n", "spec.limts: no such field"),
    ] {
        let (_folder, source) = policy_file(&unlimited.replace("limits:\n", limits));
        let error = whole(&load(&of_pod(source.file(), "ops/op-1", &["app=op"])).unwrap_err());
        assert!(error.contains(wanted), "{error}");
    }
}

/// It is truncated, written bit by bit, and holds another policy on the way.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_being_written_is_not_taken_before_it_is_whole() {
    let (_folder, source) = policy_file(&with_epoch(1));
    let mut current = following(&source);
    let mut epochs = Vec::new();
    let text = format!("{}lock: {{namespace: ns, name: op, shard: s}}\n", with_epoch(2));
    for end in (0..=text.len()).step_by(7) {
        fs::write(source.file(), &text[..end]).unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(60)).await;
        let now = current.borrow_and_update().clone();
        epochs.push((now.epoch, now.lock.is_some()));
    }
    assert!(epochs.iter().all(|seen| *seen == (1, false)), "{epochs:?}");
    fs::write(source.file(), &text).unwrap();
    epoch_becomes(&mut current, 2).await;
    assert!(current.borrow().lock.is_some());
}

const CONFIGS: &str = r#"
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {namespace: ops, name: s0, generation: 7}
spec:
  selector:
    matchExpressions: [{key: statefulset.kubernetes.io/pod-name, operator: In, values: [op-0, op-1]}]
  controller: {leaderElectionName: op}
  limits:
  - relateResources: [{apiGroups: [""], resources: [pods, configmaps]}]
    selector: {matchLabels: {slot: a}}
---
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {namespace: ops, name: s1}
spec:
  selector: {matchLabels: {app: other}}
  limits:
  - relateResources: [{apiGroups: ["*"], resources: ["*"]}]
    selector: {matchLabels: {slot: b}}
"#;

fn of_pod(file: &Path, pod: &str, labels: &[&str]) -> Source {
    let labels = labels.iter().map(|label| label.parse().unwrap()).collect();
    Source::ShardingConfig { file: file.to_owned(), pod: pod.parse().unwrap(), labels }
}

#[test]
fn the_pods_sharding_config_becomes_its_policy() {
    let (_folder, source) = policy_file(CONFIGS);
    let policy = load(&of_pod(source.file(), "ops/op-1", &[])).unwrap();
    assert_eq!(policy.epoch, 7);
    assert_eq!(policy.selector_for("", "configmaps").unwrap().to_string(), "slot=a");
    assert_eq!(policy.selector_for("", "secrets"), None);
    assert_eq!(policy.lock.unwrap().per_shard(), "op---s0");
    let other = load(&of_pod(source.file(), "ops/x", &["app=other"])).unwrap();
    assert_eq!(other.selector_for("apps", "deployments").unwrap().to_string(), "slot=b");
    assert_eq!(other.lock, None);
}

#[test]
fn a_pod_of_no_or_two_sharding_configs_has_no_policy() {
    let (_folder, source) = policy_file(CONFIGS);
    for (pod, labels) in [("ops/op-2", &[][..]), ("other/op-0", &[]), ("ops/op-0", &["app=other"])] {
        let refused = load(&of_pod(source.file(), pod, labels));
        assert!(matches!(refused, Err(LoadError::Sharding(_))), "{pod} {refused:?}");
    }
}
