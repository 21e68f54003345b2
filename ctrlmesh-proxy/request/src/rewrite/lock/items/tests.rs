use std::fs;
use std::path::Path;

use ctrlmesh_common::policy::Lock;

use super::*;
use crate::rewrite::lock::response;

fn rename() -> Rename {
    let lock = Lock { namespace: "ops".into(), name: "op".into(), shard: "s1".into() };
    Rename { on_server: lock.per_shard(), lock }
}

fn recorded(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    fs::read(folder.join(name)).unwrap()
}

fn passed(body: &[u8], encoding: Encoding, size: usize) -> Result<Vec<u8>, LockError> {
    let mut items = Items::new(encoding, rename()).unwrap();
    let mut out = Vec::new();
    for piece in body.chunks(size) {
        items.feed(piece, &mut out)?;
    }
    Ok(out)
}

#[test]
fn a_json_list_is_the_same_item_by_item_and_whole() {
    for name in ["lease-list", "lease-list-all", "lease-table", "configmap-list", "metadata-list", "lease"] {
        let body = recorded(&format!("{name}.json"));
        let whole = response(&body, Encoding::Json, &rename()).unwrap().into_owned();
        for size in [1, 2, 7, 100, body.len()] {
            let passed = passed(&body, Encoding::Json, size);
            // An object has no items, and keeps its name: only lists pass so.
            let expected = if name == "lease" { &body } else { &whole };
            assert_eq!(String::from_utf8(passed.unwrap()), String::from_utf8(expected.clone()), "{name} {size}");
        }
    }
}

#[test]
fn hidden_items_leave_a_list_that_is_one() {
    let lease = |name: &str| format!(r#"{{"metadata":{{"namespace":"ops","name":"{name}","x":"]}}\\\"{{["}}}}"#);
    let (ours, hidden, other) = (lease("op---s1"), lease("op---s2"), lease("y"));
    for items in [
        vec![],
        vec![&hidden],
        vec![&ours],
        vec![&hidden, &ours],
        vec![&ours, &hidden],
        vec![&hidden, &other, &hidden],
        vec![&hidden, &hidden, &ours, &hidden, &other],
    ] {
        for comma in [",", " ,\n  "] {
            let list: Vec<&str> = items.iter().map(|item| item.as_str()).collect();
            let body = format!(
                r#"{{"metadata":{{"a":["items"]}}, "items" : [ {} ]
}}"#,
                list.join(comma)
            );
            let passed = passed(body.as_bytes(), Encoding::Json, 3).unwrap();
            let seen: serde_json::Value = serde_json::from_slice(&passed).unwrap();
            let names: Vec<_> =
                seen["items"].as_array().unwrap().iter().map(|item| item["metadata"]["name"].clone()).collect();
            let expected: Vec<_> = items
                .iter()
                .filter(|item| **item != &hidden)
                .map(|item| if *item == &ours { "op" } else { "y" })
                .collect();
            assert_eq!(names, expected, "{body}");
        }
    }
}

#[test]
fn a_protobuf_list_reads_the_same_item_by_item_and_whole() {
    for name in ["lease-list", "lease-list-all", "configmap-list", "metadata-list"] {
        let body = recorded(&format!("{name}.protobuf"));
        let whole = response(&body, Encoding::Protobuf, &rename()).unwrap().into_owned();
        for size in [1, 2, 7, 100, body.len()] {
            let passed = passed(&body, Encoding::Protobuf, size).unwrap();
            assert_eq!(passed.len(), body.len(), "{name} {size}");
            assert_eq!(without_filler(&passed), without_filler(&whole), "{name} {size}");
        }
        assert!(name == "metadata-list" || name == "configmap-list" || whole.len() < body.len(), "{name}");
    }
    // An object is no list.
    let body = recorded("lease.protobuf");
    assert_eq!(passed(&body, Encoding::Protobuf, 5).unwrap(), body);
}

/// The fields of the list in an envelope, but for what fills.
fn without_filler(body: &[u8]) -> Vec<Vec<u8>> {
    let document = Document { body, encoding: Encoding::Protobuf };
    let root = document.root().unwrap();
    let items = document.items(&root, "items").unwrap();
    let metadata = document.field(&root, "metadata").unwrap();
    metadata.iter().chain(&items).map(|node| body[node.at.clone()].to_vec()).collect()
}

#[test]
fn what_fills_has_every_length_but_one() {
    for bytes in (2..400).chain(16_380..16_400).chain([70_000, 3 << 20]) {
        let mut out = Vec::new();
        protobuf::fill(bytes, &mut out).unwrap();
        assert_eq!(out.len(), bytes);
        let (tag, rest) = out.split_first().unwrap();
        let (length, rest) = protobuf::varint(rest).unwrap();
        assert_eq!((*tag, usize::try_from(length).unwrap()), (0x7a, rest.len()));
    }
}

#[test]
fn an_item_larger_than_any_object_is_not_kept() {
    let body = format!(r#"{{"items":[{{"a":"{}"#, "x".repeat(4 << 20));
    assert_eq!(passed(body.as_bytes(), Encoding::Json, 1 << 16), Err(LockError::TooLarge));
    let broken = [&b"k8s\0\x0a\x06\x12\x04List\x12\xff\xff\xff\x7f\x12\xff\xff\xff\x0f"[..], &[0; 64]].concat();
    assert_eq!(passed(&broken, Encoding::Protobuf, 7), Err(LockError::TooLarge));
    for body in ["{\"items\":[3]}", "}", "]"] {
        assert!(passed(body.as_bytes(), Encoding::Json, 1).is_err(), "{body}");
    }
}
