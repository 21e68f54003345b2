//! A pod that makes connection after connection, and counts how many fail.

use anyhow::Result;
use ctrlmesh_testbed::Space;
use serde_json::{Value, json};
use xtask::images::Image;

use super::operator::{self, OperatorSpec};
use super::until;

/// The API server, as pods know it, and whom they believe to be it.
const ADDRESS: &str = "10.96.0.1:443";
const CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// A pod that makes connection after connection: where it is enrolled as is wished, one of the operator's.
pub(crate) fn knocks(space: Space<'_>, wanted: Option<OperatorSpec<'_>>) -> Result<()> {
    let mut metadata = wanted.map_or_else(|| json!({}), operator::metadata);
    metadata["name"] = json!("knocks");
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "probe", "image": Image::Probe.name(), "args": ["knock", ADDRESS, CA]}]}});
    space.apply(&pod.to_string())?;
    until("connections", || Ok(knocked(space).ok().filter(|seen| count(seen, "made") > 0)))?;
    Ok(())
}

/// What came of it so far.
pub(crate) fn knocked(space: Space<'_>) -> Result<Value> {
    let get = ["exec", "knocks", "--container", "probe", "--", "/probe", "get", "http://127.0.0.1:8080/"];
    Ok(serde_json::from_str(&space.kubectl(&get)?)?)
}

pub(crate) fn count(seen: &Value, name: &str) -> u64 {
    seen[name].as_u64().unwrap_or_default()
}
