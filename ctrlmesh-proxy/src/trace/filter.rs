//! Says which requests a trace shows.

use clap::builder::PossibleValuesParser;
use clap::{Args, value_parser};
use ctrlmesh_request::request::RequestInfo;
use serde::{Deserialize, Serialize};

use crate::spans::Decision;

/// The verbs of resources, and the methods of paths that name none (apiserver's `RequestInfoFactory`).
const VERBS: [&str; 13] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "post",
    "put",
    "head",
    "options",
    "proxy",
];

/// Which requests are shown, and how many.
#[derive(Clone, Debug, Default, Eq, PartialEq, Args, Deserialize, Serialize)]
pub struct TraceFilter {
    /// Show requests of this verb only, as the API server names it. May be repeated
    #[arg(long, value_name = "VERB", value_delimiter = ',', value_parser = PossibleValuesParser::new(VERBS))]
    pub verb: Vec<String>,
    /// Show requests for this resource only, as PLURAL or PLURAL.GROUP, with its subresources. May be repeated
    #[arg(long, value_name = "RESOURCE", value_delimiter = ',')]
    pub resource: Vec<String>,
    /// Show requests for objects of this namespace only. May be repeated
    #[arg(long, value_name = "NAMESPACE", value_delimiter = ',')]
    pub object_namespace: Vec<String>,
    /// Show only requests that the proxy did not let pass, or could not answer
    #[arg(long)]
    pub refused: bool,
    /// Most requests to show in a second, up to 1000. Of others, the number is shown
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = value_parser!(u32).range(1..=1000))]
    pub rate: u32,
}

impl TraceFilter {
    /// As flags of a command.
    pub fn arguments(&self) -> Vec<String> {
        let Self { verb, resource, object_namespace, refused, rate } = self;
        let named = [("verb", verb), ("resource", resource), ("object-namespace", object_namespace)];
        let named = named.into_iter().flat_map(|(flag, all)| all.iter().map(move |one| format!("--{flag}={one}")));
        named.chain(refused.then(|| "--refused".to_owned())).chain([format!("--rate={rate}")]).collect()
    }
}

/// Whom a trace is about, and what it shows. The first line of a connection.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct TraceQuery {
    /// `NAMESPACE/NAME`. `None`: every pod of this proxy.
    pub(super) pod: Option<String>,
    pub(super) filter: TraceFilter,
}

impl TraceQuery {
    /// Whether a request of `pod` may be shown, as far as it is known before it is decided. `None`: its target cannot
    /// be read.
    pub(super) fn may_show(&self, pod: &str, info: Option<&RequestInfo<'_>>) -> bool {
        let TraceFilter { verb, resource, object_namespace, .. } = &self.filter;
        if self.pod.as_deref().is_some_and(|wanted| wanted != pod) {
            return false;
        }
        let Some(info) = info else {
            return verb.is_empty() && resource.is_empty() && object_namespace.is_empty();
        };
        let is = |wanted: &Vec<String>, value: &str| wanted.is_empty() || wanted.iter().any(|one| one == value);
        is(verb, info.verb())
            && is(object_namespace, info.namespace())
            && (resource.is_empty() || resource.iter().any(|wanted| is_resource(wanted, info)))
    }

    pub(super) fn shows(&self, decision: Decision) -> bool {
        !self.filter.refused || !matches!(decision, Decision::Passed | Decision::Rewritten)
    }
}

fn is_resource(wanted: &str, info: &RequestInfo<'_>) -> bool {
    let (plural, group) = wanted.split_once('.').unzip();
    info.is_resource_request()
        && plural.unwrap_or(wanted) == info.resource()
        && group.is_none_or(|group| group == info.api_group())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(filter: TraceFilter) -> TraceQuery {
        TraceQuery { pod: Some("ops/op-0".to_owned()), filter }
    }

    fn names(of: &[&str]) -> Vec<String> {
        of.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn requests_are_chosen_by_verb_resource_and_namespace() {
        let list = RequestInfo::parse("GET", "/apis/apps/v1/namespaces/a/deployments").unwrap();
        let scale = RequestInfo::parse("PUT", "/apis/apps/v1/namespaces/a/deployments/d/scale").unwrap();
        let health = RequestInfo::parse("GET", "/healthz").unwrap();
        let shown = |filter: &TraceFilter| {
            [&list, &scale, &health].map(|info| query(filter.clone()).may_show("ops/op-0", Some(info)))
        };
        let all = TraceFilter::default();
        assert_eq!(shown(&all), [true; 3]);
        assert_eq!(shown(&TraceFilter { verb: names(&["list", "patch"]), ..all.clone() }), [true, false, false]);
        for resource in ["deployments", "deployments.apps"] {
            assert_eq!(shown(&TraceFilter { resource: names(&[resource]), ..all.clone() }), [true, true, false]);
        }
        assert_eq!(shown(&TraceFilter { resource: names(&["deployments.other"]), ..all.clone() }), [false; 3]);
        assert_eq!(shown(&TraceFilter { object_namespace: names(&["b"]), ..all.clone() }), [false; 3]);
        assert!(!query(all.clone()).may_show("ops/op-1", Some(&list)));
        assert!(TraceQuery { pod: None, filter: all.clone() }.may_show("ops/op-1", Some(&list)));
        assert!(query(all.clone()).may_show("ops/op-0", None));
        assert!(!query(TraceFilter { verb: names(&["get"]), ..all }).may_show("ops/op-0", None));
    }

    #[test]
    fn a_filter_is_read_as_it_was_written() {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            filter: TraceFilter,
        }
        let one = |name: &str| names(&[name, "get"]);
        let filter = TraceFilter {
            verb: one("list"),
            resource: one("pods"),
            object_namespace: one("shop"),
            refused: true,
            rate: 7,
        };
        let command = ["trace".to_owned()].into_iter().chain(filter.arguments());
        assert_eq!(<Command as clap::Parser>::parse_from(command).filter, filter);
    }

    #[test]
    fn what_passed_is_not_shown_among_the_refused() {
        let refused = query(TraceFilter { refused: true, ..TraceFilter::default() });
        let all = [Decision::Passed, Decision::Rewritten, Decision::Refused, Decision::Breaker, Decision::Failed];
        assert_eq!(all.map(|decision| refused.shows(decision)), [false, false, true, true, true]);
        assert!(query(TraceFilter::default()).shows(Decision::Passed));
    }
}
