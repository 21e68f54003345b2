use super::*;

#[tokio::test(start_paused = true)]
async fn labelling_is_complete_after_a_quiet_period() {
    let (scheme, other) =
        (Arc::<Scheme>::default(), Scheme::settled(Labelling { hash_key: "x".to_owned(), ..Labelling::default() }));
    let (mut settled, start) = (QuietPeriod::default(), Instant::now());
    assert!(!settled.is(&scheme, true, 3, start));
    assert!(settled.is(&scheme, true, 3, start + SETTLES));
    assert!(!settled.is(&scheme, true, 4, start + SETTLES), "one was written without");
    assert!(settled.is(&scheme, true, 4, start + SETTLES * 2));
    assert!(!settled.is(&scheme, false, 4, start + SETTLES * 2), "one cannot be labelled");
    assert!(!settled.is(&scheme, true, 4, start + SETTLES * 3));
    assert!(!settled.is(&Arc::new(other), true, 4, start + SETTLES * 9), "by other labels");
    let hash_key = format!("{}sharding-hash", label::SPARE);
    let spare = Arc::new(Scheme::settled(Labelling { hash_key, ..Labelling::default() }));
    assert!(!settled.is(&spare, true, 4, start));
    assert!(!settled.is(&spare, true, 4, start + SETTLES), "watches may be older");
    assert!(settled.is(&spare, true, 4, start + SETTLES_AGAIN));
}

#[test]
fn the_condition_shows_the_stage_and_its_start() {
    let next = Labelling { hash_key: "x/hash".to_owned(), ..Labelling::default() };
    let begun = Scheme { next: Some(next.clone()), ..Scheme::default() };
    let at = |second| Timestamp::from_second(second).unwrap();
    let stage = Stage::of(&begun, Some("not gone through yet: pods./v1"), None);
    assert!(stage.message.ends_with("until all have both: not gone through yet: pods./v1"));
    let first = stage.condition(&[], at(1));
    assert_eq!((first.status.as_str(), first.reason.as_str()), ("False", "Labelling"));
    let switched = Scheme { former: Some(Labelling::default()), ..Scheme::settled(next.clone()) };
    let stage = Stage::of(&switched, None, Some("pod ns/a"));
    let second = stage.condition(&[first], at(2));
    assert_eq!((second.reason.as_str(), second.last_transition_time.0), ("Leaving", at(1)));
    let stage = Stage::of(&Scheme::settled(next), None, None);
    assert_eq!((stage.name, stage.message.contains("x/hash")), (None, true));
    let done = stage.condition(&[second], at(3));
    assert_eq!((done.status.as_str(), done.last_transition_time.0), ("True", at(3)));
}
