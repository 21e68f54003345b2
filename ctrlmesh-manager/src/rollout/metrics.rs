//! Checks a version on trial by the metrics that its root names.
//!
//! A round asks for all metrics of a root at once, in a task of its own. Looks at other roots do not wait for it.

use std::time::Duration;

use ctrlmesh_common::api::{CheckVerdict, RolloutMetric};
use futures::future::join_all;
use tokio::sync::oneshot;
use tracing::debug;

use super::prometheus::{self, MetricError};
use crate::drain::Drain;
use crate::rules::metric::{Address, Placeholders, Range};
use crate::telemetry;

/// Limit for one query.
const DEADLINE: Duration = Duration::from_secs(5);

/// Most characters of a check's message, as the schema has it.
const MAX_MESSAGE_CHARS: usize = 4096;

/// A verdict, and what it goes by.
pub(super) type Outcome = (CheckVerdict, String);

/// The queries of one check.
#[derive(Debug)]
pub(super) struct Round {
    metrics: Vec<RolloutMetric>,
    placeholders: Placeholders,
    outcomes: oneshot::Receiver<Vec<Outcome>>,
}

/// How a round stands.
#[derive(Debug)]
pub(super) enum Progress {
    Running(Round),
    Done(Vec<Outcome>),
    /// Its task ended without a result.
    Lost,
}

impl Round {
    /// Sends the queries. Their task ends when the round is dropped.
    pub(super) fn begin(metrics: &[RolloutMetric], placeholders: Placeholders, drain: &Drain) -> Self {
        let (mut done, outcomes) = oneshot::channel();
        let round = Self { metrics: metrics.to_vec(), placeholders, outcomes };
        let (metrics, placeholders) = (round.metrics.clone(), round.placeholders.clone());
        drain.spawn_until_started(async move {
            let checked = join_all(metrics.iter().map(|metric| ask(metric, &placeholders)));
            tokio::select! {
                () = done.closed() => {}
                checked = checked => drop(done.send(checked)),
            }
        });
        round
    }

    /// Whether it asks for these metrics, of this revision.
    pub(super) fn is_of(&self, metrics: &[RolloutMetric], revision: &str) -> bool {
        self.metrics == metrics && self.placeholders.revision == revision
    }

    pub(super) fn progress(mut self) -> Progress {
        match self.outcomes.try_recv() {
            Ok(outcomes) => Progress::Done(outcomes),
            Err(oneshot::error::TryRecvError::Empty) => Progress::Running(self),
            Err(oneshot::error::TryRecvError::Closed) => Progress::Lost,
        }
    }
}

/// The worst of all verdicts. The message begins with what is worst.
pub(super) fn combine(compared: Outcome, metrics: &[Outcome]) -> Outcome {
    let mut all: Vec<Outcome> = [compared].into_iter().chain(metrics.iter().cloned()).collect();
    all.sort_by_key(|(verdict, _)| match verdict {
        CheckVerdict::Failed => 0,
        CheckVerdict::Inconclusive => 1,
        CheckVerdict::Passed => 2,
    });
    let verdict = all[0].0;
    let messages: Vec<String> = all.into_iter().map(|(_, message)| message).collect();
    (verdict, messages.join("; ").chars().take(MAX_MESSAGE_CHARS).collect())
}

async fn ask(metric: &RolloutMetric, placeholders: &Placeholders) -> Outcome {
    let provider = &metric.provider.prometheus;
    let Some(range) = Range::parse(&metric.threshold_range) else {
        return inconclusive(metric, "a bound of its range is no number");
    };
    let Some(address) = Address::parse(&provider.address) else {
        return inconclusive(metric, "the address of its server is no http URL");
    };
    // `pod=~""` would select what has no pod.
    if placeholders.pods.is_empty() {
        return inconclusive(metric, "the version has no pod");
    }
    match placeholders.render(&provider.query) {
        Ok(query) => outcome_of(metric, range, prometheus::query(&address, &query, DEADLINE).await),
        Err(unknown) => inconclusive(metric, &unknown.to_string()),
    }
}

fn outcome_of(metric: &RolloutMetric, range: Range, value: Result<f64, MetricError>) -> Outcome {
    let name = &metric.name;
    match value {
        Ok(value) if range.contains(value) => (CheckVerdict::Passed, format!("metric {name} is {}", number(value))),
        Ok(value) => (CheckVerdict::Failed, format!("metric {name} is {}, and has to be {range}", number(value))),
        Err(error) => {
            let error = telemetry::chain(&error);
            debug!(metric = name, error, "no value");
            inconclusive(metric, &error)
        }
    }
}

fn inconclusive(metric: &RolloutMetric, why: &str) -> Outcome {
    (CheckVerdict::Inconclusive, format!("metric {} has no value: {why}", metric.name))
}

/// Not rounded, so that a value that is just out of its range is seen to be. In a few characters.
fn number(value: f64) -> String {
    let is_short = value == 0.0 || (1e-4..1e15).contains(&value.abs());
    if is_short || !value.is_finite() { value.to_string() } else { format!("{value:e}") }
}

#[cfg(test)]
mod tests;
