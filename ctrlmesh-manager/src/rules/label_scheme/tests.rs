use proptest::prelude::*;

use super::*;

fn keys(hash: &str, namespace: &str, control: &str, by: NamespaceHash) -> Labelling {
    Labelling {
        hash_key: hash.to_owned(),
        namespace_key: namespace.to_owned(),
        control_key: control.to_owned(),
        hash: by,
    }
}

fn by(hash_key: &str, hash: NamespaceHash) -> Labelling {
    Labelling { hash_key: hash_key.to_owned(), hash, ..Labelling::default() }
}

/// The steps to `wanted` and the scheme after each.
fn path(mut scheme: Scheme, wanted: &Labelling) -> Vec<(Scheme, Step)> {
    let mut path = Vec::new();
    let facts = Facts { wanted, labelled: true, left: true };
    while let Some((next, step)) = scheme.step(facts) {
        scheme = next.clone();
        path.push((next, step));
        assert!(path.len() < 20, "{path:?}");
    }
    path
}

#[test]
fn another_key_is_given_besides_then_in_force_then_alone() {
    let (old, new) = (Labelling::default(), by("x/hash", NamespaceHash::Fnv1a));
    let path = path(Scheme::settled(old.clone()), &new);
    let steps: Vec<Step> = path.iter().map(|(_, step)| *step).collect();
    assert_eq!(steps, [Step::Begun, Step::Switched, Step::Left, Step::Removed]);
    let begun = Scheme { next: Some(new.clone()), ..Scheme::settled(old.clone()) };
    let switched = Scheme { former: Some(old.clone()), ..Scheme::settled(new.clone()) };
    let leftover: BTreeSet<String> = [old.hash_key.clone()].into();
    let left = Scheme { leftover, ..Scheme::settled(new.clone()) };
    let all: Vec<Scheme> = path.into_iter().map(|(scheme, _)| scheme).collect();
    assert_eq!(all, [begun, switched, left, Scheme::settled(new)]);
}

#[test]
fn it_waits_for_the_last_object_and_for_the_last_proxy() {
    let (old, new) = (Labelling::default(), by("x/hash", NamespaceHash::Fnv1a));
    let begun = Scheme { next: Some(new.clone()), ..Scheme::settled(old.clone()) };
    assert_eq!(begun.step(Facts { wanted: &new, labelled: false, left: true }), None);
    let switched = Scheme { former: Some(old), ..Scheme::settled(new.clone()) };
    assert_eq!(switched.step(Facts { wanted: &new, labelled: true, left: false }), None);
    assert_eq!(switched.removed().count(), 0);
    let left = Scheme { leftover: ["old".to_owned()].into(), ..Scheme::settled(new.clone()) };
    assert_eq!(left.step(Facts { wanted: &new, labelled: false, left: true }), None);
    assert_eq!(left.removed().collect::<Vec<_>>(), ["old"]);
}

#[test]
fn another_hash_under_the_same_key_goes_by_spare_keys() {
    let (old, new) = (Labelling::default(), by(label::SHARDING_HASH, NamespaceHash::Kusionstack));
    let path = path(Scheme::settled(old), &new);
    let steps: Vec<Step> = path.iter().map(|(_, step)| *step).collect();
    let twice = [Step::Begun, Step::Switched, Step::Left, Step::Switched, Step::Left];
    assert_eq!(steps, [&twice[..], &[Step::Removed]].concat());
    let spare = &path[1].0.in_force;
    assert_eq!(spare.hash_key, "ctrlmesh.kusionstack.io/next-sharding-hash");
    assert_eq!((spare.hash, spare.control_key.as_str()), (new.hash, label::CONTROL));
    assert_ne!(spare.namespace_key, label::NAMESPACE, "it holds a slot, of cluster scope");
    assert_eq!(path[2].0.next.as_ref(), Some(&new), "the same again");
    assert_eq!(path[2].0.leftover.len(), 0, "what is wanted again is not taken away");
    assert_eq!(path.last().unwrap().0, Scheme::settled(new));
}

#[test]
fn an_unwanted_migration_is_given_up_where_it_is() {
    let (old, new) = (Labelling::default(), by("x/hash", NamespaceHash::Fnv1a));
    let begun = Scheme { next: Some(new.clone()), ..Scheme::settled(old.clone()) };
    let facts = Facts { wanted: &old, labelled: false, left: false };
    let (given_up, step) = begun.step(facts).unwrap();
    assert_eq!((step, &given_up.in_force), (Step::GivenUp, &old));
    assert_eq!(given_up.removed().collect::<Vec<_>>(), ["x/hash"]);
    // For a while, a replica with other flags leads, as in a rollout.
    let (begun, step) = given_up.step(Facts { wanted: &new, ..facts }).unwrap();
    assert_eq!((step, begun.leftover.len()), (Step::Begun, 0), "it is to be there, not to go");
    let switched = Scheme { former: Some(old.clone()), ..Scheme::settled(new.clone()) };
    let (back, step) = switched.step(facts).unwrap();
    let expected = Scheme { next: Some(old), ..Scheme::settled(new) };
    assert_eq!((back, step), (expected, Step::Begun), "the labels are there still");
}

#[test]
fn it_reads_what_it_writes_and_nothing_that_no_object_can_carry() {
    let (old, new) = (Labelling::default(), by("x/hash", NamespaceHash::Kusionstack));
    for (scheme, _) in path(Scheme::settled(old.clone()), &new) {
        assert_eq!(Scheme::read(&scheme.written()), Ok(scheme));
    }
    let other = by(label::SHARDING_HASH, NamespaceHash::Kusionstack);
    let both = Scheme { next: Some(other), ..Scheme::settled(old.clone()) };
    assert_eq!(Scheme::read(&both.written()), Err(SchemeError::Ambiguous));
    let mut wrong = Scheme::settled(old).written();
    wrong.in_force.hash = "md5".to_owned();
    let error = Scheme::read(&wrong).unwrap_err();
    assert_eq!(error.to_string(), "status.labels.inForce.hash");
    wrong.in_force.namespace = "a b".to_owned();
    let error = Scheme::read(&wrong).unwrap_err();
    assert_eq!(error.to_string(), "status.labels.inForce.namespace");
}

fn any_labelling() -> impl Strategy<Value = Labelling> {
    let spare = |name: &str| format!("{}{name}", label::SPARE);
    let names = vec!["a".to_owned(), "b".to_owned(), "c".to_owned(), spare("sharding-hash"), spare("namespace")];
    let keys_of = Just(names).prop_shuffle();
    (keys_of, any::<bool>()).prop_map(|(names, hash)| {
        let hash = if hash { NamespaceHash::Fnv1a } else { NamespaceHash::Kusionstack };
        keys(&names[0], &names[1], &names[2], hash)
    })
}

proptest! {
    /// At every step, objects carry no contradiction and shards select by labels that all carry. It ends with
    /// what is wanted.
    #[test]
    fn whatever_is_wanted_when_objects_carry_what_shards_go_by(
        from in any_labelling(),
        wishes in prop::collection::vec((any_labelling(), 0..6_usize, any::<bool>(), any::<bool>()), 0..5),
        last in any_labelling(),
    ) {
        let mut scheme = Scheme::settled(from);
        let run = |scheme: &mut Scheme, wanted: &Labelling, most: usize, labelled, left| -> Result<usize, TestCaseError> {
            for taken in 0..most {
                let Some((after, step)) = scheme.step(Facts { wanted, labelled, left }) else { return Ok(taken) };
                prop_assert_eq!(Scheme::read(&after.written()), Ok(after.clone()));
                let before: BTreeSet<&str> = scheme.carried().flat_map(Labelling::keys).collect();
                if after.in_force != scheme.in_force {
                    prop_assert!(labelled && step == Step::Switched);
                    prop_assert!(after.in_force.keys().iter().all(|key| before.contains(key)));
                    prop_assert_eq!(after.former.as_ref(), Some(&scheme.in_force));
                }
                if scheme.former.is_some() && after.former.is_none() {
                    prop_assert!(left || after.next == scheme.former);
                }
                *scheme = after;
            }
            Ok(most)
        };
        for (wanted, most, labelled, left) in &wishes {
            run(&mut scheme, wanted, *most, *labelled, *left)?;
        }
        let taken = run(&mut scheme, &last, 30, true, true)?;
        prop_assert!(taken < 30);
        prop_assert_eq!(scheme, Scheme::settled(last));
    }
}
