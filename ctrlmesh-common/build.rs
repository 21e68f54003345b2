//! Generates the messages of `proto/mesh.proto`, without `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    #[cfg(feature = "wire")]
    wire()?;
    println!("cargo::rerun-if-changed=proto");
    Ok(())
}

#[cfg(feature = "wire")]
fn wire() -> Result<(), Box<dyn Error>> {
    let messages = protox::compile(["proto/mesh.proto"], ["proto"])?;
    prost_build::Config::new()
        .bytes(["."])
        .btree_map(["."])
        .type_attribute("ctrlmesh.v1.PodId", "#[derive(PartialOrd, Ord)]")
        .compile_fds(messages)?;
    Ok(())
}
