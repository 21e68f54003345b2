//! Uninstalling: by the owner, by another owner, and while others attach.

use crate::bed::{Bed, TARGET};
use crate::command::{attach, is_let_go, run, status, text};

#[test]
fn uninstalling_leaves_nothing_in_the_kernel() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    run(&mut attach(&bed, &[]));
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
    let text = text(&run(&mut bed.command(&["uninstall"])));
    assert_eq!(text, format!("nothing is left below {}\n", bed.pins().display()));
    assert!(!bed.pins().exists());
    is_let_go(&bed, &pod);
    // There is nothing any more, which is what was asked for.
    run(&mut bed.command(&["uninstall"]));
    run(&mut attach(&bed, &[]));
    assert_eq!(status(&bed)["counters"]["no_listener_refused"], 0, "new maps");
}

#[test]
fn uninstalling_takes_another_owners_pods_only_when_told_to() {
    let bed = Bed::new();
    run(&mut attach(&bed, &["--owner", "other"]));
    let output = bed.command(&["uninstall"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("attached by `other`; nothing of this owner's"), "{error}");
    assert!(error.contains("`--force`"), "{error}");
    assert_eq!(status(&bed)["attachments"].as_array().unwrap().len(), 1);
    run(&mut bed.command(&["uninstall", "--force"]));
    assert!(!bed.pins().exists());
}

#[test]
fn who_attaches_while_everything_is_removed_makes_it_anew() {
    let bed = Bed::new();
    drop(bed.interceptor());
    let lock = std::fs::File::open(bed.pins()).unwrap();
    lock.lock().unwrap();
    let child = attach(&bed, &[]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut child = crate::bed::Process(child);
    crate::bed::waits_for_lock(child.0.id());
    std::fs::remove_dir_all(bed.pins()).unwrap();
    drop(lock);
    assert!(child.line().starts_with("attached "));
    assert!(child.0.wait().unwrap().success());
    assert_eq!(status(&bed)["attachments"].as_array().unwrap().len(), 1);
}

#[test]
fn the_folder_of_all_versions_goes_with_the_last() {
    let bed = Bed::new();
    let parent = bed.pins().join("ctrlmesh");
    for version in ["v1", "v2"] {
        let pins = parent.join(version);
        let options = ctrlmesh_intercept::Options { pins, ..bed.options("test") };
        drop(ctrlmesh_intercept::Interceptor::open(options.clone()).unwrap());
        if version == "v2" {
            ctrlmesh_intercept::uninstall(&options, false).unwrap();
            assert!(parent.join("v1").exists() && !parent.join("v2").exists());
            let options = ctrlmesh_intercept::Options { pins: parent.join("v1"), ..options };
            ctrlmesh_intercept::uninstall(&options, false).unwrap();
        }
    }
    assert!(!parent.exists());
}
