//! Parses the place of a store: a path, or a URL with scheme, location and options.
//!
//! A URL is `scheme://location?option=value&option=value`, with `%`, `?` and other reserved characters percent-encoded;
//! a path is taken as it is. This is the only file that knows how a name is appended to a place.

use std::borrow::Cow;

use crate::{Error, Kind, Result};

/// Parts of a URL.
#[derive(Clone, Copy)]
pub(crate) struct Url<'a> {
    pub(crate) scheme: &'a str,
    /// Location of the store, percent-encoded.
    pub(crate) location: &'a str,
    pub(crate) query: Option<&'a str>,
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

    /// Returns the options by name, percent-decoded.
    #[cfg(feature = "remote")]
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
    #[cfg(any(feature = "remote", feature = "keeper"))]
    pub(crate) fn bucket_and_prefix(self) -> Result<(String, String)> {
        let invalid = |message: &str| Error::new(Kind::Invalid, "open", self.shown(), message);
        let location = decoded(self.trimmed()).ok_or_else(|| invalid("expected percent-encoded UTF-8"))?;
        let (bucket, prefix) = location.split_once('/').unwrap_or((&location, ""));
        if bucket.is_empty() {
            return Err(invalid(match self.scheme {
                "hdfs" | "viewfs" => {
                    "expected a NameNode's host, or the name of a nameservice or mount table, after \"//\": \
                     fs.defaultFS does not stand in for it"
                }
                "keeper" => "expected the name of a keeper after \"//\"",
                _ => "expected the name of a bucket after \"//\"",
            }));
        }
        Ok((bucket.to_owned(), prefix.to_owned()))
    }

    /// Returns the URL in its usual form, without a slash at the end.
    pub(crate) fn usual(self) -> String {
        self.with(self.trimmed())
    }
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
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
}
