//! Finds pods that dialled the API server past their proxy.
//!
//! Such a pod believes only the mesh's CA, so it makes no request, and no audit log has it. The operator's log and
//! the API server's log show the failed handshake.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;
use jiff::Timestamp;
use serde_json::Value;

use super::{self as mesh, in_ours, is_ending, until};

/// What a Go client says whom the API server itself answered.
const DISBELIEF: &str = "certificate signed by unknown authority";

/// Looks from some moment on: an address may have been another pod's before.
pub(crate) struct Past<'a> {
    space: Space<'a>,
    /// What pods said before is not read.
    since: Timestamp,
    /// How often the API server had not been believed before.
    before: usize,
    /// Where the pods are, or were, of which none may dial past its proxy.
    addresses: BTreeSet<IpAddr>,
}

impl<'a> Past<'a> {
    /// From now on.
    pub(crate) fn from_now(space: Space<'a>) -> Result<Self> {
        let mut this = Self { space, since: Timestamp::now(), before: 0, addresses: BTreeSet::new() };
        this.before = this.unbelieving()?.len();
        Ok(this)
    }

    /// Refuses that any of these pods, or of those before them, dialled past its proxy.
    pub(crate) fn nobody(&mut self, pods: &[Value]) -> Result<()> {
        ensure!(!pods.is_empty(), "no pod is there");
        for pod in pods {
            self.addresses.insert(address(pod)?);
            let said = self.said(pod)?;
            ensure!(said.is_empty(), "dialled past its proxy: {said:?}");
        }
        let unbelieving = self.unbelieving()?;
        let past: Vec<&IpAddr> = unbelieving.iter().filter(|from| self.addresses.contains(from)).collect();
        ensure!(past.is_empty(), "dialled past their proxy: {past:?}");
        let dropped = dropped(self.space)?;
        ensure!(dropped.is_empty(), "packets past their proxy: {dropped:?}");
        Ok(())
    }

    /// Waits until each of these pods has dialled past its proxy, and both it and the API server have said so.
    pub(crate) fn everybody(&self, pods: &[Value]) -> Result<()> {
        for pod in pods {
            let address = address(pod)?;
            until("the pod to say that it does not believe the API server", || {
                Ok((!self.said(pod)?.is_empty()).then_some(()))
            })?;
            until("the API server to say that it is not believed", || {
                Ok(self.unbelieving()?.contains(&address).then_some(()))
            })?;
        }
        Ok(())
    }

    /// Who did not believe the API server since; where that is the user's, it is not known.
    fn unbelieving(&self) -> Result<Vec<IpAddr>> {
        let Some(node) = self.space.cluster().node() else { return Ok(Vec::new()) };
        Ok(node.control_plane().unbelieving()?.split_off(self.before))
    }

    /// What the containers of a pod say of it, those that ended too.
    fn said(&self, pod: &Value) -> Result<Vec<String>> {
        let name = pod["metadata"]["name"].as_str().context("a pod's name")?;
        let mut said = Vec::new();
        let since = format!("--since-time={}", self.since);
        let kinds = ["initContainerStatuses", "containerStatuses"];
        for status in kinds.iter().filter_map(|kind| pod["status"][kind].as_array()).flatten() {
            let container = status["name"].as_str().context("a container's name")?;
            let ended = status["restartCount"] != 0;
            for run in ["--previous=false", "--previous=true"].iter().take(1 + usize::from(ended)) {
                let log = self.space.kubectl(&["logs", name, "--container", container, &since, run])?;
                let lines = log.lines().filter(|line| line.contains(DISBELIEF));
                said.extend(lines.map(|line| format!("{name}/{container}: {line}")));
            }
        }
        Ok(said)
    }
}

/// Packets to the API server that the node's proxies dropped, by the pod that sent them. A proxy that ends may not
/// answer any more.
pub(crate) fn dropped(space: Space<'_>) -> Result<BTreeMap<String, u64>> {
    let cluster = space.cluster();
    let of_space = format!(r#"ctrlmesh_proxy_pod_bypass_packets_total{{namespace="{}",pod=""#, space.name());
    let mut dropped = BTreeMap::new();
    for proxy in mesh::proxies(cluster)? {
        let name = proxy["metadata"]["name"].as_str().context("a name")?;
        let ask = ["exec", name, "--", "/ctrlmesh-proxy", "probe", "/metrics"];
        let metrics =
            in_ours(cluster, &ask).or_else(|error| if is_ending(&proxy) { Ok(String::new()) } else { Err(error) })?;
        for line in metrics.lines().filter_map(|line| line.strip_prefix(&of_space)) {
            let (pod, _) = line.split_once('"').context("a pod")?;
            let count: u64 = line.rsplit(' ').next().context("a count")?.parse()?;
            *dropped.entry(pod.to_owned()).or_default() += count;
        }
    }
    Ok(dropped)
}

fn address(pod: &Value) -> Result<IpAddr> {
    Ok(pod["status"]["podIP"].as_str().context("a pod without address")?.parse()?)
}
