//! The endpoints of the API server, and a client of each.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ctrlmesh_common::names::api_server;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::time;

use crate::ca::api_server::own_slices;

/// Name of the API server's port (`pkg/controlplane/controller/kubernetesservice`).
const PORT: &str = "https";

/// Limit for a list.
const DEADLINE: Duration = Duration::from_secs(2);

/// By address.
pub(super) type Clients = BTreeMap<SocketAddr, Client>;

#[derive(Debug, thiserror::Error)]
pub(super) enum EndpointsError {
    #[error("list the API server's endpoints")]
    Refused(#[from] kube::Error),
    #[error("the API server did not list its endpoints within {DEADLINE:?}")]
    Slow,
}

/// Those that there are now, from the cache of one API server. A list that is not from a cache takes 100 ms there,
/// where nothing else is written. A server that has just joined may be missing for some milliseconds.
pub(super) async fn list(client: &Client) -> Result<Vec<SocketAddr>, EndpointsError> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), api_server::NAMESPACE);
    let of_it =
        ListParams::default().labels(&format!("{}={}", api_server::SLICE_LABEL, api_server::SERVICE)).match_any();
    let listed = time::timeout(DEADLINE, slices.list(&of_it)).await.map_err(|_elapsed| EndpointsError::Slow)??;
    Ok(addresses(own_slices(listed.items)))
}

fn addresses(slices: Vec<EndpointSlice>) -> Vec<SocketAddr> {
    let mut all = Vec::new();
    for slice in slices {
        // Other ports may be there, too.
        let is_its_own = |name: Option<&str>| name.is_none_or(|name| name.is_empty() || name == PORT);
        let ports = slice.ports.unwrap_or_default().into_iter().filter(|port| is_its_own(port.name.as_deref()));
        let ports: Vec<u16> = ports.filter_map(|port| u16::try_from(port.port?).ok()).collect();
        let hosts = slice.endpoints.unwrap_or_default().into_iter().flat_map(|one| one.addresses);
        let hosts = hosts.filter_map(|host| host.parse::<IpAddr>().ok());
        all.extend(hosts.flat_map(|host| ports.clone().into_iter().map(move |port| SocketAddr::new(host, port))));
    }
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn every_address_of_every_slice_is_an_endpoint_once() {
        let slice = |family: &str, addresses: &[&str]| -> Value {
            json!({"metadata": {}, "addressType": family, "endpoints": [{"addresses": addresses}],
                "ports": [{"name": "https", "port": 6443}, {"name": "konnectivity", "port": 8132}]})
        };
        let slices = json!([
            slice("IPv4", &["192.0.2.2"]),
            slice("IPv4", &["192.0.2.1", "192.0.2.2"]),
            slice("IPv6", &["2001:db8::1"])
        ]);
        let expected = ["192.0.2.1:6443", "192.0.2.2:6443", "[2001:db8::1]:6443"];
        assert_eq!(addresses(from_value(slices).unwrap()), expected.map(|one| one.parse().unwrap()));
    }
}
