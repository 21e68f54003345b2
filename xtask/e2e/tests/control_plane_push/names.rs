//! New names and addresses of the API server and of the manager.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_manager::ca::authority::Names;
use ctrlmesh_manager::ca::recovery::LeaseWatch;
use ctrlmesh_manager::ca::rotation::Holder;
use ctrlmesh_manager::ca::store::{AuthoritySettings, CaStore};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use prometheus_client::metrics::counter::Counter;

use crate::attacks::csr;
use crate::bed::{Bed, eventually};

#[tokio::test]
async fn a_new_address_gets_a_new_ca_and_the_old_one_still_signs() {
    let bed = Bed::new().await;
    let before = bed.ca_store.current();
    let wanted = AuthoritySettings {
        api_server: vec!["192.0.2.7".to_owned()],
        manager: Names::of(["127.0.0.1", "manager.example.com"]),
        validity: Duration::from_hours(24),
    };
    let mut restorer = LeaseWatch::of("push".to_owned());
    let ca_store = CaStore::open(bed.client.clone(), &bed.namespace, wanted, &mut restorer);
    let ca_store = Arc::new(ca_store.await.unwrap());
    let leadership = bed.leadership();
    eventually("it to lead", async || leadership.is_held().then_some(())).await;
    bed.run(ca_store.clone().follow(leadership, Counter::default()));
    let after = eventually("authorities for the new names", async || {
        let now = ca_store.current();
        (now.mesh.next.len() == 1 && now.manager.next.len() == 1).then_some(now)
    });
    let after = after.await;
    assert_eq!(after.mesh.current.pem(), before.mesh.current.pem());
    let (now, usual) = (SystemTime::now(), ["kubernetes.default.svc", "10.96.0.1"]);
    let chain = after.mesh.sign(Holder::Node, &csr(&usual), now).unwrap();
    assert_eq!(chain[1], before.mesh.sign(Holder::Node, &csr(&usual), now).unwrap()[1], "as it was believed");
    let chain = after.mesh.sign(Holder::Node, &csr(&["kubernetes.default.svc", "192.0.2.7"]), now).unwrap();
    assert_ne!(chain[1], before.mesh.sign(Holder::Node, &csr(&usual), now).unwrap()[1]);
    let (by, of) = after.manager.serving_authority(&Names::of(["127.0.0.1", "manager.example.com"]), now);
    assert_eq!((by.pem(), of), (before.manager.current.pem(), Names::of(["127.0.0.1"])));
    let events: Api<Event> = Api::namespaced(bed.client.clone(), &bed.namespace);
    for name in ["192.0.2.7", "manager.example.com"] {
        eventually("it to be told", async || {
            let events = events.list(&ListParams::default()).await.ok()?;
            let told = events.items.iter().any(|event| {
                event.reason.as_deref() == Some("NamesAdded")
                    && event.note.as_ref().is_some_and(|note| note.contains(name))
            });
            told.then_some(())
        })
        .await;
    }
}
