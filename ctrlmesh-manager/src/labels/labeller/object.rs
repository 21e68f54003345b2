//! Labels one object.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use serde_json::json;
use tokio::time;
use tracing::warn;

use super::{DEADLINE, Labeller, Repair};
use crate::labels::{Change, Kind};

pub(super) enum RepairOutcome {
    Done,
    Gone,
    /// The object changed or was replaced meanwhile, as the API server says.
    Changed(String),
    /// An admission changed the labels back: it does not know the current scheme yet, or the object's namespace has old
    /// labels.
    Undone,
    /// With the reason.
    Failed(String),
}

impl<MayWrite: Fn() -> bool + Send + Sync + 'static> Labeller<MayWrite> {
    pub(super) async fn repair_object(
        &self,
        name: &str,
        kind: &Kind,
        meta: &ObjectMeta,
        change: Change,
    ) -> RepairOutcome {
        self.repair(name, &self.place(kind, meta), meta, change).await
    }

    /// The current metadata; none where the object is gone.
    pub(super) async fn metadata(&self, kind: &Kind, meta: &ObjectMeta) -> Result<Option<ObjectMeta>, String> {
        // A list, because the manager has no right to get.
        let one = ListParams::default().fields(&named(meta.name.as_deref().unwrap_or_default()));
        let found = match time::timeout(DEADLINE, self.place(kind, meta).list_metadata(&one)).await {
            Ok(Ok(found)) => found.items.into_iter().map(|object| object.metadata),
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_elapsed) => return Err("no answer in time".to_owned()),
        };
        // An aggregated API server may ignore the selector.
        Ok({ found }.find(|now| now.name == meta.name && now.namespace == meta.namespace))
    }

    fn place(&self, kind: &Kind, meta: &ObjectMeta) -> Api<DynamicObject> {
        match &meta.namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind.resource),
            None => Api::all_with(self.client.clone(), &kind.resource),
        }
    }

    pub(super) async fn repair(
        &self,
        kind: &str,
        api: &Api<DynamicObject>,
        meta: &ObjectMeta,
        change: Change,
    ) -> RepairOutcome {
        // Retried, in case this replica leads again in a moment.
        if !(self.may_write)() {
            return RepairOutcome::Undone;
        }
        let name = meta.name.as_deref().unwrap_or_default();
        // The UID and version exclude a new object of the same name and any later change, such as a deletion. Pages of
        // long lists are old when they are processed.
        let mut metadata = json!({"uid": meta.uid, "labels": change});
        if let Some(version) = &meta.resource_version {
            metadata["resourceVersion"] = json!(version);
        }
        let body = Patch::Merge(json!({"metadata": metadata}));
        let params = PatchParams::default();
        let patch = api.patch_metadata(name, &params, &body);
        let (outcome, repaired) = match time::timeout(DEADLINE, patch).await {
            Ok(Ok(written)) if is_undone(&change, &written.metadata) => ("undone", RepairOutcome::Undone),
            Ok(Ok(_)) => {
                self.progress.repair();
                ("done", RepairOutcome::Done)
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => ("gone", RepairOutcome::Gone),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                ("changed", RepairOutcome::Changed(status.message))
            }
            Ok(Err(error)) => ("failed", RepairOutcome::Failed(error.to_string())),
            Err(_elapsed) => ("failed", RepairOutcome::Failed("no answer in time".to_owned())),
        };
        if let RepairOutcome::Failed(error) = &repaired {
            warn!(kind, object = name, namespace = meta.namespace, error, "not labelled; tried again");
        }
        let label = Repair { kind: kind.to_owned(), outcome };
        self.metrics.repairs.get_or_create_owned(&label).inc();
        repaired
    }
}

/// The field selector of a name, escaped like `fields.EscapeValue` of apimachinery: names of roles may contain special
/// characters.
fn named(name: &str) -> String {
    let escaped = name.replace('\\', r"\\").replace(',', r"\,").replace('=', r"\=");
    format!("metadata.name={escaped}")
}

/// Whether an admission changed a label back. If the result equals the old object, no watch event follows.
fn is_undone(change: &Change, written: &ObjectMeta) -> bool {
    let there = |key: &str| written.labels.as_ref().and_then(|labels| labels.get(key));
    change.iter().any(|(key, value)| there(key) != value.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_special_characters_are_escaped() {
        assert_eq!(named("a-1.b:c"), "metadata.name=a-1.b:c");
        assert_eq!(named(r"a,b=c\d"), r"metadata.name=a\,b\=c\\d");
    }

    #[test]
    fn a_label_that_differs_from_the_written_one_is_undone() {
        let written = |labels: &[(&str, &str)]| ObjectMeta {
            labels: Some(labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
            ..ObjectMeta::default()
        };
        let change = |value: Option<&str>| Change::from([("k".to_owned(), value.map(str::to_owned))]);
        for (value, labels, undone) in [
            (Some("1"), &[("k", "1"), ("other", "2")][..], false),
            (Some("1"), &[("k", "0")], true),
            (Some("1"), &[], true),
            (None, &[("other", "2")], false),
            (None, &[("k", "1")], true),
        ] {
            assert_eq!(is_undone(&change(value), &written(labels)), undone, "{value:?} {labels:?}");
        }
        assert!(is_undone(&change(Some("1")), &ObjectMeta::default()));
    }
}
