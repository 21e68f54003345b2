use super::machine::{MAX_CHECKS, MAX_MESSAGE, MAX_REJECTED, clipped};
use super::*;
use crate::api::{OnFailure, RolloutAnalysis, RolloutStep, Trial, TrialPhase};

const START: i64 = 1_800_000_000;

/// A workload with a rollout, whose time and pods the test changes.
struct Case {
    rule: Rollout,
    status: Option<RolloutStatus>,
    pods: Vec<PodFacts>,
    command: Option<&'static str>,
    seconds: i64,
    is_counted: bool,
    shadow: Option<ShadowReport>,
}

fn pod(revision: &str, created_at: i64) -> PodFacts {
    PodFacts { revision: revision.to_owned(), created_at, ready: true, ..PodFacts::default() }
}

fn step(slots: i32, pause: &str) -> RolloutStep {
    RolloutStep { slots: Some(slots), pause: Some(pause.to_owned()), ..RolloutStep::default() }
}

impl Case {
    /// Revision `old` is promoted, and a pod of revision `new` is there.
    fn new(rule: Rollout) -> Self {
        let pods = vec![pod("old", 1), pod("old", 2)];
        let mut case = Self { rule, status: None, pods, command: None, seconds: 0, is_counted: true, shadow: None };
        case.next(None);
        assert_eq!(case.status.as_ref().map(|status| status.promoted.as_str()), Some("old"));
        case.pods.push(pod("new", 10));
        case
    }

    fn next(&mut self, check: Option<CheckVerdict>) -> Option<&Trial> {
        let now = Timestamp::from_second(START + self.seconds).unwrap();
        let loads = SlotLoads::default();
        let observed = Observed {
            pods: &self.pods,
            command: self.command,
            check: check.map(|verdict| (verdict, "numbers".to_owned())),
            loads: self.is_counted.then_some(&loads),
            shadow: self.shadow.as_ref(),
            canary: None,
            roll_back_error: None,
            now,
        };
        self.status = next(&self.rule, self.status.as_ref(), &observed);
        self.trial()
    }

    fn after(&mut self, seconds: i64, check: Option<CheckVerdict>) -> Option<&Trial> {
        self.seconds += seconds;
        self.next(check)
    }

    fn trial(&self) -> Option<&Trial> {
        self.status.as_ref()?.trial.as_ref()
    }

    fn phase(&self) -> Option<TrialPhase> {
        self.trial().map(|trial| trial.phase)
    }

    fn promoted(&self) -> &str {
        &self.status.as_ref().unwrap().promoted
    }
}

const PASSED: Option<CheckVerdict> = Some(CheckVerdict::Passed);
const FAILED: Option<CheckVerdict> = Some(CheckVerdict::Failed);
const INCONCLUSIVE: Option<CheckVerdict> = Some(CheckVerdict::Inconclusive);

#[test]
fn a_good_version_goes_through_all_steps_and_is_promoted() {
    let mut case = Case::new(Rollout::default());
    case.pods[2].ready = false;
    let trial = case.next(None).unwrap().clone();
    assert_eq!((trial.phase, trial.slots.len(), trial.revision.as_str()), (TrialPhase::Starting, 0, "new"));
    case.pods[2].ready = true;
    assert!(is_second(case.status.as_ref().unwrap(), "new") && !is_second(case.status.as_ref().unwrap(), "old"));
    let trial = case.next(None).unwrap();
    assert_eq!((trial.phase, trial.step, trial.slots.len()), (TrialPhase::Analysing, 1, 1));
    case.after(30, PASSED);
    assert_eq!(case.trial().map(|trial| (trial.step, trial.passed)), Some((1, 1)));
    let trial = case.after(270, PASSED).unwrap();
    assert_eq!((trial.step, trial.slots.len(), trial.passed), (2, 8, 0), "a step counts by itself");
    case.after(300, PASSED);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting));
    case.pods.retain(|pod| pod.revision == "new");
    case.after(299, None);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting), "the last pause is not over");
    assert_eq!(case.after(1, None), None);
    assert_eq!(case.promoted(), "new");
    let status = case.status.unwrap();
    assert!(is_second(&status, "new") && !is_second(&status, "next"), "its pods stay in their shards");
    assert_eq!(status.checks.len(), 3);
}

#[test]
fn a_shadow_owns_nothing_and_is_reported_at_each_check() {
    let shadow = RolloutStep { shadow: true, ..step(1, "1m") };
    let mut case = Case::new(Rollout { steps: vec![shadow, step(1, "1m")], ..Rollout::default() });
    case.next(None);
    let trial = case.next(None).unwrap().clone();
    assert!(trial.shadow && trial.slots.len() == 1 && trial.message == "step 1 of 3: it shadows slots 0", "{trial:?}");
    let report = |intended, equal| {
        let revision = "new".to_owned();
        Some(ShadowReport { revision, intended, equal, refused: 1, ..ShadowReport::default() })
    };
    case.shadow = report(3, 1);
    case.next(None);
    assert_eq!(case.status.as_ref().unwrap().shadow, None, "no check was due");
    let trial = case.after(30, PASSED).unwrap();
    let says = "of 3 intended writes 1 equal, 0 different, 1 refused, 1 being compared; numbers";
    assert_eq!(trial.message, says);
    assert_eq!(case.status.as_ref().unwrap().shadow, case.shadow);
    case.shadow = report(9, 8);
    let real = case.after(30, PASSED).unwrap().clone();
    assert!(!real.shadow && real.step == 2 && real.slots == ["0"], "{real:?}");
    case.shadow = None;
    case.after(30, PASSED);
    assert_eq!(case.status.as_ref().unwrap().shadow, report(9, 8), "it stays");
}

#[test]
fn a_step_does_not_end_without_a_check_that_passed() {
    let mut case = Case::new(Rollout { steps: vec![step(1, "1m")], ..Rollout::default() });
    case.next(None);
    case.next(None);
    for _ in 0..20 {
        assert_eq!(case.after(60, INCONCLUSIVE).map(|trial| trial.step), Some(1));
    }
    assert_eq!(case.status.as_ref().unwrap().checks.len(), 1, "they do not push out others");
    assert_eq!(case.after(60, FAILED).map(|trial| trial.failed), Some(1));
    case.after(30, PASSED);
    assert_eq!(case.after(29, PASSED).map(|trial| trial.step), Some(1), "the pause began anew");
    case.pods[2].ready = false;
    assert_eq!(case.after(1, None).map(|trial| trial.step), Some(1), "no pod runs");
    case.pods[2].ready = true;
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting));
}

#[test]
fn the_second_failed_check_takes_everything_away() {
    let mut case = Case::new(Rollout::default());
    case.next(None);
    case.next(None);
    assert_eq!(case.after(30, FAILED).map(|trial| trial.slots.len()), Some(1));
    let trial = case.after(30, FAILED).unwrap();
    assert_eq!((trial.phase, trial.slots.len()), (TrialPhase::RollingBack, 0));
    assert_eq!(case.status.as_ref().unwrap().rejected[0].revision, "new");
    case.pods.retain(|pod| pod.revision == "old");
    assert_eq!(case.next(None), None);
    assert_eq!(case.promoted(), "old");
    case.pods.push(pod("new", 20));
    let held = case.next(None).unwrap();
    assert_eq!((held.phase, held.slots.len()), (TrialPhase::Held, 0), "the very same template is refused");
    case.pods.push(pod("newer", 30));
    case.next(None);
    assert_eq!(case.trial().map(|trial| (trial.revision.as_str(), trial.phase)), Some(("newer", TrialPhase::Starting)));
    case.next(None);
    let trial = case.next(None).unwrap();
    assert_eq!(trial.message, "pods of revision new have not ended yet");
    case.pods.retain(|pod| pod.revision != "new");
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Analysing));
}

#[test]
fn with_hold_a_failed_version_stays_and_can_be_tried_again() {
    let analysis = Some(RolloutAnalysis { failure_limit: Some(0), ..RolloutAnalysis::default() });
    let mut case = Case::new(Rollout { on_failure: Some(OnFailure::Hold), analysis, ..Rollout::default() });
    case.next(None);
    case.next(None);
    case.after(30, FAILED);
    assert_eq!(case.phase(), Some(TrialPhase::Held));
    case.command = Some("promote new");
    case.next(None);
    assert_eq!((case.phase(), case.status.as_ref().unwrap().rejected.len()), (Some(TrialPhase::Analysing), 0));
    case.after(30, FAILED);
    assert_eq!(case.phase(), Some(TrialPhase::Held), "the command counts once");
    case.command = Some("abort new");
    case.next(None);
    let rejected = &case.status.as_ref().unwrap().rejected;
    assert_eq!((case.phase(), rejected[0].message.as_str()), (Some(TrialPhase::RollingBack), "numbers"));
    case.command = Some("promote new again");
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::RollingBack), "its template may be gone already");
}

#[test]
fn a_manual_step_waits_for_somebody() {
    let mut case = Case::new(Rollout { steps: vec![step(1, "Manual"), step(2, "Manual")], ..Rollout::default() });
    case.next(None);
    case.next(None);
    case.after(30, PASSED);
    case.after(9000, PASSED);
    assert_eq!(case.phase(), Some(TrialPhase::Waiting));
    case.command = Some("promote other");
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Waiting), "another revision");
    case.command = Some("promote new");
    assert_eq!(case.next(None).map(|trial| trial.slots.len()), Some(2));
    case.command = Some("promote-full new");
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting));
    case.command = Some("abort new");
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::RollingBack));
}

#[test]
fn a_version_that_is_alone_takes_over_everything() {
    let mut case = Case::new(Rollout::default());
    case.next(None);
    case.pods.retain(|pod| pod.revision == "new");
    case.next(None);
    case.after(30, PASSED);
    assert_eq!(case.phase(), Some(TrialPhase::Analysing));
    case.pods.push(pod("old", 30));
    case.after(29, None);
    case.pods.pop();
    case.after(40, None);
    assert_eq!(case.phase(), Some(TrialPhase::Analysing), "there was one meanwhile");
    case.after(60, None);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting));
    // A third version comes before the last pause is over.
    case.pods.push(pod("newer", 40));
    case.next(None);
    assert_eq!((case.promoted(), case.trial().map(|trial| trial.revision.as_str())), ("new", Some("newer")));
}

#[test]
fn no_step_begins_before_the_objects_are_counted() {
    let mut case = Case::new(Rollout::default());
    case.is_counted = false;
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Starting));
    case.is_counted = true;
    assert_eq!(case.next(None).map(|trial| trial.slots.len()), Some(1));
}

#[test]
fn nothing_in_the_status_is_longer_than_its_schema_allows() {
    let namespaces: Vec<String> = (0..64).map(|number| format!("{number:063}")).collect();
    let step = RolloutStep { namespaces, ..RolloutStep::default() };
    let mut case = Case::new(Rollout { steps: vec![step], ..Rollout::default() });
    case.command = Some("x".repeat(1025).leak());
    let message = case.next(None).unwrap().message.clone();
    assert!(message.ends_with("and 59 more") && message.len() < MAX_MESSAGE, "{message}");
    assert_eq!(case.status.as_ref().unwrap().handled, None);
    assert_eq!(clipped(&"\u{e4}".repeat(9000)).chars().count(), MAX_MESSAGE);
}

#[test]
fn a_command_skips_steps_but_no_start() {
    let mut case = Case::new(Rollout::default());
    case.pods[2].ready = false;
    case.next(None);
    for command in ["promote new", "promote-full new"] {
        case.command = Some(command);
        case.next(None);
        assert_eq!(case.phase(), Some(TrialPhase::Starting), "{command}");
    }
}

#[test]
fn a_version_that_takes_over_stays_where_nobody_else_is() {
    let mut case = Case::new(Rollout::default());
    case.next(None);
    case.command = Some("promote-full new");
    case.next(None);
    case.pods.clear();
    case.next(None);
    assert_eq!(case.phase(), Some(TrialPhase::Promoting));
}

#[test]
fn containers_that_end_again_and_again_end_the_trial() {
    for has_started in [true, false] {
        let mut case = Case::new(Rollout::default());
        case.pods[2].ready = has_started;
        case.next(None);
        case.pods[2].ready = false;
        case.pods[2].restarts = MAX_RESTARTS;
        let trial = case.next(None).unwrap();
        assert_eq!(trial.phase, TrialPhase::RollingBack);
        assert_eq!(trial.message, "the containers of one of its pods were restarted 3 times");
    }
    let mut case = Case::new(Rollout::default());
    case.pods[2].ready = false;
    case.next(None);
    case.after(599, None);
    assert_eq!(case.phase(), Some(TrialPhase::Starting));
    assert_eq!(case.after(1, None).unwrap().message, "no pod had ready containers within 10 minutes");
}

#[test]
fn a_pod_that_is_made_anew_goes_on_and_one_that_stays_away_ends_the_trial() {
    let mut case = Case::new(Rollout::default());
    case.next(None);
    case.next(None);
    let new = case.pods.pop().unwrap();
    let trial = case.next(None).unwrap();
    assert_eq!((trial.phase, trial.slots.len()), (TrialPhase::Starting, 0));
    case.pods.push(new);
    assert_eq!(case.after(50, None).map(|trial| (trial.phase, trial.step)), Some((TrialPhase::Analysing, 1)));
    case.pods.pop();
    case.next(None);
    assert_eq!(case.after(60, None), None, "the user rolled it back");
}

#[test]
fn without_a_pod_of_the_old_version_there_is_nothing_to_compare() {
    let mut case = Case::new(Rollout::default());
    case.pods.retain(|pod| pod.revision == "new");
    assert_eq!(case.next(None), None);
    assert_eq!(case.promoted(), "new");
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    fn pods() -> impl Strategy<Value = Vec<PodFacts>> {
        let one = (0..3_usize, 0..20_i64, any::<(bool, bool, bool)>(), 0..4_u32);
        let one = one.prop_map(|(revision, created_at, (terminating, stopped, ready), restarts)| PodFacts {
            revision: ["old", "new", "newer"][revision].to_owned(),
            created_at,
            terminating,
            stopped,
            ready: ready && !stopped,
            restarts,
        });
        prop::collection::vec(one, 0..5)
    }

    fn verdicts() -> impl Strategy<Value = Option<CheckVerdict>> {
        prop::sample::select(vec![None, PASSED, FAILED, INCONCLUSIVE])
    }

    fn commands() -> impl Strategy<Value = Option<&'static str>> {
        let some = ["promote new", "promote-full new", "abort new", "promote newer", "abort newer", "what"];
        prop::sample::select(std::iter::once(None).chain(some.map(Some)).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn whatever_happens_a_failed_version_owns_nothing(
            moves in prop::collection::vec((pods(), verdicts(), commands(), 0..400_i64), 1..40),
            hold in any::<bool>(),
        ) {
            let on_failure = hold.then_some(OnFailure::Hold);
            let mut case = Case::new(Rollout { on_failure, ..Rollout::default() });
            for (pods, check, command, seconds) in moves {
                (case.pods, case.command) = (pods, command);
                let before = case.status.clone().unwrap();
                case.after(seconds, check);
                let status = case.status.clone().unwrap();
                if let Some(trial) = &status.trial {
                    let owns = matches!(trial.phase, TrialPhase::Analysing | TrialPhase::Waiting);
                    prop_assert_eq!(!trial.slots.is_empty(), owns);
                    prop_assert!(trial.revision != status.promoted);
                    let rejected = status.rejected.iter().any(|one| one.revision == trial.revision);
                    prop_assert_eq!(rejected, matches!(trial.phase, TrialPhase::Held | TrialPhase::RollingBack));
                    let last = before.trial.as_ref().filter(|one| one.revision == trial.revision);
                    // One that has been alone for long enough takes over everything.
                    let may_skip = case.command.is_some() || last.is_some_and(|before| before.alone_since.is_some());
                    prop_assert!(trial.step <= last.map_or(1, |before| before.step) + 1 || may_skip);
                }
                prop_assert!(status.checks.len() <= MAX_CHECKS && status.rejected.len() <= MAX_REJECTED);
                // What is written down is enough: a manager that starts anew reads it so.
                let written: RolloutStatus = serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
                let mut again = Case { status: Some(written), pods: case.pods.clone(), rule: case.rule.clone(), ..case };
                again.next(check);
                prop_assert_eq!(again.status.as_ref(), Some(&status));
                case = again;
            }
        }
    }
}
