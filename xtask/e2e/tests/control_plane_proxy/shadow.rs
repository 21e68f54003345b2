//! Writes of a shadow through the proxy to a real API server, which stores nothing of them.

use bytes::Bytes;
use http::{Request, StatusCode, Version};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::bed::{Bed, write_policy_with};
use crate::harness::client::Client;
use crate::harness::proxy::Proxy;

const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// A proxy of a pod whose writes are dry runs, with these fields in its policy besides.
fn shadow(bed: &Bed, mut fields: Value) -> Proxy {
    fields["shadow"] = json!(true);
    write_policy_with(&bed.pki, "shadow", "slot=0", &fields);
    Proxy::start(&bed.pki, bed.upstream(), &["--policy", bed.pki.path("shadow").to_str().unwrap()])
}

/// `DeleteOptions` in an envelope, with a grace period of 0.
fn protobuf_options() -> Vec<u8> {
    let type_meta = b"\x0a\x02v1\x12\x0dDeleteOptions";
    let length = u8::try_from(type_meta.len()).unwrap();
    [b"k8s\0\x0a", &[length][..], type_meta, b"\x12\x02\x08\x00\x1a\0\"\0"].concat()
}

#[tokio::test]
async fn no_write_of_a_shadow_is_stored_whatever_its_verb_and_encoding() {
    let bed = Bed::new().await;
    for name in ["a", "b", "c"] {
        bed.create(name, 0).await;
    }
    let before = bed.truth("slot=0").await;
    let (proxy, maps) = (shadow(&bed, json!({})), bed.config_maps());
    let map =
        |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}});
    let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}).to_string();
    let one = format!("{maps}/a");
    let writes: [(&str, String, &str, Vec<u8>, u16); 12] = [
        ("POST", maps.clone(), JSON, map("new").to_string().into(), 201),
        ("PUT", one.clone(), JSON, map("a").to_string().into(), 200),
        ("PATCH", one.clone(), "application/merge-patch+json", br#"{"data":{"k":"v"}}"#.to_vec(), 200),
        (
            "PATCH",
            format!("{maps}/applied?fieldManager=m"),
            "application/apply-patch+yaml",
            map("applied").to_string().into(),
            201,
        ),
        ("DELETE", one.clone(), JSON, Vec::new(), 200),
        ("DELETE", one.clone(), JSON, options.clone().into(), 200),
        ("DELETE", one.clone(), PROTOBUF, protobuf_options(), 200),
        ("DELETE", maps.clone(), JSON, options.clone().into(), 200),
        ("DELETE", maps.clone(), PROTOBUF, protobuf_options(), 200),
        // A mistake is found as in a real write, and what cannot be read is not sent.
        ("PUT", one.clone(), JSON, map("b").to_string().into(), 400),
        ("DELETE", one.clone(), "application/yaml", b"kind: DeleteOptions\napiVersion: v1".to_vec(), 415),
        ("POST", format!("/api/v1/namespaces/{}/pods/p/exec?command=true", bed.namespace), JSON, Vec::new(), 403),
    ];
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for (method, target, kind, body, expected) in &writes {
            let mut client = Client::connect(&bed.pki, proxy.address, version).await;
            let request = Request::builder().method(*method).uri(target).header("content-type", *kind);
            let token = format!("Bearer {}", bed.token);
            let request = request.header("authorization", token).body(Full::new(Bytes::from(body.clone())));
            let answer = client.ask(request.unwrap()).await;
            let status = StatusCode::from_u16(*expected).unwrap();
            assert_eq!(answer.status, status, "{method} {target} {kind}: {answer:?}");
            assert_eq!(bed.truth("slot=0").await, before, "{method} {target} {kind} is stored");
        }
        for name in ["new", "applied"] {
            assert_eq!(bed.admin("GET", &format!("{maps}/{name}"), &Value::Null).await, None, "{name}");
        }
    }
}

#[tokio::test]
async fn a_shadow_has_a_lock_of_its_own() {
    let bed = Bed::new().await;
    let lock = json!({"lock": {"namespace": bed.namespace, "name": "lead", "shard": "s1"}});
    let (proxy, maps) = (shadow(&bed, lock), bed.config_maps());
    let lock = json!({"metadata": {"name": "lead"}}).to_string();
    let mut client = Client::connect(&bed.pki, proxy.address, Version::HTTP_2).await;
    let request =
        Request::post(&maps).header("content-type", JSON).header("authorization", format!("Bearer {}", bed.token));
    let answer = client.ask(request.body(Full::new(lock.into())).unwrap()).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert!(bed.admin("GET", &format!("{maps}/lead---s1"), &Value::Null).await.is_some());
}
