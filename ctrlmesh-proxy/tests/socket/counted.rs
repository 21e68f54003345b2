//! The metrics of requests.

use crate::harness::until;
use crate::harness::watches::{Bed, WATCH, event, pods, sees};
use http::Version;

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

async fn counted(bed: &Bed, outcome: &str) -> f64 {
    let name = "ctrlmesh_proxy_requests_total{verb=\"watch\",outcome=";
    bed.proxy.metric(&format!("{name}\"{outcome}\"}}")).await
}

async fn under_way(bed: &Bed) -> f64 {
    bed.proxy.metric("ctrlmesh_proxy_streams").await
}

#[tokio::test]
async fn a_request_is_counted_when_its_answer_ends() {
    for version in BOTH {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let (mut watching, _) = bed.watch(version, WATCH, &[]).await;
        watching.send.send_data(event("ADDED", "x", 6)).await.unwrap();
        assert_eq!(watching.sees().await, sees("ADDED", "x"));
        assert_eq!((counted(&bed, "ok").await, under_way(&bed).await), (0.0, 1.0), "{version:?}");
        watching.send = crate::harness::upstream::streamed().0;
        assert_eq!(watching.next().await, None);
        until("the count", || async { counted(&bed, "ok").await == 1.0 && under_way(&bed).await == 0.0 }).await;
    }
}

#[tokio::test]
async fn a_request_whose_client_goes_away_is_counted_as_aborted() {
    for version in BOTH {
        let mut bed = Bed::new(&pods(1, "team=a")).await;
        let (watching, _) = bed.watch(version, WATCH, &[]).await;
        drop(watching);
        until("the count", || async { counted(&bed, "aborted").await == 1.0 && under_way(&bed).await == 0.0 }).await;
        assert_eq!(counted(&bed, "ok").await, 0.0, "{version:?}");
    }
}

#[tokio::test]
async fn answers_of_any_kind_count_as_whole() {
    for version in BOTH {
        let bed = Bed::new(&pods(1, "team=a")).await;
        let mut client = crate::harness::client::Client::connect(&bed.pki, bed.proxy.address, version).await;
        for method in ["GET", "GET", "DELETE"] {
            let request = http::Request::builder().method(method).uri("/api/v1/namespaces/x");
            client.ask(request.body(http_body_util::Full::default()).unwrap()).await;
        }
        let name = "ctrlmesh_proxy_requests_total{verb=";
        for (verb, count) in [("get", 2.0), ("delete", 1.0)] {
            let metric = format!("{name}\"{verb}\",outcome=\"ok\"}}");
            until("the count", || async { bed.proxy.metric(&metric).await == count }).await;
        }
    }
}
