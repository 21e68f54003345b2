use std::collections::VecDeque;
use std::sync::Mutex;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

impl Leadership {
    /// Without an election: what is called says whether this replica leads from then on.
    pub(crate) fn by_hand() -> (impl Fn(bool), Self) {
        let (state, leadership) = watch::channel(State::default());
        let set = move |leads: bool| {
            let now = leads.then(Instant::now);
            let (until, until_boot) = (now.map(|now| now + LEASE_DURATION), boot_clock::now() + LEASE_DURATION);
            state.send_replace(State { until, until_boot, since: now, other: None });
        };
        (set, Self { state: leadership, step_down: Arc::default() })
    }
}

#[test]
fn a_deleted_lease_is_free_once_its_holder_must_have_noticed() {
    let begun = Instant::now();
    let mut absence = Absence::default();
    assert!(!absence.is_over(true, begun));
    assert!(!absence.is_over(true, begun + RENEW_DEADLINE), "its holder may believe until then");
    assert!(absence.is_over(true, begun + LEASE_DURATION));
    let mut unknown = Absence::default();
    assert!(!unknown.is_over(false, begun));
    assert!(!unknown.is_over(false, begun + RETRY_PERIOD), "its holder is about to make it anew");
    assert!(unknown.is_over(false, begun + ABSENCE_GRACE));
}

/// An API server with one Lease, which refuses writes of an old version.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Stored>>);

#[derive(Default)]
struct Stored {
    lease: Option<Value>,
    version: u64,
    /// Answers to the next releases.
    refusals: VecDeque<u16>,
    /// How many releases were tried.
    returns: usize,
}

impl Server {
    /// A client that gets answers while `is_reached` is true.
    fn client(&self, is_reached: watch::Receiver<bool>) -> Client {
        let this = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (this, is_reached) = (this.clone(), is_reached.clone());
            async move {
                if !*is_reached.borrow() {
                    return std::future::pending().await;
                }
                let method = request.method().clone();
                let body = request.into_body().collect_bytes().await?;
                let (code, answer) = this.answer(&method, serde_json::from_slice(&body).ok());
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, kube::Error>(Response::builder().status(code).body(answer).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn answer(&self, method: &Method, said: Option<Value>) -> (u16, Value) {
        let stored = &mut *self.0.lock().unwrap();
        match (method, said) {
            (&Method::GET, _) => stored.lease.clone().map_or_else(|| failed(404), |one| (200, one)),
            (&Method::POST, Some(_)) if stored.lease.is_some() => failed(409),
            (&Method::POST | &Method::PUT, Some(said)) => stored.write(method, said),
            _ => failed(400),
        }
    }

    fn holder(&self) -> Option<String> {
        let stored = self.0.lock().unwrap();
        stored.lease.as_ref()?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }
}

impl Stored {
    fn write(&mut self, method: &Method, mut said: Value) -> (u16, Value) {
        let is_return = said["spec"]["holderIdentity"].is_null();
        self.returns += usize::from(is_return);
        if let Some(code) = is_return.then(|| self.refusals.pop_front()).flatten() {
            return failed(code);
        }
        let known = &said["metadata"]["resourceVersion"];
        if *method == Method::PUT && *known != self.version.to_string().as_str() {
            return failed(409);
        }
        self.version += 1;
        said["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(said.clone());
        (200, said)
    }
}

fn failed(code: u16) -> (u16, Value) {
    let reason = if code == 404 { "NotFound" } else { "Other" };
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason}))
}

fn candidate(identity: &str) -> Candidate {
    Candidate {
        lease: "one".to_owned(),
        identity: identity.to_owned(),
        address: format!("{identity}:1"),
        leader: Gauge::default(),
        readiness: Readiness::default(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_is_cut_off_stops_before_another_leads() {
    let server = Server::default();
    for late in 0..20 {
        let ((cut, reached), drain) = (watch::channel(true), Drain::default());
        let (_keep, always) = watch::channel(true);
        let mut one = campaign(server.client(reached), "ns", candidate("one"), &drain);
        one.acquired().await;
        // Vary the phase between the two replicas.
        time::sleep(RETRY_PERIOD * late / 20).await;
        let mut other = campaign(server.client(always), "ns", candidate("other"), &drain);
        time::sleep(Duration::from_secs(20)).await;
        assert!(one.is_held() && !other.is_held());
        cut.send_replace(false);
        let begun = Instant::now();
        other.acquired().await;
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        assert!(!one.is_held(), "two lead");
        drain.finish(Duration::from_secs(30)).await;
        server.0.lock().unwrap().lease = None;
    }
}

#[tokio::test(start_paused = true)]
async fn the_release_is_retried_unless_it_is_refused() {
    for (refusals, returns, holder) in [(vec![500, 409, 500], 4, None), (vec![403; 9], 1, Some("one".to_owned()))] {
        let (server, drain) = (Server::default(), Drain::default());
        let (_keep, always) = watch::channel(true);
        let mut one = campaign(server.client(always), "ns", candidate("one"), &drain);
        one.acquired().await;
        server.0.lock().unwrap().refusals = refusals.into();
        assert!(drain.finish(Duration::from_secs(10)).await);
        assert_eq!(server.holder(), holder);
        assert_eq!(server.0.lock().unwrap().returns, returns);
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_steps_down_but_cannot_release_waits() {
    let (server, drain) = (Server::default(), Drain::default());
    let (_keep, always) = watch::channel(true);
    let mut one = campaign(server.client(always.clone()), "ns", candidate("one"), &drain);
    one.acquired().await;
    let other = campaign(server.client(always), "ns", candidate("other"), &drain);
    time::sleep(RETRY_PERIOD * 2).await;
    server.0.lock().unwrap().refusals = vec![500; 1000].into();
    one.step_down();
    let begun = Instant::now();
    while !other.is_held() {
        time::sleep(Duration::from_millis(100)).await;
        assert_ne!(one.other().as_deref(), Some("one:1"), "that is not another");
        assert!(begun.elapsed() < LEASE_DURATION + 2 * RETRY_PERIOD, "nobody takes it");
    }
    time::sleep(STEP_DOWN_PAUSE).await;
    assert_eq!(one.other().as_deref(), Some("other:1"));
    assert_eq!(server.holder().as_deref(), Some("other"));
    server.0.lock().unwrap().refusals.clear();
    drain.finish(Duration::from_secs(30)).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_leader_does_ends_with_its_lead() {
    let (lead, leadership) = Leadership::by_hand();
    let (log, mut events) = tokio::sync::mpsc::unbounded_channel();
    let (begun, ended) = (log.clone(), log);
    let leads = move || {
        begun.send("begun").unwrap();
        std::future::pending()
    };
    Drain::default().spawn(leadership.while_held(leads, move || ended.send("ended").unwrap()));
    for _ in 0..2 {
        assert!(time::timeout(LEASE_DURATION, events.recv()).await.is_err(), "another replica leads");
        lead(true);
        assert_eq!(events.recv().await, Some("begun"));
        lead(false);
        assert_eq!(events.recv().await, Some("ended"));
    }
}
