use crate::rules::compile::tests::{compiled, epochs, pod, root, shard, status};
use crate::rules::compile::{Compiled, sendable};
use crate::rules::pod::Member;

use super::*;

const WEBHOOK: &str = "certDir: /certs/, port: 9443";

/// `config`, whose operator has a webhook with these fields.
fn with_webhook(config: &str, fields: &str) -> String {
    config.replace("spec: {", &format!("spec: {{webhook: {{{fields}}}, "))
}

fn by_hand(name: &str) -> String {
    with_webhook(&shard(name, &format!("{{team: {name}}}")), WEBHOOK)
}

fn of_root(more: &str) -> String {
    let rule = format!("targetStatefulSet: op, auto: {{shardingSize: 2, everyShardReplicas: 1}}{more}");
    with_webhook(&root(&rule), WEBHOOK)
}

/// A pod that is ready, at an address that ends with `ip`.
fn ready(name: &str, shard: &str, ip: &str) -> Member {
    Member { ip: Some(format!("192.0.2.{ip}")), ready: true, ..pod(name, &[("shard", shard)]) }
}

fn webhook<'a>(compiled: &'a Compiled, pod: &Member) -> &'a Webhook {
    compiled.policies[&pod.name].policy.webhook.as_ref().unwrap()
}

/// The peers of a pod, each with its addresses.
fn peers(compiled: &Compiled, pod: &Member) -> Vec<(String, Vec<String>)> {
    let of = |peer: &Peer| (peer.shard.clone(), peer.addresses.iter().map(ToString::to_string).collect());
    webhook(compiled, pod).peers.iter().map(of).collect()
}

fn is(peers: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
    let texts = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
    peers.iter().map(|(shard, addresses)| ((*shard).to_owned(), texts(addresses))).collect()
}

#[test]
fn files_are_joined_with_one_slash() {
    let pods = [ready("p", "a", "1")];
    for (fields, files, on_unowned) in [
        (WEBHOOK, ("/certs/tls.crt", "/certs/tls.key"), OnUnowned::Local),
        ("certDir: c, port: 9443, onUnowned: Local", ("c/tls.crt", "c/tls.key"), OnUnowned::Local),
        ("certDir: /, port: 9443, certName: c, keyName: k, onUnowned: Fail", ("/c", "/k"), OnUnowned::Fail),
    ] {
        let compiled = compiled(&[with_webhook(&shard("a", "{team: a}"), fields)], &pods, &Compiled::default());
        let found = webhook(&compiled, &pods[0]);
        assert_eq!((&*found.certificate, &*found.key), files, "{fields}");
        assert_eq!((found.port.get(), found.on_unowned, &*found.peers), (9443, on_unowned, &[][..]));
    }
}

#[test]
fn peers_are_the_shards_by_hand_with_the_same_lock_and_port() {
    let pods = [ready("p", "b", "1"), ready("q", "a", "2"), ready("r", "c", "3"), ready("s", "no-webhook", "4")];
    let elsewhere = by_hand("elsewhere").replace("namespace: ops", "namespace: other");
    let texts = [
        by_hand("c"),
        by_hand("b"),
        by_hand("a"),
        elsewhere,
        shard("no-webhook", "{team: d}"),
        by_hand("other-lock").replace("leaderElectionName: op", "leaderElectionName: other"),
        by_hand("other-port").replace("port: 9443", "port: 443"),
        by_hand("no-lock").replace("controller: {leaderElectionName: op}, ", ""),
    ];
    let compiled = compiled(&texts, &pods, &Compiled::default());
    assert_eq!(peers(&compiled, &pods[0]), is(&[("a", &["192.0.2.2"]), ("c", &["192.0.2.3"])]));
    assert_eq!(compiled.policies[&pods[3].name].policy.webhook, None);
    let limits = &webhook(&compiled, &pods[0]).peers[0].limits;
    assert_eq!(*limits, compiled.policies[&pods[1].name].policy.limits);
}

#[test]
fn a_shard_without_a_lock_has_no_peers() {
    let pods = [ready("p", "a", "1"), ready("q", "b", "2")];
    let texts = ["a", "b"].map(|name| by_hand(name).replace("controller: {leaderElectionName: op}, ", ""));
    assert_eq!(peers(&compiled(&texts, &pods, &Compiled::default()), &pods[0]), []);
}

#[test]
fn readiness_changes_peers_and_no_epoch() {
    let pods = [ready("p", "a", "1"), ready("q", "b", "2"), ready("r", "b", "3"), ready("s", "b", "bad")];
    let first = compiled(&["a", "b"].map(by_hand), &pods, &Compiled::default());
    let texts = ["a", "b"].map(|name| by_hand(name) + &status(&first, &format!("ops/{name}")));
    let before = compiled(&texts, &pods, &first);
    assert_eq!(peers(&before, &pods[0]), is(&[("b", &["192.0.2.2", "192.0.2.3"])]));
    let mut changed = pods.clone();
    changed[1].ready = false;
    changed[2].ip = Some("2001:db8::1".to_owned());
    let after = compiled(&texts, &changed, &before);
    assert_eq!(peers(&after, &pods[0]), is(&[("b", &["2001:db8::1"])]));
    assert_eq!((epochs(&after), &after.operators), (epochs(&before), &before.operators));
    // The pods that come and go see the same as before.
    assert_eq!(after.policies[&pods[1].name], before.policies[&pods[1].name]);
    changed[2].terminating = true;
    assert_eq!(peers(&compiled(&texts, &changed, &after), &pods[0]), is(&[("b", &[])]));
}

#[test]
fn webhooks_leave_digests_alone_and_are_sent_at_once() {
    let pods = [ready("p", "a", "1"), ready("q", "a", "2"), ready("r", "b", "3")];
    let [a, b] = ["a", "b"].map(|name| shard(name, &format!("{{team: {name}}}")));
    let first = compiled(&[a.clone(), b.clone()], &pods, &Compiled::default());
    let texts = [a + &status(&first, "ops/a"), b + &status(&first, "ops/b")];
    let texts = texts.map(|text| with_webhook(&text, WEBHOOK));
    let with_webhooks = compiled(&texts, &pods, &first);
    assert!(with_webhooks.operators.values().all(|record| record.written));
    // The change of `a` is not written.
    let texts = texts.map(|text| text.replace("{team: a}", "{team: c}"));
    let unwritten = compiled(&texts, &pods[..2], &with_webhooks);
    let sent = sendable(&unwritten, &with_webhooks.policies);
    let [p, q] = [&pods[0], &pods[1]].map(|pod| &sent[&pod.name]);
    assert!(Arc::ptr_eq(p, q), "pods that shared a policy share the next");
    assert_eq!(p.policy.limits, first.policies[&pods[0].name].policy.limits);
    let [peer] = &p.policy.webhook.as_ref().unwrap().peers[..] else { panic!("{p:?}") };
    assert_eq!((&*peer.shard, &*peer.addresses), ("b", &[][..]), "its pod is gone");
}

#[test]
fn a_pod_of_an_invalid_config_keeps_its_webhook_with_new_addresses() {
    let pods = [ready("p", "a", "1"), ready("q", "b", "2")];
    let before = compiled(&["a", "b"].map(by_hand), &pods, &Compiled::default());
    let invalid = by_hand("a").replace("{team: a}", "{}").replace("port: 9443", "port: 443");
    let moved = [Member { ip: Some("192.0.2.9".to_owned()), ..pods[0].clone() }, ready("q", "b", "8")];
    let after = compiled(&[invalid, by_hand("b")], &moved, &before);
    let kept = webhook(&after, &pods[0]);
    assert_eq!((kept.port.get(), &kept.peers[0].limits), (9443, &webhook(&before, &pods[0]).peers[0].limits));
    assert_eq!(peers(&after, &pods[0]), is(&[("b", &["192.0.2.8"])]));
    let invalid = of_root("").replace("shardingSize: 2", "shardingSize: 40");
    let members = [ready("op-0", "", "1"), ready("op-1", "", "2")];
    let before = compiled(&[of_root("")], &members, &Compiled::default());
    let after = compiled(&[invalid], &[members[0].clone(), ready("op-1", "", "7")], &before);
    assert_eq!(peers(&after, &members[0]), is(&[("r-2-normal", &["192.0.2.7"])]));
}

#[test]
fn peers_of_a_root_are_the_owners_in_its_fence() {
    let pods = ["0", "1", "2"].map(|at| ready(&format!("op-{at}"), "", at));
    let root = of_root("").replace("shardingSize: 2", "shardingSize: 3");
    let compiled = compiled(&[root], &pods, &Compiled::default());
    let found = peers(&compiled, &pods[0]);
    assert_eq!(found, is(&[("r-2-normal", &["192.0.2.1"]), ("r-3-normal", &["192.0.2.2"])]));
    let fence = compiled.policies[&pods[0].name].policy.fence.as_ref().unwrap();
    let others = fence.slots.values().filter(|owner| Some(*owner) != fence.owner.as_ref());
    assert_eq!(others.collect::<BTreeSet<_>>(), found.iter().map(|(shard, _)| shard).collect());
    assert!(webhook(&compiled, &pods[0]).peers.iter().all(|peer| peer.limits.is_empty()));
}

#[test]
fn a_pod_is_asked_once_it_may_write_for_its_shard() {
    let pods = ["0", "1"].map(|at| Member {
        uid: format!("u-{at}"),
        node: Some("n".to_owned()),
        ..ready(&format!("op-{at}"), "", at)
    });
    let first = compiled(&[of_root("")], &pods, &Compiled::default());
    assert_eq!(peers(&first, &pods[0]), is(&[("r-1-normal", &[]), ("r-2-normal", &[])]));
    let written = compiled(&[of_root("") + &status(&first, "ops/root")], &pods, &first);
    assert_eq!(peers(&written, &pods[0]), is(&[("r-2-normal", &["192.0.2.1"])]));
}

#[test]
fn without_a_fence_peers_have_limits() {
    let pods = [ready("op-0", "", "1"), ready("op-1", "", "2")];
    let root = of_root(", fence: \"Off\"");
    let first = compiled(std::slice::from_ref(&root), &pods, &Compiled::default());
    let compiled = compiled(&[root + &status(&first, "ops/root")], &pods, &first);
    let peer = &webhook(&compiled, &pods[0]).peers[0];
    assert_eq!(peer.limits, compiled.policies[&pods[1].name].policy.limits);
    assert!(!peer.limits.is_empty());
}

#[test]
fn while_a_fence_is_not_written_peers_go_on_with_limits() {
    let pods = [ready("op-0", "", "1"), ready("op-1", "", "2")];
    let of = |fence: &str, status: &str| of_root(fence) + status;
    let first = compiled(&[of(", fence: \"Off\"", "")], &pods, &Compiled::default());
    let said = status(&first, "ops/root");
    let unfenced = compiled(&[of(", fence: \"Off\"", &said)], &pods, &first);
    let fenced = compiled(&[of("", &said)], &pods, &unfenced);
    assert!(fenced.policies[&pods[0].name].policy.fence.is_some());
    let sent = &sendable(&fenced, &unfenced.policies)[&pods[0].name];
    assert_eq!(*sent, unfenced.policies[&pods[0].name]);
}

#[test]
fn pods_of_no_shard_have_no_webhook() {
    let pods = [ready("p", "none", "1")];
    let compiled = compiled(&[by_hand("a")], &pods, &Compiled::default());
    assert_eq!(compiled.policies[&pods[0].name].policy.webhook, None);
}

#[test]
fn a_shard_has_few_addresses_and_its_pods_one_policy() {
    let shards =
        ["a", "b"].map(|shard| (0..200).map(move |at| ready(&format!("{shard}-{at}"), shard, &at.to_string())));
    let pods: Vec<Member> = shards.into_iter().flatten().collect();
    let compiled = compiled(&["a", "b"].map(by_hand), &pods, &Compiled::default());
    let policies = [0, 1, 200].map(|at: usize| &compiled.policies[&pods[at].name]);
    assert!(Arc::ptr_eq(policies[0], policies[1]) && !Arc::ptr_eq(policies[0], policies[2]));
    let [(_, addresses)] = &peers(&compiled, &pods[0])[..] else { panic!("{:?}", policies[0].policy.webhook) };
    assert_eq!((addresses.len(), &*addresses[31]), (MAX_ADDRESSES, "192.0.2.31"));
}

#[test]
fn peers_that_have_no_room_are_reported_and_left_out() {
    let values: Vec<String> = (0..500).map(|at| format!("{at:060}")).collect();
    let large = |name: &str| {
        let limit = |at: usize| {
            let values = values.iter().map(|value| format!("{name}{at}{}", &value[4..])).collect::<Vec<_>>().join(", ");
            format!(
                "{{relateResources: [{{apiGroups: [g], resources: [r{at}]}}], selector: {{matchExpressions: [{{key: k, operator: In, values: [{values}]}}]}}}}"
            )
        };
        let limits: Vec<String> = (0..10).map(limit).collect();
        let one = format!("limits: [{{selector: {{matchLabels: {{team: {name}}}}}}}]");
        by_hand(name).replace(&one, &format!("limits: [{}]", limits.join(", ")))
    };
    let pods = [ready("p", "a", "1"), ready("q", "b", "2"), ready("r", "c", "3")];
    let compiled = compiled(&["a", "b", "c"].map(large), &pods, &Compiled::default());
    let troubles: Vec<_> = compiled.troubles.iter().map(|one| (&*one.object, &*one.configs)).collect();
    let expected = ["ops/a", "ops/b", "ops/c"].map(|name| (format!("ShardingConfig {name}"), [name.to_owned()]));
    let expected: Vec<_> = expected.iter().map(|(object, configs)| (&**object, &configs[..])).collect();
    assert_eq!(troubles, expected);
    assert_eq!(webhook(&compiled, &pods[0]).peers, []);
}
