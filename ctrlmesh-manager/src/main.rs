//! `ctrlmesh-manager`: the control plane of ctrlmesh.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    ctrlmesh_manager::main()
}
