use ctrlmesh_common::api::{MetricProvider, PrometheusProvider, ThresholdRange};
use tokio::net::TcpListener;

use super::*;

fn metric(name: &str, address: &str, max: &str) -> RolloutMetric {
    let prometheus = PrometheusProvider { address: address.to_owned(), query: "errors{of='{{root}}'}".to_owned() };
    let threshold_range = ThresholdRange { min: None, max: Some(max.to_owned()) };
    RolloutMetric { name: name.to_owned(), provider: MetricProvider { prometheus }, threshold_range }
}

fn checked(value: Result<f64, MetricError>) -> Outcome {
    let metric = metric("errors", "http://a", "0.05");
    outcome_of(&metric, Range::parse(&metric.threshold_range).unwrap(), value)
}

#[test]
fn a_value_is_judged_by_its_range() {
    assert_eq!(checked(Ok(0.05)), (CheckVerdict::Passed, "metric errors is 0.05".to_owned()));
    let failed = "metric errors is 0.2, and has to be at most 0.05".to_owned();
    assert_eq!(checked(Ok(0.2)), (CheckVerdict::Failed, failed));
    assert_eq!(checked(Ok(1e300)).1, "metric errors is 1e300, and has to be at most 0.05");
    assert_eq!(checked(Ok(f64::INFINITY)).0, CheckVerdict::Failed);
}

#[test]
fn without_a_value_nothing_passes() {
    let says = "metric errors has no value: the query gives no data".to_owned();
    assert_eq!(checked(Err(MetricError::NoData)), (CheckVerdict::Inconclusive, says));
}

#[test]
fn the_worst_verdict_counts_and_is_named_first() {
    let one = |verdict, text: &str| (verdict, text.to_owned());
    let [passed, failed, unknown] =
        [one(CheckVerdict::Passed, "p"), one(CheckVerdict::Failed, "f"), one(CheckVerdict::Inconclusive, "i")];
    let compared = one(CheckVerdict::Passed, "objects");
    assert_eq!(combine(compared.clone(), &[]), compared);
    let all = [passed.clone(), unknown.clone(), failed];
    assert_eq!(combine(compared.clone(), &all), one(CheckVerdict::Failed, "f; i; objects; p"));
    assert_eq!(combine(compared, &[passed.clone(), unknown]), one(CheckVerdict::Inconclusive, "i; objects; p"));
    let compared = one(CheckVerdict::Failed, "objects");
    assert_eq!(combine(compared, &[passed]), one(CheckVerdict::Failed, "objects; p"));
    let long = one(CheckVerdict::Passed, &"x".repeat(3000));
    assert_eq!(combine(long.clone(), &[long]).1.len(), MAX_MESSAGE_CHARS);
}

#[tokio::test(start_paused = true)]
async fn all_metrics_of_a_round_are_asked_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let metrics = [metric("a", &address, "1"), metric("b", &address, "1"), metric("c", "https://a", "1")];
    let placeholders = Placeholders { revision: "new".to_owned(), pods: "p".to_owned(), ..Placeholders::default() };
    let start = tokio::time::Instant::now();
    let round = Round::begin(&metrics, placeholders, &Drain::default());
    assert!(round.is_of(&metrics, "new") && !round.is_of(&metrics[..2], "new") && !round.is_of(&metrics, "old"));
    let Progress::Running(round) = round.progress() else { panic!("nobody has answered") };
    // Nobody ever answers.
    let outcomes = round.outcomes.await.unwrap();
    assert_eq!(start.elapsed().as_secs(), DEADLINE.as_secs());
    let messages: Vec<&str> = outcomes.iter().map(|(_, message)| message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "metric a has no value: there is no answer within 5 s",
            "metric b has no value: there is no answer within 5 s",
            "metric c has no value: the address of its server is no http URL",
        ]
    );
    assert!(outcomes.iter().all(|(verdict, _)| *verdict == CheckVerdict::Inconclusive));
}
