//! The places and owners that pins may have.

use crate::bed::Bed;
use ctrlmesh_intercept::{Error, Interceptor, Options, Originals, Status};

#[test]
fn pins_are_for_root_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let bed = Bed::new();
    drop(bed.interceptor());
    for folder in ["", "maps", "pods", "cgroups"] {
        assert_eq!(std::fs::metadata(bed.pins().join(folder)).unwrap().permissions().mode() & 0o777, 0o700, "{folder}");
    }
}

#[test]
fn a_folder_in_which_others_have_a_part_is_no_place_for_pins() {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let bed = Bed::new();
    let pins = bed.pins().join("v1");
    let open = || Interceptor::open(Options { pins: pins.clone(), ..Options::new("test") });
    let allow = |folder: &std::path::Path, mode| {
        fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
    };
    let refused = |folder: &std::path::Path| {
        // Who only reads would believe what others wrote.
        let errors = [open().unwrap_err(), Status::read(&pins).unwrap_err(), Originals::open(&pins).err().unwrap()];
        for error in errors {
            let shared = matches!(&error, Error::Shared { path, .. } if path == folder);
            assert!(shared, "{}: {error}", folder.display());
            assert!(error.to_string().contains("`chown root` and `chmod 700` it"), "{error}");
        }
    };
    drop(open().unwrap());
    for folder in [pins.clone(), pins.join("maps"), pins.join("pods"), pins.join("cgroups")] {
        for mode in [0o701, 0o770] {
            allow(&folder, mode);
            refused(&folder);
        }
        allow(&folder, 0o700);
        chown(&folder, Some(65534), None).unwrap();
        refused(&folder);
        chown(&folder, Some(0), None).unwrap();
    }
    // Whoever may write above could put another folder there.
    allow(&bed.pins(), 0o777);
    refused(&bed.pins());
    allow(&bed.pins(), 0o1777);
    drop(open().unwrap());
}

#[test]
fn the_bpf_file_system_itself_is_no_place_for_pins() {
    let bed = Bed::new();
    let options = Options { pins: "/sys/fs/bpf".into(), ..bed.options("test") };
    let expected = "/sys/fs/bpf is the BPF file system itself: name a folder below it";
    assert_eq!(Interceptor::open(options.clone()).unwrap_err().to_string(), expected);
    let error = ctrlmesh_intercept::uninstall(&options, true).unwrap_err();
    assert_eq!(error.to_string(), expected);
    assert!(!std::path::Path::new("/sys/fs/bpf/pods").exists());
}

#[test]
fn pins_go_nowhere_but_to_a_bpf_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let error = Interceptor::open(Options { pins: folder.path().join("pins"), ..Options::new("test") }).unwrap_err();
    assert!(matches!(error, Error::NoBpffs { .. }), "{error}");
}
