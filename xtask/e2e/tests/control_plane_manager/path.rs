//! The whole path without an operator: a root ShardingConfig, a manager, two proxies, and a client behind each.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::harness;
use crate::harness::running::{Manager, supervised};
use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::api::{ShardingConfig, ShardingConfigStatus};
use ctrlmesh_common::names::{annotation, label, root_ca};
use ctrlmesh_common::slots::NamespaceHash;
use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, Config};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

const NAMESPACE: &str = "ctrlmesh-system";

/// Namespaces with one object each.
const SPACES: [&str; 6] = ["path-a", "path-b", "path-c", "path-d", "path-e", "path-f"];

/// Everything that the test has made.
struct Journey {
    plane: ControlPlane,
    client: Client,
    namespace: String,
    folder: TempDir,
    manager: String,
}

/// A pod of the operator, and the proxy inside it.
struct Member {
    name: String,
    token: String,
}

impl Journey {
    async fn member(&self, name: &str) -> Result<Member> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let pod = json!({
            "metadata": {"name": name, "labels": {label::ENABLE_PROXY: "true"}, "annotations": {annotation::INJECTED: "true"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "op", "uid": "6d7a1f0e-0000-4000-8000-000000000000", "controller": true}]},
            "spec": {"serviceAccountName": "default", "nodeName": "node-a", "automountServiceAccountToken": false,
                "initContainers": [{"name": "ctrlmesh-proxy", "image": "none", "restartPolicy": "Always"}], "containers": [{"name": "operator", "image": "none"}]},
        });
        let made = create(&pods, pod).await?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        let token = async |audience: &str| {
            let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": made.metadata.uid});
            let request: TokenRequest = serde_json::from_value(
                json!({"metadata": {}, "spec": {"audiences": [audience], "boundObjectRef": bound}}),
            )?;
            let answer = accounts.create_token_request("default", &PostParams::default(), &request).await?;
            answer.status.and_then(|status| status.token).context("no token")
        };
        fs::write(self.folder.path().join(format!("token-{name}")), token("ctrlmesh").await?)?;
        let token = token("https://kubernetes.default.svc").await?;
        Ok(Member { name: name.to_owned(), token })
    }

    fn proxy(&self, member: &Member) -> Result<Manager> {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        let mut command = supervised(Path::new(env!("CARGO_BIN_EXE_e2e-proxy")));
        command.arg("sidecar");
        for (name, value) in [
            ("LISTEN", "127.0.0.1:0".to_owned()),
            ("ADMIN_LISTEN", "127.0.0.1:0".to_owned()),
            ("LOG_FORMAT", "json".to_owned()),
            ("THREADS", "1".to_owned()),
            ("UPSTREAM", self.plane.url().to_owned()),
            ("UPSTREAM_CA", self.plane.ca().display().to_string()),
            ("POD", format!("{}/{}", self.namespace, member.name)),
            ("MANAGER", self.manager.clone()),
            ("MANAGER_CA", path(root_ca::MANAGER_KEY)),
            ("TOKEN", path(&format!("token-{}", member.name))),
            ("STATE_DIR", path(&format!("state-{}", member.name))),
        ] {
            command.env(format!("CTRLMESH_PROXY_{name}"), value);
        }
        Manager::spawn(command)
    }

    /// A client as an operator is one: it believes the mesh's authority only.
    async fn operator(&self, member: &Member, proxy: &Manager) -> Result<Client> {
        let address = proxy.address("operators").await?;
        let mut config = Config::new(format!("https://{address}").parse()?);
        let mesh = CertificateDer::pem_file_iter(self.folder.path().join(root_ca::KEY))?;
        let mesh = mesh.map(|one| one.map(|one| one.to_vec()));
        config.root_cert = Some(mesh.collect::<Result<_, _>>()?);
        config.auth_info.token = Some(member.token.clone().into());
        Ok(Client::try_from(config)?)
    }

    async fn status(&self) -> Result<ShardingConfigStatus> {
        let configs: Api<ShardingConfig> = Api::namespaced(self.client.clone(), &self.namespace);
        configs.get("root").await?.status.context("no status")
    }

    async fn until_acknowledged(&self, after: Option<i64>) -> Result<Option<i64>> {
        retry(|| async {
            let status = self.status().await?;
            let programmed = status.conditions.iter().find(|one| one.type_ == "Programmed");
            let programmed = programmed.context("no condition")?;
            ensure!(programmed.status == "True" && status.epoch > after, "{programmed:?}");
            Ok(status.epoch)
        })
        .await
    }

    async fn root(&self, rule: Value) -> Result<()> {
        let mut root = json!({"prefix": "op", "targetStatefulSet": "op"});
        for (key, value) in rule.as_object().context("a rule")? {
            root[key] = value.clone();
        }
        let config = json!({
            "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig", "metadata": {"name": "root"},
            "spec": {"root": root},
        });
        let configs: Api<ShardingConfig> = Api::namespaced(self.client.clone(), &self.namespace);
        configs.patch("root", &PatchParams::apply("test").force(), &Patch::Apply(config)).await?;
        Ok(())
    }
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + DeserializeOwned + Serialize + Clone + std::fmt::Debug,
{
    Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?)
}

/// Waits until the client sees exactly the objects of the namespaces whose slots `owned` names.
async fn until_sees(client: &Client, owned: impl Fn(u8) -> bool) -> Result<()> {
    let hash = NamespaceHash::default();
    let expected = SPACES.into_iter().filter(|space| owned(hash.slot(space).number()));
    let expected: BTreeSet<String> = expected.map(str::to_owned).collect();
    let maps: Api<ConfigMap> = Api::all(client.clone());
    retry(|| async {
        let list = maps.list(&ListParams::default()).await?;
        let mine = list.items.into_iter().filter(|map| map.metadata.name.as_deref() == Some("mine"));
        let seen: BTreeSet<String> = mine.filter_map(|map| map.metadata.namespace).collect();
        ensure!(seen == expected, "sees {seen:?}, not {expected:?}");
        Ok(())
    })
    .await
}

async fn prepared() -> Result<(Journey, Manager)> {
    let plane = ControlPlane::start(&Options::default())?;
    let client = plane.client().await?;
    harness::install(&client).await?;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    create(&namespaces, json!({"metadata": {"name": NAMESPACE}})).await?;
    let own: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let cluster =
        json!({"metadata": {"name": root_ca::CLUSTER}, "data": {root_ca::KEY: fs::read_to_string(plane.ca())?}});
    create(&own, cluster).await?;
    let list = json!({"metadata": {"name": "ctrlmesh-sharding-resource"}, "data": {"resource-config": "groupVersionKinds: {v1: [ConfigMap]}"}});
    create(&own, list).await?;
    for space in SPACES {
        create(&namespaces, json!({"metadata": {"name": space}})).await?;
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), space);
        create(&maps, json!({"metadata": {"name": "mine"}})).await?;
    }
    let namespace = plane.namespace("operator").await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    create(&accounts, json!({"metadata": {"name": "default"}})).await?;
    let binding = json!({
        "metadata": {"name": "operator"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    });
    create::<ClusterRoleBinding>(&Api::all(client.clone()), binding).await?;
    let manager = Manager::start(&plane, NAMESPACE, &[])?;
    let address = manager.address("proxies").await?.to_string();
    Ok((Journey { plane, client, namespace, folder: TempDir::new()?, manager: address }, manager))
}

#[tokio::test]
async fn each_client_sees_its_half_through_changes_and_outages() -> Result<()> {
    let (path, manager) = prepared().await?;
    path.root(json!({"auto": {"shardingSize": 2, "everyShardReplicas": 1}})).await?;
    let members = [path.member("op-0").await?, path.member("op-1").await?];
    // Where the webhook would have put it into the pods' namespace before them.
    let maps: Api<ConfigMap> = Api::namespaced(path.client.clone(), NAMESPACE);
    let trusted = retry(|| async { maps.get(root_ca::MESH).await?.data.context("no data") })
        .await
        .with_context(|| manager.log())?;
    for key in [root_ca::KEY, root_ca::MANAGER_KEY] {
        fs::write(path.folder.path().join(key), &trusted[key])?;
    }
    let mut proxies = [path.proxy(&members[0])?, path.proxy(&members[1])?];
    let clients = [path.operator(&members[0], &proxies[0]).await?, path.operator(&members[1], &proxies[1]).await?];
    until_sees(&clients[0], |slot| slot < 16).await?;
    until_sees(&clients[1], |slot| slot >= 16).await?;
    let epoch = path.until_acknowledged(None).await?;
    // Another division, while both run.
    let hashes = |range: std::ops::Range<u8>| range.map(|hash| hash.to_string()).collect::<Vec<_>>();
    path.root(json!({"manual": [{"id": 1, "hashes": hashes(0..24)}, {"id": 2, "hashes": hashes(24..32)}]})).await?;
    path.until_acknowledged(epoch).await?;
    until_sees(&clients[0], |slot| slot < 24).await?;
    until_sees(&clients[1], |slot| slot >= 24).await?;
    // The manager is killed: both go on, also one that is started anew, from its file.
    manager.kill()?;
    until_sees(&clients[0], |slot| slot < 24).await?;
    proxies[1].kill()?;
    proxies[1] = path.proxy(&members[1])?;
    let again = path.operator(&members[1], &proxies[1]).await?;
    until_sees(&again, |slot| slot >= 24).await?;
    Ok(())
}
