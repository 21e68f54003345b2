//! Watches events, and prints each once, whatever becomes of the connection.
//!
//! The watch begins at the version of the list. Where the connection ends, it goes on behind the last event. Where the
//! API server does not have that version any more, events are listed anew, and those that were printed are left out.

use std::io::{Write as _, stderr};
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use http::StatusCode;
use k8s_openapi::api::events::v1::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::time;

use super::changes::{Batch, Changes};
use super::print::Printer;
use super::scope::{Family, Scope};
use super::{EventsError, entry};
use crate::cluster::paging::PAGE;
use crate::failure::causes;

/// After which the API server ends a watch, in seconds. The client gives up a connection that is silent for 30 s.
const WATCH_SECONDS: u32 = 25;

/// Before ShardingConfigs, or all events, are asked for again.
const PERIOD: Duration = Duration::from_secs(2);

/// After which the same is said again: on a quiet cluster nothing else tells one outage from the next.
const SAID_AGAIN: Duration = Duration::from_mins(1);

/// A watch, and what was made of it so far.
struct Follower<'a> {
    scope: &'a Scope,
    printer: Printer,
    changes: Changes,
    family: Option<Family>,
    /// Whether all events were listed once.
    is_listed: bool,
    /// What was last said on standard error, while nothing else has come.
    complaint: Option<(String, Instant)>,
}

/// Prints all events, and then those that come, for ever.
///
/// # Errors
/// The first list is refused, or the user has no right to watch.
pub(super) async fn follow(scope: &Scope, printer: Printer) -> Result<(), EventsError> {
    let (changes, family) = (Changes::default(), None);
    let mut follower = Follower { scope, printer, changes, family, is_listed: false, complaint: None };
    let start = || {
        let config = watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS);
        watcher(scope.api::<Event>(), config).default_backoff()
    };
    let mut changes = pin!(start());
    while let Some(change) = changes.next().await {
        match change {
            Ok(change) => follower.take(change).await?,
            Err(error) => {
                if follower.must_begin_anew(error)? {
                    time::sleep(PERIOD).await;
                    changes.set(start());
                }
            }
        }
    }
    Ok(())
}

impl Follower<'_> {
    async fn take(&mut self, change: watcher::Event<Event>) -> Result<(), EventsError> {
        // That a list begins does not say that the API server answers.
        if !matches!(change, watcher::Event::Init) {
            self.complaint = None;
        }
        let Some(batch) = self.changes.take(change) else { return Ok(()) };
        let is_missed = self.family.as_ref().is_none_or(|family| !family.has_all(&batch.events));
        if self.scope.root.is_some() && (batch.is_listing || is_missed) {
            self.read_family().await?;
        }
        self.print(&batch)
    }

    fn print(&mut self, batch: &Batch) -> Result<(), EventsError> {
        let names = self.family.as_ref().map(|family| &family.names);
        let entries = self.changes.unprinted(entry::entries(&batch.events, names));
        if !self.is_listed {
            self.scope.refuse_unknown(self.family.as_ref(), &entries)?;
        }
        if !entries.is_empty() || !self.is_listed {
            self.printer.print(&entries)?;
        }
        self.is_listed = true;
        Ok(())
    }

    /// The API server may be away for a while; but not at the first time.
    async fn read_family(&mut self) -> Result<(), EventsError> {
        loop {
            match self.scope.family().await {
                Ok(family) => {
                    self.family = family;
                    return Ok(());
                }
                Err(error) if !self.is_listed || error.is_forbidden() => return Err(error),
                Err(error) => self.complain(causes(&error))?,
            }
            time::sleep(PERIOD).await;
        }
    }

    /// Whether the watch must begin with a list. Else it goes on by itself.
    fn must_begin_anew(&mut self, error: watcher::Error) -> Result<bool, EventsError> {
        let status = status(&error);
        let (is_gone, is_forbidden) = (status == Some(StatusCode::GONE), status == Some(StatusCode::FORBIDDEN));
        match error {
            // The watcher would begin again at the same version. Where an open watch expires, it lists anew itself.
            watcher::Error::WatchStartFailed(_) if is_gone => return Ok(true),
            watcher::Error::WatchError(_) if is_gone => return Ok(false),
            watcher::Error::InitialListFailed(source) if !self.is_listed => return Err(self.scope.unread(source)),
            watcher::Error::InitialListFailed(source) if is_forbidden => return Err(self.scope.unread(source)),
            _ if is_forbidden => {
                return Err(EventsError::Watch { place: self.scope.place(), source: Box::new(error) });
            }
            error => self.complain(format!("watch events of {}: {}", self.scope.place(), causes(&error)))?,
        }
        Ok(false)
    }

    fn complain(&mut self, text: String) -> Result<(), EventsError> {
        let is_said = |(said, at): &(String, Instant)| *said == text && at.elapsed() < SAID_AGAIN;
        if !self.complaint.as_ref().is_some_and(is_said) {
            writeln!(stderr(), "Warning: {text}; trying again")?;
            self.complaint = Some((text, Instant::now()));
        }
        Ok(())
    }
}

/// The status with which the API server refuses.
fn status(error: &watcher::Error) -> Option<StatusCode> {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    };
    StatusCode::from_u16(code?).ok()
}
