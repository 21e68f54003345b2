//! `lib.rs` lists the modules in reading order: each names only those above it.
//!
//! Reads the sources word by word, without comments and texts, and resolves the paths that begin with `crate`, `super`
//! or `self`: in `use` trees of any depth, and anywhere else. What a macro pastes together is not seen.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

/// A module that names one which comes after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The module.
    pub module: String,
    /// The later module that it names, or `*` where it names all.
    pub names: String,
}

/// A word of a source: a name, or a sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Name(&'a str),
    Colons,
    Sign(char),
}

/// What is wrong in the crate whose source is in `src`; nothing where it has no `lib.rs`.
///
/// # Errors
/// Where a file cannot be read, or a `lib.rs` has no modules: then there is no order to check.
pub fn check(src: &Path) -> io::Result<Vec<Violation>> {
    let Ok(lib) = fs::read_to_string(src.join("lib.rs")) else { return Ok(Vec::new()) };
    let order: Vec<&str> = lib.lines().filter_map(declared_module).collect();
    if order.is_empty() {
        let message =
            format!("{} declares no modules that I can read", src.join("lib.rs").display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut violations = Vec::new();
    for (at, module) in order.iter().enumerate() {
        let mut named = BTreeSet::new();
        read_module(&src.join(format!("{module}.rs")), 1, &mut named)?;
        read_folder(&src.join(module), 2, &mut named)?;
        for later in order[at + 1..].iter().chain(&["*"]).filter(|later| named.contains(**later)) {
            violations.push(Violation { module: (*module).to_owned(), names: (*later).to_owned() });
        }
    }
    Ok(violations)
}

fn declared_module(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line =
        line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
    let (name, behind) = line.strip_prefix("mod ")?.split_once(';')?;
    let behind = behind.trim_start();
    (behind.is_empty() || behind.starts_with("//")).then(|| name.trim())
}

/// Adds the crate's modules that a file names, whose module is `depth` below the crate's root.
fn read_module(path: &Path, depth: usize, named: &mut BTreeSet<String>) -> io::Result<()> {
    if path.is_file() {
        let text = fs::read_to_string(path)?;
        named.extend(modules_in(&tokens(&text), depth).into_iter().map(str::to_owned));
    }
    Ok(())
}

fn read_folder(path: &Path, depth: usize, named: &mut BTreeSet<String>) -> io::Result<()> {
    if !path.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        if path.is_dir() {
            read_folder(&path, depth + 1, named)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            read_module(&path, depth, named)?;
        }
    }
    Ok(())
}

/// The crate's modules that the words name, in a module that is `depth` below the crate's root.
fn modules_in<'a>(tokens: &[Token<'a>], depth: usize) -> BTreeSet<&'a str> {
    let mut named = BTreeSet::new();
    // Below the file's own module: the bodies of `mod x { … }` that we are in, by the braces open where each began.
    let (mut inline, mut open) = (Vec::new(), 0_usize);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign('{') => {
                let begins = at >= 2
                    && tokens[at - 2] == Token::Name("mod")
                    && matches!(tokens[at - 1], Token::Name(_));
                if begins {
                    inline.push(open);
                }
                open += 1;
            }
            Token::Sign('}') => {
                open = open.saturating_sub(1);
                inline.pop_if(|began| *began == open);
            }
            Token::Name(_) if at == 0 || tokens[at - 1] != Token::Colons => {
                path(&tokens[at..], depth + inline.len(), &mut named);
            }
            _ => {}
        }
    }
    named
}

/// Follows a path through `crate`, `super` and `self` to the crate's root, and adds what it names there.
fn path<'a>(mut tokens: &[Token<'a>], mut depth: usize, named: &mut BTreeSet<&'a str>) {
    let mut relative = false;
    while let [Token::Name(word), Token::Colons, rest @ ..] = tokens {
        match *word {
            "crate" => depth = 0,
            "super" => depth = depth.saturating_sub(1),
            "self" => {}
            _ => break,
        }
        (tokens, relative) = (rest, true);
    }
    if !relative {
        return;
    }
    match tokens {
        [Token::Name(name), ..] if depth == 0 => {
            named.insert(name);
        }
        // All at once, those that come later too.
        [Token::Sign('*'), ..] if depth == 0 => {
            named.insert("*");
        }
        [Token::Sign('{'), rest @ ..] => {
            for branch in branches(rest) {
                let again = [&[Token::Name("self"), Token::Colons], branch].concat();
                path(&again, depth, named);
            }
        }
        _ => {}
    }
}

/// The parts of a group in braces, which has just been opened, between its own commas.
fn branches<'a, 'b>(tokens: &'b [Token<'a>]) -> Vec<&'b [Token<'a>]> {
    let (mut branches, mut start, mut open) = (Vec::new(), 0, 1_usize);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign('{') => open += 1,
            Token::Sign('}') => open -= 1,
            _ => {}
        }
        if open == 0 || open == 1 && *token == Token::Sign(',') {
            branches.push(&tokens[start..at]);
            start = at + 1;
        }
        if open == 0 {
            break;
        }
    }
    branches
}

/// The words of `text`, without comments, texts and white space.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = literal(rest) {
            length
        } else if first.is_alphanumeric() || first == '_' {
            let end = rest.find(|next: char| !next.is_alphanumeric() && next != '_');
            tokens.push(Token::Name(&rest[..end.unwrap_or(rest.len())]));
            end.unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            tokens.push(Token::Colons);
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(Token::Sign(first));
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    tokens
}

/// The length of the text or character at the beginning of `rest`, if one stands there.
fn literal(rest: &str) -> Option<usize> {
    let hashes = rest.strip_prefix('r').map(|raw| raw.len() - raw.trim_start_matches('#').len());
    if let Some(hashes) = hashes.filter(|hashes| rest[1 + hashes..].starts_with('"')) {
        let end = format!("\"{}", "#".repeat(hashes));
        let begin = hashes + 2;
        return Some(rest[begin..].find(&end).map_or(rest.len(), |at| begin + at + end.len()));
    }
    let quote = rest.chars().next().filter(|first| matches!(first, '"' | '\''))?;
    if quote == '\'' && !is_character(&rest[1..]) {
        return None;
    }
    let mut escaped = false;
    for (at, next) in rest.char_indices().skip(1) {
        if next == quote && !escaped {
            return Some(at + 1);
        }
        escaped = next == '\\' && !escaped;
    }
    Some(rest.len())
}

/// Whether a character is closed behind the quote, and does not begin a lifetime.
fn is_character(behind: &str) -> bool {
    let mut characters = behind.chars();
    characters.next() == Some('\\') || characters.next() == Some('\'')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a module that is `depth` below the root names.
    fn named(text: &str, depth: usize) -> Vec<&str> {
        modules_in(&tokens(text), depth).into_iter().collect()
    }

    #[test]
    fn what_a_path_names_is_seen_wherever_it_stands() {
        let cases: [(&str, &[&str]); 11] = [
            ("use crate::policy::Policy;", &["policy"]),
            ("use crate::{names, policy};", &["names", "policy"]),
            (
                "use crate::{names::{self, label}, policy::{A, B::{C, D}}, run};",
                &["names", "policy", "run"],
            ),
            ("use crate::{{names}, {policy::P}};", &["names", "policy"]),
            ("pub(crate) use crate :: policy as other;", &["policy"]),
            (
                "fn f() -> crate::policy::P { crate::run::g::<crate::tls::T>() }",
                &["policy", "run", "tls"],
            ),
            ("use crate::policy_store::P;", &["policy_store"]),
            ("use other::crate_::policy; use ::std::fs; x::policy()", &[]),
            ("use crate::*;", &["*"]),
            ("use crate::{names, *};", &["*", "names"]),
            ("use crate::names::*;", &["names"]),
        ];
        for (text, expected) in cases {
            assert_eq!(named(text, 1), expected, "{text}");
        }
    }

    #[test]
    fn super_reaches_the_root_from_where_it_stands() {
        assert_eq!(named("use super::policy;", 1), ["policy"]);
        assert_eq!(named("use super::policy;", 2), Vec::<&str>::new());
        assert_eq!(named("use super::super::{policy, self};", 2), ["policy", "self"]);
        assert_eq!(named("use self::policy;", 1), Vec::<&str>::new());
        assert_eq!(named("use self::super::policy;", 1), ["policy"]);
        assert_eq!(named("use super::{super::policy, other};", 2), ["policy"]);
        let inline = "mod tests { use super::*; use super::inner; use super::super::policy; } use super::late;";
        assert_eq!(named(inline, 1), ["late", "policy"]);
        assert_eq!(
            named("fn f() { if x {} } mod a { mod b { use super::super::super::c; } }", 1),
            ["c"]
        );
    }

    #[test]
    fn comments_and_texts_name_nothing() {
        let text = r##"
            // crate::a
            /* crate::b */
            fn f<'a>(x: &'a str) -> char { g("crate::c \" {", r#"crate::d " {"#, 'c', '"', '\'', '{'); crate::e::f() }
        "##;
        assert_eq!(named(text, 1), ["e"]);
    }

    #[test]
    fn our_own_crates_keep_to_it() {
        for name in crate::run::CRATES {
            let found = check(&crate::run::root().join(name).join("src")).unwrap();
            assert_eq!(found, [], "{name}");
        }
    }

    #[test]
    fn a_module_that_looks_ahead_is_named() {
        let src = std::env::temp_dir().join(format!("ctrlmesh-layering-{}", std::process::id()));
        fs::create_dir_all(src.join("early/inner")).unwrap();
        fs::write(
            src.join("lib.rs"),
            "pub mod early;\nmod late; // the later one\npub(crate) mod last;\n",
        )
        .unwrap();
        fs::write(src.join("early.rs"), "mod inner;").unwrap();
        fs::write(src.join("early/inner.rs"), "use super::super::{late::Late};").unwrap();
        fs::write(src.join("early/inner/deep.rs"), "use crate::{early::{self, x}, last};").unwrap();
        fs::write(src.join("late.rs"), "use crate::early::Early;").unwrap();
        let found = check(&src).unwrap();
        fs::remove_dir_all(&src).unwrap();
        let ahead = |names: &str| Violation { module: "early".to_owned(), names: names.to_owned() };
        assert_eq!(found, [ahead("late"), ahead("last")]);
    }

    #[test]
    fn an_order_that_cannot_be_read_is_an_error() {
        let src = std::env::temp_dir().join(format!("ctrlmesh-no-order-{}", std::process::id()));
        fs::create_dir_all(&src).unwrap();
        fs::write(src.join("lib.rs"), "fn f() {}\n").unwrap();
        let found = check(&src);
        fs::remove_dir_all(&src).unwrap();
        assert!(found.unwrap_err().to_string().ends_with("declares no modules that I can read"));
        assert_eq!(declared_module("mod a; // mod b;"), Some("a"));
        assert_eq!(declared_module("mod a { fn f() {} }"), None);
    }
}
