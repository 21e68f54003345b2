//! The kernel programs: embedded, loaded on pinned maps, one at a time as they are needed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::AsFd;

use aya::programs::links::FdLink;
use aya::programs::{CgroupAttachMode, CgroupSock, CgroupSockAddr, CgroupSockopt, Program, ProgramError, SkLookup};
use aya::{Ebpf, EbpfError, EbpfLoader};

use crate::Error;
use crate::host::privilege;
use crate::pins::record::SOCK_RELEASE;
use crate::pins::{self, Pins};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ctrlmesh.o"));

/// Programs that are attached at a cgroup, in the order in which they are: whoever is redirected sees the original
/// peer, and whatever is stored for a socket goes with it.
pub(crate) const HOOKS: [&str; 5] = ["getpeername4", "getpeername6", SOCK_RELEASE, "connect4", "connect6"];

/// Sizes of tables where a node wants others than the programs say. They count when the maps are made; that of pods
/// counts for each loader, and is 4,096 at most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Cgroups that can be enrolled.
    pub cgroups: Option<u32>,
    /// Targets in all tables.
    pub targets: Option<u32>,
    /// Connections to ports at any address, at a time.
    pub connections: Option<u32>,
    /// Pods.
    pub pods: Option<u32>,
}

/// The loaded object.
pub(crate) struct Object {
    ebpf: Ebpf,
}

impl Object {
    /// Makes the maps, or takes those that are pinned.
    pub(crate) fn load(pins: &Pins, limits: Limits) -> Result<Self, Error> {
        if OBJECT.is_empty() {
            return Err(Error::NoObject);
        }
        let mut loader = EbpfLoader::new();
        for name in pins::MAPS {
            loader.map_pin_path(name, pins.map(name));
        }
        let sizes = [("MEMBERS", limits.cgroups), ("TARGETS", limits.targets), ("CONNECTIONS", limits.connections)];
        for (name, entries) in sizes {
            if let Some(entries) = entries {
                loader.map_max_entries(name, entries);
            }
        }
        let other = |error: EbpfError| Error::Object(Box::new(error));
        let ebpf = loader.load(OBJECT).map_err(|error| privilege::explain("create the kernel's maps", error, other))?;
        Ok(Self { ebpf })
    }

    /// What tells this object from another version.
    pub(crate) fn fingerprint() -> String {
        let mut hasher = DefaultHasher::new();
        OBJECT.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// Attaches one of [`HOOKS`] at a cgroup.
    pub(crate) fn attach_cgroup(
        &mut self,
        hook: &'static str,
        cgroup: impl AsFd,
    ) -> Result<Result<FdLink, ProgramError>, Error> {
        if hook == SOCK_RELEASE {
            let program: &mut CgroupSock = self.program(hook)?;
            load(hook, program.fd().is_ok(), || program.load())?;
            return Ok(pinnable(program.attach(cgroup, CgroupAttachMode::Single).and_then(|id| program.take_link(id))));
        }
        let program: &mut CgroupSockAddr = self.program(hook)?;
        load(hook, program.fd().is_ok(), || program.load())?;
        Ok(pinnable(program.attach(cgroup, CgroupAttachMode::Single).and_then(|id| program.take_link(id))))
    }

    /// Attaches the inbound program at a network namespace.
    pub(crate) fn attach_inbound(&mut self, namespace: impl AsFd) -> Result<Result<FdLink, ProgramError>, Error> {
        let program: &mut SkLookup = self.program("inbound")?;
        load("inbound", program.fd().is_ok(), || program.load())?;
        Ok(program.attach(namespace).and_then(|id| program.take_link(id)).map(FdLink::from))
    }

    /// Answers `SO_ORIGINAL_DST` in a cgroup for as long as this object lives: aya cannot pin such a link.
    pub(crate) fn attach_getsockopt(&mut self, cgroup: impl AsFd) -> Result<Result<(), ProgramError>, Error> {
        let program: &mut CgroupSockopt = self.program("getsockopt")?;
        load("getsockopt", program.fd().is_ok(), || program.load())?;
        Ok(program.attach(cgroup, CgroupAttachMode::Single).map(drop))
    }

    fn program<'a, P>(&'a mut self, name: &'static str) -> Result<&'a mut P, Error>
    where
        &'a mut P: TryFrom<&'a mut Program>,
    {
        self.ebpf.program_mut(name).and_then(|program| program.try_into().ok()).ok_or(Error::Absent(name))
    }
}

fn pinnable<L>(linked: Result<L, ProgramError>) -> Result<FdLink, ProgramError>
where
    FdLink: TryFrom<L>,
{
    linked.and_then(|link| FdLink::try_from(link).ok().ok_or(ProgramError::NotAttached))
}

fn load(program: &'static str, loaded: bool, load: impl FnOnce() -> Result<(), ProgramError>) -> Result<(), Error> {
    if loaded {
        return Ok(());
    }
    let other = |source| Error::Load { program, source: Box::new(source) };
    load().map_err(|error| privilege::explain(format!("load program `{program}`"), error, other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_programs_have_types_but_no_build_path() {
        if OBJECT.is_empty() {
            return;
        }
        let has = |text: &str| OBJECT.windows(text.len()).any(|bytes| bytes == text.as_bytes());
        assert!(has(".BTF.ext"));
        assert!(has("/ctrlmesh/ctrlmesh-ebpf/src/redirect.rs"));
        assert!(has("let open = pod.flags & FAIL_OPEN != 0;"), "the kernel shows no source");
        assert!(!has(".debug_"), "crates are called by where they lie");
        let checkout = env!("CARGO_MANIFEST_DIR").trim_end_matches("ctrlmesh-proxy/intercept");
        assert!(checkout == "/ctrlmesh/" || !has(checkout), "it names {checkout}");
    }
}
