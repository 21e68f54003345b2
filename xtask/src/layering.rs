//! `lib.rs` lists the modules in reading order: each names only those above it.

use std::path::Path;
use std::{fs, io};

/// A module that names one which comes after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The module.
    pub module: String,
    /// The later module that it names.
    pub names: String,
}

/// What is wrong in the crate whose source is in `src`; nothing where it has no `lib.rs`.
///
/// # Errors
/// Where a file cannot be read.
pub fn check(src: &Path) -> io::Result<Vec<Violation>> {
    let Ok(lib) = fs::read_to_string(src.join("lib.rs")) else { return Ok(Vec::new()) };
    let order: Vec<&str> = lib.lines().filter_map(declared_module).collect();
    let mut violations = Vec::new();
    for (at, module) in order.iter().enumerate() {
        let mut text = String::new();
        read_all(&src.join(format!("{module}.rs")), &mut text)?;
        read_all(&src.join(module), &mut text)?;
        for later in order[at + 1..].iter().filter(|later| names(&text, later)) {
            violations.push(Violation { module: (*module).to_owned(), names: (*later).to_owned() });
        }
    }
    Ok(violations)
}

fn declared_module(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line =
        line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
    line.strip_prefix("mod ")?.strip_suffix(';')
}

/// Whether `text` names `crate::<module>`, alone or in braces.
fn names(text: &str, module: &str) -> bool {
    text.split("crate::").skip(1).any(|rest| {
        let list = rest.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let is_module = |path: &str| {
            let word = path
                .trim()
                .split(|character: char| !character.is_alphanumeric() && character != '_')
                .next();
            word == Some(module)
        };
        list.map_or_else(|| is_module(rest), |(inner, _)| inner.split(',').any(is_module))
    })
}

fn read_all(path: &Path, text: &mut String) -> io::Result<()> {
    if path.is_file() {
        text.push_str(&fs::read_to_string(path)?);
    } else if path.is_dir() {
        for entry in fs::read_dir(path)? {
            read_all(&entry?.path(), text)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_modules_that_come_later_are_found() {
        assert!(names("use crate::policy::Policy;", "policy"));
        assert!(names("use crate::{names, policy};", "policy"));
        assert!(names("fn f() -> crate::policy::P", "policy"));
        assert!(!names("use crate::policy_store::P;", "policy"));
        assert!(!names("use super::policy;", "policy"));
    }

    #[test]
    fn a_module_that_looks_ahead_is_named() {
        let src = std::env::temp_dir().join(format!("ctrlmesh-layering-{}", std::process::id()));
        fs::create_dir_all(src.join("early")).unwrap();
        fs::write(src.join("lib.rs"), "pub mod early;\nmod late;\n").unwrap();
        fs::write(src.join("early.rs"), "mod inner;").unwrap();
        fs::write(src.join("early/inner.rs"), "use crate::late::Late;").unwrap();
        fs::write(src.join("late.rs"), "use crate::early::Early;").unwrap();
        let found = check(&src).unwrap();
        fs::remove_dir_all(&src).unwrap();
        assert_eq!(found, [Violation { module: "early".to_owned(), names: "late".to_owned() }]);
    }
}
