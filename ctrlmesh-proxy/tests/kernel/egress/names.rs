//! A name server, as a pod of the cluster has one.

use std::net::Ipv4Addr;

use domain::base::iana::{Class, Rcode, Rtype};
use domain::base::{Message, MessageBuilder};
use domain::rdata::A;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};

/// What it knows, and the names that it answers over TCP only.
pub(crate) struct Zone {
    pub(crate) hosts: &'static [(&'static str, Ipv4Addr)],
    pub(crate) over_tcp: &'static str,
}

impl Zone {
    pub(crate) async fn serve_udp(&self, socket: UdpSocket) {
        let mut bytes = [0; 1024];
        while let Ok((length, peer)) = socket.recv_from(&mut bytes).await {
            let answer = self.answer(&bytes[..length], false);
            socket.send_to(&answer, peer).await.unwrap();
        }
    }

    pub(crate) async fn serve_tcp(&'static self, listener: TcpListener) {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(length) = stream.read_u16().await {
                    let mut bytes = vec![0; usize::from(length)];
                    stream.read_exact(&mut bytes).await.unwrap();
                    let answer = self.answer(&bytes, true);
                    stream.write_u16(u16::try_from(answer.len()).unwrap()).await.unwrap();
                    stream.write_all(&answer).await.unwrap();
                }
            });
        }
    }

    fn answer(&self, query: &[u8], is_tcp: bool) -> Vec<u8> {
        let query = Message::from_slice(query).unwrap();
        let question = query.sole_question().unwrap();
        let name = question.qname().to_string();
        let known = self.hosts.iter().find(|(host, _)| *host == name);
        let code = if known.is_some() { Rcode::NOERROR } else { Rcode::NXDOMAIN };
        let mut answer = MessageBuilder::new_vec().start_answer(query, code).unwrap();
        if name == self.over_tcp && !is_tcp {
            answer.header_mut().set_tc(true);
        } else if let Some((_, address)) = known.filter(|_| question.qtype() == Rtype::A) {
            answer.push((question.qname(), Class::IN, 60, A::new(*address))).unwrap();
        }
        answer.finish()
    }
}
