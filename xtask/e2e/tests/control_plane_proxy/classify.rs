//! `classify` against the API server's own code, on generated request lines.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::{env, thread};

use ctrlmesh_common::member_path::PathTemplate;
use ctrlmesh_request::classify;
use serde_json::Value;

use crate::go;
use crate::harness::random::Random;

/// How many lines a run compares.
const LINES: usize = 120_000;

/// Templates of paths to members, and what leads to a member by each.
const MEMBERS: [(&str, &str); 3] = [
    (
        "/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy",
        "/apis/cluster.karmada.io/v1alpha1/clusters/m-1/proxy",
    ),
    ("/clusters/{cluster}", "/clusters/m-1"),
    ("/spaces/{namespace}/*/{cluster}", "/spaces/team/any/m-1"),
];

/// The seed, unless `CTRLMESH_SEED` names another.
const SEED: u64 = 20_261_121;

const METHODS: [&str; 14] = [
    "GET", "GET", "GET", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "get", "Delete",
    "W@TCH",
];

const SEGMENTS: [&str; 47] = [
    "api",
    "apis",
    "v1",
    "v1",
    "apps",
    "watch",
    "proxy",
    "namespaces",
    "ns",
    "pods",
    "pods",
    "leases",
    "a",
    "b",
    "status",
    "finalize",
    "log",
    "exec",
    "",
    "",
    ".",
    "..",
    "%2e",
    "%2E%2e",
    "%2F",
    "a%2Fb",
    "%25",
    "%2",
    "%zz",
    "%",
    "a b",
    "+",
    ";",
    "a;b",
    "a=b",
    "é",
    "%ff",
    "%C3%A9",
    "%c3",
    "%00",
    "%0a",
    "namespaces%2Fns",
    "w%61tch",
    "#",
    "*",
    ":",
    "coordination.k8s.io",
];

const KEYS: [&str; 18] = [
    "watch",
    "watch",
    "watch",
    "w%61tch",
    "Watch",
    "labelSelector",
    "labelSelector",
    "label%53elector",
    "fieldSelector",
    "fieldSelector",
    "limit",
    "timeoutSeconds",
    "resourceVersion",
    "sendInitialEvents",
    "",
    "x",
    "%",
    "watch+",
];

const VALUES: [&str; 66] = [
    "",
    "true",
    "false",
    "0",
    "1",
    "FALSE",
    "fal%C5%BFe",
    "False",
    "no",
    " ",
    "+",
    "%20",
    "a=b",
    "a%3Db",
    "a%3D%3Db",
    "a!=b",
    "!a",
    "a+in+(b,c)",
    "a in (b)",
    "a%20notin%20(b%2Cc)",
    "a in ()",
    "a>5",
    "a<x",
    "a,b",
    "a,,b",
    ",",
    "%00",
    "a%00",
    "a=%00b",
    "=",
    "metadata.name=x",
    "metadata.name%3Dx",
    "metadata.name==x",
    "metadata.name!=x",
    "metadata.name=",
    "metadata.name=a%2Fb",
    "metadata.name=..",
    "metadata.name=a%5C%2Cb",
    "metadata.name=a\\=b",
    "metadata.name=a\\",
    "metadata.name=a=b",
    "metadata.name=b,metadata.name=a",
    "metadata.namespace=ns,metadata.name=z",
    "spec.nodeName=n,metadata.name=q",
    "metadata.name",
    "metadata.name=x,,",
    ",metadata.name=x",
    "metadata.name%20=x",
    "metadata.name=é",
    "metadata.name=%ff",
    "metadata.name=%25",
    "=,metadata.name=x",
    "9223372036854775807",
    "9223372036854775808",
    "-1",
    "+1",
    "%2B1",
    "1_0",
    "0x1",
    "01",
    "5;6",
    "%2",
    "a%zz",
    "é",
    "%c3%28",
    "metadata.name=%ff\\,%fe,metadata.name=%f0",
];

const PREFIXES: [&str; 24] = [
    "http://host",
    "https://host:443",
    "http://",
    "HTTP://h:1:2",
    "foo:",
    "foo://a:b:c",
    "//",
    "///",
    "/",
    "?",
    "a:b",
    ":",
    "1a:/",
    "a+1.-:/",
    "http://[::1]:80",
    "http://[::1%25en0]",
    "http://[::1",
    "http://u:p@h",
    "http://u%zz@h",
    "http://h%41",
    "http://h%C3%A9",
    "*",
    "http:/",
    "http://[1.2.3.4]",
];

fn segment_path(random: &mut Random) -> String {
    let start = random.of(&[
        "/api/v1",
        "/apis/apps/v1",
        "/apis/coordination.k8s.io/v1",
        "/api/v1/watch",
        "/apis/a/b/watch",
        "/api/v1/namespaces/ns",
        "",
    ]);
    let mut path = start.to_owned();
    for _ in 0..random.below(6) {
        path.push('/');
        path.push_str(if random.one_in(3) { random.of(&SEGMENTS) } else { random.of(&SEGMENTS[..18]) });
    }
    path
}

fn query(random: &mut Random) -> String {
    let pairs = random.below(5);
    let mut query = String::new();
    for at in 0..pairs {
        query.push_str(if at == 0 { "?" } else { random.of(&["&", "&", "&", "&", ";", "&&", "?"]) });
        query.push_str(random.of(&KEYS));
        if !random.one_in(6) {
            query.push('=');
            query.push_str(random.of(&VALUES));
        }
    }
    query
}

fn line(random: &mut Random) -> Vec<u8> {
    let mut line = random.of(&METHODS).as_bytes().to_vec();
    line.push(b' ');
    if random.one_in(12) {
        line.extend(random.of(&PREFIXES).as_bytes());
    }
    line.extend(segment_path(random).as_bytes());
    line.extend(query(random).as_bytes());
    if random.one_in(25) {
        let at = random.below(line.len());
        // A line feed would end the line, and a carriage return is the line's own end to the server.
        let byte = u8::try_from(random.below(256)).unwrap();
        line[at] = if matches!(byte, b'\n' | b'\r') { b'\t' } else { byte };
    }
    line
}

fn reference(lines: &[u8]) -> Vec<u8> {
    let mut child = Command::new(go::program("requestinfo"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("run the reference");
    let mut stdin = child.stdin.take().unwrap();
    let output = thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(lines).unwrap());
        child.wait_with_output().unwrap()
    });
    assert!(output.status.success());
    output.stdout
}

/// The same line, to a member.
fn behind(line: &[u8], prefix: &str) -> Option<Vec<u8>> {
    let space = line.iter().position(|byte| *byte == b' ')?;
    let (method, target) = (&line[..=space], &line[space + 1..]);
    // An absolute URI has its path somewhere else.
    (target.starts_with(b"/") && !target.starts_with(b"//")).then(|| [method, prefix.as_bytes(), target].concat())
}

/// Whether a reader who cleans paths might find another member, or none: the line has an empty or dotted segment, as it
/// stands or behind an escape.
fn is_ambiguous(line: &[u8]) -> bool {
    let text = String::from_utf8_lossy(line).to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/");
    let path = text.split('?').next().unwrap_or_default();
    path.contains("//") || path.split('/').any(|segment| matches!(segment, "." | ".."))
}

fn parsed(output: &[u8]) -> Vec<Value> {
    serde_json::Deserializer::from_slice(output).into_iter().map(Result::unwrap).collect()
}

#[test]
fn the_api_servers_own_code_gives_the_same_answer() {
    let seed = env::var("CTRLMESH_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    let mut random = Random(seed);
    let lines: Vec<Vec<u8>> = (0..LINES).map(|_| line(&mut random)).collect();
    let mut input = lines.join(&b'\n');
    input.push(b'\n');
    let mut ours = Vec::new();
    classify::run(&[], &mut input.as_slice(), &mut ours).unwrap();
    let (ours, theirs) = (parsed(&ours), parsed(&reference(&input)));
    assert_eq!((ours.len(), theirs.len()), (LINES, LINES));
    for ((line, ours), theirs) in lines.iter().zip(&ours).zip(&theirs) {
        assert_eq!(ours, theirs, "seed {seed}: {}", line.escape_ascii());
    }
    let refused = theirs.iter().filter(|answer| answer.get("error").is_some()).count();
    let resources = theirs.iter().filter(|answer| answer["resourceRequest"] == true).count();
    assert!(
        refused > LINES / 20 && resources > LINES / 4,
        "the lines exercise too little: {refused} refused, {resources} resources"
    );
}

#[test]
fn a_member_gives_the_same_answer_behind_its_path() {
    let seed = env::var("CTRLMESH_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    let mut random = Random(seed.wrapping_add(1));
    let templates: Vec<PathTemplate> = MEMBERS.iter().map(|(template, _)| template.parse().unwrap()).collect();
    let (mut alone, mut led) = (Vec::new(), Vec::new());
    while alone.len() < LINES / 4 {
        let line = line(&mut random);
        let (_, prefix) = MEMBERS[random.below(MEMBERS.len())];
        if let Some(to_member) = behind(&line, prefix) {
            alone.push(line);
            led.push(to_member);
        }
    }
    let lines = |lines: &[Vec<u8>]| [&lines.join(&b'\n')[..], b"\n"].concat();
    let mut ours = Vec::new();
    classify::run(&templates, &mut lines(&led).as_slice(), &mut ours).unwrap();
    let (ours, theirs) = (parsed(&ours), parsed(&reference(&lines(&alone))));
    assert_eq!((ours.len(), theirs.len()), (alone.len(), alone.len()));
    let (mut refused, mut resources) = (0, 0);
    for ((line, mut ours), theirs) in led.iter().zip(ours).zip(theirs) {
        if ours.get("error").is_some() && theirs.get("error").is_none() {
            assert!(is_ambiguous(line), "seed {seed}: {}", line.escape_ascii());
            refused += 1;
            continue;
        }
        let cluster = ours.as_object_mut().unwrap().remove("cluster");
        assert_eq!(ours, theirs, "seed {seed}: {}", line.escape_ascii());
        assert_eq!(cluster.is_some(), theirs.get("error").is_none(), "seed {seed}: {}", line.escape_ascii());
        resources += usize::from(theirs["resourceRequest"] == true);
    }
    let all = alone.len();
    assert!(refused < all / 4 && resources > all / 5, "of {all}: {refused} ambiguous, {resources} resources");
}
