//! Proxies that do not reach the manager, where nobody but the proxies fences.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::ownership::Ownership;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::bed::{Bed, ROOT, slots_of, teams, teams_of};
use crate::load::Load;
use crate::moves::{CANARY, UNCACHED, slice, sliced};
use crate::partition::{Partitions, Way};

/// For how long a slot may be nobody's: until the policy of a silent proxy has lapsed, and the machine's pace.
const UNOWNED: Duration = Duration::from_mins(1);

/// A client with a pod's credentials, through its proxy.
struct PodClient(Client);

impl PodClient {
    async fn new(bed: &Bed, pod: &str) -> Result<Self> {
        let kubeconfig = Kubeconfig::read_from(bed.path(&format!("{pod}.kubeconfig")))?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        // A refusal that asks to come again is what is looked for.
        config.default_retry = false;
        Ok(Self(Client::try_from(config)?))
    }

    /// Tries to make an object in a namespace, without leaving one. Gives the status of a refusal, if it is one.
    async fn write(&self, namespace: &str) -> Result<Option<(u16, String)>> {
        let maps: Api<ConfigMap> = Api::namespaced(self.0.clone(), namespace);
        let name = Some("probe".to_owned());
        let map = ConfigMap { metadata: ObjectMeta { name, ..ObjectMeta::default() }, ..ConfigMap::default() };
        let made = maps.create(&PostParams { dry_run: true, ..PostParams::default() }, &map).await;
        match made {
            Ok(_) => Ok(None),
            Err(kube::Error::Api(status)) => Ok(Some((status.code, status.message))),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads what its shard has.
    async fn read(&self) -> Result<()> {
        let maps: Api<ConfigMap> = Api::all(self.0.clone());
        let read = maps.list(&ListParams::default()).await?;
        ensure!(!read.items.is_empty(), "it reads nothing");
        Ok(())
    }

    async fn until_refused(&self, bed: &Bed, namespace: &str) -> Result<()> {
        bed.until("writes to be refused", async || {
            let refused = self.write(namespace).await?.context("it passes")?;
            ensure!(refused.0 == 503 && refused.1.contains("has not confirmed"), "{refused:?}");
            self.read().await
        })
        .await
    }

    async fn until_served(&self, bed: &Bed, namespace: &str) -> Result<()> {
        bed.until("writes to pass", async || {
            let refused = self.write(namespace).await?;
            ensure!(refused.is_none(), "{refused:?}");
            Ok(())
        })
        .await
    }
}

impl Bed {
    /// The root's table, as it stands.
    async fn table(&self) -> Result<Ownership> {
        let root = self.configs().get(ROOT).await?;
        root.status.and_then(|status| status.ownership).context("no table")
    }

    /// What the root says of a move.
    async fn says(&self, part: &str) -> Result<()> {
        self.until("the root to say what it waits for", async || {
            let status = self.configs().get(ROOT).await?.status.context("no status")?;
            let settled = status.conditions.iter().find(|one| one.type_ == "Settled").context("no condition")?;
            ensure!(settled.message.contains(part), "{}", settled.message);
            Ok(())
        })
        .await
    }
}

#[tokio::test]
async fn a_proxy_without_a_manager_loses_writes_then_slots() -> Result<()> {
    let test = "a_proxy_without_a_manager_loses_writes_then_slots";
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.sharded("Proxy", &UNCACHED).await?;
    let load = Load::begin(&bed);
    let (before, after) = (slice(0)?, slice(5)?);
    let lost = teams_of(&before.difference(&after).copied().collect());
    let kept = teams_of(&before.intersection(&after).copied().collect());
    let probed = lost.first().context("a team that moves")?;
    let pods = bed.table().await?.pods;
    let pod = pods.iter().find(|(_, shard)| *shard == CANARY).context("a pod of the canary")?.0.clone();
    let client = PodClient::new(&bed, &pod).await?;
    client.until_served(&bed, probed).await?;

    let running = &bed.pods[&pod];
    let (proxy, manager) = (running.proxy.as_ref().context("a proxy")?, running.proxy_peers[0]);
    let partitions = Partitions::among([proxy.group()])?;
    let way = Way { group: proxy.group(), to: manager };
    partitions.cut(way)?;
    client.until_refused(&bed, probed).await?;
    client.until_refused(&bed, kept.first().context("a team that stays")?).await?;

    bed.root(&sliced("Proxy", &after)).await?;
    bed.says("its policy lapses at").await?;
    bed.until("the slots to have another owner", async || {
        let table = bed.table().await?;
        ensure!(table.revoked.is_none() && slots_of(&table, CANARY) == after, "{table:?}");
        Ok(())
    })
    .await?;
    bed.until_written(&lost, 4).await?;
    client.until_refused(&bed, probed).await?;

    partitions.mend(way)?;
    bed.settled(|table| slots_of(table, CANARY) == after).await?;
    bed.until_written(&teams_of(&after), 4).await?;
    client.until_served(&bed, kept.first().context("a team that stays")?).await?;
    bed.verdict(load, UNOWNED).await.map(drop)
}

#[tokio::test]
async fn without_any_manager_writes_stop_until_one_is_back() -> Result<()> {
    let test = "without_any_manager_writes_stop_until_one_is_back";
    let Some(mut bed) = Bed::start(test).await? else { return Ok(()) };
    bed.sharded("Proxy", &UNCACHED).await?;
    let load = Load::begin(&bed);
    // The manager of number 0 is that of the proxy of number 0.
    let table = bed.table().await?;
    let shard = table.pods.get("op-0").context("op-0 has a shard")?;
    let team = teams_of(&slots_of(&table, shard)).first().context("it owns a team")?.clone();
    let client = PodClient::new(&bed, "op-0").await?;
    client.until_served(&bed, &team).await?;
    for manager in &bed.managers {
        manager.process.end_within(Duration::ZERO).await?;
    }
    client.until_refused(&bed, &team).await?;
    bed.managers[0].process.start()?;
    bed.managers[0].until_ready().await?;
    client.until_served(&bed, &team).await?;
    bed.managers[1].process.start()?;
    bed.managers[1].until_ready().await?;
    bed.until_written(&teams().collect(), 4).await?;
    bed.verdict(load, UNOWNED).await.map(drop)
}
