//! Error messages on machines that lack a feature.
//!
//! A kernel that is older cannot be had here, but one that is asked for more than it has says the same: our binary is
//! copied, with other numbers in the calls of its kernel programs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};

use nix::errno::Errno;

use crate::bed::{Bed, TARGET, until};

/// `bpf_map_lookup_elem`, which every program calls.
const LOOKUP: u32 = 1;
const GET_RETVAL: u32 = 186;
const SET_RETVAL: u32 = 187;

/// Our binary, where everybody can run it, with other kernel programs.
pub(crate) struct LimitedBuild {
    folder: tempfile::TempDir,
}

impl LimitedBuild {
    fn calling(instead: u32, helper: u32) -> Self {
        Self::with(|object| {
            let (from, to) = (call(instead), call(helper));
            let mut calls = 0;
            // Instructions have eight bytes, and sections of them begin at multiples of that.
            for instruction in object.chunks_exact_mut(8).filter(|bytes| **bytes == from) {
                instruction.copy_from_slice(&to);
                calls += 1;
            }
            assert!(calls > 0, "nothing calls helper {instead}");
        })
    }

    /// With kernel programs of another version, which do the same.
    pub(crate) fn version() -> Self {
        // A byte of the header that means nothing.
        Self::with(|object| object[15] = 1)
    }

    pub(crate) fn with(patch: impl FnOnce(&mut [u8])) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut binary = std::fs::read(env!("CARGO_BIN_EXE_ctrlmesh-proxy")).unwrap();
        patch(object(&mut binary));
        let patched = Self { folder };
        std::fs::write(patched.path(), binary).unwrap();
        for path in [patched.path(), patched.folder.path().to_owned()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        patched
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("ctrlmesh-proxy")
    }

    /// What it says when it is told to attach.
    fn attach(&self, bed: &Bed) -> String {
        let plain = bed.command(&["attach", "--target", TARGET, "--to", "15001", "--cgroup"]);
        let mut command = Command::new(self.path());
        failure(&once_written(command.args(plain.get_args()).arg(bed.cgroup("pod"))))
    }
}

/// Runs a program that was just written: while another test starts a process, that process has the file open for
/// writing.
pub(crate) fn once_written(command: &mut Command) -> Output {
    let mut output = None;
    until("the file is nobody's", || match command.output() {
        Err(error) if error.raw_os_error() == Some(Errno::ETXTBSY as i32) => false,
        done => {
            let done = done.unwrap();
            // What `setpriv` says of it.
            let busy = String::from_utf8_lossy(&done.stderr).contains("Text file busy");
            output = Some(done);
            !busy
        }
    });
    output.unwrap()
}

fn failure(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The instruction that calls a helper.
fn call(helper: u32) -> [u8; 8] {
    let [a, b, c, d] = helper.to_le_bytes();
    [0x85, 0, 0, 0, a, b, c, d]
}

/// The kernel programs in a binary: an ELF file for the BPF machine.
fn object(binary: &mut [u8]) -> &mut [u8] {
    const BPF: [u8; 2] = 247u16.to_le_bytes();
    let magic = b"\x7fELF\x02\x01\x01";
    let starts: Vec<usize> = (0..binary.len() - 64)
        .filter(|at| binary[*at..].starts_with(magic) && binary[at + 18..at + 20] == BPF)
        .collect();
    assert_eq!(starts.len(), 1, "{starts:?}");
    let header = &binary[starts[0]..];
    let sections = u64::from_le_bytes(header[40..48].try_into().unwrap());
    let size = u64::from(u16::from_le_bytes([header[58], header[59]]));
    let count = u64::from(u16::from_le_bytes([header[60], header[61]]));
    let end = starts[0] + usize::try_from(sections + size * count).unwrap();
    &mut binary[starts[0]..end]
}

#[test]
fn a_kernel_that_does_not_have_a_helper_is_told_which_it_is() {
    let bed = Bed::new();
    let error = LimitedBuild::calling(SET_RETVAL, 60_187).attach(&bed);
    let running = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let expected = format!(
        "the kernel ({}) is too old: helper function unknown#60187 needs Linux newer than that",
        running.trim()
    );
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_kernel_without_a_helper_is_told_the_missing_feature() {
    let bed = Bed::new();
    for (helper, feature) in [
        (GET_RETVAL, "seeing what another program decided (bpf_get_retval in connect programs)"),
        (SET_RETVAL, "refusing a connection with ECONNREFUSED (bpf_set_retval in connect programs)"),
    ] {
        // The first program that is loaded, `getpeername4`, may call neither.
        let error = LimitedBuild::calling(LOOKUP, helper).attach(&bed);
        let expected = format!(") is too old: {feature} needs Linux 6.1");
        assert!(error.contains(&expected), "{error}");
        assert!(!bed.pins().join("pods/0").exists(), "nothing is left half made");
    }
}

#[test]
fn a_kernel_without_ring_buffers_is_told_so() {
    let bed = Bed::new();
    let patched = LimitedBuild::with(|object| {
        // Kind, bytes of a key, bytes of a value, entries: a ring buffer as the object describes it.
        let ring = [27u32, 0, 0, 256 * 1024].map(u32::to_le_bytes).concat();
        let maps: Vec<usize> = (0..object.len() - 16).filter(|at| object[*at..].starts_with(&ring)).collect();
        assert_eq!(maps.len(), 1, "{maps:?}");
        // A hash table without a key: refused as a kind is that the kernel does not know.
        object[maps[0]..maps[0] + 4].copy_from_slice(&1u32.to_le_bytes());
    });
    let error = patched.attach(&bed);
    assert!(error.contains("is too old: reporting connections (a ring buffer) needs Linux 5.8"), "{error}");
}

#[test]
fn without_cgroup2_a_user_is_told_how_to_get_it() {
    let bed = Bed::new();
    let plain = bed.command(&["attach", "--target", TARGET, "--to", "15001", "--cgroup", "pod"]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "umount --all --types cgroup2 && exec \"$@\"", "sh"]);
    let error = failure(&command.arg(plain.get_program()).args(plain.get_args()).output().unwrap());
    assert!(
        error.contains("find cgroup2: no such file system is mounted (boot with `systemd.unified_cgroup_hierarchy=1`"),
        "{error}"
    );
}
