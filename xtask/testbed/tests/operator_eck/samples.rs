//! ECK's own samples, and changes of them that it must refuse.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::Cluster;
use serde_json::{Deserializer, Value, json};
use xtask::tools;

/// The names of the samples that are applied.
pub(crate) const ELASTICSEARCH: &str = "elasticsearch-sample";
pub(crate) const KIBANA: &str = "kibana-sample";

/// The setting by which a node of Elasticsearch has roles.
const ROLES: &str = "node.roles";

/// What the operator is asked to admit.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// A new object.
    Create(Value),
    /// A change, as a JSON patch, of the Elasticsearch that is there.
    Change(Value),
}

/// A request with its name.
pub(crate) type Named = (String, Request);

/// The samples. No pod of those that are applied fits on a node.
pub(crate) struct Samples {
    pub(crate) elasticsearch: Value,
    pub(crate) kibana: Value,
    /// All, as they are.
    all: Vec<Value>,
}

impl Samples {
    pub(crate) fn read(cluster: &Cluster) -> Result<Self> {
        let folder = tools::elastic_operator().with_file_name("samples");
        let files = ["elasticsearch.yaml", "kibana_es.yaml", "apm_es_kibana.yaml"];
        let all = files.iter().map(|file| read(cluster, &folder.join(file))).collect::<Result<Vec<_>>>()?.concat();
        let named = |name: &str| all.iter().find(|one| one["metadata"]["name"] == name).cloned().context("a sample");
        let mut elasticsearch = named(ELASTICSEARCH)?;
        let mut kibana = named(KIBANA)?;
        let nowhere = json!({"example.com/no-such-node": "true"});
        let nodes = &mut elasticsearch["spec"]["nodeSets"][0];
        nodes["podTemplate"]["spec"]["nodeSelector"] = nowhere.clone();
        nodes["volumeClaimTemplates"] = claim("2Gi");
        kibana["spec"]["podTemplate"]["spec"]["nodeSelector"] = nowhere;
        Ok(Self { elasticsearch, kibana, all })
    }

    /// Each sample, a variant of which the operator warns, and others that it refuses.
    pub(crate) fn creations(&self) -> Vec<Named> {
        let file = |(number, sample): (usize, &Value)| (format!("sample {number}"), Request::Create(sample.clone()));
        let mut creations: Vec<Named> = self.all.iter().enumerate().map(file).collect();
        let mut variant = |name: &str, sample: &Value, change: &dyn Fn(&mut Value)| {
            let mut changed = sample.clone();
            change(&mut changed);
            creations.push((name.to_owned(), Request::Create(changed)));
        };
        let (search, kibana) = (&self.elasticsearch, &self.kibana);
        variant("reserved setting", search, &|one| {
            one["spec"]["nodeSets"][0]["config"]["cluster.initial_master_nodes"] = json!(["a"]);
        });
        variant("no version", search, &|one| one["spec"]["version"] = json!("latest"));
        variant("unsupported version", search, &|one| one["spec"]["version"] = json!("1.7.6"));
        variant("no master", search, &|one| one["spec"]["nodeSets"][0]["config"][ROLES] = json!(["data"]));
        variant("two kinds of zones", search, &|one| {
            let [mut a, mut b] = [one["spec"]["nodeSets"][0].clone(), one["spec"]["nodeSets"][0].clone()];
            (a["zoneAwareness"], b["zoneAwareness"]) = (json!({}), json!({"topologyKey": "example.com/rack"}));
            b["name"] = json!("other");
            one["spec"]["nodeSets"] = json!([a, b]);
        });
        variant("one name twice", search, &|one| {
            let nodes = one["spec"]["nodeSets"][0].clone();
            one["spec"]["nodeSets"] = json!([nodes, nodes]);
        });
        variant("long name", search, &|one| one["metadata"]["name"] = json!("a".repeat(60)));
        variant("wrong address", search, &|one| {
            one["spec"]["http"] = json!({"tls": {"selfSignedCertificate": {"subjectAltNames": [{"ip": "here"}]}}});
        });
        variant("unsupported Kibana", kibana, &|one| one["spec"]["version"] = json!("1.7.6"));
        creations
    }

    /// Changes of the sample that is there. What is said of the claims depends on the StatefulSet that the operator has
    /// made, which only the owner of the namespace has in its cache.
    pub(crate) fn updates(&self) -> Result<Vec<Named>> {
        let config = "/spec/nodeSets/0/config";
        let roles = json!({"op": "replace", "path": format!("{config}/{ROLES}"), "value": ["data"]});
        let mut other = self.elasticsearch["spec"]["nodeSets"][0].clone();
        other.as_object_mut().context("a set of nodes")?.remove("volumeClaimTemplates");
        let change = |path: &str, value: Value| json!({"op": "replace", "path": path, "value": value});
        let claims = "/spec/nodeSets/0/volumeClaimTemplates";
        let changes = [
            ("another count", change("/spec/nodeSets/0/count", json!(5))),
            ("downgrade", change("/spec/version", json!("9.4.0"))),
            ("upgrade past a major version", change("/spec/version", json!("8.1.0"))),
            ("no master any more", roles),
            ("no claim any more", change("/spec/nodeSets/0", other)),
            ("less storage", change(claims, claim("1Gi"))),
            ("more storage", change(claims, claim("3Gi"))),
        ];
        Ok(changes.map(|(name, change)| (name.to_owned(), Request::Change(json!([change])))).to_vec())
    }
}

/// The claim of the data, as the sample has it in a comment.
fn claim(storage: &str) -> Value {
    json!([{"metadata": {"name": "elasticsearch-data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}}}])
}

/// The manifests in a file of YAML.
pub(crate) fn read(cluster: &Cluster, file: &Path) -> Result<Vec<Value>> {
    let what = || format!("read {}", file.display());
    let text = fs::read_to_string(file).with_context(what)?;
    manifests(cluster, &text).with_context(what)
}

/// The manifests in YAML. kubectl reads them, and writes a namespace into each, which is taken out again.
pub(crate) fn manifests(cluster: &Cluster, yaml: &str) -> Result<Vec<Value>> {
    let text = cluster.ask(&["create", "--dry-run=client", "--output=json", "--filename", "-"], yaml)?;
    let manifests = Deserializer::from_str(&text).into_iter::<Value>().map(|value| {
        let mut value = value?;
        value["metadata"].as_object_mut().context("metadata")?.remove("namespace");
        Ok(value)
    });
    manifests.collect()
}
