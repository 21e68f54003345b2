use k8s_openapi::ByteString;
use serde_json::json;

use super::super::super::finding::State;
use super::super::super::snapshot::samples;
use super::*;
use crate::cluster::answer::Unanswered;

fn state(installed: &Installed, check: &str) -> State {
    let findings = self::check(installed);
    let found: Vec<_> = findings.iter().filter(|one| one.check == check).collect();
    assert_eq!(found.len(), 1, "{findings:?}");
    found[0].state
}

fn denied(webhook: &str) -> DryRun {
    DryRun::Denied { webhook: webhook.to_owned(), message: "denied".to_owned() }
}

#[test]
fn webhooks_that_answer_are_good() {
    let findings = check(&samples::installed());
    assert!(findings.iter().all(|one| one.state == State::Ok), "{findings:?}");
    assert_eq!(findings.len(), 6);
}

#[test]
fn missing_configurations_and_endpoints_fail() {
    let mut installed = samples::installed();
    let webhooks = &mut installed.webhooks;
    (webhooks.validating, webhooks.labelling, webhooks.slices) = (Ok(None), Ok(None), Ok(Vec::new()));
    let live = webhooks.mutating.as_mut().unwrap().as_mut().unwrap();
    live.webhooks.as_mut().unwrap()[0].client_config.ca_bundle = None;
    for (check, expected) in
        [("validate", State::Failed), ("inject", State::Failed), ("label", State::Ok), ("service", State::Failed)]
    {
        assert_eq!(state(&installed, check), expected, "{check}");
    }
}

#[test]
fn a_configuration_without_webhooks_fails() {
    let mut installed = samples::installed();
    let webhooks = &mut installed.webhooks;
    webhooks.validating.as_mut().unwrap().as_mut().unwrap().webhooks = None;
    webhooks.mutating.as_mut().unwrap().as_mut().unwrap().webhooks = Some(Vec::new());
    webhooks.labelling.as_mut().unwrap().as_mut().unwrap().webhooks = Some(Vec::new());
    for (check, advice) in [("validate", "apply"), ("inject", "apply"), ("label", "delete it")] {
        let found = self::check(&installed).into_iter().find(|one| one.check == check).unwrap();
        assert_eq!(found.state, State::Failed, "{found:?}");
        assert!(found.message.ends_with("has no webhook, so the API server asks no manager"), "{found:?}");
        assert!(found.advice.is_some_and(|found| found.starts_with(advice)), "{check}");
    }
}

/// Two authorities.
fn pems() -> [String; 2] {
    ["a", "b"].map(|name| rcgen::generate_simple_self_signed([name.to_owned()]).unwrap().cert.pem())
}

#[test]
fn a_ca_bundle_that_the_managers_do_not_publish_fails() {
    let [own, other] = pems();
    let both = format!("{own}{other}");
    for (published, live, expected) in [
        (&own, &own, State::Ok),
        (&both, &format!("# written by hand\n{other}\n{own}"), State::Ok),
        (&own, &other, State::Failed),
        (&own, &both, State::Failed),
        (&both, &own, State::Failed),
        (&own, &"no certificate".to_owned(), State::Failed),
        (&String::new(), &other, State::Ok),
    ] {
        let mut installed = samples::installed();
        let bundle = json!({"metadata": {}, "data": {"manager-ca.crt": published, "ca.crt": "of pods"}});
        installed.trust_bundle = Ok(serde_json::from_value(bundle).unwrap());
        let validating = installed.webhooks.validating.as_mut().unwrap().as_mut().unwrap();
        let hook = &mut validating.webhooks.as_mut().unwrap()[0];
        hook.client_config.ca_bundle = Some(ByteString(live.clone().into_bytes()));
        assert_eq!(state(&installed, "validate"), expected, "{published} {live}");
    }
}

#[test]
fn a_manager_that_is_not_reached_fails() {
    let mut installed = samples::installed();
    let away = |webhook: &str| DryRun::NotCalled { webhook: webhook.to_owned(), message: "timeout".to_owned() };
    (installed.webhooks.invalid, installed.webhooks.pod) = (away(VALIDATE), away("inject.ctrlmesh.kusionstack.io"));
    assert_eq!(state(&installed, "validation answers"), State::Failed);
    assert_eq!(state(&installed, "injection answers"), State::Failed);
    installed.webhooks.pod = away("policy.example.com");
    assert_eq!(state(&installed, "injection answers"), State::Skipped);
}

#[test]
fn objects_that_pass_by_the_managers_fail() {
    let mut installed = samples::installed();
    let mut pod = match &installed.webhooks.pod {
        DryRun::Admitted { object } => object.clone(),
        other => panic!("{other:?}"),
    };
    pod.metadata.annotations = None;
    installed.webhooks.pod = DryRun::Admitted { object: pod.clone() };
    installed.webhooks.invalid = DryRun::Admitted { object: pod };
    assert_eq!(state(&installed, "validation answers"), State::Failed);
    assert_eq!(state(&installed, "injection answers"), State::Failed);
}

#[test]
fn what_others_refuse_or_nobody_may_try_is_skipped() {
    let mut installed = samples::installed();
    let forbidden = Unanswered::Forbidden { right: "create pods in namespace ops".to_owned() };
    for dry_run in [
        denied("policy.example.com"),
        DryRun::Refused { message: "exceeded quota".to_owned() },
        DryRun::NotAsked,
        DryRun::Unanswered(forbidden),
    ] {
        (installed.webhooks.invalid, installed.webhooks.pod) = (dry_run.clone(), dry_run);
        assert_eq!(state(&installed, "validation answers"), State::Skipped);
        assert_eq!(state(&installed, "injection answers"), State::Skipped);
    }
    installed.webhooks.invalid = denied(VALIDATE);
    installed.webhooks.valid = denied("policy.example.com");
    assert_eq!(state(&installed, "validation answers"), State::Skipped);
}

#[test]
fn no_webhook_is_asked_about_what_the_cluster_needs_to_start() {
    assert!(asks_about("ops") && !asks_about("kube-system") && !asks_about("ctrlmesh-system"));
}
