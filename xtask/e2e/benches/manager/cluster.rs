//! The objects of the manager's benchmark: one operator with half of the pods, and a thousand small operators.

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::names::label;
use ctrlmesh_testbed::ControlPlane;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::harness;
use crate::pods::{self, OnePod};
use crate::simulated::SYSTEM;

/// ShardingConfigs in one namespace.
pub(crate) const IN_ONE: usize = 10;

/// How many writes are under way at once.
const AT_ONCE: usize = 16;

/// A cluster with operators.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// The pods of the large operator, and then those of the small ones.
    pub(crate) pods: Vec<OnePod>,
    /// How many of them are the large operator's.
    pub(crate) large: usize,
    /// How many each small one has.
    pub(crate) each: usize,
}

/// A ShardingConfig's namespace and name.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) namespace: String,
    name: String,
}

impl Cluster {
    /// Makes `configs` ShardingConfigs and about `count` pods.
    pub(crate) async fn new(plane: &ControlPlane, configs: usize, count: usize) -> Self {
        let client = plane.client().await.unwrap();
        harness::install(&client).await.unwrap();
        let small = configs - 1;
        let (large, each) = (count / 2, (count / 2).div_ceil(small));
        let system = (SYSTEM.to_owned(), Vec::new());
        let large_one = (Config::large().namespace, vec![Config::large().name; large]);
        let mut spaces = vec![system, large_one];
        for first in (0..small).step_by(IN_ONE) {
            let here = (first..small.min(first + IN_ONE)).map(Config::small).collect::<Vec<_>>();
            let pods = here.iter().flat_map(|config| vec![config.name.clone(); each]).collect();
            spaces.push((here[0].namespace.clone(), pods));
        }
        let mut made = Vec::new();
        for (namespace, apps) in spaces {
            let namespaces: Api<Namespace> = Api::all(client.clone());
            let object = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
            namespaces.create(&PostParams::default(), &object).await.unwrap();
            made.extend(pods::create(plane, &namespace, apps).await);
        }
        let this = Self { client, pods: made, large, each };
        let all = (0..small).map(Config::small).chain([Config::large()]);
        stream::iter(all.map(|config| this.change(config, 0))).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
        this
    }

    /// Changes what the pods of `config` own.
    pub(crate) async fn change(&self, config: Config, round: usize) {
        let Config { namespace, name } = config;
        let configs: Api<ShardingConfig> = Api::namespaced(self.client.clone(), &namespace);
        let slots: Vec<String> = (0..16).map(|slot| (slot + round).to_string()).collect();
        let wanted: Value = json!({
            "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"name": name},
            "spec": {
                "controller": {"leaderElectionName": name},
                "selector": {"matchLabels": {"app": name}},
                "limits": [{"selector": {"matchExpressions": [{"key": label::SHARDING_HASH, "operator": "In", "values": slots}]}}],
            },
        });
        let force = PatchParams::apply("bench").force();
        configs.patch(&name, &force, &Patch::Apply(&wanted)).await.unwrap();
    }
}

impl Config {
    /// That of the large operator.
    pub(crate) fn large() -> Self {
        Self { namespace: "large".to_owned(), name: "large".to_owned() }
    }

    /// That of a small one.
    pub(crate) fn small(number: usize) -> Self {
        Self { namespace: format!("small-{}", number / IN_ONE), name: format!("op-{number}") }
    }
}
