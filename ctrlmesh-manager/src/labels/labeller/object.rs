//! How is one object labelled?

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use serde_json::json;
use tokio::time;
use tracing::warn;

use super::{DEADLINE, Labeller, Repair};
use crate::labels::{Change, Kind};

/// What became of an object whose labels had to be put right.
pub(super) enum RepairOutcome {
    Done,
    Gone,
    /// It was changed since it was seen, or is another now, as the API server says.
    Changed(String),
    /// It is not as it was written: what labels at once does not know yet what is wanted now, or the object's namespace
    /// says something else still.
    Undone,
    /// They are not; why.
    Failed(String),
}

// === impl Labeller ===

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

    /// How an object is now; none where it is gone.
    pub(super) async fn metadata(
        &self,
        kind: &Kind,
        meta: &ObjectMeta,
    ) -> Result<Option<ObjectMeta>, String> {
        // A list, because that is what the manager may do.
        let one = ListParams::default().fields(&named(meta.name.as_deref().unwrap_or_default()));
        let found = match time::timeout(DEADLINE, self.place(kind, meta).list_metadata(&one)).await
        {
            Ok(Ok(found)) => found.items.into_iter().map(|object| object.metadata),
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_elapsed) => return Err("no answer in time".to_owned()),
        };
        // A server of others' may not know how to select.
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
        // Where that was for a moment only, it is not forgotten.
        if !(self.may_write)() {
            return RepairOutcome::Undone;
        }
        let name = meta.name.as_deref().unwrap_or_default();
        // Another object of the same name is not meant, nor what has become of this one since it was seen: it may be on its way
        // out. Lists of many are old before they are gone through.
        let mut metadata = json!({"uid": meta.uid, "labels": change});
        if let Some(version) = &meta.resource_version {
            metadata["resourceVersion"] = json!(version);
        }
        let body = Patch::Merge(json!({"metadata": metadata}));
        let params = PatchParams::default();
        let patch = api.patch_metadata(name, &params, &body);
        let (outcome, repaired) = match time::timeout(DEADLINE, patch).await {
            Ok(Ok(written)) if is_undone(&change, &written.metadata) => {
                ("undone", RepairOutcome::Undone)
            }
            Ok(Ok(_)) => {
                self.progress.repair();
                ("done", RepairOutcome::Done)
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                ("gone", RepairOutcome::Gone)
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                ("changed", RepairOutcome::Changed(status.message))
            }
            Ok(Err(error)) => ("failed", RepairOutcome::Failed(error.to_string())),
            Err(_elapsed) => ("failed", RepairOutcome::Failed("no answer in time".to_owned())),
        };
        if let RepairOutcome::Failed(error) = &repaired {
            warn!(
                kind,
                object = name,
                namespace = meta.namespace,
                error,
                "not labelled; tried again"
            );
        }
        let label = Repair { kind: kind.to_owned(), outcome };
        self.metrics.repairs.get_or_create_owned(&label).inc();
        repaired
    }
}

/// What selects the object of that name; roles may have names with what is meant otherwise in a field selector:
/// `fields.EscapeValue` of apimachinery.
fn named(name: &str) -> String {
    let escaped = name.replace('\\', r"\\").replace(',', r"\,").replace('=', r"\=");
    format!("metadata.name={escaped}")
}

/// Whether a label is not as it was written: an admission that labels at once has put it back, because it had not heard of
/// the change yet, or gives what the object's namespace says. Where that is what was there before, no watch would tell.
fn is_undone(change: &Change, written: &ObjectMeta) -> bool {
    let there = |key: &str| written.labels.as_ref().and_then(|labels| labels.get(key));
    change.iter().any(|(key, value)| there(key) != value.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_selected_whatever_is_in_it() {
        assert_eq!(named("a-1.b:c"), "metadata.name=a-1.b:c");
        assert_eq!(named(r"a,b=c\d"), r"metadata.name=a\,b\=c\\d");
    }

    #[test]
    fn a_label_that_is_not_as_it_was_written_was_put_back() {
        let written = |labels: &[(&str, &str)]| ObjectMeta {
            labels: Some(labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()),
            ..ObjectMeta::default()
        };
        let change =
            |value: Option<&str>| Change::from([("k".to_owned(), value.map(str::to_owned))]);
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
