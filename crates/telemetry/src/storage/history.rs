//! Asks a Prometheus server for the metrics of the storage at the time of a save or load, over its [HTTP API].
//!
//! [HTTP API]: https://prometheus.io/docs/prometheus/latest/querying/api/

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::Deserialize;
use shardfast_engine::{Error, Result};

use super::exposition::counts;
use super::{Endpoint, Figure, Metric, Metrics, StorageNow, capacity, figure, kept_name, rates};

/// Time for which an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Seconds around an operation whose samples are asked for: a server scrapes once in a minute, or more often.
const AROUND_S: f64 = 90.0;

/// Times at which rates are said, over an operation.
const POINTS: usize = 40;

/// Prometheus server that scrapes the storage.
pub(crate) struct History {
    endpoint: Endpoint,
    /// Which of its series are the storage's.
    selector: String,
    kinds: HashMap<String, String>,
}

/// Answer of the server.
#[derive(Deserialize)]
struct Answer<T> {
    data: T,
}

#[derive(Deserialize)]
struct Described {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Matrix {
    result: Vec<Series>,
}

/// Samples of a metric: their times in seconds since 1970, and their values.
#[derive(Deserialize)]
struct Series {
    metric: BTreeMap<String, String>,
    values: Vec<(f64, String)>,
}

impl History {
    /// Asks the server at `http://host:port/?match={job="minio"}` which metrics it has.
    ///
    /// # Errors
    /// `Invalid` for another text, another server, or without a selector; `Unavailable` when it does not answer.
    pub(crate) fn new(url: &str) -> Result<History> {
        let mut endpoint = Endpoint::of(url)?;
        endpoint.path = endpoint.path.trim_end_matches('/').to_owned();
        let described: HashMap<String, Vec<Described>> = ask(&endpoint, "/api/v1/metadata")?;
        let Some(selector) = endpoint.query.split('&').find_map(|one| one.strip_prefix("match=")).map(str::to_owned)
        else {
            let jobs: Vec<String> = ask(&endpoint, "/api/v1/label/job/values")?;
            return Err(Error::invalid(format!(
                "--storage {}: expected which of its series are the storage's, such as \
                 http://{}/?match={{job=\"NAME\"}}, found none; its jobs: {}",
                endpoint.url,
                endpoint.address,
                jobs.join(", ")
            )));
        };
        let kind = |(name, all): (String, Vec<Described>)| Some((name, all.into_iter().next()?.kind));
        Ok(History { endpoint, selector, kinds: described.into_iter().filter_map(kind).collect() })
    }

    /// Returns the metrics from a begin, in milliseconds since 1970, for a time in milliseconds.
    ///
    /// # Errors
    /// `Invalid` when the server refuses the selector; `Unavailable` when it does not answer.
    pub(crate) fn during(&self, began_unix_ms: u64, took_ms: f64) -> Result<StorageNow> {
        let (began, took) = (began_unix_ms as f64 / 1e3, took_ms / 1e3);
        let window = (took + 2.0 * AROUND_S).ceil();
        let query = encoded(&format!("{}[{window}s]", self.selector));
        let path = format!("/api/v1/query?query={query}&time={:.3}", began + took + AROUND_S);
        let Matrix { result } = ask(&self.endpoint, &path)?;
        let kinds = self.kinds.iter().map(|(name, kind)| (name.as_str(), kind.as_str())).collect();
        let mut growing: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut gauges = Metrics::new();
        let at = |point: usize| began + took * (point as f64 + 0.5) / POINTS as f64;
        for Series { metric, values } in &result {
            let Some(name) = metric.get("__name__") else { continue };
            let labels = metric.iter().map(|(label, text)| (label.as_str(), text.as_str()));
            let Some(key) = kept_name(name, labels) else { continue };
            let samples: Vec<(f64, f64)> =
                values.iter().filter_map(|(at, value)| Some((*at, value.parse().ok()?))).collect();
            if counts(name, &kinds) {
                let points = growing.entry(key).or_insert_with(|| vec![0.0; POINTS]);
                points.iter_mut().enumerate().for_each(|(point, sum)| *sum += rate_at(&samples, at(point)));
            } else if let Some((_, value)) =
                samples.iter().rfind(|(at, value)| *at <= began + took && value.is_finite())
            {
                gauges.entry(key).or_insert(Metric { counts: false, value: 0.0 }).value += value;
            }
        }
        let ms = |point: usize| took_ms * (point as f64 + 0.5) / POINTS as f64;
        let said = |(name, points): (String, Vec<f64>)| Figure {
            points: points.iter().enumerate().map(|(point, rate)| (ms(point), *rate)).collect(),
            ..figure(&name, points.iter().sum::<f64>() / POINTS as f64)
        };
        Ok(StorageNow {
            url: self.endpoint.url.clone(),
            rates: rates(growing.into_iter().map(said).collect()),
            capacity: capacity(&gauges),
        })
    }
}

/// Returns how fast a counter grew at a time: between the samples around it, nothing when it began anew.
fn rate_at(samples: &[(f64, f64)], at: f64) -> f64 {
    let behind = samples.partition_point(|(time, _)| *time <= at);
    let (Some(before), Some(after)) = (behind.checked_sub(1).and_then(|one| samples.get(one)), samples.get(behind))
    else {
        return 0.0;
    };
    let rate = (after.1 - before.1) / (after.0 - before.0).max(1e-3);
    if rate.is_finite() { rate.max(0.0) } else { 0.0 }
}

fn ask<T: for<'a> Deserialize<'a>>(endpoint: &Endpoint, path: &str) -> Result<T> {
    let expected = "expected a Prometheus server, which knows the past; what a storage tells of now is shown by \
                    `shardfast top`";
    let text = endpoint.get(&format!("{}{path}", endpoint.path), ANSWER_WITHIN).map_err(|mut error| {
        error.message += &format!("; {expected}");
        error
    })?;
    let answer: serde_json::Result<Answer<T>> = serde_json::from_slice(&text);
    answer.map(|answer| answer.data).map_err(|error| {
        let begin: String = String::from_utf8_lossy(&text).chars().take(40).collect();
        Error::invalid(format!("--storage {}: found {begin:?} ({error}); {expected}", endpoint.url))
    })
}

/// Encodes a text for a query; what was encoded stays so.
fn encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~%".contains(&byte);
    text.bytes().map(|byte| if is_plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_samples_around() {
        let samples = [(0.0, 0.0), (10.0, 50.0), (20.0, 10.0), (30.0, 40.0)];
        let rates = [-1.0, 0.0, 9.9, 15.0, 25.0, 30.0].map(|at| rate_at(&samples, at));
        assert_eq!(rates, [0.0, 5.0, 5.0, 0.0, 3.0, 0.0]);
    }

    #[test]
    fn a_selector_is_encoded_once() {
        assert_eq!(encoded("{job=\"a b\"}[5s]"), "%7Bjob%3D%22a%20b%22%7D%5B5s%5D");
        assert_eq!(encoded("%7Ba"), "%7Ba");
    }
}
