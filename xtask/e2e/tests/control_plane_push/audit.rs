//! Reads the managers' requests from the audit log.

use std::fs;

use ctrlmesh_testbed::ControlPlane;
use jiff::Timestamp;
use serde_json::Value;

/// How the managers call themselves in requests: of the log, only what contains this is read.
pub(crate) const PROGRAM: &str = "ctrlmesh-manager";

/// A request that was not refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) verb: String,
    /// With the subresource.
    pub(crate) resource: String,
    pub(crate) name: String,
    /// When it came in.
    pub(crate) at: Timestamp,
}

/// What is in the log about the managers, as it happened.
pub(crate) fn requests(cluster: &ControlPlane) -> Vec<Request> {
    let log = fs::read_to_string(cluster.audit_log()).unwrap();
    let lines = log.lines().filter(|line| line.contains(PROGRAM));
    let events = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut requests: Vec<Request> = events.filter_map(|event| request(&event)).collect();
    requests.sort_by_key(|request| request.at);
    requests
}

fn request(event: &Value) -> Option<Request> {
    let ours = event["userAgent"].as_str()?.starts_with(PROGRAM);
    if !ours || event["responseStatus"]["code"].as_u64()? >= 300 {
        return None;
    }
    let what = &event["objectRef"];
    let subresource = what["subresource"].as_str().map(|one| format!("/{one}"));
    Some(Request {
        verb: event["verb"].as_str()?.to_owned(),
        resource: what["resource"].as_str()?.to_owned() + &subresource.unwrap_or_default(),
        name: what["name"].as_str().unwrap_or_default().to_owned(),
        at: event["requestReceivedTimestamp"].as_str()?.parse().ok()?,
    })
}
