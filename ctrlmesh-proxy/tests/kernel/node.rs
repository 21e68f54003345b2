//! One proxy for all pods of a node: each gets its own policy, and nobody another's.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ctrlmesh_common::kernel::Code;
use ctrlmesh_intercept::Slot;
use ctrlmesh_intercept::namespaces::of as namespaces_of;
use serde_json::json;

use crate::bed::{Bed, PROXY};
use crate::harness::until;
use crate::operators::{Node, POD, refused, served, shows};

#[tokio::test(flavor = "multi_thread")]
async fn each_pod_of_a_node_has_its_own_policy_and_changes() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    let (mut a, mut b) = (node.operator("a"), node.operator("b"));
    assert_eq!((a.anew(), b.anew()), (shows("a"), shows("b")));
    node.write_policy("a", "team=c");
    until("the new policy, on the connection that stands", || {
        let changed = a.ask(POD) == shows("c");
        async move { changed }
    })
    .await;
    assert_eq!(b.ask(POD), shows("b"));
    assert!(proxy.metric(r#"ctrlmesh_proxy_policy_epoch{pod="ops/a"}"#).await.abs() < f64::EPSILON);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_dials_the_address_of_another_gets_nothing() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    // The same port: the proxy tells pods apart by the address.
    let mut a = node.operator_at("a", "a", ([127, 0, 0, 1], PROXY).into());
    let address = |pod| {
        let code = Code { generation: 0, slot: node.slot(pod), index: 1 };
        Ipv4Addr::from(code.ipv4().to_ne_bytes())
    };
    assert_eq!(a.ask(&format!("@{} {POD}", address("a"))), shows("a"));
    let seen = node.upstream.seen.lock().unwrap().len();
    let answer = a.ask(&format!("@{} {POD}", address("b")));
    assert!(answer["error"].is_string(), "{answer}");
    assert_eq!(node.upstream.seen.lock().unwrap().len(), seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_share_a_network_namespace_have_own_policies() {
    let node = Node::new().await;
    let (first, mut second) = (node.pod("a"), node.pod("b"));
    second["network"] = first["network"].clone();
    node.list(&[first.clone(), second]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    let (mut a, mut b) = (node.operator("a"), node.operator_at("b", "a", node.upstream.address));
    assert_eq!((a.anew(), b.anew()), (shows("a"), shows("b")));
    // One of them leaves: the socket that both use stays.
    node.list(&[first]);
    served(&proxy, 1.0).await;
    assert_eq!(a.ask(POD), shows("a"));
    assert_eq!(a.anew(), shows("a"));
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_refused_without_a_proxy_and_served_again_after() {
    let node = Node::new().await;
    let (a, b) = (node.pod("a"), node.pod("b"));
    node.list(&[a.clone(), b]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    let (mut first, mut second) = (node.operator("a"), node.operator("b"));
    assert_eq!((first.anew(), second.anew()), (shows("a"), shows("b")));
    let slot = node.slot("a");
    let _strangers = [node.stranger("a"), node.stranger("b")];
    drop(proxy);
    assert_eq!((first.anew(), second.anew()), (refused(), refused()));
    // One of them leaves the list meanwhile.
    node.list(&[a]);
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    assert_eq!(first.anew(), shows("a"));
    assert_eq!(node.slot("a"), slot);
    until("the other to be detached", || async { node.attached() == [node.bed.cgroup("a")] }).await;
    // The kernel lets go of a link some time after its file is gone.
    until("it to be redirected no more", || {
        let goes_past = second.anew() == json!({"error": "SSLError"});
        async move { goes_past }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_with_another_cgroup_mount_keeps_former_pods() {
    let node = Node::new().await;
    let (mut a, cgroup) = (node.pod("a"), node.bed.cgroup("a"));
    let hierarchy = ctrlmesh_intercept::cgroup::Hierarchy::find().unwrap();
    // As `/proc/PID/cgroup` writes it.
    a["cgroup"] = json!(Path::new("/").join(cgroup.strip_prefix(hierarchy.mount()).unwrap()));
    node.list(&[a]);
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), shows("a"));
    let pin = node.bed.pin(Slot::new(node.slot("a")), "connect4");
    let before = crate::upgrade::linked(&pin);
    drop(proxy);
    let at = tempfile::tempdir().unwrap();
    let mut command = crate::mounts::elsewhere(at.path());
    command.arg(env!("CARGO_BIN_EXE_ctrlmesh-proxy"));
    let proxy = node.run(command);
    served(&proxy, 1.0).await;
    assert_eq!(operator.anew(), shows("a"));
    assert_eq!(crate::upgrade::linked(&pin), before, "it was attached all the time");
    assert_eq!(node.attached(), [cgroup]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gone_pod_is_released_and_the_others_notice_nothing() {
    let node = Node::new().await;
    node.list(&[node.pod("a"), node.pod("b")]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    let (mut a, mut b) = (node.operator("a"), node.operator("b"));
    assert_eq!((a.anew(), b.anew()), (shows("a"), shows("b")));
    drop(a);
    let cgroup = node.bed.cgroup("a");
    until("the cgroup to be empty", || async { fs::remove_dir(&cgroup).is_ok() }).await;
    served(&proxy, 1.0).await;
    until("the kernel to hold only the other", || async { node.attached() == [node.bed.cgroup("b")] }).await;
    let page = crate::harness::client::plain_get(proxy.admin, "/metrics").await.1;
    assert!(!page.contains(r#"pod="ops/a""#) && page.contains(r#"pod="ops/b""#), "{page}");
    assert_eq!(b.ask(POD), shows("b"));
    // It comes back under its name, as a StatefulSet's pod does.
    node.bed.cgroup("a");
    served(&proxy, 2.0).await;
    assert_eq!(node.operator("a").anew(), shows("a"));
    assert_eq!(b.ask(POD), shows("b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_off_the_list_is_served_no_more_and_its_connections_end() {
    let node = Node::new().await;
    let (a, b) = (node.pod("a"), node.pod("b"));
    node.list(&[a, b.clone()]);
    let proxy = node.proxy();
    served(&proxy, 2.0).await;
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), shows("a"));
    node.list(&[b]);
    served(&proxy, 1.0).await;
    until("its connections to end", || async { proxy.metric("ctrlmesh_proxy_connections").await == 0.0 }).await;
    assert!(operator.ask(POD)["error"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_a_policy_is_refused_until_it_has_one() {
    let node = Node::new().await;
    let (a, b) = (node.pod("a"), node.pod("b"));
    fs::remove_file(node.pki.path("a.policy")).unwrap();
    node.list(&[a, b]);
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    assert!((proxy.metric("ctrlmesh_proxy_pods_waiting").await - 1.0).abs() < f64::EPSILON);
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), refused());
    until("the complaint", || async { proxy.log().contains("read its policy") }).await;
    node.write_policy("a", "team=late");
    served(&proxy, 2.0).await;
    assert_eq!(operator.anew(), shows("late"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_waits_for_is_said_again_where_it_comes_back() {
    let node = Node::new().await;
    let (mut a, b) = (node.pod("a"), node.pod("b"));
    a["cgroup"] = json!("/no/such/cgroup");
    node.list(&[a.clone(), b.clone()]);
    let proxy = node.proxy();
    let said = || proxy.log().matches("pod cannot be served yet").count();
    for times in 1..=2 {
        until("the complaint", || async { said() == times }).await;
        node.list(std::slice::from_ref(&b));
        until("nobody to wait", || async { proxy.metric("ctrlmesh_proxy_pods_waiting").await == 0.0 }).await;
        node.list(&[a.clone(), b.clone()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_does_not_parse_is_refused_the_last_one_stays() {
    let node = Node::new().await;
    node.list(&[node.pod("a")]);
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    node.write("pods", "pods: [{pod: ops/a}]");
    until("the refusal", || async { proxy.log().contains("exactly one of cgroup, uid") }).await;
    assert_eq!(node.operator("a").anew(), shows("a"));
    node.list(&[node.pod("a"), node.pod("b")]);
    served(&proxy, 2.0).await;
    assert_eq!(node.operator("b").anew(), shows("b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_pod_is_attached_anew_without_passing_in_between() {
    let node = Node::new().await;
    let mut a = node.pod("a");
    node.list(std::slice::from_ref(&a));
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), shows("a"));
    let (before, _stranger) = (node.slot("a"), node.stranger("a"));
    node.write_policy("other", "team=other");
    a["policy"] = json!("other.policy");
    node.list(&[a]);
    until("the other policy", || {
        let answer = operator.anew();
        // Cut off, perhaps, while it is attached anew; but never answered by another.
        assert_ne!(answer["error"], "SSLError");
        let changed = answer == shows("other");
        async move { changed }
    })
    .await;
    assert_eq!(node.slot("a"), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_users_pod_named_by_a_process_needs_ptrace() {
    let node = Node::new().await;
    let mut a = node.pod("a");
    let process = node.bed.nobody(&node.bed.cgroup("a"), "a");
    let by_name = a.clone();
    a.as_object_mut().unwrap().remove("network");
    a["pid"] = json!(process.0.id());
    node.list(std::slice::from_ref(&a));
    let some = "-all,+bpf,+net_admin,+perfmon,+sys_admin";
    let proxy = node.proxy_with(some);
    until("the complaint", || async {
        proxy.log().contains("find its network namespace: find network namespace /proc/")
    })
    .await;
    assert!(proxy.log().contains("not permitted; missing CAP_SYS_PTRACE"), "{}", proxy.log());
    let mut operator = node.operator("a");
    assert_eq!(operator.anew(), refused());
    // A namespace that has a name can be had without.
    node.list(&[by_name]);
    served(&proxy, 1.0).await;
    assert_eq!(operator.anew(), shows("a"));
    drop(proxy);
    node.list(&[a]);
    let proxy = node.proxy_with(&format!("{some},+sys_ptrace"));
    served(&proxy, 1.0).await;
    assert_eq!(operator.anew(), shows("a"));
}

#[test]
fn a_pod_is_where_its_oldest_process_is_not_a_moved_child() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let inode = |name| fs::metadata(bed.namespace(name)).unwrap().ino();
    let mut namespaces = ["a", "b"].map(|name| (inode(name), name));
    // As the kernel may have it: a child's has the lower number.
    namespaces.sort_unstable();
    let [child, parent] = namespaces;
    let _processes = [parent, child].map(|(_, name)| bed.nobody(&pod, name));
    let found = namespaces_of(&pod).found.into_iter().map(|(inode, _)| inode);
    assert_eq!(found.collect::<Vec<_>>(), [parent.0, child.0]);
}
