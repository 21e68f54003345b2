//! The API server takes what the chart renders, in dry runs.

use std::sync::LazyLock;

use anyhow::{Result, ensure};
use ctrlmesh_testbed::{ControlPlane, Options};
use xtask::tools::HELMS;

use crate::helm::{self, Helm, NAMESPACE, all_values};

/// With the namespace, and the kinds of the Prometheus operator.
static PLANE: LazyLock<ControlPlane> =
    LazyLock::new(|| prepared(&Options::default()).unwrap_or_else(|error| panic!("{error:?}")));

/// A control plane with what the chart needs in a dry run.
pub(crate) fn prepared(options: &Options) -> Result<ControlPlane> {
    let plane = ControlPlane::start(options)?;
    helm::ask(&plane, &["create", "namespace", NAMESPACE], "")?;
    helm::with_prometheus_kinds(&plane)?;
    Ok(plane)
}

fn accepted(helm: &Helm, values: &[&str]) -> Result<String> {
    accepted_by(&PLANE, helm, values)
}

/// Has an API server take the chart with these values in a dry run; what it was given.
pub(crate) fn accepted_by(plane: &ControlPlane, helm: &Helm, values: &[&str]) -> Result<String> {
    // A pod needs its account to be there already; the node tier runs `helm test`.
    let rendered = helm.template(&[&["--skip-tests"], values].concat())?;
    let apply = ["apply", "--dry-run=server", "--validate=strict", "--filename", "-"];
    let said = helm::ask(plane, &apply, &rendered)?;
    let objects = rendered.matches("\nkind: ").count();
    ensure!(said.lines().count() == objects && objects > 20, "{objects} objects: {said}");
    Ok(rendered)
}

#[test]
fn the_api_server_takes_the_chart_by_default() {
    for release in HELMS {
        let rendered = accepted(&Helm::of(release, &PLANE), &[]).unwrap();
        assert_eq!(rendered.matches("\n    helm.sh/resource-policy: keep\n").count(), 4, "the definitions stay");
        assert!(!rendered.contains("kind: PodMonitor") && !rendered.contains("kind: Namespace\n"));
    }
}

#[test]
fn the_api_server_takes_every_value() {
    let values = all_values().display().to_string();
    for release in HELMS {
        let rendered = accepted(&Helm::of(release, &PLANE), &["--values", &values]).unwrap();
        let proxy = "registry.example.com:5000/team/mesh/proxy@sha256:1234";
        assert_eq!(rendered.matches(proxy).count(), 2, "sidecars have the image of the nodes");
        let is_there = [
            "failurePolicy: Ignore",
            "cidr: \"2001:db8::10/128\"",
            "name: ctrlmesh-labels-extra",
            "apps/v1: [\"Deployment\",\"StatefulSet\"]",
            "kind: PrometheusRule",
            "kind: PodMonitor",
            "ctrlmesh-proxies.json: |",
            "imagePullSecrets:",
            "- \"--label-rate=50\"",
            "value: \"info,ctrlmesh_manager::push=debug\"",
        ];
        for text in is_there {
            assert!(rendered.contains(text), "{text}");
        }
        let is_gone = [
            "resource-policy",
            "failurePolicy: Fail",
            "ctrlmesh-manager-rollouts",
            "kind: PodDisruptionBudget",
            "kind: ResourceQuota",
            "name: ctrlmesh-view",
        ];
        for text in is_gone {
            assert!(!rendered.contains(text), "{text}");
        }
    }
}

#[test]
fn the_manager_may_be_let_write_further_labels() {
    let helm = Helm::of(HELMS[1], &PLANE);
    let keys = "manager.accountPolicies.labelKeys={example.com/slot,example.com/namespace}";
    let rendered = accepted(&helm, &["--set", keys]).unwrap();
    assert!(rendered.contains(", 'example.com/slot', 'example.com/namespace']"), "{rendered}");
}

#[test]
fn each_part_can_be_switched_off() {
    let switches = [
        ("crds.install=false", "kind: CustomResourceDefinition"),
        ("networkPolicy.enabled=false", "kind: NetworkPolicy"),
        ("quota.enabled=false", "kind: ResourceQuota"),
        ("readers.enabled=false", "name: ctrlmesh-view"),
        ("manager.podDisruptionBudget.enabled=false", "kind: PodDisruptionBudget"),
        ("manager.accountPolicies.enabled=false", "ctrlmesh-manager creates one Secret, ctrlmesh-ca"),
        ("node.announce=false", "kind: ValidatingAdmissionPolicy\nmetadata:\n  name: ctrlmesh-node\n"),
        ("node.dropBypass=false", "--drop-bypass"),
        ("manager.rollouts=false", "name: ctrlmesh-manager-rollouts"),
    ];
    let helm = Helm::of(HELMS[1], &PLANE);
    let whole = helm.template(&[]).unwrap();
    for (switch, text) in switches {
        let without = accepted(&helm, &["--set", switch]).unwrap();
        assert!(whole.contains(text) && !without.contains(text), "{switch}: {text}");
    }
}
