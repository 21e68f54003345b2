use super::*;

fn question(revision: &str) -> Question {
    Question { namespace: "ops".to_owned(), root: "op".to_owned(), revision: revision.to_owned() }
}

fn version(epoch: u64) -> Version {
    Version { uid: "u".to_owned(), epoch }
}

fn enforces(revision: &str, epoch: u64) -> Answer {
    Answer::Enforces { revision: revision.to_owned(), epoch }
}

fn answers(answers: impl IntoIterator<Item = Answer>) -> Vec<(SocketAddr, Answer)> {
    let address = |at: usize| SocketAddr::from(([192, 0, 2, 1], u16::try_from(at).unwrap()));
    answers.into_iter().enumerate().map(|(at, answer)| (address(at), answer)).collect()
}

#[test]
fn a_change_of_the_table_is_asked_about_at_once_and_often() {
    let now = Instant::now();
    let mut probe = RootProbe::new(question("r.u"), now);
    probe.follow(version(3), now);
    probe.take("ops/op", Ok(answers([enforces("r.u", 2)])), now);
    assert_eq!((probe.state().enforced_epoch("u"), probe.due), (Some(2), now + RETRY.0));
    probe.take("ops/op", Ok(answers([enforces("r.u", 3)])), now);
    assert_eq!((probe.state().enforced_epoch("u"), probe.due), (Some(3), now + CALM));
    let later = now + Duration::from_secs(1);
    probe.follow(version(3), later);
    assert_eq!(probe.due, now + CALM, "it is shown");
    probe.follow(version(4), later);
    assert_eq!((probe.state().enforced_epoch("u"), probe.due), (Some(3), later), "the last proof holds");
}

#[test]
fn silence_is_asked_about_less_and_less_often() {
    let now = Instant::now();
    let mut probe = RootProbe::new(question("r.u"), now);
    let mut delays = Vec::new();
    for _ in 0..60 {
        probe.take("ops/op", Err("silent".to_owned()), now);
        delays.push(probe.due - now);
    }
    assert!(delays.is_sorted());
    assert_eq!((delays[0], delays[20], delays[59]), (RETRY.0, RETRY.1, TIRED));
}

#[test]
fn a_proof_outlives_silence_for_a_while_and_nothing_else() {
    let now = Instant::now();
    let shown = || {
        let mut probe = RootProbe::new(question("r.u"), now);
        probe.take("ops/op", Ok(answers([enforces("r.u", 2), enforces("r.u", 2)])), now);
        probe
    };
    let unclear = || Answer::Unclear { why: "silent".to_owned() };
    for other in [Answer::Passed, enforces("old", 9)] {
        let mut probe = shown();
        probe.take("ops/op", Ok(answers([unclear(), other])), now);
        assert_eq!(probe.state().enforced_epoch("u"), None);
    }
    let mut probe = shown();
    probe.take("ops/op", Ok(answers([enforces("r.u", 3), unclear()])), now);
    assert_eq!(probe.state().enforced_epoch("u"), Some(2));
    probe.take("ops/op", Ok(answers([enforces("r.u", 3), unclear()])), now + GRACE);
    assert_eq!(probe.state().enforced_epoch("u"), None);
}

#[test]
fn another_policy_has_to_be_shown_anew() {
    let now = Instant::now();
    let mut probes = BTreeMap::new();
    let ask = |revision| Targets::from([("ops/op".to_owned(), Target::Ask(question(revision)))]);
    assert!(follow(&ask("r.u"), &mut probes, now).is_empty());
    let probe = probes.get_mut("ops/op").unwrap();
    probe.take("ops/op", Ok(answers([enforces("r.u", 2)])), now);
    assert_eq!(probe.state().enforced_epoch("u"), Some(2));
    follow(&ask("s.u"), &mut probes, now);
    assert_eq!((probes["ops/op"].state().enforced_epoch("u"), probes["ops/op"].due), (None, now));
    let open = Targets::from([("ops/op".to_owned(), Target::Open(Unfenced::Removed))]);
    assert_eq!(follow(&open, &mut probes, now)["ops/op"], FenceState::Open(Unfenced::Removed));
    assert!(probes.is_empty());
}
