//! The condition `Owned`: whether every object has one owner that watches it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::as_before;
use crate::audit::{OWNED, Ownerships};
use crate::status::finding::{Finding, finding};

/// What the audit says. While it says nothing, as at the start of a new leader, what was said before stays.
pub(super) fn of(full_name: &str, before: &[Condition], ownerships: &Ownerships) -> Option<(&'static str, Finding)> {
    let said = match ownerships {
        Some(said) => said.get(full_name)?.as_ref(),
        None => None,
    };
    let said = said.map(|said| finding(said.holds, said.reason, &said.message));
    said.or_else(|| as_before(before, OWNED)).map(|finding| (OWNED, finding))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::audit::OwnedFinding;
    use crate::status::finding::condition;

    #[test]
    fn what_the_audit_said_stays_only_while_it_says_nothing_else() {
        let before = [condition("Owned", finding(false, "Unowned", "two"), None, &[], Timestamp::UNIX_EPOCH)];
        let said = |ownerships: Option<&[(&str, Option<&'static str>)]>| {
            let finding_of = |reason| OwnedFinding { holds: true, reason, message: String::new() };
            let all = |all: &[(&str, Option<&'static str>)]| {
                all.iter().map(|(name, reason)| ((*name).to_owned(), reason.map(finding_of))).collect()
            };
            of("ops/op", &before, &ownerships.map(all)).map(|(_, finding)| finding.reason.into_owned())
        };
        assert_eq!(said(None).as_deref(), Some("Unowned"), "a new leader has not looked yet");
        assert_eq!(said(Some(&[("ops/op", None)])).as_deref(), Some("Unowned"), "nothing is certain yet");
        assert_eq!(said(Some(&[("ops/op", Some("EveryObject"))])).as_deref(), Some("EveryObject"));
        assert_eq!(said(Some(&[("ops/other", None)])), None, "it is audited no more");
    }
}
