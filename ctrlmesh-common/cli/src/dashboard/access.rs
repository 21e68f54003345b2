//! Decides who may ask the page's server for what: only the page that the user has opened.
//!
//! Another user of the machine does not know the token. A page of another site cannot send it, and a name of its own
//! that leads to this address is refused by the header `Host`.

use std::net::SocketAddr;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::rand;
use http::header::{AUTHORIZATION, HOST};
use http::{Method, Request, StatusCode};

/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// Path of what needs the token. All else is the same for everybody.
const API: &str = "/api/";

/// No random numbers can be had.
#[derive(Debug, thiserror::Error)]
#[error("make a token: the system gives no random numbers")]
pub(crate) struct RandomError;

/// Who may ask for what.
#[derive(Debug)]
pub(super) struct Access {
    /// Values of the header `Host`.
    hosts: [String; 2],
    token: String,
}

impl Access {
    /// With a new token.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub(super) fn new(address: SocketAddr) -> Result<Self, RandomError> {
        let mut bytes = [0_u8; TOKEN_BYTES];
        rand::fill(&mut bytes).map_err(|_unavailable| RandomError)?;
        let token = bytes.map(|byte| format!("{byte:02x}")).concat();
        Ok(Self { hosts: [address.to_string(), format!("localhost:{}", address.port())], token })
    }

    pub(super) fn token(&self) -> &str {
        &self.token
    }

    /// # Errors
    /// The status by which the request is refused.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), StatusCode> {
        let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if !self.hosts.iter().any(|host| host == header(HOST)) {
            return Err(StatusCode::FORBIDDEN);
        }
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return Err(StatusCode::METHOD_NOT_ALLOWED);
        }
        let token = header(AUTHORIZATION).strip_prefix("Bearer ").unwrap_or_default();
        if request.uri().path().starts_with(API)
            && verify_slices_are_equal(token.as_bytes(), self.token.as_bytes()).is_err()
        {
            return Err(StatusCode::UNAUTHORIZED);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access::new(SocketAddr::from(([127, 0, 0, 1], 8000))).unwrap()
    }

    fn asked(access: &Access, method: &str, path: &str, host: &str, token: &str) -> Result<(), StatusCode> {
        let request = Request::builder().method(method).uri(path).header("host", host);
        access.check(&request.header("authorization", format!("Bearer {token}")).body(()).unwrap())
    }

    #[test]
    fn the_page_itself_is_read_without_a_token() {
        for host in ["127.0.0.1:8000", "localhost:8000"] {
            assert_eq!(asked(&access(), "GET", "/", host, ""), Ok(()), "{host}");
        }
    }

    #[test]
    fn what_is_in_the_cluster_needs_the_token() {
        let access = access();
        let token = access.token().to_owned();
        assert_eq!(token.len(), 2 * TOKEN_BYTES);
        assert_eq!(asked(&access, "GET", "/api/status", "127.0.0.1:8000", &token), Ok(()));
        for wrong in ["", &token[1..], &format!("{token}0"), &token.replace(&token[..1], "x")] {
            let refused = asked(&access, "GET", "/api/status", "127.0.0.1:8000", wrong);
            assert_eq!(refused, Err(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        assert_ne!(token, self::access().token());
    }

    #[test]
    fn other_hosts_and_other_methods_are_refused() {
        let access = access();
        for host in ["example.com", "127.0.0.1", "127.0.0.1:8001", "example.com:8000", ""] {
            assert_eq!(asked(&access, "GET", "/", host, access.token()), Err(StatusCode::FORBIDDEN), "{host}");
        }
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            let refused = asked(&access, method, "/", "127.0.0.1:8000", access.token());
            assert_eq!(refused, Err(StatusCode::METHOD_NOT_ALLOWED), "{method}");
        }
    }
}
