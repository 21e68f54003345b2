//! Keeps the state of a migration in a ConfigMap of our managers' namespace.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, Error};
use serde_json::json;

use super::carry_out::FIELD_MANAGER;
use super::error::MigrateError;
use super::state::State;

/// Name of the ConfigMap.
pub(super) const NAME: &str = "ctrlmesh-migration";

/// Its key.
const KEY: &str = "state";

/// HTTP statuses.
const CONFLICT: u16 = 409;

/// The state as it was read or written last.
pub(super) struct Store {
    client: Client,
    namespace: String,
    /// The content as it was read or written last. `None`: nothing is stored yet.
    stored: Option<String>,
    version: Option<String>,
    pub(super) state: State,
}

impl Store {
    /// # Errors
    /// The API server does not say it, or this version does not know what it says.
    pub(super) async fn open(client: &Client, namespace: &str) -> Result<Self, MigrateError> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let map = maps.get_opt(NAME).await.map_err(|source| MigrateError::Read {
            what: format!("ConfigMap {namespace}/{NAME}"),
            source: Box::new(source),
        })?;
        let stored = map.as_ref().and_then(content);
        let state = stored.as_ref().map(|text| serde_json::from_str(text)).transpose();
        let state =
            state.map_err(|source| MigrateError::State { namespace: namespace.to_owned(), name: NAME, source })?;
        Ok(Self {
            client: client.clone(),
            namespace: namespace.to_owned(),
            stored,
            version: map.and_then(|map| map.metadata.resource_version),
            state: state.unwrap_or_default(),
        })
    }

    /// Writes the state over the one that was read.
    ///
    /// # Errors
    /// It was changed meanwhile, or is refused.
    pub(super) async fn save(&mut self) -> Result<(), MigrateError> {
        let text = serde_json::to_string(&self.state)
            .map_err(|source| MigrateError::Content { object: NAME.to_owned(), source })?;
        loop {
            let source = match self.write(&text).await {
                Ok(written) => {
                    (self.stored, self.version) = (Some(text), written.metadata.resource_version);
                    return Ok(());
                }
                Err(source) => source,
            };
            let is_conflict = matches!(&source, Error::Api(status) if status.code == CONFLICT);
            // Our managers may label it meanwhile.
            match self.maps().get_opt(NAME).await {
                Ok(Some(map)) if is_conflict && content(&map) == self.stored => {
                    self.version = map.metadata.resource_version;
                }
                _ => return Err(self.unwritten(source)),
            }
        }
    }

    async fn write(&self, text: &str) -> Result<ConfigMap, Error> {
        let data = BTreeMap::from([(KEY.to_owned(), text.to_owned())]);
        if self.version.is_some() {
            let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
            let patch = json!({"metadata": {"resourceVersion": self.version}, "data": data});
            return self.maps().patch(NAME, &params, &Patch::Merge(patch)).await;
        }
        self.make_namespace().await?;
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let metadata = ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() };
        let map = ConfigMap { metadata, data: Some(data), ..ConfigMap::default() };
        self.maps().create(&params, &map).await
    }

    /// Forgets everything.
    ///
    /// # Errors
    /// It is refused.
    pub(super) async fn remove(&mut self) -> Result<(), MigrateError> {
        match self.maps().delete(NAME, &DeleteParams::default()).await {
            Ok(_) => Ok(()),
            Err(Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(source) => Err(self.unwritten(source)),
        }
    }

    async fn make_namespace(&self) -> Result<(), Error> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let metadata = ObjectMeta { name: Some(self.namespace.clone()), ..ObjectMeta::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        match namespaces.create(&PostParams::default(), &namespace).await {
            Ok(_) => Ok(()),
            Err(Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(source) => Err(source),
        }
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn unwritten(&self, source: Error) -> MigrateError {
        let namespace = self.namespace.clone();
        match source {
            Error::Api(status) if status.code == CONFLICT => MigrateError::ConcurrentRun { namespace, name: NAME },
            source => MigrateError::Write { namespace, name: NAME, source: Box::new(source) },
        }
    }
}

fn content(map: &ConfigMap) -> Option<String> {
    map.data.as_ref()?.get(KEY).cloned()
}
