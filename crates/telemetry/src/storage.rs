//! Reads what the storage tells of itself: metrics of a server as Prometheus reads them, such as those of MinIO or of a
//! NameNode, now, or those that a Prometheus server has of the time of a save.

mod exposition;
mod history;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardfast_engine::{Error, Kind, Result};
use tokio::time::timeout;

use crate::http::{get, runtime};
pub(crate) use history::History;

/// Labels that tell operations apart. Sums are over all others, such as servers and disks.
const KEPT_LABELS: [&str; 7] = ["api", "action", "method", "op", "operation", "type", "verb"];

/// Beginnings of the names of metrics that are about the server's process, not the storage.
const OF_PROCESSES: [&str; 8] =
    ["go_", "jvm_", "java_", "process_", "promhttp_", "python_", "scrape_", "net_conntrack_"];

/// Rates of bytes, other rates, and capacities that are shown.
const BYTES_MAX: usize = 4;
const RATES_MAX: usize = 8;
const CAPACITIES_MAX: usize = 6;

/// Metric: a counter or a gauge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Metric {
    counts: bool,
    value: f64,
}

/// Metrics by name and kept labels.
type Metrics = BTreeMap<String, Metric>;

/// Metrics of the storage at a moment, those that say most.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StorageNow {
    /// Place of the metrics.
    pub url: String,
    /// Counters that grow, by what they grow in a second: those of bytes first, the fastest first.
    pub rates: Vec<Figure>,
    /// Room of the storage.
    pub capacity: Vec<Figure>,
}

/// Metric and its value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Name, with the labels that tell operations apart.
    pub name: String,
    /// Value, or what it grows in a second.
    pub value: f64,
    /// Whether that is in bytes.
    pub is_bytes: bool,
    /// Rates since the begin of an operation, each with its time in milliseconds; only of a report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<(f64, f64)>,
}

/// Server of metrics, and where there.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    url: String,
    address: String,
    path: String,
    query: String,
}

impl Endpoint {
    /// Reads `http://host:port/path?query`.
    ///
    /// # Errors
    /// `Invalid` for another text.
    fn of(url: &str) -> Result<Endpoint> {
        let wrong = |found: &str| {
            let text =
                format!("--storage {}: expected http://host:port/path, found {found}", crate::without_secrets(url));
            Error::invalid(text)
        };
        let rest = url.strip_prefix("http://").ok_or_else(|| match url.starts_with("https://") {
            true => wrong("https, which is not spoken here: name a port without TLS, or a proxy"),
            false => wrong("another URL"),
        })?;
        let (address, rest) = rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at));
        if address.contains('@') {
            return Err(wrong("a user, which is not sent: name a port that needs none"));
        }
        let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
        if !port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0)) {
            return Err(wrong("no port"));
        }
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(wrong("characters that no URL has"));
        }
        Ok(Endpoint {
            url: crate::without_secrets(url),
            address: address.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
        })
    }

    /// Gets what is at a path.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    fn get(&self, path: &str, within: Duration) -> Result<Vec<u8>> {
        let failed = |what: String| Error::new(Kind::Unavailable, format!("--storage {}: {what}", self.url));
        let answer = runtime()?.block_on(async { timeout(within, get(&self.address, path)).await });
        let answer = answer.map_err(|_| failed(format!("no answer within {:.0} s", within.as_secs_f64())))?;
        Ok(answer.map_err(failed)?.to_vec())
    }
}

/// Storage whose metrics are looked at again and again.
pub struct Storage {
    endpoint: Endpoint,
    before: Option<(Instant, Metrics)>,
}

impl Storage {
    /// Names the place of a storage's metrics, `http://host:port/path`; without a path `/metrics`. Asks nothing yet.
    ///
    /// # Errors
    /// `Invalid` for another text.
    pub fn new(url: &str) -> Result<Storage> {
        let mut endpoint = Endpoint::of(url)?;
        if endpoint.path.is_empty() {
            endpoint.path = "/metrics".to_owned();
        }
        Ok(Storage { endpoint, before: None })
    }

    /// Asks the storage; rates are those since the call before, none in the first one.
    ///
    /// # Errors
    /// `Unavailable` when it does not answer in time; `Invalid` when that is not what Prometheus reads.
    pub fn look(&mut self, within: Duration) -> Result<StorageNow> {
        let Endpoint { path, query, .. } = &self.endpoint;
        let path = if query.is_empty() { path.clone() } else { format!("{path}?{query}") };
        let text = self.endpoint.get(&path, within)?;
        let at = Instant::now();
        let metrics = exposition::metrics(&text).map_err(|what| {
            let url = &self.endpoint.url;
            Error::invalid(format!("--storage {url}: expected metrics as Prometheus reads them, found {what}"))
        })?;
        let grown: BTreeMap<&String, f64> = match &self.before {
            Some((since, before)) => {
                let seconds = (at - *since).as_secs_f64().max(1e-3);
                let rate = |(name, metric): (_, &Metric)| {
                    let before = before.get(name).filter(|before| before.counts && metric.counts)?;
                    Some((name, (metric.value - before.value).max(0.0) / seconds))
                };
                metrics.iter().filter_map(rate).collect()
            }
            None => BTreeMap::new(),
        };
        let now = StorageNow {
            url: self.endpoint.url.clone(),
            rates: rates(grown.into_iter().map(|(name, rate)| figure(name, rate)).collect()),
            capacity: capacity(&metrics),
        };
        self.before = Some((at, metrics));
        Ok(now)
    }
}

/// Returns a metric's name with the labels that are kept; `None` for one that is not about the storage.
fn kept_name<'a>(name: &str, labels: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    if OF_PROCESSES.iter().any(|begin| name.starts_with(begin)) || name.ends_with("_bucket") {
        return None;
    }
    let mut kept: Vec<_> = labels.filter(|(label, _)| KEPT_LABELS.contains(label)).collect();
    kept.sort_unstable();
    let labels: Vec<String> = kept.iter().map(|(label, text)| format!("{label}={text}")).collect();
    Some(if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) })
}

fn figure(name: &str, value: f64) -> Figure {
    let bare = name.split('{').next().unwrap_or_default();
    let is_bytes = bare.contains("bytes") || bare.contains("capacity");
    Figure { name: name.to_owned(), value, is_bytes, points: Vec::new() }
}

/// Returns the rates that are shown: of those that grow the fastest, those of bytes first.
fn rates(mut all: Vec<Figure>) -> Vec<Figure> {
    all.retain(|figure| figure.value > 0.0);
    all.sort_by(|a, b| b.value.total_cmp(&a.value));
    let (mut bytes, mut others): (Vec<Figure>, Vec<Figure>) = all.into_iter().partition(|figure| figure.is_bytes);
    bytes.truncate(BYTES_MAX);
    others.truncate(RATES_MAX);
    bytes.extend(others);
    bytes
}

/// Returns the gauges that say how much room there is.
fn capacity(metrics: &Metrics) -> Vec<Figure> {
    const ROOM: [&str; 5] = ["free", "remaining", "available", "capacity", "quota"];
    const OTHERS: [&str; 5] = ["mem", "heap", "inode", "gauge_", "percent"];
    let is_room = |name: &str| {
        let bare = name.split('{').next().unwrap_or_default();
        let is_size = bare.contains("bytes") || bare.contains("capacity") || bare.contains("remaining");
        is_size && ROOM.iter().any(|word| bare.contains(word)) && !OTHERS.iter().any(|word| bare.contains(word))
    };
    let gauges = metrics.iter().filter(|(name, metric)| !metric.counts && is_room(name));
    let figures = gauges.map(|(name, metric)| Figure { is_bytes: true, ..figure(name, metric.value) });
    // Names that say what is left come first.
    let (mut left, whole): (Vec<Figure>, Vec<Figure>) =
        figures.partition(|figure| ["free", "remaining", "available"].iter().any(|word| figure.name.contains(word)));
    left.extend(whole);
    left.truncate(CAPACITIES_MAX);
    left
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Answers one connection after another, each with the next text.
    fn answering(texts: Vec<&'static str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for text in texts {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len());
            }
        });
        format!("http://{address}/minio/v2/metrics/cluster")
    }

    #[test]
    fn counters_are_rates_and_room_is_shown() {
        let first = "# TYPE s3_sent_bytes counter\ns3_sent_bytes{server=\"a\"} 0\ns3_sent_bytes{server=\"b\"} 5\n\
                     # TYPE s3_requests_total counter\ns3_requests_total{api=\"put\",server=\"a\"} 1\n\
                     # TYPE go_gc_total counter\ngo_gc_total 3\n\
                     # TYPE usable_free_bytes gauge\nusable_free_bytes 7e9\n";
        let second = "# TYPE s3_sent_bytes counter\ns3_sent_bytes{server=\"a\"} 1e12\ns3_sent_bytes{server=\"b\"} 5\n\
                      # TYPE s3_requests_total counter\ns3_requests_total{api=\"put\",server=\"a\"} 1e6\n\
                      # TYPE go_gc_total counter\ngo_gc_total 3000\n\
                      # TYPE usable_free_bytes gauge\nusable_free_bytes 6e9\n";
        let mut storage = Storage::new(&answering(vec![first, second])).unwrap();
        let now = storage.look(Duration::from_secs(5)).unwrap();
        assert_eq!((now.rates.len(), now.capacity[0].value), (0, 7e9));
        let now = storage.look(Duration::from_secs(5)).unwrap();
        let names: Vec<&str> = now.rates.iter().map(|rate| rate.name.as_str()).collect();
        assert_eq!(names, ["s3_sent_bytes", "s3_requests_total{api=put}"]);
        let of = now.rates[0].value / now.rates[1].value;
        assert!((of - 1e12 / (1e6 - 1.0)).abs() < 1.0, "{of}");
        assert_eq!((now.capacity[0].value, now.rates[0].is_bytes, now.rates[1].is_bytes), (6e9, true, false));
    }

    #[test]
    fn another_place_and_another_text_are_refused_by_name() {
        for (url, found) in [
            ("https://a:1/metrics", "TLS"),
            ("s3://bucket", "another URL"),
            ("http://a/metrics", "no port"),
            ("http://a:0", "no port"),
            ("http://me:secret@a:1/", "a user"),
            ("http://a:1/ b", "characters"),
        ] {
            let error = Storage::new(url).err().unwrap();
            assert!(error.message.contains(found) && !error.message.contains("secret"), "{error}");
        }
        let mut storage = Storage::new(&answering(vec!["<html>\n"])).unwrap();
        let error = storage.look(Duration::from_secs(5)).unwrap_err();
        assert!(error.kind == Kind::Invalid && error.message.contains("<html>"), "{error}");
        let mut storage = Storage::new("http://127.0.0.1:1").unwrap();
        assert_eq!(storage.look(Duration::from_secs(5)).unwrap_err().kind, Kind::Unavailable);
    }
}
