//! Reads where to export from OpenTelemetry's own [environment variables].
//!
//! [environment variables]: https://opentelemetry.io/docs/specs/otel/protocol/exporter/

use std::time::Duration;

use shardfast_engine::{Error, Result};

use super::message::{KeyValue, Resource, number, text};
use crate::live::Live;

/// Pause between two exports of metrics, unless the environment has another one.
const INTERVAL: Duration = Duration::from_secs(60);

/// Time for an answer, unless the environment has another one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Headers that belong to each request.
const FRAMING: [&str; 5] = ["connection", "content-length", "content-type", "host", "transfer-encoding"];

/// Attributes that a resource has at most, and bytes of each.
const ATTRIBUTES: (usize, usize) = (64, 1024);

/// Place of a server, a path there, and how requests are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) address: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) timeout: Duration,
}

/// Places and times of exports.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) traces: Option<Target>,
    pub(crate) metrics: Option<Target>,
    pub(crate) interval: Duration,
    attributes: Vec<(String, String)>,
}

impl Settings {
    /// Reads them, given the environment's variables by name; `None` if there is nothing to export.
    ///
    /// # Errors
    /// `Invalid` names a variable whose text cannot be used.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Settings>> {
        let variable = |name: &str| variable(name).filter(|text| !text.trim().is_empty());
        if variable("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let traces = target(&variable, "TRACES", "/v1/traces")?;
        let metrics = target(&variable, "METRICS", "/v1/metrics")?;
        if traces.is_none() && metrics.is_none() {
            return Ok(None);
        }
        let mut attributes = pairs(variable("OTEL_RESOURCE_ATTRIBUTES"), "OTEL_RESOURCE_ATTRIBUTES")?;
        if let Some(name) = variable("OTEL_SERVICE_NAME") {
            attributes.retain(|(key, _)| key != "service.name");
            attributes.push(("service.name".to_owned(), name));
        }
        if !attributes.iter().any(|(key, _)| key == "service.name") {
            attributes.push(("service.name".to_owned(), "shardfast".to_owned()));
        }
        let interval = ms("OTEL_METRIC_EXPORT_INTERVAL", variable("OTEL_METRIC_EXPORT_INTERVAL"), INTERVAL)?;
        Ok(Some(Settings { traces, metrics, interval, attributes }))
    }

    /// Returns the process as the resource of what it tells.
    pub(crate) fn resource(&self, live: &Live) -> Resource {
        let cut = |value: &str| value.chars().take(ATTRIBUTES.1).collect::<String>();
        let own = self.attributes.iter().take(ATTRIBUTES.0).map(|(key, value)| text(key, cut(value)));
        let mut attributes: Vec<KeyValue> = own.collect();
        attributes.extend([
            text("host.name", live.place.machine.as_str()),
            number("process.pid", u64::from(std::process::id())),
            text("service.instance.id", format!("{}:{}", live.place.machine, std::process::id())),
            number("shardfast.rank", u64::from(live.rank)),
            number("shardfast.world", u64::from(live.world)),
        ]);
        Resource { attributes }
    }
}

/// Returns where a signal goes and how; `None` if it goes nowhere. A variable of the signal counts before the one of
/// all signals.
fn target(variable: &impl Fn(&str) -> Option<String>, signal: &str, path: &str) -> Result<Option<Target>> {
    if variable(&format!("OTEL_{signal}_EXPORTER")).is_some_and(|all| !all.split(',').any(|one| one.trim() == "otlp")) {
        return Ok(None);
    }
    let named = |what: &str| {
        let (own, all) = (format!("OTEL_EXPORTER_OTLP_{signal}_{what}"), format!("OTEL_EXPORTER_OTLP_{what}"));
        match variable(&own) {
            Some(text) => (own, Some(text)),
            None => (all.clone(), variable(&all)),
        }
    };
    let (name, Some(url)) = named("ENDPOINT") else { return Ok(None) };
    let behind = if name.contains(signal) { "" } else { path };
    if let (name, Some(protocol)) = named("PROTOCOL")
        && protocol != "http/protobuf"
    {
        let what = "expected http/protobuf, which collectors take at port 4318";
        return Err(Error::invalid(format!("{name}={protocol}: {what}")));
    }
    let mut headers = vec![("content-type".to_owned(), "application/x-protobuf".to_owned())];
    let (given, text) = named("HEADERS");
    headers.extend(pairs(text, &given)?);
    let (given, text) = named("TIMEOUT");
    let timeout = ms(&given, text, TIMEOUT)?;
    // A URL may hold a password.
    let invalid = |what: &str| Error::invalid(format!("{name}: expected http://host:port, found {what}"));
    let rest = match url.trim().split_once("://") {
        Some(("http", rest)) => rest,
        Some(("https", _)) => {
            return Err(invalid("https: send to a collector of this network, which forwards with TLS"));
        }
        _ => return Err(invalid("no http URL")),
    };
    let (address, base) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    if address.is_empty() || address.contains(['@', '?', '#']) {
        return Err(invalid("a host with other things beside it"));
    }
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !address.ends_with(']') => (host, port),
        _ => (address, "80"),
    };
    let is_bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
    if host.is_empty() || port.parse::<u16>().is_err() || !is_bracketed && host.contains([':', '[', ']']) {
        return Err(invalid("a host or a port that is none"));
    }
    let address = format!("{host}:{port}");
    let path = format!("{}{behind}", if behind.is_empty() { base } else { base.trim_end_matches('/') });
    Ok(Some(Target { address, path: if path.is_empty() { "/".to_owned() } else { path }, headers, timeout }))
}

/// Returns the time in milliseconds that a variable has.
fn ms(name: &str, text: Option<String>, default: Duration) -> Result<Duration> {
    let Some(text) = text else { return Ok(default) };
    match text.trim().parse() {
        Ok(ms) if ms > 0 => Ok(Duration::from_millis(ms)),
        _ => Err(Error::invalid(format!("{name}={text}: expected a number of milliseconds"))),
    }
}

/// Returns the pairs of a variable's text `key=value,key=value`, whose values are percent-encoded.
fn pairs(text: Option<String>, name: &str) -> Result<Vec<(String, String)>> {
    let Some(all) = text else { return Ok(Vec::new()) };
    let pair = |one: &str| {
        // The text may be a password.
        let invalid = || Error::invalid(format!("{name}: expected key=value,key=value with values percent-encoded"));
        let (key, value) = one.split_once('=').ok_or_else(invalid)?;
        let value = decoded(value.trim()).ok_or_else(invalid)?;
        let is_clean = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        let is_framing = FRAMING.iter().any(|name| key.trim().eq_ignore_ascii_case(name));
        if is_framing || !is_clean(key.trim()) || value.chars().any(char::is_control) {
            return Err(invalid());
        }
        Ok((key.trim().to_owned(), value))
    };
    all.split(',').filter(|one| !one.trim().is_empty()).map(pair).collect()
}

fn decoded(text: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, text)| (*text).to_owned());
        Settings::read(find)
    }

    #[test]
    fn variables_are_those_of_opentelemetry() {
        assert!(read(&[]).unwrap().is_none());
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://node:4318/base/");
        assert!(read(&[endpoint, ("OTEL_SDK_DISABLED", "true")]).unwrap().is_none());
        let found = read(&[
            endpoint,
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other/own"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc, x-a=1"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,team=b"),
            ("OTEL_SERVICE_NAME", "gpt"),
            ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-b=2"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "50"),
        ])
        .unwrap()
        .unwrap();
        let (traces, metrics) = (found.traces.unwrap(), found.metrics.unwrap());
        assert_eq!((traces.address.as_str(), traces.path.as_str()), ("other:80", "/own"));
        assert_eq!((metrics.address.as_str(), metrics.path.as_str()), ("node:4318", "/base/v1/metrics"));
        assert_eq!(traces.headers[1..], [("authorization".into(), "Basic abc".into()), ("x-a".into(), "1".into())]);
        assert_eq!(metrics.headers[1..], [("x-b".into(), "2".into())]);
        assert_eq!(found.attributes, [("team".into(), "b".into()), ("service.name".into(), "gpt".into())]);
        let times = (traces.timeout, metrics.timeout, found.interval);
        assert_eq!(times, (Duration::from_millis(50), Duration::from_millis(250), INTERVAL));
        let none = read(&[endpoint, ("OTEL_TRACES_EXPORTER", "none")]).unwrap().unwrap();
        assert!(none.traces.is_none() && none.metrics.is_some());
    }

    #[test]
    fn what_cannot_be_used_is_named_without_its_text() {
        for (name, text) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://secret@host"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@host:1"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "secret:4317"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:99999"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "content-length=5"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=%zz"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=%0d%0ab"),
        ] {
            let all = [(name, text), ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://a:1")];
            let error = read(&all).unwrap_err();
            assert!(error.message.starts_with(name) && !error.message.contains("secret@"), "{error}");
            assert!(!error.message.contains("secret"), "{error}");
        }
        for name in ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"] {
            let grpc = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1"), (name, "grpc")];
            let message = read(&grpc).unwrap_err().message;
            assert!(message.starts_with(name) && message.contains("4318"), "{message}");
        }
    }
}
