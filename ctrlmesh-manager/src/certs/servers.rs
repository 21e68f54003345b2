//! What is the API server called?

use ctrlmesh_common::names::api_server;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client};

use crate::certs::authority::Names;

/// The API server's names and addresses: what every cluster has, the addresses of the Service `kubernetes` and of its
/// endpoints, and `more`.
///
/// # Errors
/// Where the API server does not say, as in its first moments, when its Service is not there yet: an authority without
/// that address would have to be replaced at once.
pub async fn names(client: &Client, more: &[String]) -> Result<Names, kube::Error> {
    let services: Api<Service> = Api::namespaced(client.clone(), api_server::NAMESPACE);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), api_server::NAMESPACE);
    let service = services.get(api_server::SERVICE).await?;
    let of_it = ListParams::default().labels(&format!(
        "{}={}",
        api_server::SLICE_LABEL,
        api_server::SERVICE
    ));
    let slices = slices.list(&of_it).await?;
    let cluster_ips =
        service.spec.and_then(|spec| spec.cluster_ips).unwrap_or_default().into_iter();
    let endpoints = slices
        .items
        .into_iter()
        .flat_map(|slice| slice.endpoints.unwrap_or_default())
        .flat_map(|endpoint| endpoint.addresses);
    let usual = api_server::NAMES.iter().copied().map(str::to_owned);
    Ok(Names::of(usual.chain(cluster_ips).chain(endpoints).chain(more.iter().cloned())))
}
