//! Servers in threads, with the answer that a test chooses.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::Bed;
use super::wait::PATIENCE;

/// A thread that serves, until dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(
        listener: TcpListener,
        answer: impl Fn(&TcpStream) -> std::io::Result<()> + Send + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            use std::os::fd::AsFd as _;
            while !stopped.load(Ordering::Relaxed) {
                let mut ready = [nix::poll::PollFd::new(listener.as_fd(), nix::poll::PollFlags::POLLIN)];
                nix::poll::poll(&mut ready, 50u8).unwrap();
                while let Ok((client, _)) = listener.accept() {
                    client.set_nonblocking(false).unwrap();
                    // A client that is gone already needs no answer.
                    drop(answer(&client).and_then(|()| drain(client)));
                }
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || thread::panicking(), "a server panicked");
        }
    }
}

/// Waits until the client has closed: what it sent and nobody read would turn closing into a reset.
fn drain(mut client: TcpStream) -> std::io::Result<()> {
    client.shutdown(Shutdown::Write)?;
    client.set_read_timeout(Some(PATIENCE))?;
    std::io::copy(&mut client, &mut std::io::sink()).map(drop)
}

/// Answers datagrams.
pub(crate) fn echo(bed: &Bed, address: &str) -> thread::JoinHandle<()> {
    let address: SocketAddr = address.parse().unwrap();
    let socket = bed.net().run(|| UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        let (_, peer) = socket.recv_from(&mut buffer).unwrap();
        socket.send_to(b"target", peer).unwrap();
    })
}
