//! Checks URLs of services, as users write them.

use super::network;

/// Returns the client library's options for an endpoint: an `http:` endpoint is used without TLS.
#[cfg(any(feature = "azure", feature = "gcs"))]
pub(crate) fn plain(endpoint: Option<&str>) -> object_store::ClientOptions {
    object_store::ClientOptions::new().with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http:")))
}

/// Refuses to send a token to another machine without TLS.
#[cfg(any(feature = "azure", feature = "gcs"))]
pub(crate) fn expect_tls(endpoint: Option<&str>) -> std::result::Result<(), String> {
    let plain = endpoint.and_then(|endpoint| endpoint.strip_prefix("http://"));
    let host = plain.map(|rest| rest.split(['/', '?']).next().unwrap_or_default());
    let name = host.map(|host| match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    });
    let is_here = |name: &str| {
        name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok_and(|it| it.is_loopback())
    };
    match name.filter(|name| !is_here(name)) {
        Some(name) => Err(format!("a token would go to {name} unencrypted: expected an endpoint with https:")),
        None => Ok(()),
    }
}

/// Returns whether `endpoint` is the URL of a host.
pub(crate) fn is_http(endpoint: &str) -> bool {
    let is_one = |scheme: &&str| endpoint.strip_prefix(*scheme).is_some_and(|host| !host.is_empty());
    ["http://", "https://"].iter().any(is_one) && network::is_url(endpoint)
}
