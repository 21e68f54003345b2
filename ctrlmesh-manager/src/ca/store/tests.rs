use std::collections::VecDeque;
use std::sync::Mutex;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

/// On the paused clock.
const PATIENCE: Duration = Duration::from_hours(1);

/// An API server with a published trust bundle, whose Secret is gone.
#[derive(Clone)]
struct Plane {
    authorities: Authorities,
    published: bool,
    /// Versions of the Lease, one a read. After the last one the Secret exists again.
    leases: VecDeque<&'static str>,
    /// Whether the first read of the Secret after each read of the Lease fails.
    flaps: bool,
    fails: bool,
    made: usize,
}

fn authorities() -> Authorities {
    let rotation = |kind| {
        let names = Names::of(["kubernetes"]);
        Rotation::begin(kind, &names, Duration::from_hours(24), SystemTime::now(), Vec::new()).unwrap()
    };
    Authorities { mesh: rotation(AuthorityKind::Mesh), manager: rotation(AuthorityKind::Manager) }
}

fn plane(leases: impl IntoIterator<Item = &'static str>) -> Plane {
    let leases = leases.into_iter().collect();
    let authorities = authorities();
    Plane { authorities, published: true, leases, flaps: false, fails: false, made: 0 }
}

impl Plane {
    fn answer(&mut self, method: &Method, path: &str) -> (u16, Value) {
        let failed = |code: u16, reason| {
            (code, json!({"kind": "Status", "status": "Failure", "message": "", "code": code, "reason": reason}))
        };
        let secret = format!("/secrets/{}", names::CA_SECRET);
        if method == Method::POST {
            self.made += 1;
            return (201, json!({"metadata": {}}));
        }
        match path {
            path if path.ends_with("/leases/leader") => {
                self.fails = self.flaps;
                let version = self.leases.pop_front().unwrap();
                (200, json!({"metadata": {"resourceVersion": version}}))
            }
            path if path.ends_with(&secret) && std::mem::take(&mut self.fails) => failed(500, "InternalError"),
            path if path.ends_with(&secret) && self.leases.is_empty() => {
                (200, serde_json::to_value(secret_of(&self.authorities)).unwrap())
            }
            path if path.ends_with("/configmaps") && self.published => {
                let [mesh, manager] = self.authorities.bundles();
                let data = json!({root_ca::KEY: mesh, root_ca::MANAGER_KEY: manager});
                (200, json!({"metadata": {}, "items": [{"metadata": {}, "data": data}]}))
            }
            path if path.ends_with("/configmaps") || path.ends_with("/endpointslices") => {
                (200, json!({"metadata": {}, "items": []}))
            }
            path if path.ends_with("/services/kubernetes") => (200, json!({"metadata": {}})),
            _ => failed(404, "NotFound"),
        }
    }
}

/// Opens the store, as often as it takes.
async fn opened(plane: Plane) -> (Arc<Authorities>, Plane) {
    let plane = Arc::new(Mutex::new(plane));
    let asked = Arc::clone(&plane);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (code, body) = asked.lock().unwrap().answer(request.method(), request.uri().path());
        let body = Body::from(serde_json::to_vec(&body).unwrap());
        futures::future::ok::<_, kube::Error>(Response::builder().status(code).body(body).unwrap())
    });
    let client = Client::new(service, "default");
    let mut lease_watch = LeaseWatch::of("leader".to_owned());
    let open = async {
        loop {
            let wanted = AuthoritySettings {
                api_server: Vec::new(),
                manager: Names::of(["manager"]),
                validity: Duration::from_hours(24),
            };
            let opened = CaStore::open(client.clone(), "ops", wanted, &mut lease_watch);
            match Box::pin(opened).await {
                Err(CaStoreError::Secret(_)) => time::sleep(Duration::from_secs(1)).await,
                opened => break opened.unwrap(),
            }
        }
    };
    let ca_store = time::timeout(PATIENCE, open).await.expect("the store to be open");
    let plane = plane.lock().unwrap().clone();
    (ca_store.current(), plane)
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_renews_its_lease_is_waited_for() {
    let renewed = ["1", "2", "2", "3", "3", "3"].into_iter().chain(["4", "5"].repeat(20));
    let (found, plane) = opened(plane(renewed)).await;
    assert_eq!(found.bundles(), plane.authorities.bundles(), "as it was");
    assert_eq!(plane.made, 0);
}

#[tokio::test(start_paused = true)]
async fn without_a_leader_new_authorities_are_made_despite_errors() {
    for flaps in [false, true] {
        let (found, plane) = opened(Plane { flaps, ..plane(["1"; 40]) }).await;
        assert_eq!(plane.made, 1, "flaps: {flaps}");
        assert_eq!(plane.leases.len(), 33, "flaps: {flaps}: one look, and six at which it was as before");
        for (found, before) in found.bundles().iter().zip(plane.authorities.bundles()) {
            assert!(found.ends_with(&before) && *found != before, "what it signed is trusted");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_trust_bundle_authorities_are_made_at_once() {
    let began = Instant::now();
    let (_, plane) = opened(Plane { published: false, ..plane(["1"]) }).await;
    assert_eq!((plane.made, plane.leases.len()), (1, 1), "nobody is asked who leads");
    assert_eq!(began.elapsed(), Duration::ZERO);
}
