//! A pod that makes connection after connection, and counts how many fail.

use anyhow::Result;
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};
use xtask::images::Image;

use super::until;

/// The API server, as pods know it, and whom they believe to be it.
const ADDRESS: &str = "10.96.0.1:443";
const CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// A pod that makes connection after connection; one of the operator's, where it is enrolled.
pub(crate) fn knocks(space: Space<'_>, enrolled: bool) -> Result<()> {
    let labels = if enrolled {
        json!({"app": "operator", "ctrlmesh.kusionstack.io/enable-proxy": "true"})
    } else {
        json!({})
    };
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "knocks", "labels": labels}, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "probe", "image": Image::Probe.name(), "args": ["knock", ADDRESS, CA]}]}});
    space.apply(&pod.to_string())?;
    until("connections", || Ok(knocked(space).ok().filter(|seen| count(seen, "made") > 0)))?;
    Ok(())
}

/// What came of it so far.
pub(crate) fn knocked(space: Space<'_>) -> Result<Value> {
    let get = ["exec", "knocks", "--", "/probe", "get", "http://127.0.0.1:8080/"];
    Ok(serde_json::from_str(&space.kubectl(&get)?)?)
}

pub(crate) fn count(seen: &Value, name: &str) -> u64 {
    seen[name].as_u64().unwrap_or_default()
}
