//! The machines that programs are released for.

use std::env::consts::ARCH;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

/// Linux with glibc, on a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Platform {
    /// Processors of Intel and AMD, with 64 bits
    Amd64,
    /// Processors of Arm, with 64 bits
    Arm64,
}

impl Platform {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// That of the machine that runs us.
    ///
    /// # Errors
    /// Where it is none of ours.
    pub fn of_machine() -> Result<Self> {
        let is_here = |platform: &Self| platform.target().split('-').next() == Some(ARCH);
        Self::ALL.into_iter().find(is_here).with_context(|| format!("no image is built for processors of kind {ARCH}"))
    }

    /// Its name in images, and Debian's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The compiler's name for it.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// How the programs of GNU are called that work for it, and the folder of its libraries.
    pub(crate) fn gnu(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    /// What runs its programs on another machine.
    pub(crate) fn emulator(self) -> &'static str {
        match self {
            Self::Amd64 => "qemu-x86_64-static",
            Self::Arm64 => "qemu-aarch64-static",
        }
    }

    /// Debian's packages that build for it on another machine: the compiler, and the headers of the C library.
    pub(crate) fn cross_packages(self) -> [&'static str; 2] {
        match self {
            Self::Amd64 => ["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
            Self::Arm64 => ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
        }
    }

    /// Whether this machine is of another kind.
    pub(crate) fn is_foreign(self) -> bool {
        Self::of_machine().ok() != Some(self)
    }
}
