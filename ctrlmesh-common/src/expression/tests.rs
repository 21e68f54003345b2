use regex::Regex;

use super::*;

/// Texts that are put to every expression.
const TEXTS: [&str; 34] = [
    "http://x/{id}/1",
    "a{,2}",
    "a.b",
    "axb",
    "abb",
    "aa",
    "aab",
    "aaa",
    "a{02}",
    ",",
    "-",
    "&",
    "[b",
    "[",
    "b",
    "~",
    "]",
    "é",
    "٣",
    "3",
    " ",
    "\u{a0}",
    "x",
    "A",
    "a",
    "<a>",
    "ab",
    "α",
    "a}",
    "a#b&c",
    "éé",
    "b{start}",
    "x{,2}",
    "{",
];

/// Expressions, and which of the texts they match as a whole in Go 1.26; none where Go does not read them.
const VECTORS: [(&str, Option<&[&str]>); 56] = [
    (r"http://x/{id}/.*", Some(&["http://x/{id}/1"])),
    (r"a{,2}", Some(&["a{,2}"])),
    (r"\Qa.b\E", Some(&["a.b"])),
    (r"\Qa.b", Some(&["a.b"])),
    (r"\Qab\E*", Some(&["abb", "a", "ab"])),
    (r"a**", None),
    (r"a*+", None),
    (r"a???", None),
    (r"a{2}{3}", None),
    (r"a{2}?", Some(&["aa"])),
    (r"(?:a*)*", Some(&["aa", "aaa", "a"])),
    (r"a{1001}", None),
    (r"a{02}", Some(&["a{02}"])),
    (r"[+--]", Some(&[",", "-"])),
    (r"[a--z]", None),
    (r"[a&&b]", Some(&["&", "b", "a"])),
    (r"[[a]b]", Some(&[])),
    (r"[a~~b]", Some(&["b", "~", "a"])),
    (r"[]a]", Some(&["]", "a"])),
    (
        r"[^]a]",
        Some(&[",", "-", "&", "[", "b", "~", "é", "٣", "3", " ", "\u{a0}", "x", "A", "α", "{"]),
    ),
    (r"[[:alpha:]]+", Some(&["axb", "abb", "aa", "aab", "aaa", "b", "x", "A", "a", "ab"])),
    (
        r"[[:^alpha:]]",
        Some(&[",", "-", "&", "[", "~", "]", "é", "٣", "3", " ", "\u{a0}", "α", "{"]),
    ),
    (r"[\d-z]+", Some(&["-", "3"])),
    (r"\d", Some(&["3"])),
    (r"\w", Some(&["b", "3", "x", "A", "a"])),
    (r"\s", Some(&[" "])),
    (
        r"[\D]",
        Some(&[
            ",", "-", "&", "[", "b", "~", "]", "é", "٣", " ", "\u{a0}", "x", "A", "a", "α", "{",
        ]),
    ),
    (r"\bé", Some(&[])),
    (r"\bx\B", Some(&[])),
    (r"\101", Some(&["A"])),
    (r"\1", None),
    (r"\x41", Some(&["A"])),
    (r"\x{e9}", Some(&["é"])),
    (r"\u0041", None),
    (r"\<a\>", Some(&["<a>"])),
    (r"(?x)a b", None),
    (r"(?i)AB", Some(&["ab"])),
    (r"(?P<n>a)", Some(&["a"])),
    (r"(?<n>a)", Some(&["a"])),
    (r"\p{Greek}", Some(&["α"])),
    (
        r"\p{^Greek}",
        Some(&[
            ",", "-", "&", "[", "b", "~", "]", "é", "٣", "3", " ", "\u{a0}", "x", "A", "a", "{",
        ]),
    ),
    (r"\pL", Some(&["b", "é", "x", "A", "a", "α"])),
    (r"\C", None),
    (r"\Z", None),
    (r"a}", Some(&["a}"])),
    (r"]", Some(&["]"])),
    (r"a#b&c", Some(&["a#b&c"])),
    (r"é{2}", Some(&["éé"])),
    (r"[[:foo:]]", None),
    (r"\b{start}", Some(&[])),
    (r"a|*", None),
    (r"[", None),
    (r"(a", None),
    (r"a\", None),
    (r"x*{,2}", Some(&["x{,2}"])),
    (r"[\Q]", None),
];

/// The expression as the crate has it, for whole texts.
fn compiled(expression: &str) -> Option<Regex> {
    let ours = from_go(expression).ok()?;
    Regex::new(&ours).ok()?;
    Regex::new(&format!("^(?:{ours})$")).ok()
}

#[test]
fn expressions_mean_what_they_mean_in_go() {
    for (expression, expected) in VECTORS {
        let matched = compiled(expression)
            .map(|regex| TEXTS.into_iter().filter(|text| regex.is_match(text)).collect::<Vec<_>>());
        assert_eq!(matched.as_deref(), expected, "{expression}: {:?}", from_go(expression));
    }
}

/// Whether Go 1.26 reads them.
const REPETITIONS: [(&str, bool); 10] = [
    ("(?:a{10}){100}", true),
    ("(?:a{10}){101}", false),
    ("(?:b|a{10}c|d{2}){101}", false),
    ("(?:(?:a{10})*b){101}", false),
    ("(?:(?:a{0,500}b)c{900}){2}", false),
    ("(?:a{1000}b{1000}){1}c{1000}", true),
    ("(?:a{500}){0}{1}", false),
    ("(?:(?:a{500}){0}){1000}", true),
    ("(?:a{1000}){0,}b{1000}", true),
    ("((a{40}){5}){6,}", false),
];

#[test]
fn repetitions_inside_repetitions_are_multiplied() {
    for (expression, read) in REPETITIONS {
        assert_eq!(from_go(expression).is_ok(), read, "{expression}");
    }
}

#[test]
fn what_only_rust_reads_is_refused_with_its_place() {
    let cases = [
        ("ab**", "at character 4: a repetition cannot be repeated; put the first into (?:…)"),
        ("[a--z]", "at character 4: a range in a class ends before it begins"),
        ("(?x)a", "at character 3: no such group"),
        (r"\u0041", "at character 2: there is no such escape"),
        ("a{1001}", "at character 2: at most 1000 repetitions are allowed"),
        (r"\p{Alphabetic}", "at character 14: there is no such class of Unicode's"),
        ("(?P<a.b>c)", "at character 4: a group's name is of letters, digits and _"),
    ];
    for (expression, expected) in cases {
        let said = from_go(expression).map_err(|error| error.to_string());
        assert!(said.as_ref().is_err_and(|said| said.starts_with(expected)), "{said:?}");
    }
}
