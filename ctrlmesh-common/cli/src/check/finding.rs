//! The result of one check: how it stands, what was found, and what to do.
//!
//! Pure.

use serde::Serialize;

use crate::cluster::answer::{Answer, Unanswered};

/// What checks are grouped by, in the order in which they are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) enum Group {
    KubernetesApi,
    Nodes,
    Installation,
    Webhooks,
    Rights,
    Roots,
    Proxies,
    Certificates,
    Clocks,
}

/// How a check stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum State {
    Ok,
    /// It works, and somebody should act.
    Warning,
    Failed,
    /// The check could not be made.
    Skipped,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Finding {
    pub(super) group: Group,
    /// Name of the check. Several results may have one name.
    pub(super) check: &'static str,
    pub(super) state: State,
    pub(super) message: String,
    /// Absent: nothing is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

impl Group {
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::KubernetesApi => "Kubernetes API",
            Self::Nodes => "Nodes",
            Self::Installation => "Installation",
            Self::Webhooks => "Webhooks",
            Self::Rights => "Rights",
            Self::Roots => "Roots",
            Self::Proxies => "Proxies",
            Self::Certificates => "Certificates",
            Self::Clocks => "Clocks",
        }
    }

    pub(super) fn ok(self, check: &'static str, message: impl Into<String>) -> Finding {
        Finding { group: self, check, state: State::Ok, message: message.into(), advice: None }
    }

    pub(super) fn warning(self, check: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Finding {
        let finding = self.ok(check, message);
        Finding { state: State::Warning, advice: Some(advice.into()), ..finding }
    }

    pub(super) fn failed(self, check: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { state: State::Failed, ..self.warning(check, message, advice) }
    }

    pub(super) fn skipped(self, check: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { state: State::Skipped, ..self.warning(check, message, advice) }
    }

    /// A check for which something could not be read. A request that failed is a failure; a missing right is not.
    pub(super) fn unanswered(self, check: &'static str, why: &Unanswered) -> Finding {
        match why {
            Unanswered::Forbidden { right } => {
                Finding { state: State::Skipped, ..self.ok(check, format!("you may not {right}")) }
            }
            Unanswered::Failed { request, error } => self.failed(
                check,
                format!("cannot {request}: {error}"),
                "try the same with kubectl; when that works, check again",
            ),
        }
    }

    /// The same for several requests: missing rights are one result.
    pub(super) fn all_unanswered(self, check: &'static str, why: &[&Unanswered]) -> Vec<Finding> {
        let (mut rights, mut failed): (Vec<&str>, Vec<Finding>) = (Vec::new(), Vec::new());
        for why in why {
            match why {
                Unanswered::Forbidden { right } if rights.contains(&right.as_str()) => {}
                Unanswered::Forbidden { right } => rights.push(right),
                Unanswered::Failed { .. } => failed.push(self.unanswered(check, why)),
            }
        }
        if !rights.is_empty() {
            failed.push(self.unanswered(check, &Unanswered::Forbidden { right: listed(&rights) }));
        }
        failed
    }

    /// The results of a check of what was read.
    pub(super) fn of<T>(
        self,
        check: &'static str,
        answer: &Answer<T>,
        results: impl FnOnce(&T) -> Vec<Finding>,
    ) -> Vec<Finding> {
        match answer {
            Ok(read) => results(read),
            Err(why) => vec![self.unanswered(check, why)],
        }
    }
}

impl State {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// Names in one line. Of many, the first ones and their number.
pub(super) fn listed<T: AsRef<str>>(names: &[T]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_skips_and_a_failed_request_fails() {
        let forbidden = Unanswered::Forbidden { right: "list nodes".to_owned() };
        let skipped = Group::Nodes.unanswered("nodes", &forbidden);
        assert_eq!((skipped.state, skipped.message.as_str()), (State::Skipped, "you may not list nodes"));
        let broken = Unanswered::Failed { request: "list nodes".to_owned(), error: "timeout".to_owned() };
        let failed = Group::Nodes.unanswered("nodes", &broken);
        assert_eq!((failed.state, failed.message.as_str()), (State::Failed, "cannot list nodes: timeout"));
    }

    #[test]
    fn missing_rights_are_one_result_and_each_once() {
        let forbidden = |right: &str| Unanswered::Forbidden { right: right.to_owned() };
        let (nodes, pods) = (forbidden("list nodes"), forbidden("list pods"));
        let findings = Group::Nodes.all_unanswered("nodes", &[&nodes, &pods, &nodes]);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].message, "you may not list nodes, list pods");
    }

    #[test]
    fn many_names_are_cut() {
        assert_eq!(listed(&["a", "b"]), "a, b");
        assert_eq!(listed(&["a", "b", "c", "d", "e", "f", "g"]), "a, b, c, d, e and 2 more");
    }
}
