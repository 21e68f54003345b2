//! The names and values that spans carry.
//!
//! Of a request they hold method, path, selectors, and what the API server makes of them. They hold no other part of
//! the query, no header and no body.

use ctrlmesh_request::request::RequestInfo;
use opentelemetry::KeyValue;
use opentelemetry::trace::SpanContext;

pub(super) const SHARD: &str = "ctrlmesh.shard";
pub(super) const DECISION: &str = "ctrlmesh.decision";
pub(super) const OUTCOME: &str = "ctrlmesh.outcome";
pub(super) const STATUS: &str = "http.response.status_code";
pub(super) const ERROR: &str = "error.type";
pub(super) const SERVER_ADDRESS: &str = "server.address";
pub(super) const SERVER_PORT: &str = "server.port";
pub(super) const PROTOCOL_VERSION: &str = "network.protocol.version";

const POD_NAMESPACE: &str = "k8s.namespace.name";
const POD_NAME: &str = "k8s.pod.name";
const METHOD: &str = "http.request.method";
const PATH: &str = "url.path";
const VERB: &str = "k8s.request.verb";
const GROUP: &str = "k8s.request.api_group";
const RESOURCE: &str = "k8s.request.resource";
const CLUSTER: &str = "k8s.request.cluster";
const SUBRESOURCE: &str = "k8s.request.subresource";
const NAMESPACE: &str = "k8s.request.namespace";
const LABEL_SELECTOR: &str = "k8s.request.label_selector";
const FIELD_SELECTOR: &str = "k8s.request.field_selector";

/// Of a longer value, spans have the beginning.
const MAX_VALUE_BYTES: usize = 1024;

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Decision {
    /// The API server gets it as it came.
    Passed,
    /// The API server gets it with another target or body.
    Rewritten,
    /// The policy does not let it pass.
    Refused,
    /// A rule of a `CircuitBreaker` does not let it pass.
    Breaker,
    /// A `FaultInjection` answers it, or loses its answer.
    Fault,
    /// The proxy answers, because it could do nothing else.
    Failed,
}

/// Whom a request is of, and what it asks for.
#[derive(Clone, Copy, Debug)]
pub struct RequestOrigin<'a> {
    pub method: &'a str,
    /// Without its query.
    pub path: &'a str,
    /// `None` where the target cannot be read.
    pub info: Option<&'a RequestInfo<'a>>,
    /// `NAMESPACE/NAME`; empty where it is not known.
    pub pod: &'a str,
    pub shard: Option<&'a str>,
    /// Of the span of its connection.
    pub connection: Option<&'a SpanContext>,
}

impl Decision {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Rewritten => "rewritten",
            Self::Refused => "refused",
            Self::Breaker => "breaker",
            Self::Fault => "fault",
            Self::Failed => "failed",
        }
    }
}

impl RequestOrigin<'_> {
    /// Of few values: the verb and the resource, or the method.
    pub(super) fn span_name(&self) -> String {
        match self.info.filter(|info| info.is_resource_request()) {
            Some(info) => format!("{} {}", info.verb(), shortened(info.resource())),
            None => shortened(self.method).to_owned(),
        }
    }

    pub(super) fn attributes(&self) -> Vec<KeyValue> {
        let mut all = of_pod(self.pod, self.shard);
        all.extend([text(METHOD, self.method), text(PATH, self.path)]);
        if let Some(info) = self.info {
            all.push(text(VERB, info.verb()));
            if info.is_resource_request() {
                all.extend([text(GROUP, info.api_group()), text(RESOURCE, info.resource())]);
                let rest = [
                    (CLUSTER, info.cluster().unwrap_or_default()),
                    (SUBRESOURCE, info.subresource()),
                    (NAMESPACE, info.namespace()),
                    (LABEL_SELECTOR, info.label_selector()),
                    (FIELD_SELECTOR, info.field_selector()),
                ];
                all.extend(rest.iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| text(name, value)));
            }
        }
        all
    }
}

fn text(name: &'static str, value: &str) -> KeyValue {
    KeyValue::new(name, shortened(value).to_owned())
}

/// Of what clients write, spans that wait must not take much memory.
fn shortened(value: &str) -> &str {
    &value[..value.floor_char_boundary(MAX_VALUE_BYTES)]
}

/// The operator's pod, and its shard.
pub(super) fn of_pod(pod: &str, shard: Option<&str>) -> Vec<KeyValue> {
    let pod = pod.split_once('/').map(|(namespace, name)| [text(POD_NAMESPACE, namespace), text(POD_NAME, name)]);
    pod.into_iter().flatten().chain(shard.map(|shard| text(SHARD, shard))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(method: &str, target: &str) -> Vec<(String, String)> {
        let info = RequestInfo::parse(method, target).unwrap();
        let path = target.split('?').next().unwrap();
        let origin =
            RequestOrigin { method, path, info: Some(&info), pod: "ops/op-0", shard: Some("op-0"), connection: None };
        let text = |pair: KeyValue| (pair.key.to_string(), pair.value.to_string());
        origin.attributes().into_iter().map(text).collect()
    }

    #[test]
    fn a_request_shows_what_it_asks_for_and_for_whom() {
        let target = "/apis/apps/v1/namespaces/a/deployments?labelSelector=x%3D1&fieldSelector=metadata.name%3Dn";
        let expected = [
            ("k8s.namespace.name", "ops"),
            ("k8s.pod.name", "op-0"),
            ("ctrlmesh.shard", "op-0"),
            ("http.request.method", "GET"),
            ("url.path", "/apis/apps/v1/namespaces/a/deployments"),
            ("k8s.request.verb", "list"),
            ("k8s.request.api_group", "apps"),
            ("k8s.request.resource", "deployments"),
            ("k8s.request.namespace", "a"),
            ("k8s.request.label_selector", "x=1"),
            ("k8s.request.field_selector", "metadata.name=n"),
        ];
        assert_eq!(attributes("GET", target), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn no_other_part_of_a_query_is_shown() {
        let shown = attributes("GET", "/api/v1/namespaces/a/pods/p/log?container=secret&token=secret&tailLines=7");
        assert!(shown.iter().all(|(_, value)| !value.contains("secret") && !value.contains('7')), "{shown:?}");
    }

    #[test]
    fn a_long_value_is_cut_between_two_characters() {
        let value = format!("{}éé", "a".repeat(MAX_VALUE_BYTES - 1));
        assert_eq!(shortened(&value), &value[..MAX_VALUE_BYTES - 1]);
        assert_eq!(shortened("short"), "short");
    }

    #[test]
    fn a_path_that_names_no_resource_has_its_method_for_a_name() {
        let info = RequestInfo::parse("GET", "/healthz").unwrap();
        let origin = RequestOrigin {
            method: "GET",
            path: "/healthz",
            info: Some(&info),
            pod: "",
            shard: None,
            connection: None,
        };
        assert_eq!(origin.span_name(), "GET");
        let names: Vec<String> = origin.attributes().into_iter().map(|pair| pair.key.to_string()).collect();
        assert_eq!(names, [METHOD, PATH, VERB]);
    }
}
