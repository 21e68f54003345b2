//! Reads what the checks go by, with the rights of the user.

mod installed;

use std::collections::BTreeSet;

use http::{Request, StatusCode, header};
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::api::PostParams;
use kube::client::Body;
use kube::{Api, Client};

use super::cgroups::{self, Cgroups};
use super::right::Right;
use super::snapshot::{Server, Snapshot};
use super::{CheckError, expected};
use crate::cluster::Connection;
use crate::cluster::answer::{self, Answer, Unanswered};
pub(super) use installed::installed;

/// Where kubelets have a Lease each.
const NODE_LEASES: &str = "kube-node-lease";

/// The API of admission policies.
const ADMISSION: &str = "admissionregistration.k8s.io/v1";

/// Reads what is checked before and after an installation; `rights` are the rights to ask for.
///
/// # Errors
/// The API server does not say its version.
pub(super) async fn snapshot(connection: &Connection, rights: &[Right]) -> Result<Snapshot, CheckError> {
    let client = &connection.client;
    // The first request, so that its answer says the time of the API server right before what follows.
    let server = server(connection).await?;
    let node_leases = answer::list(client, NODE_LEASES, "").await;
    let admission = client.list_api_group_resources(ADMISSION).await;
    let admission = admission.map(|list| list.resources.into_iter().map(|one| one.name).collect::<BTreeSet<_>>());
    let mut reviewed = Vec::new();
    for right in rights {
        reviewed.push((*right, review(client, right).await));
    }
    Ok(Snapshot {
        server,
        admission: admission.map_err(|error| Unanswered::of(&format!("get /apis/{ADMISSION}"), &error)),
        nodes: answer::list_all(client, "").await,
        node_leases,
        rights: reviewed,
    })
}

async fn server(connection: &Connection) -> Result<Server, CheckError> {
    let url = connection.server.clone();
    let failed = |source| CheckError::Unreachable { server: connection.server.clone(), source };
    let request = Request::get("/version").body(Body::empty());
    let request = request.map_err(|error| failed(kube::Error::HttpError(error)))?;
    let asked = Timestamp::now();
    let response = connection.client.send(request).await.map_err(failed)?;
    let answered = Timestamp::now();
    let (head, body) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(CheckError::Refused { server: url, status: head.status });
    }
    let date = head.headers.get(header::DATE).and_then(|date| date.to_str().ok());
    let date = date.and_then(|date| rfc2822::parse(date).ok()).map(|date| date.timestamp());
    let body = body.collect_bytes().await.map_err(failed)?;
    let info: Info = serde_json::from_slice(&body).map_err(|error| failed(kube::Error::SerdeError(error)))?;
    Ok(Server { url, version: info.git_version, asked, answered, date })
}

/// Whether the user has a right.
async fn review(client: &Client, right: &Right) -> Answer<bool> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let review = SelfSubjectAccessReview { spec: right.review(), ..SelfSubjectAccessReview::default() };
    let answer = reviews.create(&PostParams::default(), &review).await;
    let answer = answer.map_err(|error| Unanswered::of("create selfsubjectaccessreviews", &error))?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

/// Asks the kubelets of some nodes for their cgroups.
pub(super) async fn cgroups(client: &Client, nodes: &Answer<Vec<Node>>) -> Cgroups {
    let (ready, not_ready) = cgroups::samples(nodes.as_deref().unwrap_or_default());
    let mut answers = Vec::new();
    for node in ready {
        let path = format!("/api/v1/nodes/{node}/proxy/metrics");
        let answer = match Request::get(path).body(Vec::new()) {
            Ok(request) => client.request_text(request).await,
            Err(error) => Err(kube::Error::HttpError(error)),
        };
        let version = answer.map(|metrics| cgroups::version(&metrics));
        answers.push((node, version.map_err(|error| Unanswered::of("get nodes/proxy", &error))));
    }
    Cgroups { answers, not_ready }
}
