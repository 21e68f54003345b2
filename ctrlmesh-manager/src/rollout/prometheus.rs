//! Asks a Prometheus server for one number, by an instant query of its HTTP API.
//!
//! Roots name the servers, so any answer is possible. The manager follows no redirect and uses no proxy. What an error
//! says has text from the answer only where Prometheus itself reports an error.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time;

use crate::rules::metric::Address;

/// Most that is read of an answer.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// Most characters of an error of Prometheus that are repeated.
const MAX_ERROR_CHARS: usize = 200;

/// Why there is no number.
#[derive(Debug, thiserror::Error)]
pub(super) enum MetricError {
    #[error("the query gives no data")]
    NoData,
    #[error("the query gives {0} samples, and has to give one: aggregate them, such as by sum()")]
    ManySamples(usize),
    #[error("the result of the query is neither a scalar nor a vector of numbers")]
    ResultType,
    #[error("Prometheus refuses the query")]
    Refused(#[source] QueryError),
    #[error("the server answers {0}")]
    Status(StatusCode),
    #[error("the answer is not one of Prometheus")]
    NotPrometheus,
    #[error("the answer is longer than {MAX_ANSWER_BYTES} bytes")]
    TooLong,
    #[error("connect to {authority}")]
    Connect { authority: String, source: io::Error },
    #[error("send the query")]
    Http(#[from] hyper::Error),
    #[error("there is no answer within {} s", .0.as_secs())]
    Deadline(Duration),
    #[error("write the request")]
    Request(#[from] http::Error),
}

/// What Prometheus says of a query that it does not carry out.
#[derive(Debug, Deserialize, thiserror::Error)]
#[error("{}", error.chars().take(MAX_ERROR_CHARS).collect::<String>())]
pub(super) struct QueryError {
    error: String,
}

#[derive(Deserialize)]
#[serde(tag = "status", rename_all = "lowercase")]
enum Answer {
    Success { data: Data },
    Error(QueryError),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    result_type: String,
    result: Value,
}

/// A time in seconds since 1970, and the value.
#[derive(Deserialize)]
struct Sample(IgnoredAny, String);

#[derive(Deserialize)]
struct Series {
    /// Absent for a histogram.
    value: Option<Sample>,
}

/// The value of `query` now.
pub(super) async fn query(address: &Address, query: &str, deadline: Duration) -> Result<f64, MetricError> {
    let answered = time::timeout(deadline, get(address, query)).await;
    let (status, body) = answered.map_err(|_elapsed| MetricError::Deadline(deadline))??;
    read(status, &body)
}

async fn get(address: &Address, query: &str) -> Result<(StatusCode, Bytes), MetricError> {
    let query: String = form_urlencoded::byte_serialize(query.as_bytes()).collect();
    let request = Request::get(format!("{}/api/v1/query?query={query}", address.prefix))
        .header(header::HOST, &address.authority)
        .header(header::ACCEPT, "application/json")
        .header(header::USER_AGENT, "ctrlmesh-manager")
        .body(Empty::<Bytes>::new())?;
    let connected = TcpStream::connect((address.host.as_str(), address.port)).await;
    let stream = connected.map_err(|source| MetricError::Connect { authority: address.authority.clone(), source })?;
    let (mut send, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async { whole(send.send_request(request).await?).await };
    tokio::pin!(exchange, connection);
    tokio::select! {
        biased;
        answer = &mut exchange => answer,
        // The end of the answer may have been read already.
        _ended = &mut connection => exchange.await,
    }
}

async fn whole(response: Response<Incoming>) -> Result<(StatusCode, Bytes), MetricError> {
    let status = response.status();
    match Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await {
        Ok(body) => Ok((status, body.to_bytes())),
        Err(error) if error.is::<LengthLimitError>() => Err(MetricError::TooLong),
        Err(error) => Err(error.downcast::<hyper::Error>().map_or(MetricError::NotPrometheus, |error| (*error).into())),
    }
}

/// The number in an answer.
fn read(status: StatusCode, body: &[u8]) -> Result<f64, MetricError> {
    let data = match serde_json::from_slice(body) {
        Ok(Answer::Success { data }) if status.is_success() => data,
        Ok(Answer::Error(error)) => return Err(MetricError::Refused(error)),
        // What the parser says has parts of the answer.
        Ok(Answer::Success { .. }) | Err(_) if !status.is_success() => return Err(MetricError::Status(status)),
        Ok(Answer::Success { .. }) | Err(_) => return Err(MetricError::NotPrometheus),
    };
    match sample(data)?.1.parse::<f64>() {
        Ok(value) if value.is_nan() => Err(MetricError::NoData),
        Ok(value) => Ok(value),
        Err(_) => Err(MetricError::NotPrometheus),
    }
}

fn sample(data: Data) -> Result<Sample, MetricError> {
    match data.result_type.as_str() {
        "scalar" => Sample::deserialize(data.result).map_err(|_content| MetricError::NotPrometheus),
        "vector" => {
            let series = Vec::<Series>::deserialize(data.result).map_err(|_content| MetricError::NotPrometheus)?;
            match <[Series; 1]>::try_from(series) {
                Ok([series]) => series.value.ok_or(MetricError::ResultType),
                Err(series) if series.is_empty() => Err(MetricError::NoData),
                Err(series) => Err(MetricError::ManySamples(series.len())),
            }
        }
        _ => Err(MetricError::ResultType),
    }
}

#[cfg(test)]
mod tests;
