//! Who is fenced.

use anyhow::Result;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::api::Api;
use serde_json::json;

use crate::bed::{self, create, refusal};

async fn write(client: &Client, namespace: &str, name: &str) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    create(&maps, json!({"metadata": {"name": name}})).await?;
    Ok(())
}

#[tokio::test]
async fn a_pod_that_is_not_in_the_table_writes_nothing() -> Result<()> {
    let bed = bed::shared().await?;
    let mut operator = bed.operator().await?;
    bed.add_pod(&mut operator, "op-2").await?;
    let pod = bed.pod(&operator, "op-2").await?;
    for short in ["seven", "eight"] {
        let maps: Api<ConfigMap> = Api::namespaced(pod.clone(), &operator.place(short));
        let map = serde_json::from_value(json!({"metadata": {"name": "a"}}))?;
        let said = refusal(maps.create(&kube::api::PostParams::default(), &map).await)?;
        assert!(said.contains("and pod op-2 writes for nobody, by epoch 1"), "{said}");
    }
    Ok(())
}

#[tokio::test]
async fn whoever_is_no_pod_of_the_operator_is_not_touched() -> Result<()> {
    let bed = bed::shared().await?;
    let mut operator = bed.operator().await?;
    for pod in ["agent-0", "op-agent-7x2bz"] {
        bed.add_pod(&mut operator, pod).await?;
    }
    let others = [
        ("workload", bed.pod(&operator, "agent-0").await?),
        ("alike", bed.pod(&operator, "op-agent-7x2bz").await?),
        ("account", bed.token(&operator, json!({})).await?),
        ("admin", bed.client.clone()),
    ];
    for (name, client) in &others {
        for short in ["seven", "eight", "unlabelled"] {
            write(client, &operator.place(short), name).await?;
        }
    }
    Ok(())
}
