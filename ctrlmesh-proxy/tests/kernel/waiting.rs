//! Work that continues while one loader waits for another.

use std::fs::{self, File};
use std::path::Path;
use std::thread;
use std::time::Instant;

use crate::bed::{self, Bed, until};
use crate::command::status;
use crate::operators::{Node, served};
use crate::upgrade::linked;

#[tokio::test(flavor = "multi_thread")]
async fn a_node_proxy_that_waits_for_another_loader_goes_on_beating() {
    let node = Node::new().await;
    let a = node.pod("a");
    node.list(std::slice::from_ref(&a));
    let proxy = node.proxy();
    served(&proxy, 1.0).await;
    let lock = File::open(node.bed.pins()).unwrap();
    lock.lock().unwrap();
    node.list(&[a, node.pod("b")]);
    bed::waits_for_lock(proxy.pid().as_raw().unsigned_abs());
    let since = Instant::now();
    until("it beats", || {
        let age = status(&node.bed)["attachments"][0]["heartbeat_age"].as_f64().unwrap();
        age < since.elapsed().as_secs_f64()
    });
    drop(lock);
    served(&proxy, 2.0).await;
}

#[test]
fn the_status_is_read_while_pods_come_and_go() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    for pod in ["a", "b", "c"] {
        interceptor.attach(&bed.attach(&bed.cgroup(pod))).unwrap();
    }
    let reader = bed.interceptor();
    thread::scope(|scope| {
        let coming_and_going = scope.spawn(|| {
            for _ in 0..100 {
                interceptor.attach(&bed.attach(&bed.cgroup("d"))).unwrap();
                interceptor.detach(&bed.cgroup("d")).unwrap();
            }
        });
        while !coming_and_going.is_finished() {
            let shown = reader.status().unwrap().attachments;
            assert!(shown.len() == 3 || shown.len() == 4, "{shown:?}");
        }
        coming_and_going.join().unwrap();
    });
}

#[test]
fn another_loader_has_its_turn_while_programs_are_replaced() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pods = (0..100).map(|n| bed.cgroup(&format!("pod-{n}")));
    let slots: Vec<_> = pods.map(|pod| interceptor.attach(&bed.attach(&pod)).unwrap()).collect();
    drop(interceptor);
    for slot in &slots {
        bed.outdate(*slot);
    }
    let first = bed.pin(slots[0], "connect4");
    let before = linked(&first);
    thread::scope(|scope| {
        let replacing = scope.spawn(|| bed.interceptor());
        until("the first is replaced", || linked(&first) != before);
        let lock = File::open(bed.pins()).unwrap();
        lock.lock().unwrap();
        let outdated = |slot| fs::read_link(bed.pin(slot, "object")).unwrap() == Path::new("another");
        assert!(slots.iter().any(|slot| outdated(*slot)), "all are replaced before anybody's turn");
        drop(lock);
        drop(replacing.join().unwrap());
    });
}
