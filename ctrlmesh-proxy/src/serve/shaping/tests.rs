use std::io;

use ctrlmesh_common::policy::fault::{ApiFault, WHOLE};
use ctrlmesh_common::policy::{Fault, Policy};
use ctrlmesh_request::request::RequestInfo;
use futures::future::poll_fn;
use http::Request;
use tokio::sync::watch;

use super::*;
use crate::fault::PodFaults;
use crate::metrics::Metrics;
use crate::net::body::Relay;
use crate::net::memory_budget::MemoryLimit;

const SECOND: Duration = Duration::from_secs(1);

/// A body of which these faults were met, and the policy that has them.
fn shaped(body: &'static [u8], kinds: &[ApiFaultKind]) -> (Content, watch::Sender<Arc<Policy>>) {
    let fault = |kind: &ApiFaultKind| Fault {
        injection: "ops/storm".to_owned(),
        fault: "0".to_owned(),
        delay: None,
        abort: None,
        api_fault: Some(ApiFault { kind: *kind, share: WHOLE }),
        requests: Vec::new(),
        http: Vec::new(),
        times: None,
        includes_lock: false,
    };
    let policy = Policy { faults: kinds.iter().map(fault).collect(), ..Policy::default() };
    let (sender, current) = watch::channel(Arc::new(policy));
    let metrics = Metrics::new();
    let info = RequestInfo::parse("GET", "/api/v1/pods?watch=1").unwrap();
    let met = PodFaults::new(current, &metrics).met(&Request::new(()), &info, "/api/v1/pods", false);
    let budget = MemoryBudget::for_process(MemoryLimit(64 << 20), &metrics);
    let content = Content::Plain(Relay::full(body));
    (Shaped::within(content, true, met, &budget, Drain::default()), sender)
}

/// Each part of a body and when it came; then how it ended.
async fn read(mut content: Content) -> (Vec<(Duration, Bytes)>, io::Result<()>) {
    let (start, mut parts) = (Instant::now(), Vec::new());
    loop {
        match poll_fn(|cx| content.poll_frame(cx)).await {
            None => return (parts, Ok(())),
            Some(Err(error)) => return (parts, Err(io::Error::other(error))),
            Some(Ok(frame)) => parts.push((start.elapsed(), frame.into_data().unwrap())),
        }
    }
}

fn whole(parts: &[(Duration, Bytes)]) -> Vec<u8> {
    parts.iter().flat_map(|(_, part)| part.to_vec()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_is_whole_and_keeps_its_speed() {
    let (content, _policy) = shaped(b"0123456789abcdef", &[ApiFaultKind::SlowBody { bytes_per_second: 4 }]);
    let (parts, ended) = read(content).await;
    assert!(ended.is_ok() && whole(&parts) == b"0123456789abcdef");
    for (at, (came, _)) in parts.iter().enumerate() {
        let expected = SECOND * u32::try_from(at).unwrap() / 4;
        assert!(*came >= expected && *came <= expected + SECOND / 20, "part {at} came after {came:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cut_body_misses_its_end_and_breaks() {
    for (body, kept) in [(&b"{\"type\":1}\n"[..], &b"{\"type\":1"[..]), (b"ab", b"")] {
        let (content, _policy) = shaped(body, &[ApiFaultKind::CutWatch { after_nanoseconds: 0 }]);
        let (parts, ended) = read(content).await;
        assert!(ended.is_err());
        assert_eq!(whole(&parts), kept);
    }
}

#[tokio::test(start_paused = true)]
async fn delayed_frames_come_later_by_just_that() {
    let (content, _policy) = shaped(b"event", &[ApiFaultKind::DelayEvents { nanoseconds: 3_000_000_000 }]);
    let (parts, ended) = read(content).await;
    assert!(ended.is_ok() && whole(&parts) == b"event");
    assert!(parts[0].0 >= 3 * SECOND && parts[0].0 < 4 * SECOND, "{parts:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_lifted_comes_at_once() {
    let hour = 3_600_000_000_000;
    for kind in [ApiFaultKind::DelayEvents { nanoseconds: hour }, ApiFaultKind::SlowBody { bytes_per_second: 1 }] {
        let (content, policy) = shaped(b"0123456789", &[kind]);
        let lift = async {
            time::sleep(SECOND).await;
            policy.send_replace(Arc::default());
        };
        let ((parts, ended), ()) = tokio::join!(read(content), lift);
        assert!(ended.is_ok() && whole(&parts) == b"0123456789", "{kind:?}");
        assert!(parts.last().unwrap().0 < 2 * SECOND, "{parts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn faults_that_shape_nothing_leave_the_body_as_it_is() {
    let (content, _policy) = shaped(b"body", &[ApiFaultKind::GoAway]);
    assert!(matches!(content, Content::Plain(_)));
}
