//! Carries changes out. Each of them may have been carried out before.

use std::time::Duration;

use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client, Error, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::{self, Instant};

use super::change::{Action, Change};
use super::error::MigrateError;

/// Who has written it, as `managedFields` shows it.
pub(super) const FIELD_MANAGER: &str = "ctrlmesh-migrate";

/// Between two looks at an object that is being deleted.
const PERIOD: Duration = Duration::from_millis(100);

/// How often a change is tried whose object somebody else changes.
const ATTEMPTS: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// It was so already.
    Unchanged,
    /// There is no such object.
    Absent,
}

/// # Errors
/// The API server refuses it, or the object is another one.
pub(super) async fn carry_out(client: &Client, change: &Change, timeout: Duration) -> Result<Outcome, MigrateError> {
    let api = change.object.api(client);
    let name = &change.object.name;
    let failed = |source| MigrateError::Change { change: change.to_string(), source: Box::new(source) };
    match &change.action {
        Action::Create(content) => create(&api, change, content).await,
        Action::Delete => delete(&api, change, timeout).await,
        Action::Merge(patch) => {
            api.patch(name, &params(), &Patch::Merge(patch)).await.map_err(failed)?;
            Ok(Outcome::Done)
        }
        Action::MergeStatus(patch) => {
            let written = api.patch_status(name, &params(), &Patch::Merge(patch)).await.map_err(failed)?;
            if contains(&written.data, patch) {
                Ok(Outcome::Done)
            } else {
                Err(MigrateError::Pruned { object: change.object.to_string() })
            }
        }
        Action::AddFinalizer(finalizer) => finalizers(&api, change, finalizer, true).await,
        Action::RemoveFinalizer(finalizer) => finalizers(&api, change, finalizer, false).await,
    }
}

async fn create(api: &Api<DynamicObject>, change: &Change, content: &Value) -> Result<Outcome, MigrateError> {
    let failed = |source| MigrateError::Change { change: change.to_string(), source: Box::new(source) };
    let object: DynamicObject = serde_json::from_value(content.clone())
        .map_err(|source| MigrateError::Content { object: change.object.to_string(), source })?;
    let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    match api.create(&params, &object).await {
        Ok(_) => Ok(Outcome::Done),
        Err(Error::Api(status)) if status.is_already_exists() => {
            let there = api.get(&change.object.name).await.map_err(failed)?;
            let is_same = there.metadata.deletion_timestamp.is_none() && contains(&there.data, &object.data);
            if is_same {
                Ok(Outcome::Unchanged)
            } else {
                Err(MigrateError::Differs { object: change.object.to_string() })
            }
        }
        Err(source) => Err(failed(source)),
    }
}

/// Deletes the object, and waits until it is gone: another of its name may be made next.
async fn delete(api: &Api<DynamicObject>, change: &Change, timeout: Duration) -> Result<Outcome, MigrateError> {
    let failed = |source| MigrateError::Change { change: change.to_string(), source: Box::new(source) };
    let name = &change.object.name;
    let Some(before) = api.get_opt(name).await.map_err(failed)? else { return Ok(Outcome::Absent) };
    match api.delete(name, &DeleteParams::background()).await {
        Err(Error::Api(status)) if status.is_not_found() => return Ok(Outcome::Absent),
        deleted => drop(deleted.map_err(failed)?),
    }
    let end = Instant::now() + timeout;
    loop {
        let Some(now) = api.get_opt(name).await.map_err(failed)?.filter(|now| now.uid() == before.uid()) else {
            return Ok(Outcome::Done);
        };
        if Instant::now() >= end {
            return Err(MigrateError::Waited {
                seconds: timeout.as_secs(),
                what: format!("{} is gone", change.object),
                reason: format!("it has the finalizers {}", now.finalizers().join(", ")),
            });
        }
        time::sleep(PERIOD).await;
    }
}

async fn finalizers(
    api: &Api<DynamicObject>,
    change: &Change,
    finalizer: &str,
    is_wanted: bool,
) -> Result<Outcome, MigrateError> {
    let failed = |source| MigrateError::Change { change: change.to_string(), source: Box::new(source) };
    let name = &change.object.name;
    for _ in 0..ATTEMPTS {
        let Some(object) = api.get_opt(name).await.map_err(failed)? else { return Ok(Outcome::Absent) };
        let is_there = object.finalizers().iter().any(|one| one == finalizer);
        if is_there == is_wanted {
            return Ok(Outcome::Unchanged);
        }
        let mut finalizers: Vec<String> = object.finalizers().iter().filter(|one| *one != finalizer).cloned().collect();
        if is_wanted {
            finalizers.push(finalizer.to_owned());
        }
        let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": object.resource_version()}});
        match api.patch(name, &params(), &Patch::Merge(&patch)).await {
            Ok(_) => return Ok(Outcome::Done),
            Err(Error::Api(status)) if status.is_conflict() => {}
            Err(source) => return Err(failed(source)),
        }
    }
    Err(MigrateError::Busy { change: change.to_string() })
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Whether an object has all that is wanted. It may have more: the API server adds defaults.
fn contains(there: &Value, wanted: &Value) -> bool {
    match (there, wanted) {
        (Value::Object(there), Value::Object(wanted)) => wanted.iter().all(|(key, value)| match there.get(key) {
            None => value.is_null(),
            Some(there) => contains(there, value),
        }),
        (Value::Array(there), Value::Array(wanted)) => {
            there.len() == wanted.len() && there.iter().zip(wanted).all(|(there, wanted)| contains(there, wanted))
        }
        (there, wanted) => there == wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_make_no_difference_and_values_do() {
        let there = json!({"spec": {"a": 1, "default": true, "list": [{"x": 1, "scope": "*"}]}});
        for wanted in [json!({"spec": {"a": 1, "list": [{"x": 1}]}}), json!({"spec": {"gone": null}})] {
            assert!(contains(&there, &wanted), "{wanted}");
        }
        for wanted in
            [json!({"spec": {"a": 2}}), json!({"spec": {"list": []}}), json!({"b": 1}), json!({"spec": {"a": null}})]
        {
            assert!(!contains(&there, &wanted), "{wanted}");
        }
    }
}
