//! Parses the place of a store: a path, or a URL with scheme, location and options.
//!
//! A URL is `scheme://location?option=value&option=value`, with `%`, `?` and other reserved characters percent-encoded;
//! a path is taken as it is. This is the only file that knows how a name is appended to a place.

use std::borrow::Cow;

use crate::{Error, Kind, Result, SCHEMES, Scheme};

/// Words in the names of options that carry secrets.
const SECRETS: [&str; 7] = ["key", "secret", "token", "password", "credential", "signature", "sas"];

/// Parts of a URL.
#[derive(Clone, Copy)]
pub(crate) struct Url<'a> {
    pub(crate) scheme: &'a str,
    /// Location of the store, percent-encoded.
    pub(crate) location: &'a str,
    query: Option<&'a str>,
}

impl<'a> Url<'a> {
    /// Splits a URL; returns `None` for a path.
    pub(crate) fn of(url: &'a str) -> Option<Url<'a>> {
        let (scheme, rest) = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme))?;
        let rest = rest.strip_prefix("//")?;
        let (location, query) = match rest.split_once('?') {
            Some((location, query)) => (location, Some(query)),
            None => (rest, None),
        };
        Some(Url { scheme, location, query })
    }

    fn with(self, location: &str) -> String {
        let query = self.query.map(|query| format!("?{query}")).unwrap_or_default();
        format!("{}://{location}{query}", self.scheme)
    }

    /// Returns the location without slashes at its end, except the root's.
    fn trimmed(self) -> &'a str {
        match self.location.trim_end_matches('/') {
            "" if self.location.starts_with('/') => "/",
            trimmed => trimmed,
        }
    }

    /// Returns the URL for a message: without anything that may be a secret.
    pub(crate) fn shown(self) -> String {
        let (authority, path) = self.location.split_at(self.location.find('/').unwrap_or(self.location.len()));
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        format!("{}://{host}{path}", self.scheme)
    }

    /// Returns the scheme's backend, if the whole URL is valid.
    pub(crate) fn understood(self) -> Result<&'static Scheme> {
        let fail = |kind, message| Err(Error::new(kind, "open", self.shown(), message));
        let Some(scheme) = known(self.scheme) else {
            let offered: Vec<_> = SCHEMES.iter().map(|scheme| format!("{}://", scheme.name)).collect();
            let (offered, found) = (offered.join(", "), self.scheme);
            let message = format!("expected a path or one of {offered}; found scheme {found:?}");
            return fail(Kind::Unsupported, message);
        };
        if self.location.split('/').next().is_some_and(|authority| authority.contains('@')) {
            let what = "found a user or a password in the URL: URLs stand in logs and error messages, so take it out";
            return fail(Kind::Invalid, what.to_owned());
        }
        let options = || self.query.into_iter().flat_map(|query| query.split('&')).filter(|option| !option.is_empty());
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

    /// Returns the options by name, percent-decoded.
    #[cfg(feature = "far")]
    pub(crate) fn options(self) -> Result<Vec<(String, String)>> {
        let of_text = |option: &str| {
            let (name, value) = option.split_once('=')?;
            Some((name.to_owned(), decoded(value).filter(|value| !value.is_empty())?))
        };
        let options = self.query.into_iter().flat_map(|query| query.split('&')).filter(|option| !option.is_empty());
        let option = |option: &str| {
            let name = option.split('=').next().unwrap_or(option);
            let message = format!("expected {name}=value, percent-encoded UTF-8");
            of_text(option).ok_or_else(|| Error::new(Kind::Invalid, "open", self.shown(), message))
        };
        options.map(option).collect()
    }

    /// Returns the bucket, and the prefix in it without slashes around it, percent-decoded.
    #[cfg(feature = "far")]
    pub(crate) fn bucket_and_prefix(self) -> Result<(String, String)> {
        let invalid = |message: &str| Error::new(Kind::Invalid, "open", self.shown(), message);
        let location = decoded(self.trimmed()).ok_or_else(|| invalid("expected percent-encoded UTF-8"))?;
        let (bucket, prefix) = location.split_once('/').unwrap_or((&location, ""));
        if bucket.is_empty() {
            return Err(invalid("expected the name of a bucket after \"//\""));
        }
        Ok((bucket.to_owned(), prefix.to_owned()))
    }

    /// Returns the URL in its usual form, without a slash at the end.
    pub(crate) fn usual(self) -> String {
        self.with(self.trimmed())
    }
}

/// Returns whether a value is a URL with a user or a password before its host.
fn has_user(value: &str) -> bool {
    let authority = value.split_once("//").and_then(|(_, rest)| rest.split(['/', '?', '#']).next());
    authority.is_some_and(|authority| authority.contains('@'))
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

fn known(scheme: &str) -> Option<&'static Scheme> {
    SCHEMES.iter().find(|known| known.name.eq_ignore_ascii_case(scheme))
}

/// Returns the scheme of a valid URL; `None` for a path.
///
/// # Errors
/// [`Kind::Unsupported`] for an unknown scheme; [`Kind::Invalid`] for a malformed URL, an option that the scheme does
/// not have, and a secret.
pub(crate) fn scheme_of(url: &str) -> Result<Option<&'static Scheme>> {
    match Url::of(url) {
        Some(parts) => parts.understood().map(Some),
        None => match url.split_once(':') {
            Some((scheme, _)) if known(scheme).is_some() => {
                Err(Error::new(Kind::Invalid, "open", url, format!("expected \"//\" after \"{scheme}:\"")))
            }
            _ => Ok(None),
        },
    }
}

/// Returns the URL in its usual form, which does not depend on the current directory; `None` for a path.
///
/// # Errors
/// As [`scheme_of`].
pub(crate) fn absolute(url: &str) -> Result<Option<String>> {
    scheme_of(url)?;
    Ok(Url::of(url).map(Url::usual))
}

/// Appends `name`, a name below it, to the URL or path `url`; `""` is the place itself.
pub fn join(url: &str, name: &str) -> String {
    let below = |location: &str, name: &str| match location {
        _ if name.is_empty() => location.to_owned(),
        "/" => format!("/{name}"),
        _ => format!("{location}/{name}"),
    };
    match Url::of(url) {
        Some(parts) => parts.with(&below(parts.trimmed(), &encoded(name))),
        None => match url.trim_end_matches('/') {
            "" if url.starts_with('/') => below("/", name),
            path => below(path, name),
        },
    }
}

/// Splits the place `url` into its directory and its name there: the reverse of [`join`]. Returns `None` for a root.
pub fn split(url: &str) -> Option<(String, String)> {
    let Some(parts) = Url::of(url) else {
        let path = url.trim_end_matches('/');
        return match path.rsplit_once('/') {
            _ if path.is_empty() => None,
            None => Some((".".to_owned(), path.to_owned())),
            Some(("", name)) => Some(("/".to_owned(), name.to_owned())),
            Some((dir, name)) => Some((dir.to_owned(), name.to_owned())),
        };
    };
    let (dir, name) = parts.location.trim_end_matches('/').rsplit_once('/').filter(|(_, name)| !name.is_empty())?;
    Some((parts.with(if dir.is_empty() { "/" } else { dir }), decoded(name)?))
}

/// Encodes a path or a name for a URL.
pub(crate) fn encoded(text: &str) -> Cow<'_, str> {
    if text.contains(['%', '?']) { text.replace('%', "%25").replace('?', "%3F").into() } else { text.into() }
}

/// Decodes a path or a name of a URL; returns `None` if it is no percent-encoded UTF-8.
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?].map(|b| char::from(b).to_digit(16));
                (digits[0]? * 16 + digits[1]?) as u8
            }
            _ => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_before_the_options_and_behind_one_slash() {
        for (url, name, expected) in [
            ("run", "step", "run/step"),
            ("run//", "step", "run/step"),
            ("/", "step", "/step"),
            ("a?b", "c?d%", "a?b/c?d%"),
            ("memory://b", "step/COMMIT", "memory://b/step/COMMIT"),
            ("memory://b/run/", "step", "memory://b/run/step"),
            ("s3://b/run/?region=x&endpoint=http://h:9000", "step", "s3://b/run/step?region=x&endpoint=http://h:9000"),
            ("s3://b/run?region=x", "", "s3://b/run?region=x"),
            ("file:///", "step", "file:///step"),
            ("file:///a%3Fb", "c?d%", "file:///a%3Fb/c%3Fd%25"),
        ] {
            assert_eq!(join(url, name), expected, "{url} {name}");
            if !name.is_empty() && !name.contains('/') {
                let (dir, found) = split(expected).unwrap();
                assert_eq!((join(&dir, &found).as_str(), found.as_str()), (expected, name));
            }
        }
        for root in ["/", "file:///", "memory://b", "s3://b?region=x", ""] {
            assert_eq!(split(root), None, "{root}");
        }
        assert_eq!(split("step"), Some((".".into(), "step".into())));
    }

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
        assert_eq!(absolute("memory://b/x//?").unwrap().as_deref(), Some("memory://b/x?"));
    }
}
