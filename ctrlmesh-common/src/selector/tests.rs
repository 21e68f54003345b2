use proptest::prelude::*;

use super::*;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn the_whole_grammar_is_read() {
    let cases = [
        ("", ""),
        (" \t", ""),
        ("a", "a"),
        ("!a", "!a"),
        ("! a", "!a"),
        ("a=b", "a=b"),
        ("a==b", "a=b"),
        ("a!=b", "a!=b"),
        ("a=", "a="),
        ("a=,b", "a=,b"),
        ("a in (b)", "a in (b)"),
        ("a in(c,b)", "a in (b,c)"),
        ("a notin ( b , c )", "a notin (b,c)"),
        ("a in ()", "a in ()"),
        ("a in (,)", "a in ()"),
        ("a in (b,)", "a in (,b)"),
        ("a>5", "a>5"),
        ("a<007", "a<7"),
        ("in in (in,notin)", "in in (in,notin)"),
        ("x.io/a=b,!c", "x.io/a=b,!c"),
        ("a=b\0,c", "a=b,c"),
        ("a=b,c \0,d=e", "a=b,c"),
    ];
    for (text, printed) in cases {
        assert_eq!(Selector::parse(text).unwrap().to_string(), printed, "{text:?}");
    }
}

#[test]
fn what_the_api_server_refuses_is_refused() {
    let cases = [
        "a\0b\0=c\0",
        // A negation makes whatever follows the key an error, unless the requirement ends there.
        "!a=b",
        "!a in (b)",
        "a,",
        ",a",
        "a b",
        "a===b",
        "a=b=c",
        "a in b",
        "a in (b",
        "a in (b c)",
        "a in (b=c)",
        "a>",
        "a>x",
        "a>-5",
        "a>9223372036854775808",
        "a/b/c",
        "/a",
        "A.io/b",
        "-a",
        "a=b-",
        "a=ü",
        "(a)",
    ];
    for text in cases {
        assert!(Selector::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn names_have_the_lengths_that_kubernetes_allows() {
    let name = "a".repeat(63);
    let prefix = vec!["b".repeat(62); 4].join(".");
    assert_eq!(check_key(&format!("{prefix}/{name}")), Ok(()));
    assert_eq!(check_value(&name), Ok(()));
    assert!(check_key(&format!("{prefix}bcd/{name}")).is_err());
    assert!(check_key(&format!("{name}a")).is_err());
    assert!(check_value(&format!("{name}a")).is_err());
}

#[test]
fn a_missing_label_satisfies_only_negations() {
    let none = Labels::new();
    for (text, matches) in
        [("a!=b", true), ("a notin (b)", true), ("!a", true), ("a", false), ("a=", false), ("a<1", false)]
    {
        assert_eq!(Selector::parse(text).unwrap().matches(&none), matches, "{text:?}");
    }
}

#[test]
fn bounds_compare_integers_and_nothing_else() {
    let above = Selector::parse("a>5").unwrap();
    assert!(above.matches(&labels(&[("a", "10")])));
    assert!(!above.matches(&labels(&[("a", "5")])));
    assert!(!above.matches(&labels(&[("a", "x10")])));
}

#[test]
fn a_bound_that_cannot_be_written_is_refused() {
    assert!(Requirement::new("a", Condition::GreaterThan(-5)).is_err());
    assert!(Requirement::new("a", Condition::LessThan(0)).is_ok());
}

#[test]
fn forbidden_values_exclude_an_integer_only_in_each_spelling() {
    let between = Selector::parse("x>4,x<6").unwrap();
    let spellings = |widths: std::ops::RangeInclusive<usize>| {
        let values = widths.map(|width| format!("{:0width$}", 5)).collect();
        let requirement = Requirement::new("x", Condition::NotIn(values)).unwrap();
        Selector::from_iter([requirement])
    };
    assert!(between.overlaps(&spellings(1..=62)), "one of 63 digits is left");
    assert!(!between.overlaps(&spellings(1..=63)));
    assert!(Selector::parse("x>4,x<7").unwrap().overlaps(&spellings(1..=63)), "6 is left");
    let greatest = Selector::parse("x>9223372036854775806").unwrap();
    assert!(greatest.overlaps(&Selector::everything()));
    assert!(!Selector::parse("x>9223372036854775807").unwrap().overlaps(&Selector::everything()));
    assert!(!Selector::parse("x<0").unwrap().overlaps(&Selector::everything()));
}

#[test]
fn selectors_overlap_unless_a_label_decides_between_them() {
    let cases = [
        ("a=b", "a=c", false),
        ("a=b", "c=d", true),
        ("a in (b,c)", "a in (c,d)", true),
        ("a in (b,c)", "a notin (b,c)", false),
        ("a", "!a", false),
        ("a!=b", "!a", true),
        ("a=b", "a!=b", false),
        ("a>5", "a<6", false),
        ("a>5", "a<7", true),
        ("a<0", "", false),
        ("a<7", "a in (7,8)", false),
        ("", "", true),
    ];
    for (one, other, overlap) in cases {
        let (one, other) = (Selector::parse(one).unwrap(), Selector::parse(other).unwrap());
        assert_eq!(one.overlaps(&other), overlap, "{one} / {other}");
        assert_eq!(other.overlaps(&one), overlap, "{other} / {one}");
    }
}

fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[0-9]", "[abc]"]
}

fn any_requirement() -> impl Strategy<Value = Requirement> {
    let values = || prop::collection::btree_set(any_value(), 1..4);
    let condition = prop_oneof![
        any_value().prop_map(Condition::Equals),
        any_value().prop_map(Condition::NotEquals),
        values().prop_map(Condition::In),
        values().prop_map(Condition::NotIn),
        Just(Condition::Exists),
        Just(Condition::DoesNotExist),
        (0..9_i64).prop_map(Condition::GreaterThan),
        (0..9_i64).prop_map(Condition::LessThan),
    ];
    ("[xy]", condition).prop_map(|(key, condition)| Requirement::new(key, condition).unwrap())
}

fn any_selector() -> impl Strategy<Value = Selector> {
    prop::collection::vec(any_requirement(), 0..4).prop_map(|requirements| requirements.into_iter().collect())
}

fn any_labels() -> impl Strategy<Value = Labels> {
    prop::collection::btree_map("[xy]", any_value(), 0..3)
}

proptest! {
    #[test]
    fn what_is_printed_is_read_back(selector in any_selector()) {
        prop_assert_eq!(Selector::parse(&selector.to_string()), Ok(selector));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[a-z0-9=!<>(), ./\\-_\0\u{fc}]{0,40}") {
        drop(Selector::parse(&text));
    }

    #[test]
    fn and_matches_what_both_match(one in any_selector(), other in any_selector(), labels in any_labels()) {
        let both = one.matches(&labels) && other.matches(&labels);
        prop_assert_eq!(one.clone().and(&other).matches(&labels), both);
        prop_assert!(!both || one.overlaps(&other));
    }
}
