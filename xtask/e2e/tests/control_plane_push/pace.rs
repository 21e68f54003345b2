//! No status is written more than once a second, whatever changes.

use std::collections::BTreeMap;
use std::time::Duration;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_testbed::{ControlPlane, Options};
use jiff::Timestamp;
use kube::Api;
use serde_json::json;

use crate::audit::requests;
use crate::bed::eventually;
use crate::full::{OPERATOR, ROOT, SYSTEM, divide_fenced, world};
use crate::process::Replica;

/// How often the root is changed, each time as soon as its shards say so.
const CHANGES: u32 = 12;

/// When the status of each object was written, by resource and name.
fn statuses(cluster: &ControlPlane) -> BTreeMap<(String, String), Vec<Timestamp>> {
    let mut statuses: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let writes = ["update", "patch"];
    for one in requests(cluster) {
        if one.resource.ends_with("/status") && writes.contains(&one.verb.as_str()) {
            statuses.entry((one.resource, one.name)).or_default().push(one.at);
        }
    }
    statuses
}

#[tokio::test]
async fn no_status_is_written_more_than_once_a_second() {
    let cluster = ControlPlane::start(&Options { audit: true, ..Options::default() }).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    let configs: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    for change in 0..CHANGES {
        let canary = json!({"replicas": 1, "inNamespaces": [format!("team-{}", change % 2)]});
        // A move of a fenced share is not paced.
        divide_fenced(&client, "Off", 1, Some(canary)).await;
        let wanted = format!("\"team-{}\"", change % 2);
        eventually("the shards to say so", async || {
            let canary = configs.get_opt("op-0-canary").await.ok()??;
            json!(canary.spec).to_string().contains(&wanted).then_some(())
        })
        .await;
    }
    eventually("the root's status to say so", async || {
        let root = configs.get(ROOT).await.ok()?;
        (root.status?.observed_generation == root.metadata.generation).then_some(())
    })
    .await;
    let written = eventually("the ManagerState to be written by both who do", async || {
        let written = statuses(&cluster);
        let of_states = written.keys().filter(|(resource, _)| resource == "managerstates/status");
        (of_states.filter(|key| written[*key].len() > 1).count() == 1).then_some(written)
    })
    .await;
    let of_root = &written[&("shardingconfigs/status".to_owned(), ROOT.to_owned())];
    assert!(of_root.len() > 2, "its status was written {} times", of_root.len());
    let apart = |two: &[Timestamp]| Duration::try_from(two[1].duration_since(two[0])).unwrap();
    let soonest = written.iter().filter_map(|(object, times)| {
        let soonest = times.windows(2).map(apart).min()?;
        (soonest < Duration::from_millis(995)).then_some((object, soonest))
    });
    let soonest: Vec<_> = soonest.collect();
    assert!(soonest.is_empty(), "written again so soon: {soonest:?}");
}
