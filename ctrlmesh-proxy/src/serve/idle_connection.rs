//! A connection over HTTP/1.1 that takes one request after the other.

use std::cell::RefCell;

use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::SendRequest;

/// The idle connection to one server, if there is one.
#[derive(Debug)]
pub(super) struct IdleConnection<B>(RefCell<Option<SendRequest<B>>>);

/// Why a request was not answered.
#[derive(Debug)]
pub(super) enum NotAnswered<E> {
    /// No connection could be opened.
    Open(E),
    /// The new connection ended before anything of the request was sent.
    Unsent(hyper::Error),
    /// Perhaps it was carried out.
    Sent(hyper::Error),
}

impl<B: Body + 'static> IdleConnection<B> {
    /// Sends a request over the idle connection, or one that it opens, once.
    pub(super) async fn send<E>(
        &self,
        mut request: Request<B>,
        open: impl AsyncFn() -> Result<SendRequest<B>, E>,
    ) -> Result<Response<Incoming>, NotAnswered<E>> {
        let mut reused = None;
        if let Some(mut sender) = self.0.take()
            && sender.ready().await.is_ok()
        {
            reused = Some(sender);
        }
        loop {
            let (mut sender, is_reused) = match reused.take() {
                Some(sender) => (sender, true),
                None => (open().await.map_err(NotAnswered::Open)?, false),
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    // It is idle once the response was read.
                    self.0.replace(Some(sender));
                    return Ok(response);
                }
                Err(mut error) => match error.take_message() {
                    // Closed while it was idle: nothing of the request was sent.
                    Some(unsent) if is_reused => request = unsent,
                    Some(_unsent) => return Err(NotAnswered::Unsent(error.into_error())),
                    None => return Err(NotAnswered::Sent(error.into_error())),
                },
            }
        }
    }
}

impl<B> IdleConnection<B> {
    /// Whether there is one.
    pub(super) fn is_open(&self) -> bool {
        self.0.borrow().as_ref().is_some_and(|sender| !sender.is_closed())
    }

    /// Makes a connection the idle one.
    pub(super) fn keep(&self, sender: SendRequest<B>) {
        self.0.replace(Some(sender));
    }
}

impl<B> Default for IdleConnection<B> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}
