//! Says which rules of a CircuitBreaker on other servers do not hold as they are written.

use super::Target;
use crate::rules::breaker::Access;
use crate::status::finding::Finding;
use crate::status::interception;

/// Why the rules do not hold in every pod; `None` if they do.
pub(super) fn not_intercepted(access: &Access, targets: &[Target<'_>]) -> Option<Finding> {
    if access.ports.is_empty() {
        return None;
    }
    interception::not_intercepted("trafficInterceptRules and restRules", targets)
}

/// Which rules ask for more than TLS shows; `None` if none does.
pub(super) fn path_not_visible(access: &Access) -> Option<Finding> {
    interception::path_not_visible("paths and methods of rule", &access.hidden, "http:// leaves TLS out")
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::Redirect;

    use super::*;
    use crate::rules::breaker::Breaker;
    use crate::rules::pod::Member;

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
    fn limits_alone_hold_where_nothing_else_is_sent_to_the_proxy() {
        let member = Member { redirect: Redirect::Nowhere, ..Member::default() };
        let target = Target { member: &member, policy: None, receipt: None, before: None, acknowledged: false };
        let message = not_intercepted(&access(&rule("r", "a")), std::slice::from_ref(&target)).unwrap().message;
        assert!(message.starts_with("trafficInterceptRules and restRules hold in pod"), "{message}");
        assert!(not_intercepted(&access(""), &[target]).is_none());
    }

    #[test]
    fn rules_that_tls_hides_a_part_from_are_named() {
        let rules = [rule("open", "http://a/v1"), rule("one", "https://a/v1"), rule("two", "a/v1")].join(", ");
        let message = path_not_visible(&access(&rules)).unwrap().message;
        let start = "TLS is matched by host alone: paths and methods of rule \"one\", \"two\" are not seen there";
        assert!(message.starts_with(start), "{message}");
        assert!(path_not_visible(&access(&rule("open", "https://a"))).is_none());
    }
}
