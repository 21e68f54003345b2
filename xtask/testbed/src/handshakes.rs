//! Finds clients that dialled the API server and refused its certificate.
//!
//! They make no request, so no audit log has them. The server's own log does, when it is told to be verbose.

use std::net::{IpAddr, SocketAddr};

/// Has the API server log handshakes that fail: they are of a level that it is usually silent about.
pub(crate) const LOGGED: &str = "--vmodule=secure_serving=5";

/// What it says before the address of whoever dialled.
const FAILED: &str = "http: TLS handshake error from ";

/// What it says where the client ended the handshake by an alert, as one does that does not believe it. A connection
/// that was merely closed, such as a probe's, is another thing.
const ALERT: &str = "remote error: tls: ";

/// Everybody in an API server's log that did not believe it, each as often as that happened.
pub(crate) fn unbelieving(log: &str) -> Vec<IpAddr> {
    let from = |line: &str| {
        let (address, why) = line.split_once(FAILED)?.1.split_once(": ")?;
        let address: SocketAddr = address.parse().ok()?;
        why.starts_with(ALERT).then_some(address.ip())
    };
    log.lines().filter_map(from).collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn who_did_not_believe_the_server_is_found_and_nobody_else() {
        let log = "I1123 09:00:00.000001 7 secure_serving.go:303] http: TLS handshake error from 10.214.1.5:40112: remote error: tls: bad certificate\n\
            I1123 09:00:00.000002 7 secure_serving.go:303] http: TLS handshake error from 10.214.1.6:40113: EOF\n\
            I1123 09:00:00.000003 7 httplog.go:134] \"HTTP\" verb=\"GET\" srcIP=\"10.214.1.7:40114\"\n\
            I1123 09:00:00.000004 7 secure_serving.go:303] http: TLS handshake error from 10.214.1.5:40115: remote error: tls: unknown certificate authority\n";
        let pod = IpAddr::from(Ipv4Addr::new(10, 214, 1, 5));
        assert_eq!(unbelieving(log), [pod, pod]);
    }
}
