//! Expressions in the crate's spelling against Go's own package, on generated ones.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail so")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, thread};

use ctrlmesh_common::expression::from_go;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use regex::{Regex, RegexBuilder};

/// How many expressions of each sort a run compares.
const EXPRESSIONS: usize = 2_000;

/// The seed, unless `CTRLMESH_SEED` names another.
const SEED: u64 = 20_261_121;

const TEXTS: [&str; 40] = [
    "",
    "a",
    "aa",
    "aab",
    "ab",
    "b",
    "A",
    "aB",
    "ba",
    "c",
    "k",
    "K",
    "\u{212a}",
    "s",
    "ſ",
    "é",
    "É",
    "éa",
    "α",
    "Σ",
    "ς",
    "٣",
    "3",
    "3a",
    "_",
    "-",
    "]",
    "[",
    "{2}",
    "a{,2}",
    "^",
    "\\",
    "a.b",
    "a b",
    " ",
    "\n",
    "a\nb",
    "\t",
    "a-b:c",
    "\u{10ffff}",
];

/// What stands by itself.
const PLAIN: [&str; 53] = [
    "a",
    "b",
    "A",
    "k",
    "s",
    "é",
    "α",
    "3",
    "-",
    "_",
    ".",
    "^",
    "$",
    " ",
    "]",
    "}",
    ":",
    ",",
    r"\.",
    r"\-",
    r"\n",
    r"\t",
    r"\x41",
    r"\x{e9}",
    r"\101",
    r"\0",
    r"\d",
    r"\D",
    r"\s",
    r"\S",
    r"\w",
    r"\W",
    r"\b",
    r"\B",
    r"\A",
    r"\z",
    r"\pL",
    r"\PL",
    r"\p{Greek}",
    r"\P{Greek}",
    r"\p{^Lu}",
    r"\p{Lu}",
    r"\P{Ll}",
    r"\p{any}",
    r"\Qa.b\E",
    r"\Q]\E",
    r"\<",
    r"\_",
    "é|ſ",
    "a{,2}",
    "{",
    "{a}",
    "x{02}",
];

/// What stands in a class.
const MEMBERS: [&str; 34] = [
    "a",
    "b",
    "a-c",
    "A-Z",
    "é",
    "k",
    "s",
    "3",
    "0-9",
    "-",
    "&&",
    "~~",
    "--",
    "[",
    "^",
    ".",
    "[:alpha:]",
    "[:^digit:]",
    "[:word:]",
    r"\d",
    r"\W",
    r"\s",
    r"\pL",
    r"\P{Greek}",
    r"\]",
    r"\\",
    r"\x41-\x43",
    r"\n",
    r"\101",
    ":",
    "{",
    "|",
    "+--",
    "α-ω",
];

/// What soup is made of.
const PIECES: [&str; 73] = [
    "a",
    "b",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "*",
    "+",
    "?",
    "|",
    "^",
    "$",
    ".",
    "\\",
    "-",
    ",",
    "1",
    "2",
    "0",
    "(?",
    "(?P<",
    "(?<",
    ">",
    "(?i",
    ":",
    "i",
    "m",
    "[:",
    ":]",
    "alpha",
    "\\p",
    "\\p{",
    "\\P{^",
    "Greek",
    "Latin",
    "isGreek",
    "L",
    "Alphabetic",
    "sc=",
    "Grek",
    "Old_Nubian",
    "Lu",
    "Uppercase_Letter",
    "\\Q",
    "\\E",
    "\\x",
    "\\x{",
    "\\1",
    "\\8",
    "\\u",
    "\\Z",
    "\\z",
    "\\C",
    "\\R",
    "\\K",
    "é",
    "&&",
    "--",
    "~~",
    "<",
    "P",
    "U",
    "x",
    "R",
    "\\b{start}",
    "{1001}",
    "{1000}",
    "{2,1}",
    "{,3}",
    "#",
    " ",
];

/// One item, whole and right.
fn item() -> impl Strategy<Value = String> {
    let plain = select(&PLAIN[..]);
    let member = select(&MEMBERS[..]);
    let class = (any::<bool>(), any::<bool>(), prop::collection::vec(member, 1..4)).prop_map(
        |(not, bracket, members)| {
            let (not, bracket) = (if not { "^" } else { "" }, if bracket { "]" } else { "" });
            format!("[{not}{bracket}{}]", members.concat())
        },
    );
    prop_oneof![3 => plain.prop_map(str::to_owned), 1 => class]
}

/// Expressions that mostly are some.
fn expression() -> impl Strategy<Value = String> {
    let repeat = || {
        select(vec![
            "", "", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{2}?", "{0}",
            "{3}",
        ])
    };
    let repeated = (item(), repeat()).prop_map(|(item, repeat)| format!("{item}{repeat}"));
    repeated.prop_recursive(4, 12, 4, move |inner| {
        let open = select(vec![
            "(", "(", "(?:", "(?i:", "(?s:", "(?m:", "(?U:", "(?i-s:", "(?-i:", "(?P<n>", "(?<m>",
            "(?P<1>", "(?im:",
        ]);
        let flag = select(vec!["", "", "", "(?i)", "(?s)a", "(?-i)b", "(?i)|"]);
        let parts = prop::collection::vec(inner, 1..4);
        (open, flag, parts, any::<bool>(), repeat()).prop_map(
            |(open, flag, parts, either, repeat)| {
                format!("{open}{flag}{}){repeat}", parts.join(if either { "|" } else { "" }))
            },
        )
    })
}

/// What mostly is no expression.
fn soup() -> impl Strategy<Value = String> {
    let piece = select(&PIECES[..]);
    prop::collection::vec(piece, 1..7).prop_map(|pieces| pieces.concat())
}

fn generated() -> Vec<String> {
    let seed = env::var("CTRLMESH_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    let config = Config { rng_seed: RngSeed::Fixed(seed), ..Config::default() };
    let mut runner = TestRunner::new(config);
    let (right, soup) = (expression(), soup());
    let mut all = Vec::new();
    for _ in 0..EXPRESSIONS {
        all.push(right.new_tree(&mut runner).unwrap().current());
        all.push(soup.new_tree(&mut runner).unwrap().current());
    }
    all
}

fn hexadecimal(text: &str) -> String {
    text.bytes().fold(String::new(), |mut all, one| {
        write!(all, "{one:02x}").unwrap();
        all
    })
}

/// What Go says, a line for each expression.
fn reference(expressions: &[String]) -> Vec<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/expression/main.go");
    let binary = Path::new(env!("CARGO_TARGET_TMPDIR")).join("expression");
    let built = Command::new("go").args(["build", "-o"]).arg(&binary).arg(source).status();
    assert!(built.expect("Go is needed to ask its own package").success());
    let mut input = TEXTS.map(hexadecimal).join(" ");
    for expression in expressions {
        write!(input, "\n{}", hexadecimal(expression)).unwrap();
    }
    let mut child =
        Command::new(binary).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let output = thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input.as_bytes()).unwrap());
        child.wait_with_output().unwrap()
    });
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// What the crate says of the expression in its own spelling.
fn ours(expression: &str) -> Option<String> {
    let compile = |text: &str| RegexBuilder::new(text).size_limit(1 << 26).build().ok();
    let spelled = from_go(expression).ok()?;
    let part = compile(&spelled)?;
    let whole = compile(&format!(r"\A(?:{spelled})\z"))?;
    let said = TEXTS.iter().map(|text| match (part.is_match(text), whole.is_match(text)) {
        (_, true) => '2',
        (true, false) => '1',
        (false, false) => '0',
    });
    Some(said.collect())
}

#[test]
fn generated_expressions_mean_what_they_mean_to_gos_own_package() {
    let expressions = generated();
    let theirs = reference(&expressions);
    assert_eq!(theirs.len(), expressions.len());
    // Go takes such an operator to be of what stands before the flags, or before the quotation of nothing.
    let far = Regex::new(r"(\(\?[imsU-]*\)|\\Q(\\E|$))+[*+?{]").unwrap();
    let (mut read, mut wrong) = (0, Vec::new());
    for (expression, theirs) in expressions.iter().zip(&theirs) {
        let ours = ours(expression).unwrap_or_else(|| "refused".to_owned());
        read += usize::from(ours != "refused");
        let stricter = ours == "refused" && far.is_match(expression);
        if ours != *theirs && !stricter {
            wrong.push(format!(
                "{expression:?} ({:?})\n  ours   {ours}\n  theirs {theirs}",
                from_go(expression)
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), expressions.len(), wrong.join("\n"));
    assert!(
        (EXPRESSIONS / 2..EXPRESSIONS * 3 / 2).contains(&read),
        "the expressions exercise too little: {read} were read"
    );
}
