//! Reads metrics in the [text format] of Prometheus.
//!
//! [text format]: https://prometheus.io/docs/instrumenting/exposition_formats/

use std::borrow::Cow;
use std::collections::HashMap;

use super::{Metric, Metrics, kept_name};

/// Returns the metrics of a text, summed over labels that are not kept.
///
/// # Errors
/// The first line that is none of the format, shortened.
pub(super) fn metrics(text: &[u8]) -> Result<Metrics, String> {
    let text = String::from_utf8_lossy(text);
    let mut kinds: HashMap<&str, &str> = HashMap::new();
    let mut found = Metrics::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(comment) = line.strip_prefix('#') {
            let mut words = comment.split_whitespace();
            if let (Some("TYPE"), Some(name), Some(kind)) = (words.next(), words.next(), words.next()) {
                kinds.insert(name, kind);
            }
            continue;
        }
        let sample = sample(line).ok_or_else(|| format!("the line {:?}", line.chars().take(60).collect::<String>()))?;
        let labels = sample.labels.iter().map(|(name, text)| (*name, &**text));
        let Some(name) = kept_name(sample.name, labels).filter(|_| sample.value.is_finite()) else { continue };
        let counts = counts(sample.name, &kinds);
        let metric = found.entry(name).or_insert(Metric { counts, value: 0.0 });
        metric.value += sample.value;
    }
    if found.is_empty() && kinds.is_empty() && !text.trim().is_empty() {
        return Err("no metrics".to_owned());
    }
    Ok(found)
}

/// Returns whether a metric only grows.
pub(super) fn counts(name: &str, kinds: &HashMap<&str, &str>) -> bool {
    match kinds.get(name) {
        Some(kind) => kind.eq_ignore_ascii_case("counter"),
        // Sums and numbers of histograms and summaries, and counters of which nothing is said.
        None => ["_total", "_count", "_sum"].iter().any(|end| name.ends_with(end)),
    }
}

struct Sample<'a> {
    name: &'a str,
    labels: Vec<(&'a str, Cow<'a, str>)>,
    value: f64,
}

/// Reads `name{label="text",…} value time`; `None` for another line.
fn sample(line: &str) -> Option<Sample<'_>> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let end = line.find(|c| !is_name(c)).filter(|&end| end > 0)?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner.trim_start();
        loop {
            if let Some(behind) = rest.strip_prefix('}') {
                rest = behind;
                break;
            }
            let (label, behind) = rest.split_once('=')?;
            let quoted = behind.trim_start().strip_prefix('"')?;
            let (text, behind) = unquoted(quoted)?;
            labels.push((label.trim(), text));
            rest = behind.trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
        }
    }
    let value = rest.split_whitespace().next()?;
    let value = match value {
        "+Inf" | "Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        "NaN" | "Nan" => f64::NAN,
        number => number.parse().ok()?,
    };
    Some(Sample { name, labels, value })
}

/// Returns the text up to its closing quote, and what is behind it.
fn unquoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut escaped = false;
    let end = text.find(|c| match c {
        _ if escaped => {
            escaped = false;
            false
        }
        '\\' => {
            escaped = true;
            false
        }
        c => c == '"',
    })?;
    let inner = &text[..end];
    let inner = match inner.contains('\\') {
        true => inner.replace("\\n", " ").replace("\\\"", "\"").replace("\\\\", "\\").into(),
        false => inner.into(),
    };
    Some((inner, &text[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_minio_and_of_a_name_node_are_read() {
        let found = metrics(
            b"# HELP minio_s3_requests_total Total number\n# TYPE minio_s3_requests_total counter\n\
              minio_s3_requests_total{api=\"putobject\",server=\"127.0.0.1:9000\"} 12\n\
              minio_s3_requests_total{api=\"putobject\",server=\"127.0.0.2:9000\"} 30\n\
              # TYPE name_node_activity_files_created COUNTER\n\
              name_node_activity_files_created{processname=\"NameNode\",hostname=\"a \\\"b\\\" }\",} 3 1700000000000\n\
              fs_namesystem_capacity_remaining{context=\"dfs\"} 4.5E10\n\n\
              latency_sum 2.5\nodd +Inf\n",
        )
        .unwrap();
        let of = |name: &str| found.get(name).map(|metric| (metric.counts, metric.value));
        assert_eq!(of("minio_s3_requests_total{api=putobject}"), Some((true, 42.0)));
        assert_eq!(of("name_node_activity_files_created"), Some((true, 3.0)));
        assert_eq!(of("fs_namesystem_capacity_remaining"), Some((false, 4.5e10)));
        assert_eq!(of("latency_sum"), Some((true, 2.5)));
        assert_eq!(of("odd"), None);
    }

    #[test]
    fn any_other_text_is_an_error_and_no_panic() {
        for text in
            ["<html>", "a{", "a{b", "a{b=", "a{b=\"", "a{b=\"c\\", "a{b=\"c\"", "a{b=\"c\"}", "a x", "é 1", "{} 1"]
        {
            assert!(metrics(text.as_bytes()).is_err(), "{text}");
        }
        assert!(metrics(b"\xff\xfe").is_err());
        assert!(metrics(b"").unwrap().is_empty());
    }
}
