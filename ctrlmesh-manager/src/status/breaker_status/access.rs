//! Says which rules of a CircuitBreaker on other servers do not hold as they are written.

use ctrlmesh_common::policy::Redirect;

use super::Target;
use crate::rules::breaker::Access;
use crate::status::finding::{Finding, finding, listed};

/// Why the rules do not hold in every pod; `None` if they do.
pub(super) fn not_intercepted(access: &Access, targets: &[Target<'_>]) -> Option<Finding> {
    if access.ports.is_empty() {
        return None;
    }
    let outside = targets.iter().filter(|target| target.member.redirect != Redirect::Node);
    let outside: Vec<String> = outside.map(|target| target.member.name.name.clone()).collect();
    let message = || {
        format!(
            "trafficInterceptRules and restRules do not hold in pod {}: its proxy is inside, and only the node's enforces them",
            listed(&outside, ", ")
        )
    };
    (!outside.is_empty()).then(|| finding(false, "NotIntercepted", message()))
}

/// Which rules ask for more than TLS shows; `None` if none does.
pub(super) fn path_not_visible(access: &Access) -> Option<Finding> {
    let names: Vec<String> = access.hidden.iter().map(|name| format!("{name:?}")).collect();
    let message = || {
        format!(
            "TLS is matched by host alone: paths and methods of rule {} are not seen there; http:// leaves TLS out",
            listed(&names, ", ")
        )
    };
    (!names.is_empty()).then(|| finding(true, "MatchedByHost", message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::breaker::Breaker;
    use crate::rules::pod::{Member, PodName};

    fn access(rules: &str) -> Access {
        let text = format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: CircuitBreaker\nmetadata: {{name: b, namespace: ops}}\n\
             spec: {{selector: {{matchLabels: {{app: a}}}}, trafficInterceptRules: [{rules}]}}\n"
        );
        Breaker::from(&serde_saphyr::from_str(&text).unwrap()).access
    }

    fn rule(name: &str, content: &str) -> String {
        format!(
            "{{name: {name}, interceptType: Whitelist, contentType: Normal, contents: ['{content}'], methods: ['*']}}"
        )
    }

    #[test]
    fn pods_with_their_proxy_inside_are_named() {
        let pod = |name: &str, redirect| Member {
            name: PodName { namespace: "ops".to_owned(), name: name.to_owned() },
            redirect,
            ..Member::default()
        };
        let members = [pod("a", Redirect::Node), pod("b", Redirect::Sidecar), pod("c", Redirect::Nowhere)];
        let target = |member| Target { member, policy: None, receipt: None, before: None, acknowledged: false };
        let targets: Vec<Target<'_>> = members.iter().map(target).collect();
        let rules = access(&rule("r", "a"));
        let finding = not_intercepted(&rules, &targets).unwrap();
        assert_eq!((finding.holds, &*finding.reason), (false, "NotIntercepted"));
        assert!(
            finding.message.starts_with("trafficInterceptRules and restRules do not hold in pod b, c: "),
            "{}",
            finding.message
        );
        assert!(not_intercepted(&rules, &targets[..1]).is_none());
        assert!(not_intercepted(&access(""), &targets).is_none(), "limits hold there, too");
    }

    #[test]
    fn rules_that_tls_hides_a_part_from_are_named() {
        let rules = [rule("open", "http://a/v1"), rule("one", "https://a/v1"), rule("two", "a/v1")].join(", ");
        let finding = path_not_visible(&access(&rules)).unwrap();
        assert_eq!((finding.holds, &*finding.reason), (true, "MatchedByHost"));
        let start = "TLS is matched by host alone: paths and methods of rule \"one\", \"two\" are not seen there";
        assert!(finding.message.starts_with(start), "{}", finding.message);
        assert!(path_not_visible(&access(&rule("open", "https://a"))).is_none());
    }
}
