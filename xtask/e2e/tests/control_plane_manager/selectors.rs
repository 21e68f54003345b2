//! Our label selectors select what a real API server selects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::selector::{Labels, Selector};
use ctrlmesh_testbed::{ControlPlane, retry};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, PostParams};
use kube::core::{ObjectList, ObjectMeta, PartialObjectMeta};
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// How many generated selectors are put to the API server.
const SELECTORS: usize = 800;

/// Keys at the edges of the grammar: its words, and the longest names and prefixes with their neighbours.
fn edge_key() -> impl Strategy<Value = String> {
    let prefix = |bytes: usize| format!("{}/x", "p".repeat(bytes));
    proptest::sample::select(vec![
        "in".to_owned(),
        "notin".to_owned(),
        "IN".to_owned(),
        "k".repeat(63),
        "k".repeat(64),
        prefix(253),
        prefix(254),
        "X.io/z".to_owned(),
        "x..io/z".to_owned(),
        "/z".to_owned(),
        "x.io/".to_owned(),
    ])
}

/// Values at the edges of the grammar: its words, the longest, and the integers that 64 bits just hold or do not.
fn edge_value() -> impl Strategy<Value = String> {
    proptest::sample::select(vec![
        "in".to_owned(),
        "notin".to_owned(),
        "v".repeat(63),
        "v".repeat(64),
        "9223372036854775806".to_owned(),
        "9223372036854775807".to_owned(),
        "9223372036854775808".to_owned(),
        "-9223372036854775808".to_owned(),
        "00000000000000000000000000000000000000000000000000000000000005".to_owned(),
        "+5".to_owned(),
        "0x5".to_owned(),
    ])
}

/// Selectors of every shape, and texts that are nearly selectors.
fn any_selector() -> impl Strategy<Value = String> {
    use proptest::prelude::*;
    let key = || prop_oneof![6 => "[xy]", 2 => Just("x.io/z".to_owned()), 2 => "[xy=!,-]{1,3}", 2 => edge_key()];
    let value = || prop_oneof![8 => "[abc]", 4 => "[0-9]{1,2}", 2 => "[a-c!=<>( )_.-]{0,3}", 2 => Just(String::new()), 2 => edge_value()];
    let space = || prop_oneof![6 => Just(String::new()), 2 => Just(" ".to_owned()), 1 => "[ \t\n\r]{1,2}", 1 => Just("\0".to_owned())];
    let values = move || prop::collection::vec(value(), 0..4).prop_map(|values| values.join(","));
    let exact = (key(), space(), "(=|==|!=|>|<|=>|!)", space(), value())
        .prop_map(|(key, a, sign, b, value)| format!("{key}{a}{sign}{b}{value}"));
    let set = (key(), "( | )", "(in|notin|In)", space(), values(), space())
        .prop_map(|(key, a, sign, b, values, c)| format!("{key}{a}{sign}{b}({values}){c}"));
    let bare =
        (space(), "!{0,2}", space(), key(), space()).prop_map(|(a, not, b, key, c)| format!("{a}{not}{b}{key}{c}"));
    let requirement = prop_oneof![3 => exact, 3 => set, 2 => bare, 1 => "[a-z=!<>(), \0]{0,8}"];
    prop::collection::vec(requirement, 0..4).prop_map(|requirements| requirements.join(","))
}

#[tokio::test]
async fn selectors_mean_what_the_api_server_takes_them_to_mean() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("selectors").await?;
    let maps: Api<ConfigMap> = Api::namespaced(plane.client().await?, &namespace);
    let objects = labelled_objects(&maps).await?;
    let mut runner = TestRunner::new(Config { rng_seed: RngSeed::Fixed(7), ..Config::default() });
    let strategy = any_selector();
    let (mut accepted, mut refused) = (Vec::new(), 0);
    for _ in 0..SELECTORS {
        let text = strategy.new_tree(&mut runner).map_err(|reason| anyhow::anyhow!("{reason}"))?.current();
        let parsed = Selector::parse(&text);
        match maps.list_metadata(&ListParams::default().labels(&text)).await {
            Ok(list) => {
                let selector = parsed.with_context(|| format!("only the API server accepts {text:?}"))?;
                let theirs = names(&list);
                let ours = objects.iter().filter(|(_, labels)| selector.matches(labels)).map(|(name, _)| name.clone());
                assert_eq!(ours.collect::<BTreeSet<_>>(), theirs, "{text:?}");
                accepted.push((selector, theirs));
            }
            Err(kube::Error::Api(status)) if status.code == 400 => {
                refused += 1;
                ensure!(parsed.is_err(), "only we accept {text:?}: {}", status.message);
            }
            Err(error) => return Err(error).with_context(|| format!("{text:?}")),
        }
    }
    ensure!(
        accepted.len() > SELECTORS / 5 && refused > SELECTORS / 5,
        "{} accepted, {refused} refused: too one-sided",
        accepted.len()
    );
    what_is_printed_means_the_same(&maps, &accepted).await
}

fn names(list: &ObjectList<PartialObjectMeta<ConfigMap>>) -> BTreeSet<String> {
    list.items.iter().map(kube::ResourceExt::name_any).collect()
}

/// Whether the API server finds by what we print of each selector, and of it AND another one, what it found by the
/// texts that they were read from.
async fn what_is_printed_means_the_same(
    maps: &Api<ConfigMap>,
    accepted: &[(Selector, BTreeSet<String>)],
) -> Result<()> {
    let mut common = 0;
    for ((one, found), (other, also_found)) in accepted.iter().zip(accepted.iter().skip(1)) {
        let printed = one.to_string();
        let list = maps.list_metadata(&ListParams::default().labels(&printed)).await;
        assert_eq!(names(&list.with_context(|| printed.clone())?), *found, "{printed:?}");
        let both = one.clone().and(other).to_string();
        let list = maps.list_metadata(&ListParams::default().labels(&both)).await;
        let expected: BTreeSet<_> = found.intersection(also_found).cloned().collect();
        assert_eq!(names(&list.with_context(|| both.clone())?), expected, "{both:?}");
        common += usize::from(!expected.is_empty() && expected != *found);
    }
    ensure!(common > accepted.len() / 20, "{common} of {} have some in common", accepted.len());
    Ok(())
}

/// The labels of the objects that selectors are tried on: all combinations of a few, and some at the edges.
fn label_sets() -> Vec<Labels> {
    let mut sets = Vec::new();
    for x in [None, Some(""), Some("a"), Some("b"), Some("5"), Some("07"), Some("9223372036854775807")] {
        for y in [None, Some("a"), Some("10")] {
            for z in [None, Some("c")] {
                sets.push(vec![("x", x), ("y", y), ("x.io/z", z)]);
            }
        }
    }
    let longest = "k".repeat(63);
    let edges = [("in", "notin"), ("notin", "in"), (longest.as_str(), "5"), ("x", "9223372036854775808")];
    sets.extend(edges.map(|(key, value)| vec![(key, Some(value))]));
    let owned = |set: Vec<(&str, Option<&str>)>| {
        set.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned()))).collect()
    };
    sets.into_iter().map(owned).collect()
}

async fn labelled_objects(maps: &Api<ConfigMap>) -> Result<BTreeMap<String, Labels>> {
    let mut objects = BTreeMap::new();
    for labels in label_sets() {
        let name = format!("object-{}", objects.len());
        let metadata = ObjectMeta { name: Some(name.clone()), labels: Some(labels.clone()), ..ObjectMeta::default() };
        maps.create(&PostParams::default(), &ConfigMap { metadata, ..ConfigMap::default() }).await?;
        objects.insert(name, labels);
    }
    tokio::time::timeout(
        Duration::from_secs(30),
        retry(|| async {
            let listed = maps.list_metadata(&ListParams::default()).await?.items.len();
            ensure!(listed >= objects.len(), "{listed} of {}", objects.len());
            anyhow::Ok(())
        }),
    )
    .await??;
    Ok(objects)
}
