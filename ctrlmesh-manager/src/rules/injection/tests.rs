use super::*;

fn read(spec: &str) -> Injection {
    let text = format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: FaultInjection\nmetadata: {{name: storm, namespace: ops}}\nspec:\n  selector: {{matchLabels: {{app: a}}}}\n{spec}"
    );
    Injection::from(&serde_saphyr::from_str::<FaultInjection>(&text).unwrap())
}

#[test]
fn every_field_reaches_the_proxy() {
    let injection = read(
        "  httpFault:
  - name: slow
    delay: {fixedDelay: 1500ms, jitter: 1s, percent: '12.5'}
    abort: {httpStatus: 503, percent: '0'}
    includeLock: true
    match:
      resources: [{apiGroups: [apps], verbs: [list]}]
      httpMatch:
      - {host: {exact: kubernetes.default.svc}, path: {regex: '/apis/.*'}, method: GET, headers: [{name: X-A, value: b}]}
      - {method: '*'}
    effectiveTime: {timeZone: Europe/Berlin, startTime: '22:00:01', endTime: '06:00:00', daysOfWeek: [0, 6], daysOfMonth: [31], months: [1]}
  - apiFault: {type: CutWatch, after: 2s}
  - apiFault: {type: TooManyRequests, percent: '100.0'}
",
    );
    assert_eq!(injection.selection.errors, Vec::<String>::new());
    assert_eq!((injection.selection.name.as_str(), injection.regexes), ("ops/storm", 1));
    let [slow, cut, many] = injection.faults.as_slice() else { panic!("{injection:?}") };
    assert_eq!(slow.full_name(), "ops/storm/slow");
    let delay = Delay { nanoseconds: 1_500_000_000, jitter_nanoseconds: 1_000_000_000, share: WHOLE / 8 };
    assert_eq!(slow.delay, Some(delay));
    assert_eq!(slow.abort, Some(Abort { status: 503, share: 0 }));
    assert!(slow.includes_lock && !cut.includes_lock);
    let every = || vec!["*".to_owned()];
    let (api_groups, verbs) = (vec!["apps".to_owned()], vec!["list".to_owned()]);
    assert_eq!(
        slow.requests,
        [RequestMatch { api_groups, resources: every(), verbs, namespaces: every(), ..RequestMatch::default() }]
    );
    assert_eq!(slow.http[0].path, Some(fault::TextMatch::Regex("/apis/.*".to_owned())));
    assert_eq!(slow.http[1], fault::HttpMatch::default());
    assert!(injection.ports.is_empty() && injection.hidden.is_empty());
    let times = slow.times.clone().unwrap();
    assert_eq!((times.zone.as_str(), times.from, times.until), ("Europe/Berlin", Some(79_201), Some(21_600)));
    assert_eq!((times.weekdays, times.days, times.months), (vec![0, 6], vec![31], vec![1]));
    assert_eq!(cut.api_fault.unwrap().kind, ApiFaultKind::CutWatch { after_nanoseconds: 2_000_000_000 });
    assert_eq!((cut.fault.as_str(), cut.requests.len(), cut.times.clone()), ("1", 0, None));
    let many = many.api_fault.unwrap();
    assert_eq!(many, ApiFault { kind: ApiFaultKind::TooManyRequests { retry_after_seconds: 1 }, share: WHOLE });
}

#[test]
fn ports_are_those_of_all_faults() {
    let injection = read(
        "  httpFault:
  - {abort: {httpStatus: 503}, match: {httpMatch: [{ports: [8443, 80]}, {host: {exact: a}, ports: [443]}, {}]}}
  - {name: more, abort: {httpStatus: 503}, match: {httpMatch: [{method: GET, ports: [80, 81]}]}}
",
    );
    assert_eq!(injection.selection.errors, Vec::<String>::new());
    assert_eq!(injection.ports, [80, 81, 443, 8443].into());
    assert_eq!((&*injection.faults[0].http[0].ports, injection.hidden), (&[8443, 80][..], vec!["more".to_owned()]));
}

#[test]
fn faults_that_ask_for_what_tls_hides_are_named() {
    for (http, is_hidden) in [
        ("{host: {exact: a}, ports: [443]}", false),
        ("{method: '*', ports: [443]}", false),
        ("{method: GET}", false),
        ("{method: GET, ports: [80]}", false),
        ("{method: GET, ports: [80, 8080]}", true),
        ("{path: {exact: /a}, ports: [443]}", true),
        ("{headers: [{name: a, value: b}], ports: [443]}", true),
        ("{path: {exact: /a}}, {ports: [443]}", false),
    ] {
        let fault = format!("  httpFault: [{{abort: {{httpStatus: 503}}, match: {{httpMatch: [{http}]}}}}]\n");
        assert_eq!(read(&fault).hidden, vec!["0"; usize::from(is_hidden)], "{http}");
    }
}

#[test]
fn what_is_switched_off_or_invalid_has_no_faults() {
    let fault = "  httpFault: [{abort: {httpStatus: 500}}]\n";
    assert_eq!(read(fault).faults.len(), 1);
    let off = read(&format!("{fault}  disabled: true\n"));
    assert!(off.selection.selector.is_none() && off.faults.is_empty() && off.selection.errors.is_empty());
    let invalid = read("  httpFault: [{apiFault: {type: SlowBody}}]\n");
    assert!(
        invalid.selection.selector.is_none() && invalid.selection.errors[0].contains("bytesPerSecond"),
        "{invalid:?}"
    );
}

#[test]
fn a_share_is_exact_and_never_rounds_to_none() {
    for (percent, expected) in [
        (None, WHOLE),
        (Some("100"), WHOLE),
        (Some("0"), 0),
        (Some("0.000"), 0),
        (Some("50"), WHOLE / 2),
        (Some("0.5"), WHOLE / 200),
        (Some("99.9999999"), WHOLE - 1),
        (Some("0.0000000001"), 1),
    ] {
        assert_eq!(share(percent), expected, "{percent:?}");
    }
}

#[test]
fn an_expression_that_proxies_cannot_compile_is_refused() {
    let deep = |depth: usize| {
        let regex = format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
        read(&format!(
            "  httpFault: [{{abort: {{httpStatus: 500}}, match: {{httpMatch: [{{path: {{regex: '{regex}'}}}}]}}}}]\n"
        ))
    };
    assert_eq!(deep(100).selection.errors, Vec::<String>::new());
    let refused: Vec<usize> = (240..255).filter(|depth| !deep(*depth).selection.errors.is_empty()).collect();
    assert!(refused.contains(&249) && refused.contains(&254), "{refused:?}");
    for depth in (240..255).filter(|depth| !refused.contains(depth)) {
        let taken = deep(depth);
        let regex = taken.faults[0].regexes().next().unwrap();
        assert!(fault::whole_match(regex).is_ok(), "{depth}");
    }
}
