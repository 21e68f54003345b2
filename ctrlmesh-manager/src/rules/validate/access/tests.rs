use ctrlmesh_common::api::LabelSelector;

use super::*;

/// The messages on rules in YAML's flow style: errors, and warnings.
fn said(rules: &str) -> (Vec<String>, Vec<String>) {
    let traffic_intercept_rules = serde_saphyr::from_str(rules).unwrap();
    let (selector, rate_limitings) = (LabelSelector::default(), Vec::new());
    let mut report = Report::default();
    check(&CircuitBreakerSpec { selector, rate_limitings, traffic_intercept_rules }, &mut report);
    let texts = |problems: &[super::super::Problem]| problems.iter().map(ToString::to_string).collect();
    (texts(&report.errors), texts(&report.warnings))
}

fn rule(kind: &str, contents: &str, more: &str) -> String {
    format!("{{name: a, interceptType: Whitelist, contentType: {kind}, contents: [{contents}], methods: ['*']{more}}}")
}

fn read(text: &str) -> TrafficInterceptRule {
    serde_saphyr::from_str(text).unwrap()
}

#[test]
fn ports_are_those_that_contents_name_or_else_the_field() {
    for (kind, contents, more, expected) in [
        ("Normal", "a", "", vec![80, 443]),
        ("Normal", "a", ", ports: [8080, 53]", vec![53, 8080]),
        ("Normal", "'a:8443', 'https://b/x'", ", ports: [8080]", vec![443, 8443]),
        ("Normal", "'http://a', 'http://b:8081', c", ", ports: [9000]", vec![80, 8081, 9000]),
        ("Regexp", "'https://a:8443/.*'", "", vec![80, 443]),
        ("Regexp", "'https://a:8443/.*'", ", ports: [8443]", vec![8443]),
    ] {
        let ports = rule_ports(&read(&rule(kind, contents, more)));
        assert_eq!(Vec::from_iter(ports), expected, "{kind} {contents} {more}");
    }
}

#[test]
fn what_is_wrong_with_a_rule_names_its_field() {
    for (kind, contents, more, expected) in [
        (
            "Normal",
            "a, 'b?c'",
            "",
            "[0].contents[1]: \"b?c\" is not of the form [http://|https://]HOST[:PORT][/PATH]: ",
        ),
        ("Regexp", "'a(b'", "", "[0].contents[0]: \"a(b\" is no regular expression"),
        ("Regexp", "'(a{1000}){1000}'", "", "[0].contents[0]: "),
        ("Normal", "a", ", ports: [80, 5441]", "[0].ports[1]: 5441 is not allowed; the proxy itself listens there"),
        ("Normal", "a:15001", "", "[0].contents[0]: \"a:15001\" is not of the form"),
    ] {
        let (errors, _) = said(&format!("[{}]", rule(kind, contents, more)));
        let expected = format!("spec.trafficInterceptRules{expected}");
        assert!(errors.len() == 1 && errors[0].starts_with(&expected), "{expected}: {errors:?}");
    }
    let both = rule("Normal", "a", "").replace("['*']", "[GET, '*']");
    let (errors, _) = said(&format!("[{both}]"));
    assert_eq!(errors, ["spec.trafficInterceptRules[0].methods: \"*\" is every method, and cannot be beside others"]);
}

#[test]
fn the_rules_of_one_breaker_fit_into_a_pod() {
    let many = |count: usize| (0..count).map(|at| format!("'a:{}'", 1000 + at)).collect::<Vec<_>>().join(", ");
    let of = |first: &str, second: &str| said(&format!("[{first}, {second}]")).0;
    let (one, other) = (rule("Normal", &many(31), ""), rule("Normal", "a:80", ""));
    assert_eq!(of(&one, &other), Vec::<String>::new());
    let errors = of(&one, &rule("Normal", "a", ""));
    assert_eq!(
        errors,
        ["spec.trafficInterceptRules: and restRules name 33 ports; at most 32 are allowed in all together"],
        "80 and 443 besides"
    );
    let regexps = |count: usize| rule("Regexp", &vec!["a"; count].join(", "), "");
    assert_eq!(of(&regexps(15), &regexps(1)), Vec::<String>::new());
    let errors = of(&regexps(15), &regexps(2));
    assert_eq!(errors, ["spec.trafficInterceptRules: have 17 regular expressions; at most 16 are allowed in all"]);
}

#[test]
fn ports_that_nothing_uses_are_warned_of() {
    let warnings = |contents: &str| said(&format!("[{}]", rule("Normal", contents, ", ports: [8080]"))).1;
    let unused = "spec.trafficInterceptRules[0].ports: is not used: every content names its scheme or its port";
    assert_eq!(warnings("'http://a', 'b:1'"), [unused]);
    assert_eq!(warnings("'http://a', b"), Vec::<String>::new());
}
