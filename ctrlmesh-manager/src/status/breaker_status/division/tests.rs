use proptest::prelude::*;

use super::*;

/// What happens in a group, in some order.
#[derive(Clone, Debug)]
enum Step {
    Comes,
    /// The pod at this index is gone.
    Goes(usize),
    /// It leaves the group, or comes back to it; its proxy does not know yet.
    Moves(usize),
    /// Its proxy is sent what is written now.
    IsSent(usize),
    /// It enforces what it was sent, and acknowledges that.
    Enforces(usize),
    /// The leader writes the next division.
    Divides,
}

/// Of which division a policy is, and its part there. Generation 0: nothing is divided yet. `None`: it is not the
/// group's.
type Policy = (Option<i64>, Option<u32>);

#[derive(Debug)]
struct Pod {
    uid: String,
    is_member: bool,
    sent: Option<Policy>,
    /// As the proxy has it, and as the leader knows it.
    enforced: Option<Policy>,
}

#[derive(Debug, Default)]
struct Group {
    pods: Vec<Pod>,
    division: Option<BucketDivision>,
    count: usize,
    now: i64,
}

impl Group {
    /// The policy of a pod that follows from what is written.
    fn policy(&self, pod: &Pod) -> Policy {
        if !pod.is_member {
            return (None, None);
        }
        let Some(division) = &self.division else { return (Some(0), None) };
        let has_part = division.pods.iter().any(|one| one.uid == pod.uid);
        (Some(division.generation), has_part.then_some(division.parts))
    }

    fn divide(&mut self) {
        // Room is kept for some time.
        self.now += 10_000;
        let sharer = |pod: &Pod| Sharer {
            pod: DivisionPod { name: pod.uid.clone(), uid: pod.uid.clone() },
            // An older receipt is the same while another policy is under way. That is a known gap.
            acknowledged: pod.enforced == Some(self.policy(pod)) && pod.sent == pod.enforced,
            is_member: pod.is_member,
        };
        let known = |pod: &&Pod| {
            let before = self.division.iter().flat_map(|division| &division.pods);
            pod.is_member || before.into_iter().any(|one| one.uid == pod.uid)
        };
        let sharers: Vec<Sharer> = self.pods.iter().filter(known).map(sharer).collect();
        let now = Timestamp::from_millisecond(self.now).unwrap();
        self.division = next("ops/op", self.division.as_ref(), &sharers, now);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Comes if self.pods.len() < 9 => {
                self.count += 1;
                self.pods.push(Pod { uid: format!("u{}", self.count), is_member: true, sent: None, enforced: None });
            }
            Step::Goes(at) if at < self.pods.len() => drop(self.pods.remove(at)),
            Step::Moves(at) if at < self.pods.len() => self.pods[at].is_member ^= true,
            Step::IsSent(at) if at < self.pods.len() => self.pods[at].sent = Some(self.policy(&self.pods[at])),
            Step::Enforces(at) if at < self.pods.len() => {
                let pod = &mut self.pods[at];
                // A proxy takes no older division.
                if pod
                    .sent
                    .is_some_and(|sent| pod.enforced.is_none_or(|enforced| sent.0.is_none() || sent.0 >= enforced.0))
                {
                    pod.enforced = pod.sent;
                }
            }
            Step::Divides => self.divide(),
            _ => {}
        }
    }

    fn sum(&self) -> f64 {
        let parts = self.pods.iter().filter_map(|pod| pod.enforced?.1);
        parts.map(|of| 1.0 / f64::from(of)).sum()
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Comes),
        1 => (0..9_usize).prop_map(Step::Goes),
        1 => (0..9_usize).prop_map(Step::Moves),
        6 => (0..9_usize).prop_map(Step::IsSent),
        6 => (0..9_usize).prop_map(Step::Enforces),
        6 => Just(Step::Divides),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn the_parts_are_never_more_than_the_bucket(steps in prop::collection::vec(step(), 1..300)) {
        let mut group = Group::default();
        for step in steps {
            group.step(&step);
            prop_assert!(group.sum() < 1.0 + 1e-9, "{group:?}");
        }
        // Once all is quiet, every pod of the group has its part.
        for _ in 0..8 {
            for at in 0..group.pods.len() {
                group.step(&Step::IsSent(at));
                group.step(&Step::Enforces(at));
            }
            group.divide();
        }
        let members: Vec<&Pod> = group.pods.iter().filter(|pod| pod.is_member).collect();
        let parts = group.division.as_ref().map_or(0, |division| division.pods.len());
        prop_assert_eq!(parts, members.len());
        prop_assert!(group.division.is_none_or(|division| usize::try_from(division.parts).unwrap() == members.len()));
    }
}

#[test]
fn a_division_that_does_not_change_keeps_its_generation() {
    let sharer = |uid: &str| Sharer {
        pod: DivisionPod { name: uid.to_owned(), uid: uid.to_owned() },
        acknowledged: true,
        is_member: true,
    };
    let at = |second| Timestamp::from_second(second).unwrap();
    let both = [sharer("a"), sharer("b")];
    let first = next("ops/op", None, &both, at(5)).unwrap();
    assert_eq!((first.generation, first.parts, first.pods.len()), (5000, 2, 2));
    assert_eq!(next("ops/op", Some(&first), &both, at(6)), Some(first.clone()));
    // Also where the clock has gone back.
    assert_eq!(next("ops/op", Some(&first), &both[..1], at(4)).unwrap().generation, 5001);
}

#[test]
fn a_pod_that_is_slow_to_acknowledge_gets_its_part_all_the_same() {
    let mut group = Group::default();
    let all = |group: &mut Group, pods: std::ops::Range<usize>| {
        for at in pods {
            group.step(&Step::IsSent(at));
            group.step(&Step::Enforces(at));
        }
    };
    let shown = |group: &Group| group.division.as_ref().map(|one| (one.parts, one.pods.len()));
    group.step(&Step::Comes);
    for _ in 0..2 {
        all(&mut group, 0..1);
        group.divide();
    }
    assert_eq!(shown(&group), Some((1, 1)));
    all(&mut group, 0..1);
    group.step(&Step::Comes);
    all(&mut group, 0..2);
    group.divide();
    // The first one enforces the smaller part, and the leader looks before the second one says anything.
    all(&mut group, 0..1);
    group.divide();
    assert_eq!(shown(&group), Some((2, 1)));
    all(&mut group, 0..2);
    group.divide();
    assert_eq!(shown(&group), Some((2, 2)));
}
