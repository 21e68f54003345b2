use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const DEADLINE: Duration = Duration::from_secs(5);

const QUERY: &str = r#"sum(rate(errors{pod=~"a|b"}[1m])) + 1"#;

async fn listen(prefix: &str) -> (TcpListener, Address) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}{prefix}", listener.local_addr().unwrap());
    (listener, Address::parse(&address).unwrap())
}

/// Takes one request, and answers it.
async fn answer(listener: &TcpListener, status: &str, body: &str) -> String {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    // A client that has enough goes.
    let _written = stream.write_all(answer.as_bytes()).await;
    String::from_utf8(head).unwrap()
}

async fn asked(status: &str, body: &str) -> Result<f64, MetricError> {
    let (listener, address) = listen("").await;
    let (value, _) = tokio::join!(query(&address, QUERY, DEADLINE), answer(&listener, status, body));
    value
}

fn vector(values: &[&str]) -> String {
    let series = values.iter().map(|value| format!(r#"{{"metric":{{}},"value":[1700000000.5,"{value}"]}}"#));
    let series: Vec<String> = series.collect();
    format!(r#"{{"status":"success","data":{{"resultType":"vector","result":[{}]}}}}"#, series.join(","))
}

#[tokio::test]
async fn the_query_is_encoded_and_the_path_is_kept() {
    let (listener, address) = listen("/prometheus/").await;
    let body = vector(&["0.25"]);
    let (value, head) = tokio::join!(query(&address, QUERY, DEADLINE), answer(&listener, "200 OK", &body));
    assert_eq!(value.unwrap().to_string(), "0.25");
    let target = head.split(' ').nth(1).unwrap();
    let (path, sent) = target.split_once("?query=").unwrap();
    assert_eq!(path, "/prometheus/api/v1/query");
    let decoded = form_urlencoded::parse(format!("query={sent}").as_bytes()).next().unwrap().1.into_owned();
    assert_eq!(decoded, QUERY);
    assert!(!sent.contains(['"', '|', '{', ' ']), "{sent}");
    assert!(head.contains(&format!("host: {}\r\n", address.authority)), "{head}");
}

#[tokio::test]
async fn one_sample_or_a_scalar_is_a_value() {
    let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1700000000,"-3e2"]}}"#;
    assert_eq!(asked("200 OK", scalar).await.unwrap().to_string(), "-300");
    assert_eq!(asked("200 OK", &vector(&["+Inf"])).await.unwrap().to_string(), "inf");
}

#[tokio::test]
async fn whatever_is_not_one_number_is_an_error_that_says_why() {
    let matrix = r#"{"status":"success","data":{"resultType":"matrix","result":[]}}"#;
    let histogram =
        r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"histogram":[1,{}]}]}}"#;
    let refused = r#"{"status":"error","errorType":"bad_data","error":"parse error: unexpected end of input"}"#;
    let long = "x".repeat(2 * MAX_ANSWER_BYTES);
    let cases = [
        ("200 OK", vector(&[]), "the query gives no data"),
        ("200 OK", vector(&["NaN"]), "the query gives no data"),
        ("200 OK", vector(&["1", "2"]), "the query gives 2 samples, and has to give one"),
        ("200 OK", matrix.to_owned(), "the result of the query is neither a scalar nor a vector"),
        ("200 OK", histogram.to_owned(), "the result of the query is neither a scalar nor a vector"),
        ("400 Bad Request", refused.to_owned(), "Prometheus refuses the query: parse error: unexpected end of input"),
        ("503 Service Unavailable", "secret".to_owned(), "the server answers 503 Service Unavailable"),
        ("302 Found\r\nlocation: http://127.0.0.1:1/", String::new(), "the server answers 302 Found"),
        ("500 Internal Server Error", vector(&["1"]), "the server answers 500"),
        ("200 OK", r#""secret""#.to_owned(), "the answer is not one of Prometheus"),
        ("200 OK", vector(&["secret"]), "the answer is not one of Prometheus"),
        ("200 OK", long, "the answer is longer than 1048576 bytes"),
    ];
    for (status, body, says) in cases {
        let error = crate::telemetry::chain(&asked(status, &body).await.unwrap_err());
        assert!(error.starts_with(says) && !error.contains("secret"), "{says}: {error}");
    }
}

#[tokio::test]
async fn nobody_who_listens_is_an_error() {
    let (listener, address) = listen("").await;
    drop(listener);
    let error = query(&address, QUERY, DEADLINE).await.unwrap_err();
    assert!(matches!(error, MetricError::Connect { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_is_waited_for_until_the_deadline() {
    let (_listener, address) = listen("").await;
    let start = time::Instant::now();
    let error = query(&address, QUERY, DEADLINE).await.unwrap_err();
    assert!(matches!(error, MetricError::Deadline(_)), "{error}");
    assert_eq!(start.elapsed().as_secs(), DEADLINE.as_secs());
}
