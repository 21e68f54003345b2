//! The Secret with the certificate authorities is deleted while pods trust them.

use ctrlmesh_testbed::{ControlPlane, Options, retry};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::bed::{eventually, opened, soon};
use crate::process::Replica;
use crate::replicas::{bundle, presented};

const SECRET: &str = "ctrlmesh-ca";

async fn remove(client: &Client, namespace: &str) {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    secrets.delete(SECRET, &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn a_starting_replica_waits_until_the_leader_restores_it() {
    let plane = ControlPlane::shared();
    let client = plane.client().await.unwrap();
    let namespace = plane.namespace("gone").await.unwrap();
    let mut leader = Replica::start(plane, &namespace, &[]).await;
    eventually("authorities to be published", async || bundle(&client, &namespace, "manager-ca.crt").await).await;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let before = secrets.get(SECRET).await.unwrap().data;
    // Leaders of other tests write their own into every ConfigMap of that name.
    let believed = before.as_ref().and_then(|data| data.get("manager.crt")).unwrap();
    let believed = String::from_utf8(believed.0.clone()).unwrap();
    // It is not to be faster than the other one begins.
    leader.program().send(Signal::SIGSTOP);
    remove(&client, &namespace).await;
    let mut second = Replica::start(plane, &namespace, &[]).await;
    let waits = second.program().until_logged("waiting for the leader to restore them");
    soon("it to wait", waits).await;
    leader.program().send(Signal::SIGCONT);
    let after = eventually("the Secret to be back", async || secrets.get_opt(SECRET).await.ok()?);
    assert_eq!(after.await.data, before, "as it was");
    second.until_ready().await;
    for replica in [&leader, &second] {
        assert!(presented(replica.grpc, &believed).await.is_some(), "another authority");
    }
}

#[tokio::test]
async fn who_makes_an_authority_anew_has_the_old_ones_believed_on() {
    // One of its own: leaders of other tests put every ConfigMap of this name right.
    let plane = ControlPlane::start(&Options::default()).unwrap();
    let client = plane.client().await.unwrap();
    let namespace = plane.namespace("gone").await.unwrap();
    let ca_store = retry(|| opened(&client, &namespace)).await.unwrap();
    let before = ca_store.current();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let map = json!({"metadata": {"name": "ctrlmesh-root-ca"}, "data": {
        "ca.crt": before.mesh.bundle(),
        "manager-ca.crt": before.manager.bundle(),
    }});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    remove(&client, &namespace).await;
    // No replica leads that knows the keys.
    let made = soon("others to be made", opened(&client, &namespace)).await.unwrap();
    let after = made.current();
    for (before, after) in [(&before.mesh, &after.mesh), (&before.manager, &after.manager)] {
        assert_ne!(before.current.pem(), after.current.pem(), "its key is lost");
        let both = format!("{}{}", after.current.pem(), before.bundle());
        assert_eq!(after.bundle(), both, "what it signed is believed");
    }
    let again = opened(&client, &namespace).await.unwrap().current();
    assert_eq!(again.mesh.bundle(), after.mesh.bundle(), "it is written down");
}
