//! Says which rules on other servers than the API server do not hold as they are written.

use ctrlmesh_common::policy::Redirect;

use super::finding::{Finding, finding, listed};
use super::targets::Target;

/// Why `rules` on other servers do not hold in every pod; `None` if they do.
pub(super) fn not_intercepted<Before>(rules: &str, targets: &[Target<'_, Before>]) -> Option<Finding> {
    let outside = targets.iter().filter(|target| target.member.redirect == Redirect::Nowhere);
    let outside: Vec<String> = outside.map(|target| target.member.name.name.clone()).collect();
    let message = || {
        let pods = listed(&outside, ", ");
        format!(
            "{rules} hold in pod {pods} for a forward proxy only: with interception env or kubeconfig, its proxy is sent nothing else"
        )
    };
    (!outside.is_empty()).then(|| finding(false, "NotIntercepted", message()))
}

/// Which rules ask for more than TLS shows; `None` if none does. `hidden` says of what, and `advice` what to do.
pub(super) fn path_not_visible(hidden: &str, names: &[String], advice: &str) -> Option<Finding> {
    let quoted: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    let message = || {
        let names = listed(&quoted, ", ");
        format!("TLS is matched by host alone: {hidden} {names} are not seen there; {advice}")
    };
    (!names.is_empty()).then(|| finding(true, "MatchedByHost", message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::pod::{Member, PodName};

    #[test]
    fn pods_whose_proxy_sees_no_other_server_are_named() {
        let pod = |name: &str, redirect| Member {
            name: PodName { namespace: "ops".to_owned(), name: name.to_owned() },
            redirect,
            ..Member::default()
        };
        let members = [
            pod("a", Redirect::Node),
            pod("s", Redirect::Sidecar),
            pod("b", Redirect::Nowhere),
            pod("c", Redirect::Nowhere),
        ];
        let target = |member| Target { member, policy: None, receipt: None, before: None, acknowledged: false };
        let targets: Vec<Target<'_, ()>> = members.iter().map(target).collect();
        let finding = not_intercepted("such rules", &targets).unwrap();
        assert_eq!((finding.holds, &*finding.reason), (false, "NotIntercepted"));
        assert!(
            finding.message.starts_with("such rules hold in pod b, c for a forward proxy only: "),
            "{}",
            finding.message
        );
        assert!(not_intercepted("such rules", &targets[..2]).is_none());
    }

    #[test]
    fn rules_that_tls_hides_a_part_from_are_named() {
        let names = ["one", "two"].map(str::to_owned);
        let finding = path_not_visible("paths of rule", &names, "do this").unwrap();
        assert_eq!((finding.holds, &*finding.reason), (true, "MatchedByHost"));
        let expected = r#"TLS is matched by host alone: paths of rule "one", "two" are not seen there; do this"#;
        assert_eq!(finding.message, expected);
        assert!(path_not_visible("paths of rule", &[], "do this").is_none());
    }
}
