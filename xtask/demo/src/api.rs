//! A blocking JSON client for the API server.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_testbed::Cluster;
use http::{Method, Request};
use kube::Client;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// How long one answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Who we are in the audit log, as owner of fields too.
pub const OURSELVES: &str = "ctrlmesh-demo";

/// A client of the cluster's administrator.
pub struct Api {
    runtime: Runtime,
    client: Client,
}

impl fmt::Debug for Api {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    /// A client of `cluster`.
    ///
    /// # Errors
    /// Where the kubeconfig cannot be read.
    pub fn of(cluster: &Cluster) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let client = runtime.block_on(cluster.client())?;
        Ok(Self { runtime, client })
    }

    /// What is at `path`.
    ///
    /// # Errors
    /// Where the API server does not answer, or refuses.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.ask(Method::GET, path, None, "application/json")
    }

    /// What is at `path`, as text, where it is answered in time.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn text(&self, path: &str, within: Duration) -> Result<String> {
        let request = Request::get(path).body(Vec::new())?;
        let answer = async { timeout(within, self.client.request_text(request)).await };
        let answer = self.runtime.block_on(answer).context("no answer in time")?;
        answer.with_context(|| format!("GET {path}"))
    }

    /// Makes `object` where it is not there, and what it should be where it is.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn apply(&self, path: &str, object: &Value) -> Result<Value> {
        let path = format!("{path}?fieldManager={OURSELVES}&force=true");
        self.ask(Method::PATCH, &path, Some(object), "application/apply-patch+yaml")
    }

    /// Changes some fields of what is at `path`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn merge(&self, path: &str, fields: &Value) -> Result<Value> {
        self.ask(Method::PATCH, path, Some(fields), "application/merge-patch+json")
    }

    /// Deletes what is at `path`; `options` are `DeleteOptions`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn delete(&self, path: &str, options: &Value) -> Result<Value> {
        self.ask(Method::DELETE, path, Some(options), "application/json")
    }

    fn ask(&self, method: Method, path: &str, body: Option<&Value>, kind: &str) -> Result<Value> {
        let bytes = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let request = Request::builder().method(method.clone()).uri(path).header("content-type", kind).body(bytes)?;
        let answer = async { timeout(ANSWER_WITHIN, self.client.request(request)).await };
        let answer = self.runtime.block_on(answer).context("no answer in time")?;
        answer.with_context(|| format!("{method} {path}"))
    }
}
