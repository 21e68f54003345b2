//! What the manager keeps of the workloads of operators, and whether they can hold a new version back.
//!
//! A workload waits for new pods to become Ready before it removes old ones. So a readiness gate holds a new version
//! back, unless the update strategy of the workload does without old pods beforehand.

use ctrlmesh_common::names::label;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::rules::object_name::full_name;
use crate::rules::pod;

/// `maxSurge` and `maxUnavailable` of Deployments that name none.
const DEFAULT_PERCENT: &str = "25%";

/// What the manager keeps of a Deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeploymentInfo {
    /// The service account in its template.
    pub account: String,
    /// How many pods it should have. `None` where its pods do not ask for a proxy: so most workloads of a cluster can
    /// be scaled without a change of the cache.
    pub replicas: Option<i32>,
    /// Why it cannot hold a new version back. `None` as well where its pods do not ask for a proxy.
    pub obstacle: Option<String>,
    /// After how many seconds without progress it says so. `None` where its pods do not ask for a proxy.
    pub progress_deadline: Option<i32>,
}

/// What the manager keeps of a StatefulSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetInfo {
    pub first_ordinal: u32,
    /// The service account in its template.
    pub account: String,
    /// As of a [`DeploymentInfo`].
    pub replicas: Option<i32>,
    /// As of a [`DeploymentInfo`].
    pub obstacle: Option<String>,
    /// The revision of its template, once its controller has seen that. `None` as well where its pods do not ask for a
    /// proxy.
    pub update_revision: Option<String>,
}

#[derive(Clone, Copy)]
enum Rounding {
    Down,
    Up,
}

impl From<&Deployment> for DeploymentInfo {
    fn from(deployment: &Deployment) -> Self {
        let spec = deployment.spec.as_ref();
        let template = spec.map(|spec| &spec.template);
        let account = pod::template_account(template);
        if !template.is_some_and(asks_for_proxy) {
            return Self { account, ..Self::default() };
        }
        let replicas = Some(replicas(spec.and_then(|spec| spec.replicas)));
        let progress_deadline = spec.and_then(|spec| spec.progress_deadline_seconds);
        Self { account, replicas, obstacle: obstacle_of_deployment(deployment), progress_deadline }
    }
}

impl From<&StatefulSet> for SetInfo {
    fn from(set: &StatefulSet) -> Self {
        let spec = set.spec.as_ref();
        let template = spec.map(|spec| &spec.template);
        let (first_ordinal, account) = (pod::first_ordinal(set).1, pod::template_account(template));
        if !template.is_some_and(asks_for_proxy) {
            return Self { first_ordinal, account, ..Self::default() };
        }
        let replicas = Some(replicas(spec.and_then(|spec| spec.replicas)));
        let status = set.status.as_ref().filter(|status| status.observed_generation == set.metadata.generation);
        let update_revision = status.and_then(|status| status.update_revision.clone());
        Self { first_ordinal, account, replicas, obstacle: obstacle_of_stateful_set(set), update_revision }
    }
}

/// Why the strategy of `deployment` cannot hold a new version back, and what to set.
pub fn obstacle_of_deployment(deployment: &Deployment) -> Option<String> {
    let name = full_name(&deployment.metadata);
    let spec = deployment.spec.as_ref()?;
    let strategy = spec.strategy.as_ref();
    if strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("Recreate") {
        return Some(format!(
            "spec.strategy.type of Deployment {name} is Recreate, which ends all old pods first: set it to RollingUpdate, with a maxUnavailable of 0 and a maxSurge of at least 1"
        ));
    }
    let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
    let default = IntOrString::String(DEFAULT_PERCENT.to_owned());
    let unavailable = rolling.and_then(|rolling| rolling.max_unavailable.as_ref()).unwrap_or(&default);
    let surge = rolling.and_then(|rolling| rolling.max_surge.as_ref()).unwrap_or(&default);
    let replicas = replicas(spec.replicas);
    let field = format!("spec.strategy.rollingUpdate.maxUnavailable of Deployment {name} is {}", shown(unavailable));
    let wanted = "set it to 0, with a maxSurge of at least 1";
    // Of 0 pods none can be lacking.
    match (resolved(unavailable, replicas, Rounding::Down).min(replicas), resolved(surge, replicas, Rounding::Up)) {
        _ if replicas == 0 => None,
        (0, 0) => Some(format!("{field}, which is 1 pod of {replicas} where maxSurge is 0: {wanted}")),
        (0, _) => None,
        (lacking, _) => Some(format!("{field}, {} of {replicas}: {wanted}", pods(lacking))),
    }
}

/// Why the strategy of `set` cannot hold a new version back, and what to set.
pub fn obstacle_of_stateful_set(set: &StatefulSet) -> Option<String> {
    let name = full_name(&set.metadata);
    let spec = set.spec.as_ref()?;
    let strategy = spec.update_strategy.as_ref()?;
    if strategy.type_.as_deref() == Some("OnDelete") {
        return Some(format!(
            "spec.updateStrategy.type of StatefulSet {name} is OnDelete, which replaces no pod by itself: set it to RollingUpdate"
        ));
    }
    let unavailable = strategy.rolling_update.as_ref()?.max_unavailable.as_ref()?;
    let replicas = replicas(spec.replicas);
    // The API reference says up. Kubernetes took it for down at first, which is never more.
    let lacking = resolved(unavailable, replicas, Rounding::Up).min(replicas);
    (lacking > 1).then(|| {
        let (value, pods) = (shown(unavailable), pods(lacking));
        format!(
            "spec.updateStrategy.rollingUpdate.maxUnavailable of StatefulSet {name} is {value}, {pods} of {replicas}: set it to 1"
        )
    })
}

fn asks_for_proxy(template: &PodTemplateSpec) -> bool {
    let labels = template.metadata.as_ref().and_then(|meta| meta.labels.as_ref());
    labels.and_then(|labels| labels.get(label::ENABLE_PROXY)).is_some_and(|value| value == "true")
}

fn replicas(written: Option<i32>) -> i32 {
    written.unwrap_or(1)
}

/// How many pods a number or a percentage of `replicas` is. The API server admits no other text, which counts as 0.
fn resolved(value: &IntOrString, replicas: i32, rounding: Rounding) -> i32 {
    match value {
        IntOrString::Int(number) => *number,
        IntOrString::String(text) => {
            let percent: i64 = text.strip_suffix('%').and_then(|digits| digits.parse().ok()).unwrap_or_default();
            let hundredths = percent.saturating_mul(replicas.into());
            let whole = match rounding {
                Rounding::Down => hundredths / 100,
                Rounding::Up => hundredths.saturating_add(99) / 100,
            };
            i32::try_from(whole).unwrap_or(i32::MAX)
        }
    }
}

fn shown(value: &IntOrString) -> String {
    match value {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(text) => text.clone(),
    }
}

fn pods(count: i32) -> String {
    if count == 1 { "1 pod".to_owned() } else { format!("{count} pods") }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn workload(spec: Value) -> Value {
        let template = json!({"metadata": {"labels": {label::ENABLE_PROXY: "true"}}, "spec": {"containers": []}});
        let mut workload = json!({"metadata": {"namespace": "ops", "name": "web"},
            "spec": {"replicas": 4, "selector": {}, "serviceName": "web", "template": template}});
        for (key, value) in spec.as_object().unwrap() {
            workload["spec"][key] = value.clone();
        }
        workload
    }

    fn deployment(spec: Value) -> Deployment {
        serde_json::from_value(workload(spec)).unwrap()
    }

    fn set(spec: Value) -> StatefulSet {
        serde_json::from_value(workload(spec)).unwrap()
    }

    #[test]
    fn a_deployment_holds_back_what_it_replaces_one_more_pod_by() {
        let zero = "set it to 0, with a maxSurge of at least 1";
        for (replicas, unavailable, surge, expected) in [
            (4, json!(0), json!(1), None),
            (4, Value::Null, Value::Null, Some("is 25%, 1 pod of 4")),
            (3, Value::Null, Value::Null, None),
            (4, json!("25%"), json!("25%"), Some("is 25%, 1 pod of 4")),
            (8, json!("25%"), json!(1), Some("is 25%, 2 pods of 8")),
            (4, json!("24%"), json!(1), None),
            (4, json!("24%"), json!(0), Some("is 24%, which is 1 pod of 4 where maxSurge is 0")),
            (4, json!("24%"), json!("1%"), None),
            (4, json!(3), json!(0), Some("is 3, 3 pods of 4")),
            (2, json!(9), json!(1), Some("is 9, 2 pods of 2")),
            (0, json!(1), json!(1), None),
        ] {
            let rolling = json!({"maxUnavailable": unavailable, "maxSurge": surge});
            let strategy = json!({"type": "RollingUpdate", "rollingUpdate": rolling});
            let found = obstacle_of_deployment(&deployment(json!({"replicas": replicas, "strategy": strategy})));
            let field = "spec.strategy.rollingUpdate.maxUnavailable of Deployment ops/web";
            let expected = expected.map(|what| format!("{field} {what}: {zero}"));
            assert_eq!(found, expected, "{replicas} {rolling}");
        }
        assert_eq!(obstacle_of_deployment(&deployment(json!({"replicas": null}))), None, "one pod, and no strategy");
        let found = obstacle_of_deployment(&deployment(json!({"strategy": {"type": "Recreate"}}))).unwrap();
        assert!(found.starts_with("spec.strategy.type of Deployment ops/web is Recreate"), "{found}");
        let paused = json!({"paused": true, "strategy": {"rollingUpdate": {"maxUnavailable": 0}}});
        assert_eq!(obstacle_of_deployment(&deployment(paused)), None);
    }

    #[test]
    fn a_stateful_set_holds_back_what_it_replaces_pod_by_pod() {
        for (strategy, expected) in [
            (Value::Null, None),
            (json!({"type": "RollingUpdate"}), None),
            (json!({"rollingUpdate": {"partition": 2}}), None),
            (json!({"rollingUpdate": {"maxUnavailable": 1}}), None),
            (json!({"rollingUpdate": {"maxUnavailable": "25%"}}), None),
            (
                json!({"rollingUpdate": {"maxUnavailable": "26%"}}),
                Some("rollingUpdate.maxUnavailable of StatefulSet ops/web is 26%, 2 pods of 4: set it to 1"),
            ),
            (
                json!({"rollingUpdate": {"maxUnavailable": 3}}),
                Some("rollingUpdate.maxUnavailable of StatefulSet ops/web is 3, 3 pods of 4: set it to 1"),
            ),
            (
                json!({"type": "OnDelete"}),
                Some(
                    "type of StatefulSet ops/web is OnDelete, which replaces no pod by itself: set it to RollingUpdate",
                ),
            ),
        ] {
            let found = obstacle_of_stateful_set(&set(json!({"updateStrategy": strategy})));
            assert_eq!(found, expected.map(|what| format!("spec.updateStrategy.{what}")), "{strategy}");
        }
    }

    #[test]
    fn of_workloads_without_a_proxy_only_the_account_is_kept() {
        let of = |spec: Value| DeploymentInfo::from(&deployment(spec));
        let asks = of(json!({}));
        assert_eq!((asks.replicas, asks.obstacle.is_some()), (Some(4), true));
        let template = json!({"spec": {"containers": [], "serviceAccountName": "robot"}});
        let other = DeploymentInfo { account: "robot".to_owned(), ..DeploymentInfo::default() };
        assert_eq!(of(json!({"template": template})), other);
        let of = |spec: Value| SetInfo::from(&set(spec));
        let asks = of(json!({"ordinals": {"start": 2}, "updateStrategy": {"type": "OnDelete"}}));
        assert_eq!((asks.first_ordinal, asks.replicas, asks.obstacle.is_some()), (2, Some(4), true));
        let other = SetInfo { account: "robot".to_owned(), ..SetInfo::default() };
        assert_eq!(of(json!({"template": template})), other);
    }
}
