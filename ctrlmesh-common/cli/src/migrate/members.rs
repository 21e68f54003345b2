//! Reads by which path the predecessor's proxy takes an operator's requests for those to member clusters.
//!
//! Pure.

use ctrlmesh_common::api::Unit;
use ctrlmesh_common::member_path::PathTemplate;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::flags;
use super::object::ObjectRef;
use super::snapshot::{Snapshot, in_both_groups, rule};

/// The variable of the predecessor's proxy. It takes so many segments off the path of each request; `*` is any one of
/// them.
pub(super) const VARIABLE: &str = "Mesh-Pre-Url-Added";

/// Gives the proxies of all pods variables, as `KEY=VALUE;KEY=VALUE`.
const EXTRA_VARIABLES: &str = "--proxy-extra-envs";

/// Stands for any one segment in the variable, and in a template.
const ANY: &str = "*";

/// The variable where it is set. `value` is absent where it is not to be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Variable {
    value: Option<String>,
}

/// The variable of a workload's pods. `None`: its operator works in the one cluster.
pub(super) fn variable(snapshot: &Snapshot, workload: &DynamicObject) -> Option<Variable> {
    let template = workload.data.pointer("/spec/template");
    let of_template = template.and_then(|template| of_pod(template.get("metadata"), template.get("spec")));
    let labels = workload.data.pointer("/spec/selector/matchLabels").and_then(Value::as_object);
    let is_its = |pod: &&DynamicObject| {
        let has = |(key, value): (&String, &Value)| pod.labels().get(key).map(String::as_str) == value.as_str();
        pod.metadata.namespace == workload.metadata.namespace && labels.is_some_and(|labels| labels.iter().all(has))
    };
    let mut of_pods = snapshot.pods.iter().filter(is_its).filter_map(of_own);
    let flags = snapshot.manager.as_ref().map(flags::of).unwrap_or_default();
    let extra = flags.iter().find(|flag| flag.name == EXTRA_VARIABLES);
    let of_all = || listed(&extra?.value, ';');
    let found: Vec<Variable> = of_template.into_iter().chain(of_pods.next()).chain(of_all()).collect();
    found.iter().find(|one| one.value.is_some()).or(found.first()).cloned()
}

/// The variable of a pod.
pub(super) fn of_own(pod: &DynamicObject) -> Option<Variable> {
    of_pod(Some(&json!({"annotations": pod.metadata.annotations})), pod.data.get("spec"))
}

fn of_pod(metadata: Option<&Value>, spec: Option<&Value>) -> Option<Variable> {
    let containers = spec.and_then(|spec| spec.get("containers")).and_then(Value::as_array);
    let mut variables = containers.into_iter().flatten().filter_map(|one| one.get("env")?.as_array()).flatten();
    let named = variables.find(|one| one["name"] == VARIABLE);
    let of_containers = named.map(|one| Variable { value: one["value"].as_str().map(str::to_owned) });
    let annotation = |key: &str| {
        let annotations = metadata?.get("annotations")?;
        in_both_groups(key).iter().find_map(|key| annotations.get(key)?.as_str())
    };
    let injected = || {
        let containers: Value = serde_json::from_str(annotation("env-inject")?).ok()?;
        let mut all = containers.as_array()?.iter().filter_map(|one| one["env"].as_array()).flatten();
        let one = all.find(|one| one["key"] == VARIABLE)?;
        Some(Variable { value: one["value"].as_str().map(str::to_owned) })
    };
    let synced = || listed(annotation("env-sync")?, ',');
    of_containers.or_else(injected).or_else(synced)
}

/// The variable in a list of `KEY=VALUE`, or of `KEY` alone.
fn listed(list: &str, separator: char) -> Option<Variable> {
    list.split(separator).find_map(|one| {
        let (name, value) = one.split_once('=').map_or((one, None), |(name, value)| (name, Some(value)));
        (name.trim() == VARIABLE).then(|| Variable { value: value.map(str::to_owned) })
    })
}

/// Why a workload with the variable cannot be enrolled yet: its root does not divide members. The rest says what to do.
pub(super) fn problem(root: &DynamicObject, target: &ObjectRef, variable: &Variable) -> Option<String> {
    let of_root = |field: &str| rule(root).and_then(|rule| rule.get(field));
    let has_paths = of_root("clusters").and_then(Value::as_array).is_some_and(|paths| !paths.is_empty());
    if has_paths && of_root("unit") == Some(&json!(Unit::Cluster)) {
        return None;
    }
    let root = format!("{}/{}", root.namespace().unwrap_or_default(), root.name_any());
    let (path, advice) = match variable.value.as_deref().map(|value| (value, template(value))) {
        Some((value, Ok(template))) => (value, format!("`clusters: [{{path: \"{template}\"}}]`")),
        Some((value, Err(error))) => (value, format!("`clusters` with the path that leads to a member ({error})")),
        None => ("…", "`clusters` with the path that leads to a member".to_owned()),
    };
    Some(format!(
        "{target} works in member clusters ({VARIABLE}={path}), which root {root} does not divide: all replicas would \
         write there. Say {advice}, `unit: Cluster` and `fence: Proxy` in the root: then each member has one shard. A root \
         takes that only when it is made: scale the workload to zero, delete the root, apply it so, and run this step \
         again"
    ))
}

/// The template that stands for the path. What stands before the last `proxy` is the member's name; without that, the
/// last `*` is.
fn template(path: &str) -> Result<PathTemplate, String> {
    let mut segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    let last = |wanted: &str| segments.iter().rposition(|segment| *segment == wanted);
    let at = last("proxy").and_then(|at| at.checked_sub(1)).or_else(|| last(ANY));
    let member = at.and_then(|at| segments.get_mut(at)).ok_or_else(|| format!("no segment of {path:?} names one"))?;
    *member = "{cluster}";
    format!("/{}", segments.join("/")).parse::<PathTemplate>().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(annotations: &Value, env: &Value) -> Option<Variable> {
        of_pod(Some(&json!({"annotations": annotations})), Some(&json!({"containers": [{"env": env}]})))
    }

    fn of(value: &str) -> Variable {
        Variable { value: Some(value.to_owned()) }
    }

    #[test]
    fn the_variable_is_found_wherever_the_proxy_gets_it_from() {
        let (none, sync) = (json!({}), "ctrlmesh.kusionstack.io/env-sync");
        assert_eq!(pod(&none, &json!([{"name": VARIABLE, "value": "/a/*"}])), Some(of("/a/*")));
        assert_eq!(pod(&json!({sync: format!("A=1,{VARIABLE}=/b/*,C=2")}), &json!([])), Some(of("/b/*")));
        assert_eq!(pod(&json!({sync: VARIABLE}), &json!([])), Some(Variable { value: None }));
        let inject = json!([{"name": "ctrlmesh-proxy", "env": [{"key": VARIABLE, "value": "/c/*"}]}]).to_string();
        assert_eq!(pod(&json!({"kridge.kusionstack.io/env-inject": inject}), &json!([])), Some(of("/c/*")));
        let hidden = json!([{"name": VARIABLE, "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}]);
        assert_eq!(pod(&none, &hidden), Some(Variable { value: None }));
        assert_eq!(pod(&json!({sync: "A=1"}), &json!([{"name": "A", "value": "1"}])), None);
        assert_eq!(listed(&format!("A=1;{VARIABLE}=/d/*"), ';'), Some(of("/d/*")));
    }

    #[test]
    fn the_segment_before_proxy_is_the_member() {
        for (path, expected) in [
            ("/apis/*/v1/clusterextensions/*/proxy", "/apis/*/v1/clusterextensions/{cluster}/proxy"),
            ("apis/*/v1/clusterextensions/one/proxy/", "/apis/*/v1/clusterextensions/{cluster}/proxy"),
            ("/spaces/*/*", "/spaces/*/{cluster}"),
        ] {
            assert_eq!(template(path).map(|template| template.to_string()).as_deref(), Ok(expected));
        }
        for (path, says) in [("/", "names one"), ("/proxy", "names one"), ("/api/v1/pods/*", "leads to objects")] {
            let error = template(path).unwrap_err();
            assert!(error.contains(says), "{path}: {error}");
        }
    }
}
