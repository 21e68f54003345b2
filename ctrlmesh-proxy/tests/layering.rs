//! `lib.rs` lists the modules in reading order: each may name only those above it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn modules_name_only_modules_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
    let order: Vec<&str> = lib.lines().filter_map(module).collect();
    assert!(!order.is_empty(), "no modules found in lib.rs");
    for (at, module) in order.iter().enumerate() {
        let texts = sources(&src, module);
        assert!(!texts.is_empty(), "`{module}` has no source");
        for (path, text) in texts {
            for below in &order[at + 1..] {
                let named = text.contains(&format!("crate::{below}::"))
                    || text.contains(&format!("crate::{below};"));
                assert!(!named, "{} names `{below}`, which comes after `{module}`", path.display());
            }
        }
    }
}

#[test]
fn only_intercept_names_aya() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (path, text) in tree(&src) {
        let intercept = path.strip_prefix(&src).unwrap().starts_with("intercept");
        assert!(intercept || !text.contains("aya::"), "{} names aya", path.display());
    }
}

fn module(line: &str) -> Option<&str> {
    line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')
}

/// `module.rs` and the files in `module/`.
fn sources(src: &Path, module: &str) -> Vec<(PathBuf, String)> {
    let file = src.join(format!("{module}.rs"));
    let mut texts = tree(&src.join(module));
    texts.extend(fs::read_to_string(&file).ok().map(|text| (file, text)));
    texts
}

fn tree(folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let texts = entries.map(|path| {
        if path.is_dir() {
            tree(&path)
        } else {
            vec![(path.clone(), fs::read_to_string(path).unwrap())]
        }
    });
    texts.flatten().collect()
}
