//! Opens a store by its URL: the table of schemes.

use std::sync::Arc;

#[cfg(feature = "azure")]
use crate::azure;
#[cfg(feature = "gcs")]
use crate::gcs;
#[cfg(feature = "hdfs")]
use crate::hdfs;
#[cfg(feature = "keeper")]
use crate::keeper;
use crate::place::{Url, decoded};
#[cfg(feature = "s3")]
use crate::s3;
use crate::{Error, Kind, Result, Shared, Store, local, memory};

/// Words in the names of options that carry secrets.
const SECRETS: [&str; 7] = ["key", "secret", "token", "password", "credential", "signature", "sas"];

type OpenUrl = fn(Url<'_>, &Arc<Shared>) -> Result<Arc<dyn Store>>;

/// Scheme of URLs, with its backend.
struct Scheme {
    name: &'static str,
    options: &'static [&'static str],
    open: OpenUrl,
}

/// Backends by scheme. A new one is one file and one line here.
const SCHEMES: &[Scheme] = &[
    Scheme { name: "file", options: &[], open: local::open_url },
    Scheme { name: "memory", options: &[], open: memory::open_url },
    #[cfg(feature = "azure")]
    Scheme { name: "az", options: azure::OPTIONS, open: azure::open_url },
    #[cfg(feature = "gcs")]
    Scheme { name: "gs", options: gcs::OPTIONS, open: gcs::open_url },
    #[cfg(feature = "hdfs")]
    Scheme { name: "hdfs", options: hdfs::OPTIONS, open: hdfs::open_url },
    #[cfg(feature = "s3")]
    Scheme { name: "s3", options: s3::OPTIONS, open: s3::open_url },
    #[cfg(feature = "keeper")]
    Scheme { name: "keeper", options: &[], open: keeper::open_url },
    #[cfg(feature = "hdfs")]
    Scheme { name: "viewfs", options: hdfs::OPTIONS, open: hdfs::open_url },
];

/// Opens the store at `url`: `file:///path`, a plain path, `memory://bucket/path`, or `az://container/prefix`,
/// `gs://bucket/prefix`, `s3://bucket/prefix`, `hdfs://namenode:port/path`, `viewfs://cluster/path`, which are reached
/// over the network.
///
/// Creates nothing: a path that does not exist yet is created with the first object.
///
/// # Errors
/// [`Kind::Unsupported`] for an unknown scheme; [`Kind::Invalid`] for a malformed URL, an unknown option, a secret in
/// the URL, or a path through something that is no directory.
pub fn open(url: &str) -> Result<Arc<dyn Store>> {
    open_on(url, &Arc::default())
}

/// Opens a store like [`open`], with the state that stores share.
///
/// # Errors
/// As [`open`].
pub fn open_on(url: &str, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    match (scheme_of(url)?, Url::of(url)) {
        (Some(scheme), Some(parts)) => (scheme.open)(parts, shared),
        _ => local::open_path(url, shared),
    }
}

/// Returns the URL or path in a form that does not depend on the current directory, without a slash at the end: a path
/// is made absolute, a URL with a scheme stays. Reads no storage.
///
/// # Errors
/// As [`open`] for an invalid URL; [`Kind::Invalid`] if there is no current directory.
pub fn absolute(url: &str) -> Result<String> {
    scheme_of(url)?;
    Url::of(url).map_or_else(|| local::absolute(url), |url| Ok(url.usual()))
}

fn known(scheme: &str) -> Option<&'static Scheme> {
    SCHEMES.iter().find(|known| known.name.eq_ignore_ascii_case(scheme))
}

/// Returns the scheme of a valid URL; `None` for a path.
///
/// # Errors
/// [`Kind::Unsupported`] for an unknown scheme; [`Kind::Invalid`] for a malformed URL, an option that the scheme does
/// not have, and a secret.
fn scheme_of(url: &str) -> Result<Option<&'static Scheme>> {
    match Url::of(url) {
        Some(parts) => understood(parts).map(Some),
        None => match url.split_once(':') {
            Some((scheme, _)) if known(scheme).is_some() => {
                Err(Error::new(Kind::Invalid, "open", url, format!("expected \"//\" after \"{scheme}:\"")))
            }
            _ => Ok(None),
        },
    }
}

/// Returns the scheme's backend, if the whole URL is valid.
fn understood(url: Url<'_>) -> Result<&'static Scheme> {
    let fail = |kind, message| Err(Error::new(kind, "open", url.shown(), message));
    let Some(scheme) = known(url.scheme) else {
        let offered: Vec<_> = SCHEMES.iter().map(|scheme| format!("{}://", scheme.name)).collect();
        let (offered, found) = (offered.join(", "), url.scheme);
        let message = format!("expected a path or one of {offered}; found scheme {found:?}");
        return fail(Kind::Unsupported, message);
    };
    if url.location.split('/').next().is_some_and(|authority| authority.contains('@')) {
        let what = "found a user or a password in the URL: URLs stand in logs and error messages, so take it out";
        return fail(Kind::Invalid, what.to_owned());
    }
    let options = || url.query.into_iter().flat_map(|query| query.split('&')).filter(|option| !option.is_empty());
    let names = || options().map(|option| option.split('=').next().unwrap_or(option));
    let is_secret = |name: &&str| SECRETS.iter().any(|word| name.to_ascii_lowercase().contains(word));
    if let Some(name) = names().find(is_secret) {
        let why = "URLs stand in logs and error messages, so no secret may";
        return fail(Kind::Invalid, format!("found the option {name:?}: {why}"));
    }
    if let Some(name) = names().find(|name| !scheme.options.contains(name)) {
        let (scheme, remedy) = (scheme.name, "(a \"?\" in a name is written %3F)");
        let offered = match known(scheme).map(|known| known.options.join(", ")) {
            Some(offered) if !offered.is_empty() => format!("{scheme}:// has the options {offered}"),
            _ => format!("{scheme}:// has no options"),
        };
        return fail(Kind::Invalid, format!("{offered}; found {name:?} {remedy}"));
    }
    if let Some(name) = names().enumerate().find_map(|(i, name)| names().skip(i + 1).find(|&next| next == name)) {
        return fail(Kind::Invalid, format!("expected each option once, found {name:?} twice"));
    }
    // Text that is not percent-encoded is reported by `options`.
    let values =
        || options().filter_map(|option| Some((option.split_once('=')?.0, decoded(option.split_once('=')?.1)?)));
    if let Some((name, _)) = values().find(|(_, value)| value.contains(char::is_control)) {
        return fail(Kind::Invalid, format!("expected printable characters in {name}=, found a control character"));
    }
    if let Some((name, _)) = values().find(|(_, value)| has_user(value)) {
        let why = "URLs stand in logs and error messages, so take it out";
        return fail(Kind::Invalid, format!("found a user or a password in {name}=: {why}"));
    }
    Ok(scheme)
}

/// Returns whether a value is a URL with a user or a password before its host.
fn has_user(value: &str) -> bool {
    let authority = value.split_once("//").and_then(|(_, rest)| rest.split(['/', '?', '#']).next());
    authority.is_some_and(|authority| authority.contains('@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_secret_or_unknown_is_refused_and_secrets_are_not_shown() {
        let refused = |url: &str| scheme_of(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string();
        for url in [
            "file://joe:hunter2@host/x",
            "memory://b/x?secret_access_key=hunter2",
            "memory://b/x?a=1&X-Amz-Signature=hunter2",
            "memory://b/x?Session_Token=hunter2",
            "nfs://joe:hunter2@host/x?password=hunter2",
        ] {
            let text = refused(url);
            assert!(!text.contains("hunter2") && !text.contains("joe"), "{text}");
        }
        assert!(refused("memory://b/x?secret_access_key=1").contains("found the option \"secret_access_key\""));
        assert!(refused("file://joe@host/x").starts_with("open file://host/x: found a user or a password"));
        let text = refused("memory://b/x?region=eu");
        assert_eq!(
            text,
            "open memory://b/x: memory:// has no options; found \"region\" (a \"?\" in a name is written %3F)"
        );
        assert!(scheme_of("memory://b/x?").is_ok());
    }

    #[cfg(feature = "s3")]
    #[test]
    fn an_option_stands_once_in_print_and_without_a_password() {
        for (url, said) in [
            ("s3://b/x?region=a&region=b", "expected each option once, found \"region\" twice"),
            ("s3://b/x?storage_class=A%0AB", "printable characters in storage_class=, found a control character"),
            ("s3://b/x?region=a%7F", "printable characters in region="),
            ("s3://b/x?endpoint=http://joe:hunter2@h:1", "found a user or a password in endpoint="),
            ("s3://b/x?endpoint=http%3A%2F%2Fjoe%3Ahunter2%40h:1/y", "found a user or a password in endpoint="),
        ] {
            let text = scheme_of(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string();
            assert!(text.contains(said) && !text.contains("hunter2") && !text.contains("joe"), "{text}");
        }
        assert!(scheme_of("s3://b/x?endpoint=http://h:1/@y&region=a").is_ok());
    }

    #[test]
    fn a_url_has_no_slash_behind_it() {
        assert_eq!(absolute("memory://b/x//?").unwrap(), "memory://b/x?");
    }
}
