use ctrlmesh_common::policy::Lock;
use tokio::io;
use tokio::task::JoinSet;

use super::*;

fn plan() -> LockPlan {
    let lock = Lock { namespace: "ops".into(), name: "lead".into(), shard: "s1".into() };
    let rename = Rename { on_server: lock.per_shard(), lock };
    LockPlan { rename, in_path: true, in_fields: None, in_body: true, unless_lock: None }
}

/// A request whose body does not end, and the tasks that keep it open.
async fn unfinished(first: &'static [u8]) -> (Request<Relay>, JoinSet<()>) {
    let (ours, theirs) = io::duplex(1 << 20);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut send, connection) = h2::client::handshake(theirs).await.unwrap();
        let request = Request::put("https://k/").header(header::CONTENT_TYPE, "application/json");
        let (_response, mut body) = send.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(Bytes::from_static(first), false).unwrap();
        drop(connection.await);
    });
    let mut connection = h2::server::handshake(ours).await.unwrap();
    let (request, respond) = connection.accept().await.unwrap().unwrap();
    tasks.spawn(async move {
        let _open = respond;
        while connection.accept().await.is_some() {}
    });
    (request.map(|body| Relay::http2(body, None)), tasks)
}

#[tokio::test(start_paused = true)]
async fn a_lock_has_a_deadline_of_its_own() {
    for (deadline, waited) in [(Duration::from_mins(2), BODY_TIMEOUT), (Duration::from_secs(2), Duration::from_secs(2))]
    {
        let (sent, _open) = unfinished(b"{").await;
        let (budget, waits) = (CollectBudget::new(None), WaitTime::default());
        let error = rename_body(sent, "update", &plan(), deadline, &budget, &waits).await.unwrap_err();
        assert!(matches!(error, LockedError::Slow { deadline } if deadline == waited), "{error}");
        assert_eq!(waits.total(), waited);
    }
}
