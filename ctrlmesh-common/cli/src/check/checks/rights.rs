//! Checks the rights of whoever calls the command.

use super::super::finding::{Finding, Group};
use super::super::pages;
use super::super::snapshot::Snapshot;

const CHECK: &str = "your rights";

pub(super) fn check(snapshot: &Snapshot) -> Vec<Finding> {
    let group = Group::Rights;
    let (mut findings, mut unread, mut good) = (Vec::new(), Vec::new(), 0);
    for (right, answer) in &snapshot.rights {
        match answer {
            Ok(true) => good += 1,
            Ok(false) => {
                let advice = format!("ask for the right, or leave this to somebody who has it: {}", pages::RIGHTS);
                let found = format!("you may not {right}, which {} needs", right.purpose);
                findings.push(group.warning(CHECK, found, advice));
            }
            Err(why) => unread.push(why),
        }
    }
    findings.extend(group.all_unanswered(CHECK, &unread));
    if good > 0 {
        findings
            .insert(0, group.ok(CHECK, format!("you have {good} of {} rights that are needed", snapshot.rights.len())));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::State;
    use super::super::super::right::OF_COMMANDS;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    #[test]
    fn each_missing_right_is_named() {
        let mut snapshot = samples::snapshot();
        let forbidden = Unanswered::Forbidden { right: "create selfsubjectaccessreviews".to_owned() };
        snapshot.rights =
            vec![(OF_COMMANDS[0], Ok(true)), (OF_COMMANDS[3], Ok(false)), (OF_COMMANDS[1], Err(forbidden))];
        let findings = check(&snapshot);
        let states: Vec<State> = findings.iter().map(|one| one.state).collect();
        assert_eq!(states, [State::Ok, State::Warning, State::Skipped]);
        assert_eq!(findings[0].message, "you have 1 of 3 rights that are needed");
        assert_eq!(findings[1].message, "you may not list namespaces, which `ctrlmesh plan` needs");
    }
}
