use serde_json::{Value, json};

use super::finding::Group;
use super::*;

#[test]
fn results_are_printed_with_all_documented_fields() {
    let checks = vec![
        Group::KubernetesApi.ok("version", "Kubernetes v1.36.1"),
        Group::Clocks.warning("nodes", "node-1 is ahead", "synchronize it"),
    ];
    let printed = text::document(text::Format::Json, &Document::new(KIND, &Report { pre: false, checks })).unwrap();
    let document: Value = serde_json::from_str(&printed).unwrap();
    let expected = json!({"apiVersion": "cli.ctrlmesh.kusionstack.io/v1alpha1", "kind": "Check", "pre": false,
    "checks": [
        {"group": "KubernetesApi", "check": "version", "state": "Ok", "message": "Kubernetes v1.36.1"},
        {"group": "Clocks", "check": "nodes", "state": "Warning", "message": "node-1 is ahead",
            "advice": "synchronize it"},
    ]});
    assert_eq!(document, expected);
}

#[test]
fn the_docs_list_every_field_group_and_state() {
    let docs = include_str!("../../../../docs/inspect.md");
    for field in ["pre", "checks[].group", ".check", "checks[].state", "checks[].message", "checks[].advice"] {
        assert!(docs.contains(&format!("`{field}`")), "{field}");
    }
    for state in ["Ok", "Warning", "Failed", "Skipped"] {
        assert!(docs.contains(&format!("`{state}`")), "{state}");
    }
    for group in
        ["KubernetesApi", "Nodes", "Installation", "Webhooks", "Rights", "Roots", "Proxies", "Certificates", "Clocks"]
    {
        assert!(docs.contains(&format!("`{group}`")), "{group}");
    }
}
