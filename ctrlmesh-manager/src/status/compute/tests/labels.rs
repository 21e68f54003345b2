//! What the status of a root says of the labels of its objects.

use super::*;
use crate::rules::label_coverage::KindName;

#[test]
fn relabelling_is_reported_if_nothing_worse_is() {
    let message = "not all objects of these kinds are labelled yet: pods./v1".to_owned();
    let (some, beside) = (Unlabelled::Some(message.clone()), Unlabelled::Beside(message));
    let summary = |text: &str, unlabelled: &Unlabelled| {
        let plan = plan(text);
        let none = BTreeMap::new();
        let inputs = StatusInputs { unlabelled: Some(unlabelled), ..inputs(&none, 1) };
        summary(&of_first(&plan, inputs))[2].clone()
    };
    let one = ROOT.to_owned() + &pod("op-0");
    let both = one.clone() + &pod("op-1");
    assert_eq!(summary(&both, &some), "Degraded=True Unlabelled");
    assert_eq!(summary(&both, &beside), "Degraded=False Relabelling", "each has its objects");
    assert_eq!(summary(&one, &some), "Degraded=True ShardsWithoutPods");
    assert_eq!(summary(ROOT, &some), "Degraded=True NoPods");
}

#[test]
fn a_root_goes_by_the_kinds_that_it_names() {
    let plan = plan(&(ROOT.to_owned() + &pod("op-0") + &pod("op-1")));
    let (none, listed) = (BTreeMap::new(), Unlabelled::Some("of the list".to_owned()));
    let summary = |established, gap| {
        let coverage = LabelCoverage { established, gap, needed: Vec::new() };
        let coverages = LabelCoverages::from_iter([("ops/root".to_owned(), coverage)]);
        let inputs = StatusInputs { unlabelled: Some(&listed), coverages: &coverages, ..inputs(&none, 1) };
        let status = of_first(&plan, inputs);
        let mut summary = summary(&status);
        summary.retain(|one| one.starts_with("Degraded") || one.starts_with("Labelled"));
        summary
    };
    assert_eq!(summary(true, None), ["Degraded=False AsExpected", "Labelled=True Complete"]);
    let going = || Some(LabelGap::InProgress("x".to_owned()));
    assert_eq!(summary(false, going()), ["Degraded=True Labelling", "Labelled=False Labelling"]);
    assert_eq!(summary(true, going()), ["Degraded=True Labelling", "Labelled=True Complete"]);
    let failed = Some(LabelGap::Failed("x".to_owned()));
    assert_eq!(summary(false, failed), ["Degraded=True Unlabelled", "Labelled=False Unlabelled"]);
    let kind = KindName { group: "apps".to_owned(), resource: "deployments".to_owned() };
    let forbidden = Some(LabelGap::Forbidden(vec![MissingRule { kind, verbs: vec!["watch", "patch"] }]));
    assert_eq!(summary(false, forbidden), ["Degraded=True LabelsForbidden", "Labelled=False LabelsForbidden"]);
}
