//! Those who follow requests now.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use ctrlmesh_runtime::sync::{lock, read, write};
use http::uri::PathAndQuery;
use tokio::sync::mpsc;
use tokio::sync::mpsc::{Receiver, Sender};

use super::filter::TraceQuery;
use super::line::{TraceLine, TracedRequest};
use super::request::LiveRequest;
use crate::spans::{Decision, RequestOrigin};

/// Those who may follow at once.
const MAX_LISTENERS: usize = 8;

/// Lines that wait for a reader. Later ones are omitted.
const MAX_WAITING: usize = 256;

/// The window of a rate.
const SECOND: Duration = Duration::from_secs(1);

/// Everyone who follows requests of this process.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Whether there is one.
    any: AtomicBool,
    all: RwLock<Vec<Arc<Listener>>>,
}

/// One who follows requests.
#[derive(Debug)]
pub(super) struct Listener {
    query: TraceQuery,
    lines: Sender<String>,
    shown: Mutex<Shown>,
}

/// What was shown within the present second.
#[derive(Debug)]
struct Shown {
    since: Instant,
    count: u32,
    /// Since somebody asked last.
    omitted: u64,
}

impl Listeners {
    /// Whether anyone follows requests of this process.
    pub fn any(&self) -> bool {
        // A request that comes while somebody begins to follow may be missed.
        self.any.load(Ordering::Relaxed)
    }

    /// Begins to follow a request. `None` where nobody wants to see it.
    pub fn begin(&self, of: &RequestOrigin<'_>, target: &PathAndQuery) -> Option<Box<LiveRequest>> {
        if !self.any() {
            return None;
        }
        let may_show = |one: &&Arc<Listener>| one.query.may_show(of.pod, of.info);
        let listeners: Vec<_> = read(&self.all).iter().filter(may_show).cloned().collect();
        (!listeners.is_empty()).then(|| Box::new(LiveRequest::new(of, target, listeners)))
    }

    /// Adds one who follows, and the lines for it. `None` where there are enough.
    pub(super) fn add(&self, query: TraceQuery) -> Option<(Arc<Listener>, Receiver<String>)> {
        let mut all = write(&self.all);
        if all.len() >= MAX_LISTENERS {
            return None;
        }
        let (lines, received) = mpsc::channel(MAX_WAITING);
        let shown = Mutex::new(Shown { since: Instant::now(), count: 0, omitted: 0 });
        let listener = Arc::new(Listener { query, lines, shown });
        // Under the lock, as below: what was set last is what is so.
        self.any.store(true, Ordering::Relaxed);
        all.push(listener.clone());
        drop(all);
        Some((listener, received))
    }

    pub(super) fn remove(&self, listener: &Arc<Listener>) {
        let mut all = write(&self.all);
        all.retain(|one| !Arc::ptr_eq(one, listener));
        self.any.store(!all.is_empty(), Ordering::Relaxed);
    }
}

impl Listener {
    pub(super) fn show(&self, request: &TracedRequest, decision: Decision) {
        if !self.query.shows(decision) {
            return;
        }
        let mut shown = lock(&self.shown);
        if shown.since.elapsed() >= SECOND {
            (shown.since, shown.count) = (Instant::now(), 0);
        }
        let has_room = shown.count < self.query.filter.rate;
        let line = || TraceLine::Request(Box::new(request.clone())).text();
        if has_room && self.lines.try_send(line()).is_ok() {
            shown.count += 1;
        } else {
            shown.omitted += 1;
        }
    }

    /// How many requests were not shown since the last call.
    pub(super) fn omitted(&self) -> u64 {
        std::mem::take(&mut lock(&self.shown).omitted)
    }
}

impl TraceLine {
    /// With its end.
    pub(super) fn text(&self) -> String {
        // Maps with keys that are no text are all that cannot be written, and there is none.
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::TraceFilter;
    use super::*;

    fn query(rate: u32) -> TraceQuery {
        TraceQuery { pod: None, filter: TraceFilter { rate, ..TraceFilter::default() } }
    }

    fn begin(listeners: &Listeners) -> Option<Box<LiveRequest>> {
        let of = RequestOrigin {
            method: "GET",
            path: "/healthz",
            info: None,
            pod: "ops/op-0",
            shard: None,
            connection: None,
        };
        listeners.begin(&of, &PathAndQuery::from_static("/healthz"))
    }

    #[test]
    fn nobody_follows_no_request() {
        let listeners = Listeners::default();
        assert!(begin(&listeners).is_none());
        let (listener, _lines) = listeners.add(query(1)).unwrap();
        assert!(begin(&listeners).is_some());
        listeners.remove(&listener);
        assert!(begin(&listeners).is_none());
    }

    #[test]
    fn what_is_too_much_is_counted() {
        let listeners = Listeners::default();
        let (listener, mut lines) = listeners.add(query(1000)).unwrap();
        for _ in 0..MAX_WAITING + 3 {
            drop(begin(&listeners));
        }
        assert_eq!((listener.omitted(), listener.omitted()), (3, 0));
        let line: TraceLine = serde_json::from_str(&lines.try_recv().unwrap()).unwrap();
        assert!(matches!(line, TraceLine::Request(request) if request.pod == "ops/op-0"));
    }

    #[test]
    fn only_so_many_may_follow() {
        let listeners = Listeners::default();
        let all: Vec<_> = (0..MAX_LISTENERS).map(|_| listeners.add(query(1)).unwrap()).collect();
        assert!(listeners.add(query(1)).is_none());
        listeners.remove(&all[0].0);
        assert!(listeners.add(query(1)).is_some());
    }
}
