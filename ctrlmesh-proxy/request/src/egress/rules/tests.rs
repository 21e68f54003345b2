use super::*;

const HTTP: Option<Scheme> = Some(Scheme::Http);
const HTTPS: Option<Scheme> = Some(Scheme::Https);

fn rule(list: AccessList, urls: &[UrlMatch], methods: &[&str]) -> AccessRule {
    AccessRule {
        breaker: "ops/egress".to_owned(),
        rule: "one".to_owned(),
        ports: (1..=u16::MAX).collect(),
        list,
        urls: urls.to_vec(),
        methods: methods.iter().map(|method| (*method).to_owned()).collect(),
    }
}

fn rules(access: &[AccessRule]) -> Rules {
    Rules::new(&Egress { ports: vec![80, 443], access: access.to_vec() }).unwrap()
}

fn host(host: &str) -> UrlParts {
    UrlParts { host: host.to_owned(), ..UrlParts::default() }
}

fn path(path: &str) -> UrlParts {
    UrlParts { path: Some(path.to_owned()), ..host("a.com") }
}

/// Whether the URL matches. What a list allows and what it denies is always the opposite.
fn matches(url: &UrlMatch, visible: &Visible<'_>) -> bool {
    let [allow, deny] =
        [AccessList::Allow, AccessList::Deny].map(|list| rules(&[rule(list, std::slice::from_ref(url), &[ANY])]));
    let is_matched = allow.decide(visible).is_ok();
    assert_ne!(is_matched, deny.decide(visible).is_ok(), "{url:?} {visible:?}");
    is_matched
}

fn parts_match(parts: &UrlParts, visible: &Visible<'_>) -> bool {
    matches(&UrlMatch::Parts(parts.clone()), visible)
}

fn regex_matches(text: &str, visible: &Visible<'_>) -> bool {
    matches(&UrlMatch::Regex(text.to_owned()), visible)
}

fn tls(host: &str) -> Visible<'_> {
    Visible { scheme: HTTPS, host, port: 443, request: None }
}

fn get<'a>(host: &'a str, path: &'a str) -> Visible<'a> {
    Visible { scheme: HTTP, host, port: 80, request: Some(("GET", path)) }
}

#[test]
fn only_an_allowing_rule_with_just_this_host_names_it() {
    let metadata = || UrlMatch::Parts(host("169.254.169.254"));
    let named = |list, url: UrlMatch| rules(&[rule(list, &[url], &[ANY])]).name(&get("169.254.169.254", "/latest"));
    assert!(named(AccessList::Allow, metadata()));
    assert!(!named(AccessList::Deny, metadata()));
    for other in [host("*"), host("*.169.254"), host("169.254.169.253"), host("metadata.example.com")] {
        assert!(!named(AccessList::Allow, UrlMatch::Parts(other)));
    }
    assert!(!named(AccessList::Allow, UrlMatch::Regex(".*".to_owned())));
    let elsewhere = AccessRule { ports: vec![443], ..rule(AccessList::Allow, &[metadata()], &[ANY]) };
    assert!(!rules(&[elsewhere]).name(&get("169.254.169.254", "/")));
}

#[test]
fn hosts_match_by_name_by_what_they_are_below_or_by_address() {
    for (listed, seen, expected) in [
        ("a.com", "a.com", true),
        ("a.com", "A.Com.", true),
        ("A.com.", "a.com", true),
        ("a.com", "b.a.com", false),
        ("*.a.com", "b.a.com", true),
        ("*.a.com", "C.b.a.com.", true),
        ("*.a.com", "a.com", false),
        ("*.a.com", "ba.com", false),
        ("*.a.com", ".a.com", false),
        ("*", "a.com", true),
        ("*", "10.0.0.1", true),
        ("*", "", true),
        ("10.0.0.1", "10.0.0.1", true),
        ("10.0.0.1", "::ffff:10.0.0.1", true),
        ("10.0.0.1", "10.0.0.10", false),
        ("*.0.0.1", "10.0.0.1", false),
        ("fd00::1", "FD00:0:0::1", true),
        ("fd00::1", "[fd00::1]", true),
        ("fd00::1", "fd00::2", false),
    ] {
        assert_eq!(parts_match(&host(listed), &tls(seen)), expected, "{listed} {seen}");
    }
}

#[test]
fn schemes_and_ports_match_where_they_are_absent_or_equal() {
    for (scheme, port, seen, expected) in [
        (None, None, HTTP, true),
        (HTTP, None, HTTP, true),
        (HTTPS, None, HTTP, false),
        (HTTP, None, None, true),
        (HTTPS, None, None, true),
        (None, Some(80), HTTP, true),
        (None, Some(443), HTTP, false),
        (HTTPS, Some(443), None, false),
    ] {
        let parts = UrlParts { scheme, port, ..host("a.com") };
        let visible = Visible { scheme: seen, ..get("a.com", "/") };
        assert_eq!(parts_match(&parts, &visible), expected, "{parts:?} {seen:?}");
    }
}

#[test]
fn paths_match_whole_or_by_how_they_begin() {
    for (listed, seen, expected) in [
        ("/v1", "/v1", true),
        ("/v1", "/v1/", false),
        ("/v1", "/v1?a=/b", true),
        ("/v1/*", "/v1", true),
        ("/v1/*", "/v1/", true),
        ("/v1/*", "/v1/x/y", true),
        ("/v1/*", "/v10", false),
        ("/v1//*", "/v1/x", true),
        ("/*", "/", true),
        ("/*", "*", true),
        ("/", "", true),
        ("/", "/x", false),
        ("/v1/*", "*", false),
        ("/public/*", "/public/../private", false),
        ("/public/*", "/public/%2e%2e/private", false),
        ("/public/*", "/x/..//public/%61", true),
        ("/public/*", "/public%2Fa", false),
        ("/public/*", "/public/..%2fa", true),
        ("/a%2fb", "/a%2Fb", true),
        ("/caf\u{e9}", "/caf%c3%a9", true),
    ] {
        assert_eq!(parts_match(&path(listed), &get("a.com", seen)), expected, "{listed} {seen}");
    }
}

#[test]
fn where_no_path_is_seen_the_host_alone_counts() {
    for visible in [tls("a.com"), Visible { scheme: None, ..tls("a.com") }] {
        assert!(parts_match(&path("/v1/*"), &visible));
        assert!(!parts_match(&path("/v1/*"), &Visible { host: "b.com", ..visible }));
    }
}

#[test]
fn methods_count_only_where_they_are_seen() {
    let url = [UrlMatch::Parts(host("a.com"))];
    let refuses = |methods: &[&str], visible: &Visible<'_>| {
        rules(&[rule(AccessList::Deny, &url, methods)]).decide(visible).is_err()
    };
    for (methods, expected) in
        [(&["GET"][..], true), (&["POST", "GET"], true), (&[ANY], true), (&["POST"], false), (&["get"], false)]
    {
        assert_eq!(refuses(methods, &get("a.com", "/")), expected, "{methods:?}");
        assert!(refuses(methods, &tls("a.com")));
    }
}

#[test]
fn a_regular_expression_matches_the_whole_normal_url() {
    let port = |port| Visible { port, ..get("A.com.", "/v1/../v2//x?q") };
    for (text, visible, expected) in [
        ("http://a\\.com/v2/x", port(80), true),
        ("http://a\\.com/v2", port(80), false),
        ("http://a\\.com:80/v2/x", port(80), false),
        ("http://a\\.com:8080/v2/x", port(8080), true),
        ("http://a\\.com:443/.*", port(443), true),
        ("http://\\[fd00::1\\]/", get("FD00::0:1", "/"), true),
        ("http://a\\.com", get("a.com", "*"), true),
        ("http://a\\.com/\\*", get("a.com", "/*"), true),
    ] {
        assert_eq!(regex_matches(text, &visible), expected, "{text} {visible:?}");
    }
}

#[test]
fn a_regular_expression_is_tried_with_all_that_may_be_hidden() {
    let other = |port| Visible { scheme: None, port, ..tls("a.com") };
    for (text, visible, expected) in [
        ("https://a\\.com/", tls("a.com"), true),
        ("https://a\\.com", tls("a.com"), true),
        ("https://a\\.com/.*", tls("a.com"), true),
        ("https://a\\.com/v1", tls("a.com"), false),
        ("http://a\\.com/", tls("a.com"), false),
        ("http://a\\.com/", other(80), true),
        ("https://a\\.com:80", other(80), true),
        ("https://a\\.com", other(443), true),
        ("http://a\\.com:443/", other(443), true),
        ("https?://a\\.com", other(5432), false),
    ] {
        assert_eq!(regex_matches(text, &visible), expected, "{text} {visible:?}");
    }
}

#[test]
fn a_rule_is_about_its_own_ports() {
    let only = |port, name| AccessRule {
        ports: vec![port],
        ..rule(AccessList::Allow, &[UrlMatch::Parts(host(name))], &[ANY])
    };
    let rules = rules(&[only(80, "a.com"), only(8080, "b.com")]);
    let passes = |host, port| rules.decide(&Visible { scheme: HTTP, host, port, request: None }).is_ok();
    let [a, b] = ["a.com", "b.com"].map(|host| [80, 8080, 443].map(|port| passes(host, port)));
    assert_eq!((a, b), ([true, false, true], [false, true, true]));
}

#[test]
fn every_rule_must_let_pass_and_the_first_that_does_not_is_named() {
    let one = |name: &str, list, text: &str| AccessRule {
        rule: name.to_owned(),
        ..rule(list, &[UrlMatch::Parts(host(text)), UrlMatch::Regex("http://c\\.com/.*".to_owned())], &[ANY])
    };
    let rules = rules(&[
        one("all", AccessList::Allow, "*.com"),
        one("not-b", AccessList::Deny, "b.com"),
        one("only-a", AccessList::Allow, "a.com"),
    ]);
    let refused = |host| rules.decide(&get(host, "/")).err().map(|rule| rule.rule.as_str());
    let got = ["a.com", "b.com", "c.com", "d.com", "a.org"].map(refused);
    assert_eq!(got, [None, Some("not-b"), Some("not-b"), Some("only-a"), Some("all")]);
    assert!(Rules::default().decide(&tls("x")).is_ok());
}

#[test]
fn what_is_denied_by_another_name_is_told_from_what_is_not_allowed() {
    let url = |text| [UrlMatch::Parts(host(text))];
    let rules = rules(&[
        rule(AccessList::Allow, &url("a.com"), &[ANY]),
        rule(AccessList::Deny, &url("169.254.169.254"), &[ANY]),
    ]);
    assert!(rules.denied(&get("192.0.2.1", "/")).is_ok() && rules.decide(&get("192.0.2.1", "/")).is_err());
    assert!(rules.denied(&get("169.254.169.254", "/")).is_err());
}

#[test]
fn only_parts_with_a_path_need_one() {
    let parts = |path: Option<&str>| UrlMatch::Parts(UrlParts { path: path.map(str::to_owned), ..host("a.com") });
    let urls = [parts(None), parts(Some("/*")), parts(Some("/")), parts(Some("/v1/*"))];
    assert_eq!(urls.map(|url| needs_path(&url)), [false, false, true, true]);
    assert!(!needs_path(&UrlMatch::Regex("https://a\\.com/v1".to_owned())));
}

#[test]
fn a_regular_expression_that_is_none_is_refused_with_its_rule() {
    let urls = [UrlMatch::Regex("(".to_owned())];
    let access = vec![rule(AccessList::Deny, &urls[..0], &[]), rule(AccessList::Deny, &urls, &[ANY])];
    let error = Rules::new(&Egress { ports: vec![80], access }).unwrap_err();
    assert!(matches!(error, EgressError::Regex { at: 1, .. }), "{error}");
}
