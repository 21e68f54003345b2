//! `ctrlmesh`, also as `kubectl ctrlmesh`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ctrlmesh::main(std::env::args_os()).unwrap_or_else(|error| ctrlmesh::report(&error))
}
