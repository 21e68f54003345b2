//! The fuzz targets, on seeded input: recorded bytes and words of the grammars, mangled.
#![expect(clippy::unwrap_used, reason = "a test may fail so")]

use std::path::Path;
use std::{env, fs};

use random::Random;

#[path = "harness/random.rs"]
mod random;

#[path = "../../../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "public where the fuzzer links it")]
mod targets;

/// How often each target is called, unless `CTRLMESH_FUZZ_RUNS` says otherwise.
const RUNS: u64 = 5_000;

/// The seed, unless `CTRLMESH_SEED` names another.
const SEED: u64 = 20_261_121;

/// Words that the targets know.
const WORDS: [&str; 52] = [
    "#",
    " HTTP/1.1\r\n",
    "GET ",
    "DELETE ",
    "PUT ",
    "POST ",
    "/api/v1/",
    "/apis/coordination.k8s.io/v1/",
    "namespaces/ops/",
    "leases",
    "configmaps",
    "/op",
    "op---s1",
    "op---s2",
    "watch/",
    "?",
    "&",
    "=",
    ";",
    "%2C",
    "%00",
    "%",
    "%2F",
    "//",
    "..",
    "labelSelector",
    "label%53elector",
    "fieldSelector",
    "metadata.name",
    "watch",
    "a in (b,c)",
    "!",
    "notin",
    "(",
    ")",
    ",",
    " ",
    "\0",
    "\n",
    "{\"metadata\":{\"name\":\"op\"}}",
    "\"name\"",
    "\\u006f",
    "[{\"path\":\"/metadata/name\",\"value\":\"op\"}]",
    "k8s\0",
    "\u{fffd}",
    "resourceVersion=",
    "/public/",
    "/../",
    "%2e%2e",
    "%75",
    "\u{16}\u{3}\u{1}",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

/// Lines to start from.
const LINES: [&str; 11] = [
    "GET /api/v1/namespaces/ops/pods?labelSelector=team%3Da&watch=1",
    "DELETE /apis/apps/v1/namespaces/x/deployments?labelSelector=a,b&labelSelector=c",
    "GET /apis/coordination.k8s.io/v1/namespaces/ops/leases/op?x=y",
    "GET /apis/coordination.k8s.io/v1/leases?fieldSelector=metadata.name%3Dop,metadata.namespace%3Dops",
    "GET /api/v1/watch/namespaces/ops/configmaps?limit=5&continue=abc",
    "labelSelector=a+in+(b,c)&fieldSelector=metadata.name!=op&limit=1",
    "a in (b,c),!d,e!=f,g>5,h notin (,i)",
    "x.io/key==value,,",
    "GET /public/a/../b a.com\r\n",
    "GET /private/..//%70ublic/%2e/b?c a.com\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

/// As many pairs as the server reads, and a few about it.
const FULL_QUERIES: [usize; 4] = [9_995, 9_999, 10_000, 10_001];

fn full_query(pairs: usize) -> Vec<u8> {
    format!("DELETE /api/v1/namespaces/ops/pods?dryRun=All{}", "&x".repeat(pairs - 1)).into_bytes()
}

/// Bytes of the API server, what OpenSSL begins a connection with, and lines.
fn corpus() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let recorded = files.iter().map(|file| fs::read(file).unwrap());
    let lines = LINES.iter().map(|line| line.as_bytes().to_vec());
    recorded.chain(lines).collect()
}

/// Cuts, doubles, overwrites and inserts, a few times.
fn mangled(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..random.below(5) {
        let at = random.below(bytes.len());
        let end = at + random.below((bytes.len() - at).min(40));
        let word = WORDS[random.below(WORDS.len())].as_bytes();
        match random.below(6) {
            0 => drop(bytes.drain(at..end)),
            1 => drop(bytes.splice(at..end, word.iter().copied())),
            2 => drop(bytes.splice(at..at, word.iter().copied())),
            3 => bytes.extend_from_within(at..end),
            4 => bytes.truncate(at),
            _ => bytes.get_mut(at).into_iter().for_each(|byte| *byte = random.0.to_le_bytes()[0]),
        }
    }
    bytes
}

fn drive(target: fn(&[u8])) {
    let number = |name, default| env::var(name).map_or(default, |text| text.parse().unwrap());
    let mut random = Random(number("CTRLMESH_SEED", SEED));
    let corpus = corpus();
    for bytes in corpus.iter().cloned().chain(FULL_QUERIES.map(full_query)) {
        target(&bytes);
    }
    for _ in 0..number("CTRLMESH_FUZZ_RUNS", RUNS) {
        target(&mangled(&mut random, &corpus));
    }
}

#[test]
fn every_request_line_is_refused_or_narrowed() {
    drive(targets::request_line);
}

#[test]
fn every_query_keeps_what_is_not_the_selector() {
    drive(targets::query);
}

#[test]
fn every_selector_of_a_client_is_anded_with_the_policy() {
    drive(targets::selector);
}

#[test]
fn every_body_is_refused_or_changes_only_names() {
    drive(targets::lock_body);
}

#[test]
fn every_stream_says_the_same_however_it_is_cut() {
    drive(targets::watch_frames);
}

#[test]
fn every_client_hello_says_the_same_however_it_is_cut() {
    drive(targets::client_hello);
}

#[test]
fn every_request_passes_as_below_a_path_only_if_it_is() {
    drive(targets::http_head);
}
