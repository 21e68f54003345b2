//! Enrols the operator, and writes the root by which it is divided.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use ctrlmesh_common::names::{self, label};
use ctrlmesh_common::slots::SlotSet;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Environment, configs};
use crate::install::{ROLLED_OUT_WITHIN, rolled_out};
use crate::operator::Operator;

impl Environment {
    /// Enrols the operator by a rolling update: labels its pods' template, and waits until the pods from before are
    /// gone.
    ///
    /// # Errors
    /// Where the API server refuses it, or the rollout does not end.
    pub fn enrol(&self) -> Result<()> {
        self.roll(&json!("true"))
    }

    /// Takes the label out of the template again, and waits in the same way.
    ///
    /// # Errors
    /// As [`Self::enrol`].
    pub fn leave(&self) -> Result<()> {
        self.roll(&Value::Null)
    }

    fn roll(&self, enrolled: &Value) -> Result<()> {
        let names = || -> Result<BTreeSet<String>> {
            let pods = self.pods()?;
            Ok(pods.iter().filter_map(|pod| Some(pod["metadata"]["name"].as_str()?.to_owned())).collect())
        };
        let before = names()?;
        let labels = json!({label::ENABLE_PROXY: enrolled});
        let template = json!({"spec": {"template": {"metadata": {"labels": labels}}}});
        self.api.merge(&self.deployment(), &template)?;
        rolled_out(&self.cluster, self.operator().namespace, &format!("deployment/{}", self.operator().name))?;
        let gone = || Ok(names()?.is_disjoint(&before).then_some(()));
        self.until("the pods from before to be gone", ROLLED_OUT_WITHIN, gone)
    }

    /// Writes the root ShardingConfig, which the API server fences; `rule` is what its `spec.root` has beside prefix
    /// and target, by which the canary gets these slots.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub fn shard(&self, canary: SlotSet, rule: &Value) -> Result<()> {
        self.rules(|rules| rules.begin(Timestamp::now(), canary));
        self.divide(rule)
    }

    /// Writes the root ShardingConfig, by which the operator's replicas have what the rules here do not say.
    ///
    /// # Errors
    /// Where the API server refuses it.
    pub fn divide(&self, rule: &Value) -> Result<()> {
        let Operator { namespace, name, lock, .. } = self.operator();
        let selector = self.work.resource_selector();
        let mut root =
            json!({"prefix": "share", "targetDeployment": name, "resourceSelector": selector, "fence": "Server"});
        for (key, value) in rule.as_object().context("a rule")? {
            root[key] = value.clone();
        }
        let mut config = json!({
            "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
            "kind": "ShardingConfig",
            "metadata": {"name": name},
            "spec": {"root": root},
        });
        if let Some(lock) = lock {
            config["spec"]["controller"] = json!({"leaderElectionName": lock});
        }
        self.api.apply(&format!("{}/{name}", configs(namespace)), &config).map(drop)
    }

    /// How many slots each shard has by the root's table.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn slots(&self) -> Result<BTreeMap<String, usize>> {
        let Operator { namespace, name, .. } = self.operator();
        let root = self.api.get(&format!("{}/{name}", configs(namespace)))?;
        let mut counts = BTreeMap::new();
        for owner in root["status"]["ownership"]["slots"].as_object().into_iter().flat_map(|slots| slots.values()) {
            *counts.entry(owner.as_str().unwrap_or_default().to_owned()).or_default() += 1;
        }
        Ok(counts)
    }

    /// Deletes the root ShardingConfig, and waits until it is gone: its finalizer stays until all is handed back.
    ///
    /// # Errors
    /// Where the API server refuses it, or it stays.
    pub fn unshard(&self) -> Result<()> {
        let Operator { namespace, name, .. } = self.operator();
        self.api.delete(&format!("{}/{name}", configs(namespace)), &json!({}))?;
        self.until("the root to be gone", ROLLED_OUT_WITHIN, || {
            let list = self.api.get(&configs(namespace))?;
            let mut left = list["items"].as_array().into_iter().flatten();
            Ok(left.all(|config| config["metadata"]["name"] != *name).then_some(()))
        })
    }
}
