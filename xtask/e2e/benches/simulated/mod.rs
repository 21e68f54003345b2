//! Shared parts of the benchmarks that simulate proxies against a real manager.
#![allow(dead_code, reason = "each benchmark uses a part")]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;

use ctrlmesh_testbed::{ControlPlane, retry};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::time::{self, Duration};

use crate::harness::running::Manager;

pub(crate) mod link;
pub(crate) mod processor;
pub(crate) mod token;

/// The manager's namespace.
pub(crate) const SYSTEM: &str = "ctrlmesh-system";

/// How often it is looked whether all are connected.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// An address that no client gets as its own: one that dials while nobody listens there would meet itself.
pub(crate) fn free_address() -> SocketAddr {
    (20_000..30_000)
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .find(|address| TcpListener::bind(address).is_ok())
        .unwrap()
}

/// Waits until so many proxies follow.
pub(crate) async fn connected(manager: &Manager, count: usize) {
    let count = u64::try_from(count).unwrap();
    while manager.counted("ctrlmesh_manager_push_clients ").await.unwrap_or_default() < count {
        time::sleep(LOOK_EVERY).await;
    }
}

/// A file with whom the proxies believe to be the manager, once it has said so in `namespace`.
pub(crate) async fn authority(plane: &ControlPlane, client: &Client, namespace: &str) -> PathBuf {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let authority = retry(|| async {
        let map = maps.get("ctrlmesh-root-ca").await?;
        let found = map.data.and_then(|mut data| data.remove("manager-ca.crt"));
        anyhow::Context::context(found, "no certificate yet")
    });
    let file = plane.folder().join("bench-ca");
    fs::write(&file, authority.await.unwrap()).unwrap();
    file
}
