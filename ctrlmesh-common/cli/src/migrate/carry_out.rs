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

/// How long API servers may ask a webhook whose configuration is gone. Their informers take far less.
const WEBHOOKS_END: Duration = Duration::from_secs(10);

/// How often a change is tried whose object somebody else changes.
const ATTEMPTS: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// It was so already.
    Unchanged,
    /// There is no such object, or it is being deleted.
    Absent,
    /// Somebody else has made the object.
    Foreign,
}

/// What a change is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A step needs it: what it changes has to be there.
    Step,
    /// It takes a step back: what is gone stays gone, and only what a step made is deleted.
    Undo,
}

/// For a moment after a webhook configuration is deleted, an API server goes on asking the webhook.
///
/// # Errors
/// The API server refuses it, or the object is another one.
pub(super) async fn carry_out(
    client: &Client,
    change: &Change,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Outcome, MigrateError> {
    let end = Instant::now() + WEBHOOKS_END;
    loop {
        match attempt(client, change, purpose, timeout).await {
            Err(error) if is_of_webhook(&error) && Instant::now() < end => time::sleep(PERIOD).await,
            outcome => return outcome,
        }
    }
}

/// Whether nobody answered for a webhook.
fn is_of_webhook(error: &MigrateError) -> bool {
    let MigrateError::Change { source, .. } = error else { return false };
    matches!(source.as_ref(), Error::Api(status) if status.message.contains("failed calling webhook"))
}

async fn attempt(
    client: &Client,
    change: &Change,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Outcome, MigrateError> {
    let api = change.object.api(client);
    match &change.action {
        Action::Create(content) => create(&api, change, content).await,
        Action::Delete => delete(&api, change, purpose, timeout).await,
        Action::Merge(patch) => merge(&api, change, purpose, patch, false).await,
        Action::MergeStatus(patch) => merge(&api, change, purpose, patch, true).await,
        Action::AddFinalizer(finalizer) => finalizers(&api, change, finalizer, true).await,
        Action::RemoveFinalizer(finalizer) => finalizers(&api, change, finalizer, false).await,
    }
}

async fn merge(
    api: &Api<DynamicObject>,
    change: &Change,
    purpose: Purpose,
    patch: &Value,
    is_of_status: bool,
) -> Result<Outcome, MigrateError> {
    let (name, merge) = (&change.object.name, Patch::Merge(patch));
    let written = if is_of_status {
        api.patch_status(name, &params(), &merge).await
    } else {
        api.patch(name, &params(), &merge).await
    };
    match written {
        Ok(written) if is_of_status && !contains(&written.data, patch) => {
            Err(MigrateError::Pruned { object: change.object.to_string() })
        }
        Ok(_) => Ok(Outcome::Done),
        Err(Error::Api(status)) if purpose == Purpose::Undo && status.is_not_found() => Ok(Outcome::Absent),
        Err(source) => Err(failed(change, source)),
    }
}

fn failed(change: &Change, source: Error) -> MigrateError {
    MigrateError::Change { change: change.to_string(), source: Box::new(source) }
}

async fn create(api: &Api<DynamicObject>, change: &Change, content: &Value) -> Result<Outcome, MigrateError> {
    let failed = |source| failed(change, source);
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
async fn delete(
    api: &Api<DynamicObject>,
    change: &Change,
    purpose: Purpose,
    timeout: Duration,
) -> Result<Outcome, MigrateError> {
    let failed = |source| failed(change, source);
    let name = &change.object.name;
    let Some(before) = api.get_opt(name).await.map_err(failed)? else { return Ok(Outcome::Absent) };
    if purpose == Purpose::Undo && !is_made_here(&before) {
        return Ok(Outcome::Foreign);
    }
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
    let failed = |source| failed(change, source);
    let name = &change.object.name;
    for _ in 0..ATTEMPTS {
        let Some(object) = api.get_opt(name).await.map_err(failed)? else { return Ok(Outcome::Absent) };
        let is_there = object.finalizers().iter().any(|one| one == finalizer);
        if is_there == is_wanted {
            return Ok(Outcome::Unchanged);
        }
        // Nothing that is being deleted gets another finalizer.
        if is_wanted && object.metadata.deletion_timestamp.is_some() {
            return Ok(Outcome::Absent);
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

/// Whether a migration has made the object: some of its fields are a migration's.
fn is_made_here(object: &DynamicObject) -> bool {
    object.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER))
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
mod tests;
