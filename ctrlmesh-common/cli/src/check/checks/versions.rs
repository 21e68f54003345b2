//! Checks that managers, node proxies, sidecars and this program are of one version.

use std::cmp::Ordering;

use ctrlmesh_common::names::annotation;
use ctrlmesh_manager::install::rbac;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use super::super::snapshot::Installed;
use crate::text::counted;
use crate::version::image::{OWN, order};
use crate::version::part::{MANAGER, NODE_PROXY, Part, SIDECAR, has_ended, image_of, parts};

/// Whether every manager has the version of this program.
pub(super) fn is_own(installed: &Installed) -> bool {
    let managers = installed.managers.iter().flat_map(|pods| parts(pods, MANAGER));
    let versions: Vec<Option<String>> = managers.map(|part| part.version).collect();
    let is_own = |version: &Option<String>| version.as_deref().and_then(|one| order(OWN, one)) == Some(Ordering::Equal);
    !versions.is_empty() && versions.iter().all(is_own)
}

pub(super) fn check(installed: &Installed) -> Vec<Finding> {
    let mut findings = Group::Proxies.of("managers", &installed.managers, |pods| managers(&parts(pods, MANAGER)));
    // The first by name, where an upgrade is under way; that one is a finding of its own.
    let managers = installed.managers.iter().flat_map(|pods| parts(pods, MANAGER)).next();
    let wanted = managers.and_then(|part| part.version);
    findings.extend(
        Group::Proxies.of("node proxies", &installed.node_proxies, |pods| {
            node_proxies(&parts(pods, NODE_PROXY), wanted.as_deref())
        }),
    );
    findings.extend(Group::Proxies.of("sidecars", &installed.enrolled, |pods| {
        let mut findings = vec![sidecars(pods, wanted.as_deref())];
        findings.extend(not_admitted(pods));
        findings
    }));
    findings
}

fn managers(parts: &[Part]) -> Vec<Finding> {
    let group = Group::Proxies;
    let Some(part) = parts.first() else { return Vec::new() };
    // One version may come from several registries.
    if parts.iter().any(|other| other.version != part.version) {
        let advice = format!("wait until the upgrade is over, or undo it: {}", pages::UPGRADE);
        return vec![group.warning("managers", format!("of several versions: {}", said(parts)), advice)];
    }
    let Some(version) = &part.version else {
        let found = format!("{} has no version as its tag", part.image);
        return vec![group.warning("managers", found, "tag the images with their version")];
    };
    let found = format!("{version}, as this program");
    vec![match order(OWN, version) {
        Some(Ordering::Equal) => group.ok("managers", found),
        relation => {
            let relation = match relation {
                Some(Ordering::Less) => "older than they are",
                Some(_) => "newer than they are",
                None => "of another version",
            };
            let advice = format!("take `ctrlmesh` of version {version}, or upgrade the cluster: {}", pages::UPGRADE);
            group.warning("managers", format!("{version}, and this program is {OWN}: {relation}"), advice)
        }
    }]
}

fn node_proxies(parts: &[Part], wanted: Option<&str>) -> Vec<Finding> {
    let group = Group::Proxies;
    let is_other = |part: &&Part| wanted.is_some_and(|wanted| part.version.as_deref() != Some(wanted));
    if parts.is_empty() {
        return Vec::new();
    }
    if parts.len() == 1 && !parts.iter().any(|part| is_other(&part)) {
        return vec![group.ok("node proxies", said(parts))];
    }
    let advice = format!(
        "see whether the update goes on, `kubectl -n {} rollout status daemonset/ctrlmesh-node`: {}",
        rbac::NAMESPACE,
        pages::UPGRADE
    );
    let managers = wanted.map_or_else(String::new, |wanted| format!("; the managers are {wanted}"));
    vec![group.warning("node proxies", format!("{}{managers}", said(parts)), advice)]
}

fn sidecars(pods: &[Pod], wanted: Option<&str>) -> Finding {
    let group = Group::Proxies;
    let all = parts(pods, SIDECAR);
    if all.is_empty() {
        let found = match pods.len() {
            0 => "none, and no pod is enrolled".to_owned(),
            number => format!("none, of {}", counted(number, "enrolled pod")),
        };
        return group.ok("sidecars", found);
    }
    let is_current = |image: &str| wanted.is_none_or(|wanted| crate::version::image::tag(image) == Some(wanted));
    let others = pods.iter().filter(|pod| image_of(pod, SIDECAR).is_some_and(|image| !is_current(image)));
    let others: Vec<String> = others.map(path).collect();
    if others.is_empty() {
        return group.ok("sidecars", said(&all));
    }
    let found = format!("of another version than the managers: {}", listed(&others));
    let advice = format!("make these pods anew, `kubectl rollout restart` of their workloads: {}", pages::UPGRADE);
    group.warning("sidecars", found, advice)
}

/// Pods that were labelled after their admission, which nobody serves.
fn not_admitted(pods: &[Pod]) -> Option<Finding> {
    let is_admitted = |pod: &Pod| pod.annotations().get(annotation::INJECTED).is_some_and(|value| value == "true");
    let is_exempt = |pod: &Pod| super::super::expected::EXEMPT.contains(&pod.namespace().unwrap_or_default().as_str());
    let is_here = |pod: &Pod| pod.metadata.deletion_timestamp.is_none() && !has_ended(pod);
    let others = pods.iter().filter(|pod| is_here(pod) && !is_admitted(pod) && !is_exempt(pod));
    let others: Vec<String> = others.map(path).collect();
    let found = format!("labelled after their admission, so nobody serves them: {}", listed(&others));
    let advice =
        format!("make these pods anew, `kubectl rollout restart` of their workloads: {}", pages::TROUBLESHOOTING);
    (!others.is_empty()).then(|| Group::Proxies.warning("enrolled pods", found, advice))
}

fn said(parts: &[Part]) -> String {
    let one = |part: &Part| format!("{} ({})", part.version.as_ref().unwrap_or(&part.image), counted(part.pods, "pod"));
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn path(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn pod(name: &str, container: &str, image: &str, injected: bool) -> Pod {
        let annotations = if injected { json!({"ctrlmesh.kusionstack.io/injected": "true"}) } else { json!({}) };
        serde_json::from_value(json!({"metadata": {"namespace": "ops", "name": name, "annotations": annotations},
            "spec": {"containers": [], "initContainers": [{"name": container, "image": image}]}}))
        .unwrap()
    }

    fn messages(installed: &Installed) -> Vec<(State, String)> {
        check(installed).into_iter().map(|one| (one.state, one.message)).collect()
    }

    #[test]
    fn parts_of_this_version_are_good() {
        let installed = samples::installed();
        assert!(is_own(&installed));
        let found = messages(&installed);
        assert!(found.iter().all(|(state, _)| *state == State::Ok), "{found:?}");
        assert_eq!(found[2].1, "none, and no pod is enrolled");
    }

    #[test]
    fn other_managers_are_compared_with_this_program() {
        let mut installed = samples::installed();
        let managers = |images: &[&str]| Ok(images.iter().map(|image| pod("m", "manager", image, true)).collect());
        for (images, says) in [
            (&["m:9.0.0"][..], "9.0.0, and this program is 0.1.0: older than they are"),
            (&["m:0.0.9"], "0.0.9, and this program is 0.1.0: newer than they are"),
            (&["m:edge"], "edge, and this program is 0.1.0: of another version"),
            (&["m@sha256:0"], "m@sha256:0 has no version as its tag"),
            (&["m:0.1.0", "m:0.2.0"], "of several versions: 0.1.0 (1 pod), 0.2.0 (1 pod)"),
        ] {
            installed.managers = managers(images);
            assert_eq!(messages(&installed)[0], (State::Warning, says.replace("0.1.0:", &format!("{OWN}:"))));
            assert!(!is_own(&installed));
        }
    }

    #[test]
    fn proxies_of_another_version_are_named() {
        let mut installed = samples::installed();
        installed.node_proxies = Ok(vec![pod("n", "proxy", "p:0.0.9", true)]);
        installed.enrolled = Ok(vec![pod("web-a", "ctrlmesh-proxy", "p:0.0.9", true)]);
        let found = messages(&installed);
        assert_eq!(found[1], (State::Warning, format!("0.0.9 (1 pod); the managers are {OWN}")));
        assert_eq!(found[2], (State::Warning, "of another version than the managers: ops/web-a".to_owned()));
    }

    #[test]
    fn pods_that_were_labelled_too_late_are_named() {
        let mut installed = samples::installed();
        installed.enrolled = Ok(vec![pod("web-a", "operator", "o:1", false)]);
        let expected = "labelled after their admission, so nobody serves them: ops/web-a".to_owned();
        assert_eq!(messages(&installed)[3], (State::Warning, expected));
    }

    #[test]
    fn without_rights_versions_are_skipped() {
        let mut installed = samples::installed();
        let forbidden = Unanswered::Forbidden { right: "list pods".to_owned() };
        installed.managers = Err(forbidden.clone());
        (installed.node_proxies, installed.enrolled) = (Err(forbidden.clone()), Err(forbidden));
        assert!(messages(&installed).iter().all(|(state, _)| *state == State::Skipped));
        assert!(!is_own(&installed));
    }
}
