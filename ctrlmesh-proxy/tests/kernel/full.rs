//! Full tables and slots.

use std::fs;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::Duration;

use crate::bed::{Bed, TARGET, TARGET_V6, counted};
use crate::command::is_let_go;
use ctrlmesh_intercept::{Attach, Error, Interceptor, Limits, Options};

fn limited(bed: &Bed, limits: Limits) -> Interceptor {
    Interceptor::open(Options { limits, ..bed.options("test") }).unwrap()
}

fn states(interceptor: &Interceptor) -> Vec<&'static str> {
    interceptor.status().unwrap().attachments.iter().map(|attachment| attachment.state).collect()
}

#[test]
fn a_full_table_leaves_an_open_pod_alone() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { targets: Some(1), ..Limits::default() });
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.fail_open = true;
    let error = interceptor.attach(&attach).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table TARGETS is full: it holds 1 entries (detach what is no longer needed, or name fewer targets)"
    );
    let _target = bed.target(TARGET);
    let seen = bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local));
    assert_eq!(counted(&interceptor, "table_full"), 1);
    assert!(interceptor.status().unwrap().attachments.is_empty());
}

#[test]
fn a_full_table_closes_a_closed_pod() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { targets: Some(1), ..Limits::default() });
    interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap_err();
    let _targets = [bed.target(TARGET), bed.target(TARGET_V6)];
    for target in [TARGET, TARGET_V6] {
        assert_eq!(bed.connect(&bed.cgroup("pod"), target, "blocking").error, "ECONNREFUSED");
    }
    let status = interceptor.status().unwrap();
    assert_eq!((status.attachments.len(), status.attachments[0].to), (1, 0));
}

#[test]
fn an_attached_pod_keeps_its_targets_when_more_do_not_fit() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    let _proxy = bed.enrol(&mut interceptor, &attach);
    attach.targets.list = (0..=255).map(|n| format!("10.1.0.{n}:443").parse().unwrap()).collect();
    let error = interceptor.attach(&attach).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table DESTINATIONS is full: it holds 255 entries (detach what is no longer needed, or name fewer targets)"
    );
    assert_eq!(bed.connect(&bed.cgroup("pod"), TARGET, "blocking").answer, format!("proxy 0 {TARGET}"));
}

#[test]
fn too_many_targets_do_not_close_an_unattached_pod() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.targets.list = (0..=254).map(|n| format!("10.1.0.{n}:443").parse().unwrap()).collect();
    attach.targets.list.push(TARGET.parse().unwrap());
    let error = interceptor.attach(&attach).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table DESTINATIONS is full: it holds 255 entries (detach what is no longer needed, or name fewer targets)"
    );
    assert_eq!(counted(&interceptor, "table_full"), 1);
    assert!(states(&interceptor).is_empty());
    let _target = bed.target(TARGET);
    let seen = bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local));
    // Named twice it is one target.
    attach.targets.list[0] = TARGET.parse().unwrap();
    interceptor.attach(&attach).unwrap();
}

#[test]
fn a_caller_whom_no_table_knows_is_refused() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { cgroups: Some(1), ..Limits::default() });
    interceptor.attach(&bed.attach(&bed.cgroup("first"))).unwrap();
    let second = bed.attach(&bed.cgroup("second"));
    let error = interceptor.attach(&second).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table MEMBERS is full: it holds 1 entries (detach what is no longer needed, or name fewer targets)"
    );
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&bed.cgroup("second"), TARGET, "blocking").error, "ECONNREFUSED");
    assert_eq!((counted(&interceptor, "table_full"), counted(&interceptor, "not_enrolled")), (1, 1));
    // There is room again: the same call attaches it properly.
    interceptor.detach(&bed.cgroup("first")).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &second);
    assert!(bed.connect(&bed.cgroup("second"), TARGET, "blocking").answer.starts_with("proxy"));
}

#[test]
fn a_closed_pod_stays_closed_when_the_next_attempt_fails() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { cgroups: Some(1), ..Limits::default() });
    interceptor.attach(&bed.attach(&bed.cgroup("first"))).unwrap();
    let second = bed.attach(&bed.cgroup("second"));
    interceptor.attach(&second).unwrap_err();
    let stranger = Attach { except: vec![bed.cgroup("stranger")], ..second.clone() };
    assert!(matches!(interceptor.attach(&stranger), Err(Error::NotBelow { .. })));
    let open = Attach { fail_open: true, ..second };
    assert!(matches!(interceptor.attach(&open), Err(Error::Full { .. })));
    interceptor.upgrade().unwrap();
    drop(interceptor);
    let interceptor = bed.interceptor();
    assert_eq!(states(&interceptor), ["attached", "closed"]);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&bed.cgroup("second"), TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn a_dead_loaders_claim_is_swept_and_not_attached() {
    let bed = Bed::new();
    let slot = bed.interceptor().attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    let folder = bed.pins().join("pods").join(slot.to_string());
    for name in ["connect4", "connect6", "getpeername4", "getpeername6", "object", "state"] {
        fs::remove_file(folder.join(name)).unwrap();
    }
    symlink("claimed", folder.join("state")).unwrap();
    let mut next = bed.interceptor();
    next.upgrade().unwrap();
    assert!(!folder.join("connect4").exists() && states(&next).is_empty());
    let _target = bed.target(TARGET);
    let seen = bed.connect(&bed.cgroup("pod"), TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local));
    assert_eq!(next.sweep().unwrap(), [slot]);
    assert!(!folder.exists());
}

#[test]
fn without_a_free_slot_a_closed_pod_waits_refused() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { pods: Some(1), ..Limits::default() });
    interceptor.attach(&bed.attach(&bed.cgroup("first"))).unwrap();
    let second = bed.attach(&bed.cgroup("second"));
    for attempt in 1..=2 {
        let error = interceptor.attach(&second).unwrap_err();
        assert_eq!(
            error.to_string(),
            "table PODS is full: it holds 1 entries (detach what is no longer needed, or name fewer targets)"
        );
        assert_eq!(counted(&interceptor, "table_full"), attempt);
        assert_eq!(states(&interceptor), ["attached", "closed"]);
    }
    let _targets = [bed.target(TARGET), bed.target(TARGET_V6)];
    for target in [TARGET, TARGET_V6] {
        assert_eq!(bed.connect(&bed.cgroup("second"), target, "blocking").error, "ECONNREFUSED");
    }
    interceptor.upgrade().unwrap();
    assert_eq!(bed.connect(&bed.cgroup("second"), TARGET, "blocking").error, "ECONNREFUSED");
    interceptor.detach(&bed.cgroup("first")).unwrap();
    let _proxy = bed.enrol(&mut interceptor, &second);
    assert_eq!(states(&interceptor), ["attached"]);
    let seen = bed.connect(&bed.cgroup("second"), TARGET, "blocking");
    assert_eq!(seen.answer, format!("proxy 0 {TARGET}"));
}

#[test]
fn without_a_free_slot_an_open_pod_stays_unattached() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { pods: Some(1), ..Limits::default() });
    interceptor.attach(&bed.attach(&bed.cgroup("first"))).unwrap();
    let open = Attach { fail_open: true, ..bed.attach(&bed.cgroup("open")) };
    assert!(matches!(interceptor.attach(&open), Err(Error::Full { table: "PODS", .. })));
    assert_eq!((counted(&interceptor, "table_full"), states(&interceptor).len()), (1, 1));
    interceptor.attach(&bed.attach(&bed.cgroup("closed"))).unwrap_err();
    interceptor.detach(&bed.cgroup("closed")).unwrap();
    let _target = bed.target(TARGET);
    for pod in ["open", "closed"] {
        is_let_go(&bed, &bed.cgroup(pod));
    }
}

#[test]
fn a_failed_change_of_an_attached_pod_lets_nothing_more_pass() {
    let bed = Bed::new();
    let mut interceptor = limited(&bed, Limits { cgroups: Some(3), ..Limits::default() });
    let before = Attach { except: vec![bed.cgroup("pod/proxy")], ..bed.attach(&bed.cgroup("pod")) };
    let _proxy = bed.enrol(&mut interceptor, &before);
    let _target = bed.target(TARGET);
    let more = ["pod/proxy", "pod/a", "pod/b"].map(|name| bed.cgroup(name));
    let after = Attach { except: more.into(), ..before };
    // There is room for one of the two.
    assert!(matches!(interceptor.attach(&after), Err(Error::Full { table: "MEMBERS", .. })));
    for name in ["pod/a", "pod/b"] {
        let seen = bed.connect(&bed.cgroup(name), TARGET, "blocking");
        assert_eq!(seen.answer, format!("proxy 0 {TARGET}"), "{name}");
    }
    let seen = bed.connect(&bed.cgroup("pod/proxy"), TARGET, "blocking");
    assert_eq!(seen.answer, format!("target {}", seen.local), "what passed before still does");
    assert_eq!(interceptor.status().unwrap().attachments[0].except, [bed.cgroup("pod/proxy")]);
    // What was taken for the attempt is given back.
    interceptor.attach(&Attach { except: vec![bed.cgroup("pod/b")], ..after.clone() }).unwrap();
}

#[test]
fn a_failed_attach_changes_nothing_of_an_attached_pod() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pod = bed.cgroup("held/pod");
    let before = bed.attach(&pod);
    let slot = interceptor.attach(&before).unwrap();
    let _target = bed.target(TARGET);
    let folder = bed.pins().join(format!("pods/{slot}"));
    let pinned = fs::read_link(folder.join("object")).unwrap();
    // Another version's, which the loader would replace; and nobody may attach below any more.
    fs::remove_file(folder.join("object")).unwrap();
    symlink("another", folder.join("object")).unwrap();
    crate::life::hold(&bed.cgroup("held"), &folder.join("connect4"));
    let after = Attach { except: vec![bed.cgroup("held/pod/a")], fail_open: true, ..before };
    let error = interceptor.attach(&after).unwrap_err();
    assert!(!matches!(error, Error::Full { .. }), "{error}");
    assert_eq!(bed.connect(&bed.cgroup("held/pod/a"), TARGET, "blocking").error, "ECONNREFUSED");
    let status = interceptor.status().unwrap();
    assert_eq!((status.attachments[0].fail, status.attachments[0].except.len()), ("closed", 0));
    assert_ne!(fs::read_link(folder.join("object")).unwrap(), pinned);
}

/// Most programs that the kernel takes at one hook of a cgroup (`BPF_CGROUP_MAX_PROGS`).
const MAX_PROGRAMS: u32 = 64;

#[test]
fn a_full_hook_is_attached_once_there_is_room() {
    let bed = Bed::new();
    fs::create_dir(bed.pins()).unwrap();
    let pod = bed.cgroup("pod");
    let other = |number: u32| {
        let pins = bed.pins().join(number.to_string());
        Interceptor::open(Options { pins, ..bed.options("test") }).unwrap()
    };
    let mut all: Vec<Interceptor> = (0..=MAX_PROGRAMS).map(other).collect();
    let mut last = all.pop().unwrap();
    for one in &mut all {
        one.attach(&bed.attach(&pod)).unwrap();
    }
    thread::scope(|scope| {
        let attached = scope.spawn(|| last.attach(&bed.attach(&pod)));
        // Long enough for an attempt that fails.
        thread::sleep(Duration::from_millis(300));
        all[0].detach(&pod).unwrap();
        attached.join().unwrap().unwrap();
    });
}
