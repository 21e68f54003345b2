//! Knows the nodes whose own proxy has said that their kernel does not let it redirect connections.

use std::sync::Arc;

use ctrlmesh_common::names::label;
use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client};

use super::{Cache, PAGE};

impl Cache {
    /// Of all other nodes nothing is read.
    pub(super) fn follow_unfit_nodes(self: Arc<Self>, client: &Client) -> impl Future<Output = ()> + use<> {
        let unfit = Config::default().page_size(PAGE).labels(&format!("{}=false", label::EBPF));
        let nodes = watcher(Api::<PartialObjectMeta<Node>>::all(client.clone()), unfit);
        self.follow(nodes, |state| &mut state.unfit_nodes, |node| (node.metadata.name.unwrap_or_default(), ()))
    }
}
