//! Reads and watches of leader-election locks of several shards, also across a policy change.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};

use crate::bed::{Bed, names, write_policy};
use crate::go::{self, Running};
use crate::harness::client::Client;
use crate::harness::proxy::Proxy;
use crate::harness::soon;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// A proxy of the shard that has the lock `lead`.
fn with_lock(bed: &Bed) -> Proxy {
    let policy = bed.pki.path("locks");
    let lock = json!({"lock": {"namespace": bed.namespace, "name": "lead", "shard": "s1"}});
    fs::write(&policy, lock.to_string()).unwrap();
    Proxy::start(&bed.pki, bed.upstream(), &["--policy", policy.to_str().unwrap()])
}

#[tokio::test]
async fn no_way_to_read_them_shows_another_shards_lock_or_is_refused() {
    let bed = Bed::new().await;
    for name in ["lead", "lead---s1", "lead---s2", "other"] {
        bed.create(name, 0).await;
    }
    let proxy = with_lock(&bed);
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let maps = bed.config_maps();
    let everywhere = "/api/v1/configmaps";
    for version in BOTH {
        for target in [&maps, everywhere] {
            for included in ["None", "Metadata", "Object"] {
                let asked = format!("{target}?includeObject={included}");
                let answer = bed.by(&proxy, version, &asked, table).await;
                let list: Value = serde_json::from_slice(&answer.body).unwrap();
                let rows = list["rows"].as_array().unwrap();
                let shown: BTreeSet<&str> = rows.iter().map(|row| row["cells"][0].as_str().unwrap()).collect();
                assert!(shown.contains("lead") && shown.contains("other"), "{asked}: {shown:?}");
                assert!(!shown.iter().any(|name| name.contains("---")), "{asked}: {shown:?}");
            }
        }
        let one = bed.by(&proxy, version, &format!("{maps}/lead?includeObject=None"), table).await;
        let one: Value = serde_json::from_slice(&one.body).unwrap();
        assert_eq!(one["rows"][0]["cells"][0], "lead", "{one}");
        let direct = bed.direct(version, &maps, "application/yaml").await;
        let answer = bed.by(&proxy, version, &maps, "application/yaml").await;
        assert_eq!((direct.status, answer.status), (StatusCode::OK, StatusCode::OK));
        let shown = names(&serde_json::from_slice(&answer.body).unwrap());
        assert!(shown.contains("lead") && !shown.iter().any(|name| name.contains("---")));
    }
}

#[tokio::test]
async fn client_go_that_writes_cbor_takes_its_lock_in_json() {
    let bed = Bed::new().await;
    let proxy = with_lock(&bed);
    let mut command = Command::new(go::program("elector"));
    command.args(["-server", &format!("https://{}", proxy.address), "-namespace", &bed.namespace]);
    command.args(["-token", &bed.token, "-ca"]).arg(bed.pki.path("mesh.crt"));
    let mut elector = Running::start(command.env("KUBE_FEATURE_ClientsAllowCBOR", "true"));
    assert_eq!(elector.line(), "leading\n");
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", bed.namespace);
    let list = bed.admin("GET", &leases, &Value::Null).await.unwrap();
    assert_eq!(names(&list), BTreeSet::from(["lead---s1".to_owned()]));
    // The first attempt was in CBOR.
    let refused = proxy.metric(r#"ctrlmesh_proxy_requests_total{verb="create",outcome="refused"}"#);
    assert!(refused.await >= 1.0);
}

/// More than one page, and the second is larger than the first.
#[tokio::test]
async fn a_share_of_several_pages_joins_and_leaves_whole() {
    const OBJECTS: usize = 250;
    let bed = Bed::new().await;
    for number in 0..OBJECTS {
        bed.create(&format!("c{number}"), 1).await;
    }
    let proxy = bed.proxy("policy", "slot=0");
    let list = bed.through(&proxy, Version::HTTP_2, &bed.config_maps()).await.1;
    let at = list["metadata"]["resourceVersion"].as_str().unwrap();
    let watch = format!("{}?watch=1&resourceVersion={at}", bed.config_maps());
    let request =
        Request::get(watch).header("authorization", format!("Bearer {}", bed.token)).body(Full::default()).unwrap();
    let mut client = Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await;
    let mut watch = client.send(request).await.unwrap().into_body();
    let mut read = Vec::new();
    for (selector, kind) in [("slot=1", "ADDED"), ("slot=0", "DELETED")] {
        write_policy(&bed.pki, "policy", selector);
        let mut seen = BTreeSet::new();
        while seen.len() < OBJECTS {
            let frame = soon("an event", watch.frame()).await.unwrap().unwrap();
            read.extend(frame.into_data().unwrap());
            while let Some(end) = read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = read.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line).unwrap();
                assert_eq!(line["type"], kind, "{line}");
                let name = line["object"]["metadata"]["name"].as_str().unwrap();
                assert!(seen.insert(name.to_owned()), "{name} twice");
            }
        }
    }
}
