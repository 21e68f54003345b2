//! Attaching, detaching and sweeping, up to the capacity of a node.

use std::time::Instant;

use crate::bed::{Bed, PROXY, TARGET, count, targets};
use crate::command::is_let_go;
use ctrlmesh_intercept::{Error, Interceptor};

#[test]
fn a_cgroup_that_is_gone_is_swept_with_its_maps_and_links() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.except = vec![bed.cgroup("pod/proxy")];
    let slot = interceptor.attach(&attach).unwrap();
    let stays = interceptor.attach(&bed.attach(&bed.cgroup("stays"))).unwrap();
    assert_eq!(interceptor.sweep().unwrap(), []);
    std::fs::remove_dir(bed.cgroup("pod/proxy")).unwrap();
    std::fs::remove_dir(bed.cgroup("pod")).unwrap();
    assert!(!interceptor.status().unwrap().attachments[0].alive);
    assert_eq!(interceptor.sweep().unwrap(), [slot]);
    let left: Vec<_> =
        interceptor.status().unwrap().attachments.into_iter().map(|attachment| attachment.slot).collect();
    assert_eq!(left, [stays]);
    assert!(!bed.pins().join(format!("pods/{slot}")).exists());
    assert_eq!(members(&bed).len(), 1, "only what stays is enrolled");
}

#[test]
fn a_cgroup_of_the_same_name_is_another_cgroup() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let old = interceptor.attach(&bed.attach(&pod)).unwrap();
    std::fs::remove_dir(&pod).unwrap();
    bed.cgroup("pod");
    let new = interceptor.attach(&bed.attach(&pod)).unwrap();
    assert_ne!(old, new);
    assert_eq!(interceptor.sweep().unwrap(), [old]);
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&pod, TARGET, "blocking").error, "ECONNREFUSED");
}

#[test]
fn after_detaching_nothing_is_redirected_and_nothing_is_left() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    let mut interceptor = bed.interceptor();
    let _proxy = bed.enrol(&mut interceptor, &bed.attach(&pod));
    interceptor.detach(&pod).unwrap();
    let _target = bed.target(TARGET);
    is_let_go(&bed, &pod);
    assert!(interceptor.status().unwrap().attachments.is_empty());
    assert!(members(&bed).is_empty() && entries(&bed, "TARGETS") == 0);
    assert!(matches!(interceptor.detach(&pod), Err(Error::NotAttached(_))));
}

#[test]
fn another_owners_cgroup_is_left_alone() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    bed.interceptor().attach(&bed.attach(&pod)).unwrap();
    let mut other = Interceptor::open(bed.options("other")).unwrap();
    let error = other.attach(&bed.attach(&pod)).unwrap_err();
    assert_eq!(error.to_string(), format!("{} is attached by `test` (`--owner test` speaks for it)", pod.display()));
    assert!(matches!(other.detach(&pod), Err(Error::Owned { .. })));
    assert_eq!(other.status().unwrap().attachments.len(), 1);
}

#[test]
fn another_owner_neither_sweeps_nor_retargets_nor_excepts_a_pod() {
    let bed = Bed::new();
    let pod = bed.cgroup("pod");
    bed.interceptor().attach(&bed.attach(&pod)).unwrap();
    let mut other = Interceptor::open(bed.options("other")).unwrap();
    let mut attach = bed.attach(&bed.cgroup("pod-of-other"));
    attach.targets.list.clear();
    other.attach(&attach).unwrap();
    attach.except = vec![pod.clone()];
    let error = other.attach(&attach).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{} is not below ", pod.display())), "{error}");
    std::fs::remove_dir(&pod).unwrap();
    other.sweep().unwrap();
    let left = other.status().unwrap().attachments;
    let of_test = left.iter().find(|attachment| attachment.owner == "test").unwrap();
    assert!(!of_test.targets.is_empty(), "{of_test:?}");
    assert_eq!(bed.interceptor().sweep().unwrap().len(), 1);
}

#[test]
fn a_pods_excepted_cgroup_belongs_to_no_other_pod() {
    let bed = Bed::new();
    let (pod, proxy) = (bed.cgroup("above/pod"), bed.cgroup("above/pod/proxy"));
    let excepting = |cgroup: &str| {
        let mut attach = bed.attach(&bed.cgroup(cgroup));
        attach.except = vec![proxy.clone()];
        attach
    };
    let mut interceptor = bed.interceptor();
    interceptor.attach(&excepting("above/pod")).unwrap();
    let _target = bed.target(TARGET);
    let passes = || bed.connect(&proxy, TARGET, "blocking").answer.starts_with("target");
    for owner in ["test", "other"] {
        let mut interceptor = Interceptor::open(bed.options(owner)).unwrap();
        for attach in [bed.attach(&proxy), excepting("above")] {
            let error = interceptor.attach(&attach).unwrap_err();
            assert!(matches!(error, Error::Excepted { .. }), "{error}");
        }
    }
    assert!(passes());
    interceptor.attach(&excepting("above/pod")).unwrap();
    interceptor.attach(&bed.attach(&pod)).unwrap();
    interceptor.attach(&bed.attach(&proxy)).unwrap();
    assert!(!passes());
}

#[test]
fn an_attached_cgroup_is_no_exception_of_the_one_above() {
    let bed = Bed::new();
    let container = bed.cgroup("pod/container");
    let mut interceptor = bed.interceptor();
    interceptor.attach(&bed.attach(&container)).unwrap();
    let mut other = Interceptor::open(bed.options("other")).unwrap();
    let mut attach = bed.attach(&bed.cgroup("pod"));
    attach.except = vec![container.clone()];
    for interceptor in [&mut other, &mut interceptor] {
        let error = interceptor.attach(&attach).unwrap_err();
        assert!(matches!(&error, Error::Owned { cgroup, .. } if *cgroup == container), "{error}");
    }
    let _target = bed.target(TARGET);
    assert_eq!(bed.connect(&container, TARGET, "blocking").error, "ECONNREFUSED");
    assert_eq!(interceptor.status().unwrap().attachments.len(), 1);
}

#[test]
fn an_address_of_the_proxy_cannot_be_a_target() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    for address in ["127.64.0.1:443", "[fd63:746c:6d65:7368::1]:443"] {
        let mut attach = bed.attach(&bed.cgroup("pod"));
        attach.targets.list.push(address.parse::<std::net::SocketAddr>().unwrap().into());
        let error = interceptor.attach(&attach).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{address} is an address that connections are redirected to, and cannot be a target")
        );
    }
    assert!(interceptor.status().unwrap().attachments.is_empty());
}

#[test]
fn a_pod_that_loses_ipv6_goes_on_over_ipv4() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("pod"))).unwrap();
    interceptor.serve_ipv6(slot, &bed.net()).unwrap();
    let native = |interceptor: &Interceptor| interceptor.status().unwrap().attachments[0].ipv6;
    assert!(native(&interceptor));
    // No network namespace at all: it cannot be entered.
    let none = ctrlmesh_intercept::listener::Namespace::open("/proc/self/ns/uts".as_ref());
    interceptor.serve_ipv6(slot, &none.unwrap()).unwrap_err();
    assert!(!native(&interceptor));
}

#[test]
fn what_is_no_cgroup_is_refused_by_name() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let folder = tempfile::tempdir().unwrap();
    let error = interceptor.attach(&bed.attach(folder.path())).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with(&format!("{} is not a cgroup of the cgroup2 file system at ", folder.path().display())),
        "{error}"
    );
    assert!(matches!(interceptor.attach(&bed.attach("/no/such".as_ref())), Err(Error::NotACgroup { .. })));
    let root = ctrlmesh_intercept::cgroup::Hierarchy::find().unwrap();
    assert!(matches!(interceptor.attach(&bed.attach(root.mount())), Err(Error::RootCgroup(_))));
    assert!(interceptor.status().unwrap().attachments.is_empty());
}

/// Attaches the program of a link as its only owner: nobody else may attach there or below.
pub(crate) fn hold(cgroup: &std::path::Path, pin: &std::path::Path) {
    let link = aya::programs::links::PinnedLink::from_pin(pin).unwrap();
    let program = aya::programs::links::FdLink::from(link).info().unwrap().program_id().to_string();
    // Without flags.
    let mut command = std::process::Command::new("bpftool");
    let command = command.args(["cgroup", "attach"]).arg(cgroup).args(["connect4", "id", &program]);
    assert!(command.status().unwrap().success());
}

#[test]
fn a_cgroup_that_another_program_holds_exclusively_is_named() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let slot = interceptor.attach(&bed.attach(&bed.cgroup("elsewhere"))).unwrap();
    let pin = bed.pins().join(format!("pods/{slot}/connect4"));
    hold(&bed.cgroup("held"), &pin);
    let pod = bed.cgroup("held/pod");
    let error = interceptor.attach(&bed.attach(&pod)).unwrap_err();
    assert!(matches!(error, Error::Exclusive { .. }), "{error}");
    let left = interceptor.status().unwrap().attachments;
    assert_eq!(left.len(), 1, "what could not be attached is not left half made: {left:?}");
}

#[test]
fn a_cgroup_is_found_by_its_pods_uid_and_its_containers_id() {
    let bed = Bed::new();
    let uid = format!("{:08x}-93c1-4f6e-9d61-0f4b6f1f2a3b", std::process::id());
    let hierarchy = ctrlmesh_intercept::cgroup::Hierarchy::find().unwrap();
    assert!(matches!(hierarchy.pod(&uid), Err(Error::NoSuchCgroup { .. })));
    let pod = format!("node/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice", uid.replace('-', "_"));
    // CRI-O's monitor has the same id.
    bed.cgroup(&format!("{pod}/crio-conmon-c0ffee.scope"));
    let found = hierarchy.pod(&uid).unwrap();
    assert_eq!(found.path, bed.cgroup(&pod));
    assert!(hierarchy.container(&found, "c0ffee").is_err());
    let container = bed.cgroup(&format!("{pod}/crio-c0ffee.scope"));
    assert_eq!(hierarchy.container(&found, "c0ffee").unwrap().path, container);
}

#[test]
fn a_thousand_pods_are_attached_and_work() {
    let bed = Bed::new();
    let mut interceptor = bed.interceptor();
    let pods: Vec<_> = (0..count(1000)).map(|n| bed.cgroup(&format!("pod-{n}"))).collect();
    let mut times = Vec::new();
    let before = memory();
    for pod in &pods {
        let attach = bed.attach(pod);
        let start = Instant::now();
        interceptor.attach(&attach).unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    eprintln!(
        "{} pods: attach p50 {p50:?}, p99 {p99:?}; maps {} KiB, the loader grew by {} KiB",
        pods.len(),
        locked(&bed) / 1024,
        memory().saturating_sub(before)
    );
    let last = pods.len() - 1;
    let listener = ctrlmesh_intercept::listener::outbound(&bed.net(), PROXY).unwrap();
    interceptor.listen(ctrlmesh_intercept::Slot::new(u16::try_from(last).unwrap()), &listener).unwrap();
    let _proxy = bed.proxy(interceptor.originals().unwrap(), listener);
    assert_eq!(bed.connect(&pods[last], TARGET, "blocking").answer, format!("proxy {last} {TARGET}"));
    assert_eq!(bed.connect(&pods[0], TARGET, "blocking").error, "ECONNREFUSED");
    let start = Instant::now();
    interceptor.upgrade().unwrap();
    eprintln!("upgrade of {} pods: {:?}", pods.len(), start.elapsed());
    assert_eq!(bed.connect(&pods[last], TARGET, "blocking").answer, format!("proxy {last} {TARGET}"));
    // One table for all: a change reaches every pod.
    let mut attach = bed.attach(&pods[0]);
    attach.targets = targets(&["10.97.3.7:443"]);
    interceptor.attach(&attach).unwrap();
    assert_eq!(bed.connect(&pods[last], "10.97.3.7:443", "blocking").answer, format!("proxy {last} 10.97.3.7:443"));
}

/// Cgroups that the kernel knows.
fn members(bed: &Bed) -> Vec<u64> {
    let map = aya::maps::MapData::from_pin(bed.pins().join("maps/MEMBERS")).unwrap();
    let map: aya::maps::HashMap<_, u64, u64> = aya::maps::Map::from_map_data(map).unwrap().try_into().unwrap();
    map.keys().collect::<Result<_, _>>().unwrap()
}

fn entries(bed: &Bed, name: &str) -> usize {
    let map = aya::maps::MapData::from_pin(bed.pins().join("maps").join(name)).unwrap();
    let map: aya::maps::lpm_trie::LpmTrie<_, [u8; 20], u32> =
        aya::maps::Map::from_map_data(map).unwrap().try_into().unwrap();
    map.keys().count()
}

/// Bytes of kernel memory that the maps take, as the kernel says.
fn locked(bed: &Bed) -> u64 {
    let maps = std::fs::read_dir(bed.pins().join("maps")).unwrap().flatten();
    let files = maps.map(|map| aya::maps::MapData::from_pin(map.path()).unwrap());
    files.map(|map| memlock(&map)).sum()
}

fn memlock(map: &aya::maps::MapData) -> u64 {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd())).unwrap();
    info.lines().find_map(|line| line.strip_prefix("memlock:")).unwrap().trim().parse().unwrap()
}

/// Resident memory of this process in KiB.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}
