//! Checks the version of the API server, and what it serves.

use std::collections::BTreeSet;

use super::super::finding::{Finding, Group};
use super::super::pages;
use super::super::snapshot::{Server, Snapshot};
use crate::version::image::numbers;

/// The oldest version that says in a pod's token on which node the pod is.
const OLDEST: [u64; 2] = [1, 30];

/// With which the API server refuses writes.
const FENCE: &str = "validatingadmissionpolicies";

/// With which it labels new objects.
const LABELS: &str = "mutatingadmissionpolicies";

pub(super) fn check(snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = vec![version(&snapshot.server)];
    findings
        .extend(Group::KubernetesApi.of("policies", &snapshot.admission, |served| vec![fence(served), labels(served)]));
    findings
}

fn version(server: &Server) -> Finding {
    let Server { url, version, .. } = server;
    let found = format!("{url} is Kubernetes {version}");
    match numbers(version) {
        Some(numbers) if numbers.as_slice() < OLDEST.as_slice() => {
            let advice = format!("upgrade the cluster to Kubernetes 1.30 or newer: {}", pages::BEFORE);
            Group::KubernetesApi.failed("version", found, advice)
        }
        Some(_) => Group::KubernetesApi.ok("version", found),
        None => {
            let advice = format!("make sure that it is Kubernetes 1.30 or newer: {}", pages::BEFORE);
            Group::KubernetesApi.warning("version", format!("{found}, which is not read"), advice)
        }
    }
}

fn fence(served: &BTreeSet<String>) -> Finding {
    if served.contains(FENCE) {
        let found = "ValidatingAdmissionPolicy is served: the API server can refuse writes to what a pod does not own";
        return Group::KubernetesApi.ok("fence", found);
    }
    let found = "ValidatingAdmissionPolicy is not served: only proxies can refuse writes to what a pod does not own";
    let advice = format!("switch admissionregistration.k8s.io/v1 on, or set `root.fence: Proxy`: {}", pages::FENCE);
    Group::KubernetesApi.warning("fence", found, advice)
}

fn labels(served: &BTreeSet<String>) -> Finding {
    let found = if served.contains(LABELS) {
        "MutatingAdmissionPolicy is served: the API server labels new objects by itself"
    } else {
        "MutatingAdmissionPolicy is not served: the managers label new objects by a webhook"
    };
    Group::KubernetesApi.ok("labels", found)
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn states(snapshot: &Snapshot) -> Vec<(&'static str, State)> {
        check(snapshot).iter().map(|one| (one.check, one.state)).collect()
    }

    #[test]
    fn a_new_api_server_is_good() {
        let expected = [("version", State::Ok), ("fence", State::Ok), ("labels", State::Ok)];
        assert_eq!(states(&samples::snapshot()), expected);
    }

    #[test]
    fn an_old_api_server_fails_and_cannot_fence() {
        let mut snapshot = samples::snapshot();
        snapshot.server.version = "v1.29.9-gke.1".to_owned();
        snapshot.admission = Ok(BTreeSet::new());
        let expected = [("version", State::Failed), ("fence", State::Warning), ("labels", State::Ok)];
        assert_eq!(states(&snapshot), expected);
        snapshot.server.version = "edge".to_owned();
        assert_eq!(states(&snapshot)[0], ("version", State::Warning));
    }

    #[test]
    fn without_the_right_to_discover_policies_are_skipped() {
        let mut snapshot = samples::snapshot();
        snapshot.admission = Err(Unanswered::Forbidden { right: "get /apis".to_owned() });
        assert_eq!(states(&snapshot), [("version", State::Ok), ("policies", State::Skipped)]);
    }
}
