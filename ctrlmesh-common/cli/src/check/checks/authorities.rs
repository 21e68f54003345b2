//! Checks how long the certificate authorities are valid, and who does not know the next one yet.

use std::time::SystemTime;

use ctrlmesh_common::names::{annotation, root_ca};
use ctrlmesh_manager::ca::authority::validity_of;
use ctrlmesh_manager::install::rbac;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt as _;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use super::super::snapshot::{Installed, Snapshot};
use crate::text::duration;

/// The next authority is made at half of a life. A quarter later it is overdue.
const OVERDUE_PARTS: i64 = 4;

/// The present authority signs until this many quarters of its life have passed.
const SIGNING_QUARTERS: i64 = 3;

/// From when until when an authority is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Validity {
    begin: Timestamp,
    end: Timestamp,
}

impl Validity {
    fn seconds(self) -> i64 {
        self.end.duration_since(self.begin).as_secs()
    }
}

pub(super) fn check(snapshot: &Snapshot, installed: &Installed) -> Vec<Finding> {
    let now = snapshot.server.date.unwrap_or(snapshot.server.answered);
    let pods = installed.enrolled.as_deref().unwrap_or_default();
    Group::Certificates.of("trust bundle", &installed.trust_bundle, |bundle| {
        let Some(bundle) = bundle else {
            let found = format!("there is no ConfigMap {} in namespace {}", root_ca::MESH, rbac::NAMESPACE);
            let advice = format!("check again once a manager leads: it writes the bundle: {}", pages::CERTIFICATES);
            return vec![Group::Certificates.failed("trust bundle", found, advice)];
        };
        let mesh = authorities(bundle, root_ca::KEY);
        let mut findings = vec![
            age("mesh authority", &mesh, now),
            age("manager authority", &authorities(bundle, root_ca::MANAGER_KEY), now),
        ];
        findings.extend(successor(&mesh, pods, now));
        findings
    })
}

/// The authorities under a key, oldest first. Those that cannot be read are left out.
fn authorities(bundle: &ConfigMap, key: &str) -> Vec<Validity> {
    let pem = bundle.data.iter().flatten().find(|(name, _)| *name == key).map_or("", |(_, pem)| pem.as_str());
    let at = |time: SystemTime| Timestamp::try_from(time).ok();
    let mut all: Vec<Validity> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .filter_map(|certificate| {
            let (begin, end) = validity_of(&certificate.ok()?)?;
            Some(Validity { begin: at(begin)?, end: at(end)? })
        })
        .collect();
    all.sort();
    all
}

fn age(check: &'static str, all: &[Validity], now: Timestamp) -> Finding {
    let group = Group::Certificates;
    let advice = format!("look at the managers' logs: the leader makes the next authority: {}", pages::CERTIFICATES);
    let Some(newest) = all.iter().max_by_key(|one| one.end) else {
        return group.failed(check, "no certificate can be read", advice);
    };
    let left = newest.end.duration_since(now).as_secs();
    if left <= 0 {
        return group.failed(check, format!("the newest one ended at {}", newest.end), advice);
    }
    let left_for = duration(left.unsigned_abs());
    if left < newest.seconds() / OVERDUE_PARTS {
        return group.warning(check, format!("the newest one ends in {left_for}, and no other follows"), advice);
    }
    group.ok(check, format!("the newest one is valid for another {left_for}"))
}

/// Where the next authority is made: enrolled pods that run since before, and do not know it.
fn successor(all: &[Validity], pods: &[Pod], now: Timestamp) -> Option<Finding> {
    let newest = all.last()?;
    let present = all.iter().rev().find(|one| one.begin < newest.begin && one.end > now)?;
    let is_old = |pod: &&Pod| started(pod).is_some_and(|started| started < newest.begin);
    let old = pods.iter().filter(|pod| pod.annotations().contains_key(annotation::INJECTED)).filter(is_old);
    let old: Vec<String> =
        old.map(|pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())).collect();
    if old.is_empty() {
        return None;
    }
    let signs = present.begin + jiff::SignedDuration::from_secs(present.seconds() / 4 * SIGNING_QUARTERS);
    let found = format!("run since before the next authority: {}", listed(&old));
    let advice = format!("restart them before {signs}, when the next authority signs: {}", pages::CERTIFICATES);
    Some(Group::Certificates.warning("next authority", found, advice))
}

/// When the oldest container that runs was started.
fn started(pod: &Pod) -> Option<Timestamp> {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let running = containers.filter_map(|one| one.state.as_ref()?.running.as_ref()?.started_at.as_ref());
    running.map(|time| time.0).min()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ctrlmesh_manager::ca::authority::{Authority, Names};
    use serde_json::json;

    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    const DAY: u64 = 24 * 3600;

    /// A bundle of authorities that live 100 days, made so many days ago.
    fn bundle(ages: &[u64]) -> ConfigMap {
        let now: SystemTime = samples::now().into();
        let made = |age: &u64| {
            let names = Names::of(["kubernetes"]);
            let begin = now - Duration::from_secs(age * DAY);
            Authority::generate("test", &names, Duration::from_secs(100 * DAY), begin).unwrap().pem().to_owned()
        };
        let pem: String = ages.iter().map(made).collect();
        serde_json::from_value(json!({"metadata": {}, "data": {"ca.crt": pem, "manager-ca.crt": pem}})).unwrap()
    }

    fn findings(ages: &[u64], pods: Vec<Pod>) -> Vec<Finding> {
        let mut installed = samples::installed();
        installed.trust_bundle = Ok(Some(bundle(ages)));
        installed.enrolled = Ok(pods);
        check(&samples::snapshot(), &installed)
    }

    #[test]
    fn the_newest_authority_counts() {
        for (ages, state, says) in [
            (&[1][..], State::Ok, "the newest one is valid for another 99d"),
            (&[80, 30], State::Ok, "the newest one is valid for another 70d"),
            (&[80], State::Warning, "the newest one ends in 20d, and no other follows"),
            (&[], State::Failed, "no certificate can be read"),
        ] {
            let found = findings(ages, Vec::new());
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(found.iter().all(|one| one.state == state && one.message == says), "{found:?}");
        }
        assert_eq!(findings(&[101], Vec::new())[0].state, State::Failed);
    }

    #[test]
    fn pods_that_run_since_before_the_next_authority_are_named() {
        let pod = |name: &str, days: i64| -> Pod {
            let started = samples::now() - jiff::SignedDuration::from_hours(24 * days);
            let container = json!({"name": "operator", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": started.to_string()}}});
            serde_json::from_value(json!({"metadata": {"namespace": "ops", "name": name,
                "annotations": {"ctrlmesh.kusionstack.io/injected": "true"}},
                "status": {"containerStatuses": [container]}}))
            .unwrap()
        };
        let pods = || vec![pod("old", 20), pod("new", 5)];
        let found = findings(&[60, 10], pods());
        assert_eq!((found.len(), found[2].state), (3, State::Warning));
        assert_eq!(found[2].message, "run since before the next authority: ops/old");
        assert_eq!(findings(&[10], pods()).len(), 2, "there is no next authority");
        assert_eq!(findings(&[101, 10], pods()).len(), 2, "the former authority has ended");
    }

    #[test]
    fn a_missing_bundle_fails_and_a_missing_right_skips() {
        let mut installed = samples::installed();
        installed.trust_bundle = Ok(None);
        assert_eq!(check(&samples::snapshot(), &installed)[0].state, State::Failed);
        installed.trust_bundle = Err(Unanswered::Forbidden { right: "get configmaps".to_owned() });
        assert_eq!(check(&samples::snapshot(), &installed)[0].state, State::Skipped);
    }
}
