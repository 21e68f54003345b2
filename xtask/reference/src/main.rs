//! Writes `docs/reference/commands.md` and `docs/reference/crds.md`, or with `--check` compares them.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;

mod commands;
mod crds;

/// Writes the generated reference pages
#[derive(Parser)]
struct Arguments {
    /// Write nothing; fail where a page is not what would be written
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let programs = [ctrlmesh::command(), ctrlmesh_proxy::command(), ctrlmesh_manager::command()];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    for (name, page) in [("commands.md", commands::page(programs)?), ("crds.md", crds::page()?)] {
        let file = folder.join(name);
        if arguments.check {
            let current = fs::read_to_string(&file).unwrap_or_default();
            ensure!(current == page, "docs/reference/{name} is stale: run `cargo xtask docs`");
        } else {
            fs::write(&file, page).with_context(|| format!("write docs/reference/{name}"))?;
        }
    }
    Ok(())
}

/// Text as a cell of a Markdown table: on one line, without the table's own sign.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}
