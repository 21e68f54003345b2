//! Writes the list of replicas into the status of the `ManagerState`.
//!
//! Users of the predecessor read it there; nothing of ours does. Other fields of the status stay as they are.

use std::time::Duration;

use ctrlmesh_common::api::{ManagerEndpoint, ManagerPorts, ManagerState, ManagerStateStatus};
use ctrlmesh_common::names::MANAGER_STATE;
use jiff::Timestamp;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use tokio::time;
use tracing::warn;

use crate::leader::lease::Leadership;
use crate::status::status_writer::{StatusPermit, StatusWriter, read_or_create};

const PERIOD: Duration = Duration::from_secs(5);

/// Limit for one round of calls to the API server.
const DEADLINE: Duration = Duration::from_secs(10);

pub struct ReplicaList {
    pub client: Client,
    /// Of the managers.
    pub namespace: String,
    /// The Service in front of the managers.
    pub service: String,
    /// Name of this replica's pod.
    pub replica: String,
    /// gRPC port, the same for all replicas.
    pub grpc: u16,
    pub leadership: Leadership,
    pub status_writer: StatusWriter,
}

impl ReplicaList {
    pub async fn run(mut self) {
        let mut ticks = time::interval(PERIOD);
        loop {
            self.leadership.acquired().await;
            ticks.tick().await;
            let looked = async { Box::pin(self.write(&mut self.status_writer.take().await)).await };
            match time::timeout(DEADLINE, looked).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(%error, state = MANAGER_STATE, "not written; tried again"),
                Err(_elapsed) => warn!(state = MANAGER_STATE, "not written in time; tried again"),
            }
        }
    }

    async fn write(&self, status_writer: &mut StatusPermit<'_>) -> kube::Result<()> {
        let slices: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &self.namespace);
        let ours = format!("kubernetes.io/service-name={}", self.service);
        let slices = slices.list(&ListParams::default().labels(&ours)).await?.items;
        let states: Api<ManagerState> = Api::all(self.client.clone());
        let state = read_or_create(&states, || self.leadership.is_held()).await?;
        let Some(state) = state else { return Ok(()) };
        let before = state.status.clone().unwrap_or_default();
        let after = status(&slices, &self.namespace, &self.replica, self.grpc, &before, Timestamp::now());
        if after != before && self.leadership.is_held() {
            let state = ManagerState { status: Some(after), ..state };
            status_writer.writes();
            states.replace_status(MANAGER_STATE, &PostParams::default(), &state).await?;
        }
        Ok(())
    }
}

/// The timestamp changes only when something else does.
fn status(
    slices: &[EndpointSlice],
    namespace: &str,
    leader: &str,
    grpc_port: u16,
    before: &ManagerStateStatus,
    now: Timestamp,
) -> ManagerStateStatus {
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let endpoints = endpoints.filter_map(|endpoint| {
        let name = endpoint.target_ref.as_ref()?.name.clone()?;
        let leader = name == leader;
        Some(ManagerEndpoint { leader, name, pod_ip: endpoint.addresses.first()?.clone() })
    });
    let mut endpoints: Vec<ManagerEndpoint> = endpoints.collect();
    // In a dual-stack cluster each pod is in one slice per family.
    endpoints.sort_by(|one, other| one.name.cmp(&other.name));
    endpoints.dedup_by(|one, other| one.name == other.name);
    let same = ManagerStateStatus {
        namespace: Some(namespace.to_owned()),
        endpoints,
        ports: Some(ManagerPorts {
            grpc_leader_election_port: Some(grpc_port.into()),
            grpc_non_leader_election_port: Some(grpc_port.into()),
        }),
        ..before.clone()
    };
    if same == *before {
        return same;
    }
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    ManagerStateStatus { update_timestamp: Some(Time(now)), ..same }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::LabelsStatus;
    use serde_json::json;

    use super::*;

    #[test]
    fn every_pod_behind_the_service_is_a_manager_and_one_leads() {
        let endpoint =
            |name: &str, address: &str| json!({"addresses": [address], "targetRef": {"kind": "Pod", "name": name}});
        let slice = |family: &str, endpoints: serde_json::Value| {
            serde_json::from_value(json!({"metadata": {}, "addressType": family, "endpoints": endpoints})).unwrap()
        };
        let slices: Vec<EndpointSlice> = vec![
            slice("IPv4", json!([endpoint("m-1", "10.0.0.2"), endpoint("m-0", "10.0.0.1")])),
            slice("IPv6", json!([endpoint("m-0", "fd00::1")])),
        ];
        let at = |second| Timestamp::from_second(second).unwrap();
        let first = status(&slices, "ns", "m-1", 9071, &ManagerStateStatus::default(), at(1));
        let seen: Vec<_> =
            first.endpoints.iter().map(|one| (one.name.as_str(), one.pod_ip.as_str(), one.leader)).collect();
        assert_eq!(seen, [("m-0", "10.0.0.1", false), ("m-1", "10.0.0.2", true)]);
        assert_eq!(first.update_timestamp, Some(Time(at(1))));
        let ports = first.ports.clone().unwrap();
        let ports = [ports.grpc_leader_election_port, ports.grpc_non_leader_election_port];
        assert_eq!(ports, [Some(9071), Some(9071)]);
        let again = status(&slices, "ns", "m-1", 9071, &first, at(9));
        assert_eq!(again, first, "nothing has changed");
        let next = status(&slices, "ns", "m-0", 9071, &first, at(9));
        assert_eq!(next.update_timestamp, Some(Time(at(9))));
        let labels = Some(LabelsStatus::default());
        let with_labels = ManagerStateStatus { labels: labels.clone(), ..first };
        let next = status(&slices, "ns", "m-0", 9071, &with_labels, at(9));
        assert_eq!(next.labels, labels, "what is another's stays");
    }
}
