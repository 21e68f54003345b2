//! Has lists answered from an older state, where a fault says so.

use std::rc::{Rc, Weak};

use ctrlmesh_request::decide;
use ctrlmesh_request::request::RequestInfo;
use ctrlmesh_request::rewrite;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use tokio::time;

use crate::fault::{MetFaults, Recording};
use crate::net::body::Relay;
use crate::policy::InForce;
use crate::serve::failure::Failure;
use crate::serve::pending::Pending;
use crate::serve::target::with_target;
use crate::session::Session;
use crate::upstream::UsedConnection;
use crate::watch::splice;
use crate::watch::splice::RequestTemplate;

impl Session {
    /// Has the API server answer a list from an older state, where one is known that the list may be answered from.
    /// Until the versions of its collection have been recorded for long enough, none is.
    pub(super) async fn send_stale(
        self: &Rc<Self>,
        mut request: Request<Relay>,
        info: &RequestInfo<'_>,
        target: &PathAndQuery,
        pending: &Pending,
    ) -> Result<Response<Relay>, Failure> {
        let send = async |request| self.send(&UsedConnection::default(), request, false, |_| {}).await;
        let Some((met, reading)) = pending.stale_list() else { return send(request).await };
        let template = || RequestTemplate::new(&request, target.clone(), info);
        let version = self.past_version(&template, info, met);
        let version = version.filter(|version| self.may_list_at(*version, info, reading.policy()));
        let Some(stale) = version.and_then(|version| at_version(request.uri(), version)) else {
            return send(request).await;
        };
        let template = template();
        let meant = std::mem::replace(request.uri_mut(), stale);
        let answered = send(request).await?;
        if matches!(answered.status(), StatusCode::GONE | StatusCode::BAD_REQUEST) {
            // A server that cannot tell that state is asked as the client means it.
            let meant = meant.path_and_query().and_then(|meant| template.request(meant.clone()).ok());
            return send(meant.ok_or(Failure::Target)?).await;
        }
        met.count_stale(target.path());
        Ok(answered)
    }

    /// The version that the collection had some time ago. From now on its versions are recorded.
    fn past_version(
        self: &Rc<Self>,
        template: &dyn Fn() -> RequestTemplate,
        info: &RequestInfo<'_>,
        met: &MetFaults,
    ) -> Option<u64> {
        let recorded = met.recorded(info)?;
        let version = met.past_version(&recorded);
        // Without memory for the request, nothing is recorded.
        let budget = self.resources.unread.budget();
        let begun = met.record(recorded).and_then(|begun| Some((begun, template().reserved(budget)?)));
        if let Some((recording, template)) = begun {
            let recording = record(Rc::downgrade(self), template, recording, met.clone());
            self.server.drain.spawn_local(recording);
        }
        version
    }

    /// Whether that state answers the client, which goes on from it then.
    fn may_list_at(&self, version: u64, info: &RequestInfo<'_>, policy: &InForce) -> bool {
        let is_wanted = decide::oldest_wanted(info).is_some_and(|oldest| oldest <= version);
        let since_change = policy.changed_at_of(info.resource_key()).is_none_or(|at| at <= version);
        // A watch from a version that may have been read under another policy is refused, and the client lists again.
        is_wanted && since_change && self.policy.is_newer_than_past(policy, info, version)
    }
}

/// Records the versions of a collection, as long as the fault is there and the client's connection is open.
async fn record(session: Weak<Session>, template: RequestTemplate, recording: Recording, met: MetFaults) {
    let Some(drain) = session.upgrade().map(|session| session.server.drain.clone()) else { return };
    let recording = async {
        while let Some(session) = session.upgrade() {
            let Ok(info) = template.info() else { return };
            // So that it is known which versions are newer than an earlier policy.
            Box::pin(splice::clear(&session, &template)).await;
            let Ok(version) = Box::pin(splice::version(&session, &template, &info)).await else { return };
            drop(session);
            recording.add(version);
            time::sleep(recording.interval()).await;
        }
    };
    tokio::select! {
        () = recording => {}
        () = met.into_lifted(drain) => {}
    }
}

fn at_version(uri: &Uri, version: u64) -> Option<Uri> {
    with_target(uri, rewrite::at_version(uri.path_and_query()?.as_str(), version)?)
}
