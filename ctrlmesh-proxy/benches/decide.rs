//! What does it cost to decide about a request, with a fence on writes and without? And what do 64 guards add?
//!
//! `cargo bench -p ctrlmesh-proxy --bench decide [-- [guard] [--quick]]`. Each figure is the median of the rounds, in
//! nanoseconds a request, with the least and the greatest. A round decides about all requests of its row in turn.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, or panics")]
#![allow(clippy::cast_precision_loss, reason = "what is counted is far below 2^52")]

use std::env;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use ctrlmesh_common::policy::guard::{Bucket, RequestMatch, Trigger};
use ctrlmesh_common::policy::{Fence, Guard, Limit, Lock, Policy};
use ctrlmesh_common::resource::ResourceMatch;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::SlotSet;
use ctrlmesh_proxy::policy::Writes;
use ctrlmesh_request::decide;
use ctrlmesh_request::guard::{Guards, Moment};
use ctrlmesh_request::request::RequestInfo;

/// Method and target.
type Line = (&'static str, &'static str);

const READS: &[Line] = &[
    ("GET", "/apis/example.com/v1/namespaces/shop/widgets/a"),
    ("GET", "/api/v1/namespaces/shop/pods/a"),
    ("GET", "/apis/example.com/v1/widgets?limit=500&resourceVersion=0"),
];

const WRITES: &[Line] = &[
    ("POST", "/apis/example.com/v1/namespaces/shop/widgets"),
    ("PUT", "/apis/example.com/v1/namespaces/shop/widgets/a/status"),
    ("PATCH", "/apis/example.com/v1/namespaces/shop/widgets/a?fieldManager=x"),
    (
        "DELETE",
        "/apis/example.com/v1/namespaces/a-namespace-with-a-name-as-long-as-they-may-have-is-63-bytes/widgets/a",
    ),
    ("PUT", "/apis/example.com/v1/widgets/a"),
];

const ROUNDS: usize = 21;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    // `cargo test --benches` only builds.
    if arguments.iter().any(|argument| argument == "--test") {
        return;
    }
    let times = if arguments.iter().any(|argument| argument == "--quick") { 2_000 } else { 100_000 };
    if arguments.iter().any(|argument| argument == "guard") {
        guards(times);
    } else {
        decides(times);
    }
}

fn decides(times: usize) {
    println!("ns a request             | without a fence          | with one");
    for (name, lines) in [("reads", READS), ("writes", WRITES)] {
        let requests = parsed(lines);
        let policies = [policy(None), policy(Some(fence()))].map(Arc::new);
        let [without, with] = in_turn(|at| round_of(&policies[at], &requests, times));
        println!("decide and count, {name:<6} | {without:<24} | {with}");
    }
}

/// Without guards, the proxy asks none.
fn guards(times: usize) {
    println!("ns that guards add       | 64, none matches         | 64, all match");
    for (name, lines) in [("reads", READS), ("writes", WRITES)] {
        let requests = parsed(lines);
        let mut guards = ["evict", "*"].map(|verb| {
            let mut guards = Guards::default();
            guards.replace(&(0..64).map(|number| guard(number, verb)).collect::<Vec<_>>(), Moment(0));
            guards
        });
        let mut now = 0;
        let [none, all] = in_turn(|at| {
            let begun = Instant::now();
            for _ in 0..times {
                for request in &requests {
                    now += 1_000_000;
                    black_box(guards[at].admit(black_box(request), Moment(now)).is_ok());
                }
            }
            begun.elapsed().as_nanos() as f64 / (times * requests.len()) as f64
        });
        println!("admit, {name:<17} | {none:<24} | {all}");
    }
}

/// A limit that lets every request of the bench pass.
fn guard(number: usize, verb: &str) -> Guard {
    let all = || vec!["*".to_owned()];
    let requests = RequestMatch {
        api_groups: all(),
        resources: all(),
        verbs: vec![verb.to_owned()],
        namespaces: all(),
        ..RequestMatch::default()
    };
    Guard {
        breaker: format!("ops/breaker-{}", number / 8),
        rule: format!("rule-{number}"),
        bucket: Some(Bucket { burst: 1000, limit: 1_000_000, interval_nanoseconds: 1_000_000_000 }),
        budget: None,
        part: None,
        trigger: Trigger::Normal,
        sleeping_window_nanoseconds: None,
        requests: vec![requests],
        urls: Vec::new(),
        reset: None,
        holds: false,
    }
}

fn parsed(lines: &[Line]) -> Vec<RequestInfo<'static>> {
    lines.iter().map(|(method, target)| RequestInfo::parse(method, target).unwrap()).collect()
}

/// The figures of two cases. In turn, so that both see the same machine.
fn in_turn(mut round_of: impl FnMut(usize) -> f64) -> [String; 2] {
    let mut figures = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            figures[at].push(round_of(at));
        }
    }
    figures.map(spread)
}

/// Nanoseconds a request.
fn round_of(policy: &Arc<Policy>, requests: &[RequestInfo<'_>], times: usize) -> f64 {
    let writes = Writes::default();
    let under = writes.under(policy);
    let begun = Instant::now();
    for _ in 0..times {
        for request in requests {
            let write = decide::written(policy, black_box(request)).map(|written| under.begin(written));
            black_box(decide::decide(policy, black_box(request)));
            drop(black_box(write));
        }
    }
    begun.elapsed().as_nanos() as f64 / (times * requests.len()) as f64
}

fn spread(mut figures: Vec<f64>) -> String {
    figures.sort_by(f64::total_cmp);
    format!("{:.0} ({:.0} to {:.0})", figures[figures.len() / 2], figures[0], figures[figures.len() - 1])
}

fn resources() -> Vec<ResourceMatch> {
    let of = |group: &str, resource: &str| ResourceMatch {
        api_groups: vec![group.to_owned()],
        resources: vec![resource.to_owned()],
    };
    vec![of("example.com", "widgets"), of("apps", "deployments"), of("", "configmaps"), of("", "secrets")]
}

/// A pod that owns all slots of a table with 64 pinned namespaces.
fn fence() -> Fence {
    let owned = |name: &str| name.to_owned();
    Fence {
        owner: Some(owned("widgets-1-normal")),
        slots: SlotSet::ALL.iter().map(|slot| (slot, owned("widgets-1-normal"))).collect(),
        namespaces: (0..64).map(|number| (format!("pinned-{number}"), owned("widgets-0-canary"))).collect(),
        resources: resources(),
        ..Fence::default()
    }
}

fn policy(fence: Option<Fence>) -> Policy {
    let selector = Selector::parse("ctrlmesh.kusionstack.io/sharding-hash in (1,2,3,4,5,6,7,8,9,10)").unwrap();
    let limit = Limit { relate_resources: resources(), selector, changed_at: None };
    let lock = Lock { namespace: "ops".to_owned(), name: "lead".to_owned(), shard: "widgets-1-normal".to_owned() };
    Policy { epoch: 7, limits: vec![limit], lock: Some(lock), fence, ..Policy::default() }
}
