//! Finds the names and addresses of the API server.

use std::net::{IpAddr, SocketAddr};

use ctrlmesh_common::names::api_server;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::ListParams;
use kube::{Api, Client};

use crate::ca::authority::Names;

/// Name of the API server's port (`pkg/controlplane/controller/kubernetesservice`).
const PORT: &str = "https";

/// Of one slice. No cluster has as many API servers, and each address is in the mesh's certificates.
const MAX_ENDPOINTS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiServer {
    /// The usual names, the addresses of the Service `kubernetes` and of its endpoints, and configured names.
    pub names: Names,
    /// Addresses that pods may dial: that Service and its endpoints, in order.
    pub addresses: Vec<SocketAddr>,
}

impl ApiServer {
    /// Keeps only addresses that are among `names`. A client of another address would not trust our certificate for it.
    ///
    /// So the API server itself answers there.
    #[must_use]
    pub fn among(mut self, names: &Names) -> Self {
        self.addresses.retain(|one| names.contains_all(&Names::of([one.ip().to_string()])));
        self
    }
}

/// `more` are further names.
///
/// # Errors
/// Where the API server does not answer, or its Service does not exist yet, as in its first moments. An authority
/// without that address would have to be replaced at once.
pub async fn find(client: &Client, more: &[String]) -> Result<ApiServer, kube::Error> {
    let services: Api<Service> = Api::namespaced(client.clone(), api_server::NAMESPACE);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), api_server::NAMESPACE);
    let service = services.get(api_server::SERVICE).await?;
    let of_it = ListParams::default().labels(&format!("{}={}", api_server::SLICE_LABEL, api_server::SERVICE));
    let slices = slices.list(&of_it).await?;
    Ok(of(service, slices.items, more))
}

/// Those of these slices that the API server itself keeps: the one called as its Service. Where there is none, somebody
/// else keeps them all, as some providers do (`--endpoint-reconciler-type=none`).
///
/// Whoever may write slices may label one for that Service. The API server writes over one of that name.
pub fn own_slices(slices: Vec<EndpointSlice>) -> Vec<EndpointSlice> {
    let is_own = |slice: &EndpointSlice| slice.metadata.name.as_deref() == Some(api_server::SERVICE);
    if slices.iter().any(is_own) { slices.into_iter().filter(is_own).collect() } else { slices }
}

/// Whether clients are to be sent there. Unknown counts as yes.
fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) != Some(false)
}

fn of(service: Service, slices: Vec<EndpointSlice>, more: &[String]) -> ApiServer {
    let spec = service.spec.unwrap_or_default();
    // Other ports may be there, too.
    let is_its_own = |name: Option<&str>| name.is_none_or(|name| name.is_empty() || name == PORT);
    let ports = spec.ports.unwrap_or_default().into_iter();
    let ports = ports.filter(|port| is_its_own(port.name.as_deref())).map(|port| port.port);
    let mut all = vec![(spec.cluster_ips.unwrap_or_default(), ports.collect::<Vec<_>>())];
    for slice in own_slices(slices) {
        let endpoints = slice.endpoints.unwrap_or_default().into_iter().filter(is_ready);
        let hosts = endpoints.flat_map(|one| one.addresses).filter(|host| host.parse::<IpAddr>().is_ok());
        let ports = slice.ports.unwrap_or_default().into_iter();
        let ports = ports.filter(|port| is_its_own(port.name.as_deref()));
        let ports = ports.filter_map(|port| port.port);
        all.push((hosts.take(MAX_ENDPOINTS).collect(), ports.collect()));
    }
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for (hosts, ports) in &all {
        let hosts = hosts.iter().filter_map(|host| host.parse::<IpAddr>().ok());
        addresses.extend(hosts.flat_map(|host| {
            let ports = ports.iter().filter_map(|port| u16::try_from(*port).ok());
            ports.map(move |port| SocketAddr::new(host, port))
        }));
    }
    // Slices are not ordered.
    addresses.sort_unstable();
    addresses.dedup();
    let usual = api_server::NAMES.iter().copied().map(str::to_owned);
    let hosts = all.into_iter().flat_map(|(hosts, _)| hosts);
    ApiServer { names: Names::of(usual.chain(hosts).chain(more.iter().cloned())), addresses }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn servers(service: Value, slices: Value) -> ApiServer {
        let named = ["api.example.com".to_owned()];
        of(from_value(service).unwrap(), from_value(slices).unwrap(), &named)
    }

    #[test]
    fn it_is_at_its_service_of_either_family_and_at_every_endpoint() {
        let service = json!({"spec": {"clusterIPs": ["10.96.0.1", "fd00:96::1"],
            "ports": [{"name": "https", "port": 443, "targetPort": 6443}, {"name": "konnectivity", "port": 8132}]}});
        let slice = |addresses: &[&str]| {
            json!({"metadata": {}, "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}],
                "endpoints": [{"addresses": addresses}]})
        };
        let slices = json!([slice(&["192.0.2.2"]), slice(&["192.0.2.1", "192.0.2.2"])]);
        let ApiServer { names, addresses } = servers(service, slices);
        let expected = ["10.96.0.1:443", "192.0.2.1:6443", "192.0.2.2:6443", "[fd00:96::1]:443"];
        assert_eq!(addresses, expected.map(|one| one.parse().unwrap()));
        let also = ["10.96.0.1", "fd00:96::1", "192.0.2.1", "192.0.2.2", "api.example.com"];
        assert!(names.contains_all(&Names::of(api_server::NAMES.iter().chain(&also))));
    }

    #[test]
    fn slices_that_others_label_for_it_do_not_count() {
        let service = json!({"spec": {"clusterIPs": ["10.96.0.1"], "ports": [{"name": "https", "port": 443}]}});
        let slice = |name: &str, endpoints: Value| {
            json!({"metadata": {"name": name}, "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}],
                "endpoints": endpoints})
        };
        let away = json!({"addresses": ["192.0.2.2"], "conditions": {"ready": false}});
        let own = slice("kubernetes", json!([{"addresses": ["192.0.2.1"]}, away, {"addresses": ["a.example.com"]}]));
        let foreign = slice("foreign", json!([{"addresses": ["192.0.2.66"]}]));
        let addresses = |slices: Value| servers(service.clone(), slices).addresses;
        let expected = |host: &str| ["10.96.0.1:443", host].map(|one| one.parse().unwrap());
        assert_eq!(addresses(json!([foreign, own])), expected("192.0.2.1:6443"));
        assert_eq!(addresses(json!([foreign])), expected("192.0.2.66:6443"), "nobody else keeps any");
        let names = servers(service.clone(), json!([own])).names;
        assert!(!names.contains_all(&Names::of(["a.example.com"])));

        let many: Vec<Value> = (0..200).map(|at| json!({"addresses": [format!("192.0.2.{at}")]})).collect();
        assert_eq!(addresses(json!([slice("kubernetes", json!(many))])).len(), 1 + MAX_ENDPOINTS);
    }

    #[test]
    fn an_address_outside_the_constraints_is_not_redirected() {
        let service = json!({"spec": {"clusterIPs": ["10.96.0.1"], "ports": [{"name": "https", "port": 443}]}});
        let slices = json!([{"metadata": {}, "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}],
            "endpoints": [{"addresses": ["192.0.2.1", "192.0.2.2"]}]}]);
        let known = Names::of(["kubernetes", "10.96.0.1", "192.0.2.1"]);
        let ApiServer { names, addresses } = servers(service, slices).among(&known);
        assert_eq!(addresses, ["10.96.0.1:443", "192.0.2.1:6443"].map(|one| one.parse().unwrap()));
        assert!(names.contains_all(&Names::of(["192.0.2.2"])), "the next authority is to know it");
    }

    #[test]
    fn without_any_address_the_usual_names_remain() {
        let ApiServer { names, addresses } = servers(json!({}), json!([]));
        assert!(addresses.is_empty());
        assert_eq!(names, Names::of(api_server::NAMES.iter().chain(&["api.example.com"])));
    }
}
