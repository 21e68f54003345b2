//! Reads objects for commands that go on where one of them cannot be read.

use std::fmt::{self, Debug};

use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::api::ListParams;
use kube::{Api, Client, Error, Resource};
use serde::de::DeserializeOwned;

use super::{paging, resource_name};
use crate::failure::causes;

/// HTTP status of a request that the user has no right to.
const FORBIDDEN: u16 = 403;

/// HTTP status of a resource or an object that does not exist.
const NOT_FOUND: u16 = 404;

/// What the API server said, or why it did not.
pub(crate) type Answer<T> = Result<T, Unanswered>;

/// Why something was not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The user lacks a right, which is written as `kubectl auth can-i` takes it.
    Forbidden { right: String },
    /// The request failed. The error has its causes in it.
    Failed { request: String, error: String },
}

impl Unanswered {
    /// Why the request failed that needs this right.
    pub(crate) fn of(right: &str, error: &Error) -> Self {
        match error {
            Error::Api(status) if status.code == FORBIDDEN => Self::Forbidden { right: right.to_owned() },
            error => Self::Failed { request: right.to_owned(), error: causes(error) },
        }
    }
}

impl fmt::Display for Unanswered {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forbidden { right } => write!(out, "you may not {right}"),
            Self::Failed { request, error } => write!(out, "{request}: {error}"),
        }
    }
}

/// Reads one object of a namespace. `None`: it does not exist.
pub(crate) async fn get<K>(client: &Client, namespace: &str, name: &str) -> Answer<Option<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let right = format!("get {} {name} in namespace {namespace}", plural::<K>());
    found(Api::<K>::namespaced(client.clone(), namespace).get_opt(name).await, &right)
}

/// Reads one object of cluster scope. `None`: it does not exist.
pub(crate) async fn get_global<K>(client: &Client, name: &str) -> Answer<Option<K>>
where
    K: Resource<DynamicType = (), Scope = ClusterResourceScope> + Clone + DeserializeOwned + Debug,
{
    let right = format!("get {}", plural::<K>());
    found(Api::<K>::all(client.clone()).get_opt(name).await, &right)
}

/// Lists the objects of a namespace with these labels.
pub(crate) async fn list<K>(client: &Client, namespace: &str, labels: &str) -> Answer<Vec<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let right = format!("list {} in namespace {namespace}", plural::<K>());
    listed(&Api::<K>::namespaced(client.clone(), namespace), labels, &right).await
}

/// Lists the objects of the whole cluster with these labels.
pub(crate) async fn list_all<K>(client: &Client, labels: &str) -> Answer<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let right = format!("list {} in all namespaces", plural::<K>());
    listed(&Api::<K>::all(client.clone()), labels, &right).await
}

/// Lists the objects of a namespace with these labels, or of the whole cluster where none is named.
pub(crate) async fn list_in<K>(client: &Client, namespace: Option<&str>, labels: &str) -> Answer<Vec<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    match namespace {
        Some(namespace) => list(client, namespace, labels).await,
        None => list_all(client, labels).await,
    }
}

/// An object of a resource that the API server does not have does not exist.
pub(crate) fn found<K>(read: Result<Option<K>, Error>, right: &str) -> Answer<Option<K>> {
    match read {
        Err(Error::Api(status)) if status.code == NOT_FOUND => Ok(None),
        read => read.map_err(|error| Unanswered::of(right, &error)),
    }
}

/// A resource that the API server does not have has no objects.
async fn listed<K>(api: &Api<K>, labels: &str, right: &str) -> Answer<Vec<K>>
where
    K: Clone + DeserializeOwned + Debug,
{
    let params = ListParams::default();
    let params = if labels.is_empty() { params } else { params.labels(labels) };
    match paging::list(api, params).await {
        Err(Error::Api(status)) if status.code == NOT_FOUND => Ok(Vec::new()),
        read => read.map_err(|error| Unanswered::of(right, &error)),
    }
}

fn plural<K: Resource<DynamicType = ()>>() -> String {
    resource_name(&K::group(&()), &K::plural(&()))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_missing_right_differs_from_a_failure() {
        let right = "list nodes in all namespaces";
        let refused = |code| Error::Api(Status::failure("no", "Reason").with_code(code).boxed());
        let forbidden = Unanswered::Forbidden { right: right.to_owned() };
        assert_eq!(Unanswered::of(right, &refused(FORBIDDEN)), forbidden);
        let failed = Unanswered::Failed { request: right.to_owned(), error: "no".to_owned() };
        assert_eq!(Unanswered::of(right, &refused(500)), failed);
    }

    #[test]
    fn an_object_of_an_unknown_kind_does_not_exist() {
        let unknown = Error::Api(Status::failure("404 page not found", "").with_code(NOT_FOUND).boxed());
        assert_eq!(found::<()>(Err(unknown), "get things x"), Ok(None));
    }

    #[test]
    fn resources_are_called_as_kubectl_takes_them() {
        use k8s_openapi::api::apps::v1::DaemonSet;
        use k8s_openapi::api::core::v1::Node;
        assert_eq!([plural::<DaemonSet>(), plural::<Node>()], ["daemonsets.apps", "nodes"]);
    }
}
