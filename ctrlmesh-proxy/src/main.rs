//! `ctrlmesh-proxy`: the proxy between an operator and its API server.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    ctrlmesh_proxy::main()
}
