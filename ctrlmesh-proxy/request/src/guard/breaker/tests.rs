use ctrlmesh_common::policy::guard::{Bucket, Budget, Part};
use proptest::prelude::*;

use super::*;
use crate::guard::bucket::tests::NaiveBucket;

const SECOND: u64 = 1_000_000_000;

fn guard(trigger: Trigger, bucket: Option<Bucket>, window: Option<u64>) -> Guard {
    Guard {
        breaker: "ops/wild".to_owned(),
        rule: "creates".to_owned(),
        bucket,
        budget: None,
        part: None,
        trigger,
        sleeping_window_nanoseconds: window,
        requests: Vec::new(),
        urls: Vec::new(),
        reset: None,
        holds: false,
    }
}

/// Two at once, and one a second.
const TWO: Option<Bucket> = Some(Bucket { burst: 2, limit: 1, interval_nanoseconds: SECOND });

/// Asks for one request, as the only rule on it.
fn ask(breaker: &mut Breaker, guard: &Guard, now: Moment) -> Verdict {
    let verdict = breaker.check(guard, now);
    breaker.refuse(guard, verdict, now);
    if matches!(verdict, Verdict::Pass | Verdict::Probe) {
        breaker.pass(guard, verdict, ProbeId(now.0), now);
    }
    verdict
}

fn refused(cause: Cause, retry_at: Option<u64>, opens: bool) -> Verdict {
    Verdict::Refuse { cause, retry_at: retry_at.map(Moment), opens }
}

#[test]
fn a_limiter_refuses_one_by_one_and_never_opens() {
    let (guard, mut breaker) = (guard(Trigger::LimiterOnly, TWO, None), Breaker::default());
    let asked = [0, 0, 0, SECOND, SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let pass = Verdict::Pass;
    let empty = |at| refused(Cause::Empty, Some(at), false);
    assert_eq!(asked, [pass, pass, empty(SECOND), pass, empty(2 * SECOND)]);
    assert!(!breaker.is_open(&guard));
}

/// Two percent of a share with so many objects, a second.
fn of_share(trigger: Trigger, objects: Option<u64>) -> Guard {
    let budget = Some(Budget { percent: 2, interval_nanoseconds: SECOND, objects });
    Guard { budget, ..guard(trigger, None, None) }
}

#[test]
fn a_budget_passes_at_once_and_then_the_breaker_opens() {
    let (guard, mut breaker) = (of_share(Trigger::Normal, Some(199)), Breaker::default());
    let asked = [0, 0, 0, 0, 2 * SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let (pass, open) = (Verdict::Pass, |opens| refused(Cause::OpenUntilReset, None, opens));
    assert_eq!(asked, [pass, pass, pass, open(true), open(false)], "2 % of 199 are 3");
}

#[test]
fn a_budget_of_a_limiter_comes_back() {
    let (guard, mut breaker) = (of_share(Trigger::LimiterOnly, Some(100)), Breaker::default());
    let half = SECOND / 2;
    let asked = [0, half, half, SECOND, SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let (pass, empty) = (Verdict::Pass, |at| refused(Cause::Empty, Some(at), false));
    assert_eq!(asked, [pass, pass, empty(SECOND), pass, empty(SECOND + half)]);
}

#[test]
fn a_share_that_is_not_counted_opens_nothing() {
    for trigger in [Trigger::Normal, Trigger::LimiterOnly] {
        let (uncounted, mut breaker) = (of_share(trigger, None), Breaker::default());
        let verdict = ask(&mut breaker, &uncounted, Moment(7));
        assert_eq!(verdict, refused(Cause::Uncounted, Some(7 + SECOND), false));
        let counted = of_share(trigger, Some(1));
        breaker = breaker.with_part_of(&uncounted, &counted, Moment(8));
        assert_eq!(ask(&mut breaker, &counted, Moment(8)), Verdict::Pass);
    }
    let forced = of_share(Trigger::ForceClosed, None);
    assert_eq!(ask(&mut Breaker::default(), &forced, Moment(0)), Verdict::Pass);
}

#[test]
fn a_share_that_grows_allows_more_at_once() {
    let (small, large) = (of_share(Trigger::LimiterOnly, Some(50)), of_share(Trigger::LimiterOnly, Some(150)));
    let mut breaker = Breaker::default();
    assert_eq!(ask(&mut breaker, &small, Moment(0)), Verdict::Pass);
    assert_eq!(ask(&mut breaker, &small, Moment(1)), refused(Cause::Empty, Some(SECOND), false));
    breaker = breaker.with_part_of(&small, &large, Moment(2));
    let half = SECOND / 2;
    let asked = [half, half, half].map(|now| ask(&mut breaker, &large, Moment(now)));
    assert_eq!(asked, [Verdict::Pass, Verdict::Pass, refused(Cause::Empty, Some(SECOND), false)]);
}

#[test]
fn a_breaker_without_a_window_stays_open() {
    let (guard, mut breaker) = (guard(Trigger::Normal, TWO, None), Breaker::default());
    let asked = [0, 0, 0, 9 * SECOND, u64::MAX].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let open = |opens| refused(Cause::OpenUntilReset, None, opens);
    assert_eq!(asked, [Verdict::Pass, Verdict::Pass, open(true), open(false), open(false)]);
    assert!(breaker.is_open(&guard));
}

#[test]
fn a_window_ends_with_one_probe_that_closes() {
    let (guard, mut breaker) = (guard(Trigger::Normal, TWO, Some(5 * SECOND)), Breaker::default());
    let asked = [0, 0, 0, 4 * SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let open = |opens| refused(Cause::Open, Some(5 * SECOND), opens);
    assert_eq!(asked, [Verdict::Pass, Verdict::Pass, open(true), open(false)]);
    let now = Moment(5 * SECOND);
    assert_eq!(ask(&mut breaker, &guard, now), Verdict::Probe);
    assert_eq!(ask(&mut breaker, &guard, now), refused(Cause::Open, Some(6 * SECOND), false), "one at a time");
    assert!(breaker.is_open(&guard));
    breaker.probe_ended(&guard, ProbeId(7), true, now);
    assert!(breaker.is_open(&guard), "that is another probe");
    breaker.probe_ended(&guard, ProbeId(now.0), true, now);
    assert!(!breaker.is_open(&guard));
    assert_eq!(ask(&mut breaker, &guard, now), Verdict::Pass);
}

#[test]
fn a_failed_probe_opens_for_another_window() {
    let guard = guard(Trigger::Normal, TWO, Some(5 * SECOND));
    let mut breaker = Breaker::opened(&guard, Some(Moment(0)), Moment(0));
    assert_eq!(ask(&mut breaker, &guard, Moment(SECOND)), Verdict::Probe);
    breaker.probe_ended(&guard, ProbeId(SECOND), false, Moment(2 * SECOND));
    assert_eq!(ask(&mut breaker, &guard, Moment(3 * SECOND)), refused(Cause::Open, Some(7 * SECOND), false));
}

#[test]
fn an_empty_bucket_keeps_a_breaker_half_open() {
    let empty = Some(Bucket { burst: 1, limit: 0, interval_nanoseconds: SECOND });
    let (guard, mut breaker) = (guard(Trigger::Normal, empty, Some(SECOND)), Breaker::default());
    let asked = [0, 0, 2 * SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let open = |opens| refused(Cause::Open, None, opens);
    assert_eq!(asked, [Verdict::Pass, open(true), open(false)], "nothing flows in, so no time will do");
    let slow = Some(Bucket { burst: 1, limit: 1, interval_nanoseconds: 60 * SECOND });
    let guard = Guard { bucket: slow, ..guard };
    let (mut breaker, at) = (Breaker::default(), Some(60 * SECOND));
    let asked = [0, 0, 51 * SECOND, 60 * SECOND].map(|now| ask(&mut breaker, &guard, Moment(now)));
    let open = |opens| refused(Cause::Open, at, opens);
    assert_eq!(asked, [Verdict::Pass, open(true), open(false), Verdict::Probe], "who comes early delays nobody");
}

#[test]
fn a_probe_that_was_not_sent_leaves_it_half_open() {
    let guard = guard(Trigger::Normal, TWO, Some(5 * SECOND));
    let mut breaker = Breaker::opened(&guard, Some(Moment(0)), Moment(0));
    assert_eq!(ask(&mut breaker, &guard, Moment(1)), Verdict::Probe);
    breaker.probe_unsent(ProbeId(7));
    assert!(matches!(ask(&mut breaker, &guard, Moment(1)), Verdict::Refuse { .. }), "that is another probe");
    breaker.probe_unsent(ProbeId(1));
    assert_eq!(ask(&mut breaker, &guard, Moment(2)), Verdict::Probe);
}

#[test]
fn the_wait_is_until_the_window_is_over_and_a_token_is_there() {
    let slow = Some(Bucket { burst: 1, limit: 1, interval_nanoseconds: 60 * SECOND });
    let (guard, mut breaker) = (guard(Trigger::Normal, slow, Some(SECOND)), Breaker::default());
    let asked = [0, 0].map(|now| ask(&mut breaker, &guard, Moment(now)));
    assert_eq!(asked, [Verdict::Pass, refused(Cause::Open, Some(60 * SECOND), true)]);
}

#[test]
fn forced_breakers_ask_no_bucket() {
    let mut breaker = Breaker::default();
    let opened = guard(Trigger::ForceOpened, TWO, None);
    assert_eq!(ask(&mut breaker, &opened, Moment(0)), refused(Cause::ForceOpened, None, false));
    assert!(breaker.is_open(&opened));
    let closed = guard(Trigger::ForceClosed, TWO, None);
    for _ in 0..10 {
        assert_eq!(ask(&mut breaker, &closed, Moment(0)), Verdict::Pass);
    }
    assert_eq!(breaker, Breaker::default(), "nothing was counted");
}

/// What users are told of a breaker with the trigger Normal.
struct Model {
    tokens: NaiveBucket,
    window: Option<u64>,
    opened_at: Option<u64>,
    probe: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Passes,
    IsProbe,
    Refused,
}

impl Model {
    fn ask(&mut self, now: u64) -> Answer {
        let is_over = |at: u64| self.window.is_some_and(|window| now >= at + window);
        let asleep = self.opened_at.is_some_and(|at| !is_over(at));
        if asleep || self.probe.is_some() {
            return Answer::Refused;
        }
        if !self.tokens.has_token(now) {
            self.opened_at = self.opened_at.or(Some(now));
            return Answer::Refused;
        }
        self.tokens.take();
        if self.opened_at.is_none() {
            return Answer::Passes;
        }
        self.probe = Some(now);
        Answer::IsProbe
    }

    fn probe_ended(&mut self, succeeded: bool, now: u64) {
        self.probe = None;
        self.opened_at = (!succeeded).then_some(now);
    }
}

/// A guard whose bucket of 5, and 2 a second, is divided.
fn shared(trigger: Trigger, of: u32, number: Option<u32>) -> Guard {
    let bucket = Some(Bucket { burst: 5, limit: 2, interval_nanoseconds: SECOND });
    let part = Part { group: "ops/op".to_owned(), generation: 1, of, number };
    Guard { part: Some(part), ..guard(trigger, bucket, None) }
}

#[test]
fn a_part_begins_empty_and_opens_only_when_it_is_used_up() {
    let guard = shared(Trigger::Normal, 2, Some(0));
    let mut breaker = Breaker::new(&guard, Moment(SECOND));
    // One a second is this pod's.
    assert_eq!(ask(&mut breaker, &guard, Moment(SECOND)), refused(Cause::Empty, Some(2 * SECOND), false));
    assert_eq!(ask(&mut breaker, &guard, Moment(2 * SECOND)), Verdict::Pass);
    assert_eq!(ask(&mut breaker, &guard, Moment(2 * SECOND)), refused(Cause::OpenUntilReset, None, true));
}

#[test]
fn a_pod_without_a_part_is_refused_and_opens_nothing() {
    for trigger in [Trigger::Normal, Trigger::LimiterOnly] {
        let (waits, left_out) = (shared(trigger, 2, None), shared(trigger, 9, Some(5)));
        let mut breaker = Breaker::new(&waits, Moment(0));
        assert_eq!(ask(&mut breaker, &waits, Moment(0)), refused(Cause::PartAwaited, Some(SECOND), false));
        breaker = breaker.with_part_of(&waits, &left_out, Moment(0));
        assert_eq!(ask(&mut breaker, &left_out, Moment(SECOND)), refused(Cause::NoPart, None, false));
        let one = shared(trigger, 1, Some(0));
        breaker = breaker.with_part_of(&left_out, &one, Moment(SECOND));
        assert_eq!(ask(&mut breaker, &one, Moment(SECOND)), refused(Cause::Empty, Some(SECOND * 3 / 2), false));
        assert_eq!(ask(&mut breaker, &one, Moment(2 * SECOND)), Verdict::Pass);
        breaker = breaker.with_part_of(&one, &waits, Moment(2 * SECOND)).with_part_of(&waits, &one, Moment(2 * SECOND));
        let empty = refused(Cause::Empty, Some(SECOND * 5 / 2), false);
        assert_eq!(ask(&mut breaker, &one, Moment(2 * SECOND)), empty, "it is as new");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_does_what_its_model_does(
        (burst, limit, interval) in (1..5_u32, 0..9_u32, 1..100_u64),
        window in prop::option::of(1..200_u64),
        steps in prop::collection::vec((0..60_u64, prop::option::weighted(0.3, any::<bool>())), 1..200),
    ) {
        let bucket = Bucket { burst, limit, interval_nanoseconds: interval };
        let guard = guard(Trigger::Normal, Some(bucket), window);
        let mut model = Model { tokens: NaiveBucket::full(bucket, 0), window, opened_at: None, probe: None };
        let (mut breaker, mut now) = (Breaker::default(), 0);
        for (step, ends) in steps {
            // Probes are told apart by their moments.
            now += step + 1;
            if let (Some(succeeded), Some(probe)) = (ends, model.probe) {
                breaker.probe_ended(&guard, ProbeId(probe), succeeded, Moment(now));
                model.probe_ended(succeeded, now);
            } else {
                let verdict = ask(&mut breaker, &guard, Moment(now));
                let answer = match verdict {
                    Verdict::Pass => Answer::Passes,
                    Verdict::Probe => Answer::IsProbe,
                    Verdict::Refuse { .. } => Answer::Refused,
                };
                prop_assert_eq!(answer, model.ask(now));
                if let Verdict::Refuse { retry_at: Some(retry_at), .. } = verdict {
                    prop_assert!(retry_at > Moment(now));
                }
            }
            prop_assert_eq!(breaker.is_open(&guard), model.opened_at.is_some());
        }
    }

    #[test]
    fn at_the_named_moment_the_request_passes(
        (burst, limit, interval) in (1..5_u32, 1..9_u32, 1..100_u64),
        window in prop::option::of(1..200_u64),
        requests in 1..20_usize,
    ) {
        let bucket = Bucket { burst, limit, interval_nanoseconds: interval };
        for trigger in [Trigger::Normal, Trigger::LimiterOnly] {
            let (guard, mut breaker) = (guard(trigger, Some(bucket), window), Breaker::default());
            for _ in 0..requests {
                if let Verdict::Refuse { retry_at: Some(at), .. } = ask(&mut breaker, &guard, Moment(7)) {
                    let mut later = breaker.clone();
                    let before = ask(&mut later.clone(), &guard, Moment(at.0 - 1));
                    let is_refused = matches!(before, Verdict::Refuse { .. });
                    prop_assert!(is_refused);
                    let verdict = ask(&mut later, &guard, at);
                    let passes = matches!(verdict, Verdict::Pass | Verdict::Probe);
                    prop_assert!(passes);
                }
            }
        }
    }
}
