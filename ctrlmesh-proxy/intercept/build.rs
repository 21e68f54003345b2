//! Puts the kernel programs where the crate embeds them from.

use std::error::Error;
use std::path::PathBuf;
use std::{env, fs};

use object::build::elf::{Builder, SectionData};
use object::elf;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let object =
        env::var_os("CTRLMESH_BPF_OBJECT").map_or_else(|| root.join("../../target/bpf/ctrlmesh.o"), PathBuf::from);
    println!("cargo::rerun-if-env-changed=CTRLMESH_BPF_OBJECT");
    println!("cargo::rerun-if-changed={}", object.display());
    let embedded = PathBuf::from(env::var("OUT_DIR")?).join("ctrlmesh.o");
    if object.exists() {
        fs::write(embedded, without_debug_information(&fs::read(&object)?)?)?;
    } else if env::var("PROFILE")? == "release" {
        return Err(format!("no kernel programs at {}: run `cargo xtask build-ebpf`", object.display()).into());
    } else {
        // The proxy builds and most of its tests pass without; `intercept` then says what to run.
        fs::write(embedded, [])?;
    }
    Ok(())
}

/// The same without DWARF, which is nine tenths of it: the kernel reads BTF only. It also names crates by a hash of the
/// folder that they lie in, which would make each checkout's proxy another one.
fn without_debug_information(object: &[u8]) -> Result<Vec<u8>, object::build::Error> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete |= name.starts_with(b".debug") || name.starts_with(b".rel.debug");
    }
    builder.delete_orphans();
    // LLVM keeps the sections' names with the symbols'.
    let names = builder.sections.add();
    names.name = b".shstrtab".as_slice().into();
    names.sh_type = elf::SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut smaller = Vec::new();
    builder.write(&mut smaller)?;
    Ok(smaller)
}
