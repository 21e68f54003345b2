//! `ctrlmesh`, also as `kubectl ctrlmesh`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    ctrlmesh::main(std::env::args_os())
}
