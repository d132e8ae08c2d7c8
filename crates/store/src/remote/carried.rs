//! Collects the secret values that the requests of a call carry, so that no error repeats them.
//!
//! A service may repeat a request in its refusal, and proxies do so on pages of their own: with the signature, the
//! token of a session, or the signed query of a URL. So an error shows of an answer only the service's code and
//! message, and these only if they contain nothing of the requests or of the keys that sign them.

use std::collections::{HashSet, VecDeque};
use std::fmt;

use http::header::{AUTHORIZATION, CONTENT_TYPE, DATE, HOST, HeaderName, RANGE, USER_AGENT};
use object_store::client::HttpRequest;

/// Headers that an error may repeat: they hold no secret, and messages quote their values.
const PUBLIC_HEADERS: [HeaderName; 9] = [
    CONTENT_TYPE,
    DATE,
    HOST,
    RANGE,
    USER_AGENT,
    HeaderName::from_static("x-amz-content-sha256"),
    HeaderName::from_static("x-amz-copy-source"),
    HeaderName::from_static("x-amz-date"),
    HeaderName::from_static("x-ms-date"),
];

/// Parts of a query that an error may repeat, for the same reason.
const PUBLIC_QUERY: [&str; 8] =
    ["continuation-token", "key-marker", "list-type", "marker", "partNumber", "prefix", "upload-id-marker", "uploadId"];

/// Maximum number of values that are kept, the last ones: a call has many requests, of which few are in flight.
const VALUES_MAX: usize = 1024;

/// Length of a run of letters and digits that a text and a value may not share.
const COMMON: usize = 16;

/// Letters and digits of the shortest secret, which a text may not contain as a whole.
const SECRET_MIN: usize = 8;

/// Characters of a text that are examined, and characters that are shown.
const LOOKED_AT: usize = 4096;
const SHOWN: usize = 300;

/// Longest code of a service, in bytes.
const CODE_BYTES_MAX: usize = 64;

/// Values that requests carried, except those that errors may repeat.
#[derive(Clone, Default)]
pub(crate) struct Carried(VecDeque<Box<str>>);

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Carried")
    }
}

impl Carried {
    /// Adds the values that a request carries.
    pub(crate) fn add(&mut self, request: &HttpRequest) {
        for (name, value) in request.headers().iter().filter(|(name, _)| !PUBLIC_HEADERS.contains(name)) {
            match *name == AUTHORIZATION {
                true => self.add_authorization(&String::from_utf8_lossy(value.as_bytes())),
                // A shorter one is a word that messages have, such as the name of a checksum.
                false => self.keep(&String::from_utf8_lossy(value.as_bytes()), COMMON),
            }
        }
        self.add_query(request.uri().query().unwrap_or_default(), COMMON);
        let content = request.headers().get(CONTENT_TYPE).map_or(&b""[..], |content| content.as_bytes());
        let Some(body) = request.body().as_bytes() else { return };
        if content.starts_with(b"application/x-www-form-urlencoded") {
            // A request for a token: the secret of a client, or the token that proves the caller's identity.
            self.add_query(&String::from_utf8_lossy(body), SECRET_MIN);
        } else if content.starts_with(b"multipart/mixed") {
            self.add_batch(&String::from_utf8_lossy(body));
        }
    }

    /// Adds a secret that requests do not contain verbatim.
    pub(crate) fn hold(&mut self, secret: &str) {
        self.keep(secret, SECRET_MIN);
    }

    /// Adds requests within a request, each with a head of its own.
    fn add_batch(&mut self, body: &str) {
        for line in body.lines() {
            match line.split_once(": ") {
                Some((name, value)) if AUTHORIZATION == name => self.add_authorization(value),
                Some(_) => {}
                None => {
                    let query = line.split(' ').nth(1).and_then(|target| target.split_once('?'));
                    self.add_query(query.map_or("", |(_, query)| query), COMMON);
                }
            }
        }
    }

    fn add_authorization(&mut self, value: &str) {
        // Messages name the scheme, which stands in front, and headers that must be signed.
        let parts = value.split_once(' ').map_or(value, |(_, rest)| rest).split([' ', ',']);
        parts.filter(|part| !part.starts_with("SignedHeaders=")).for_each(|part| self.keep(part, SECRET_MIN));
    }

    fn add_query(&mut self, query: &str, bytes_min: usize) {
        for (name, value) in query.split('&').filter_map(|part| part.split_once('=')) {
            if !PUBLIC_QUERY.contains(&name) {
                self.keep(value, bytes_min);
            }
        }
    }

    fn keep(&mut self, value: &str, bytes_min: usize) {
        if value.len() < bytes_min {
            return;
        }
        if self.0.len() == VALUES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(value.into());
    }

    /// Returns whether a text contains any of the values, in any encoding.
    fn is_in(&self, text: &str) -> bool {
        let text = bare(text.as_bytes());
        let parts: HashSet<&[u8]> = text.windows(COMMON).collect();
        self.0.iter().map(|value| bare(value.as_bytes())).any(|value| match value.len() {
            ..SECRET_MIN => false,
            short @ ..COMMON => text.windows(short).any(|part| *part == *value),
            _ => value.windows(COMMON).any(|part| parts.contains(part)),
        })
    }

    /// Returns the text on one line, without control characters, cut if it is long; empty if it contains a value that
    /// was sent.
    pub(crate) fn shown(&self, text: &str) -> String {
        let cut: String = text.chars().take(LOOKED_AT).collect();
        let text = quick_xml::escape::unescape(&cut).map_or_else(|_| cut.clone(), |text| text.into_owned());
        if self.is_in(&text) {
            return String::new();
        }
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut shown = String::new();
        for c in line.chars().take(SHOWN) {
            match c {
                '"' | '\'' | '\\' => shown.push(c),
                _ => shown.extend(c.escape_debug()),
            }
        }
        if line.chars().nth(SHOWN).is_some() { shown + "…" } else { shown }
    }

    /// Returns a service's code; empty if it is none, or contains a value that was sent.
    pub(crate) fn shown_code<'a>(&self, code: &'a str) -> &'a str {
        let is_code = code.len() <= CODE_BYTES_MAX
            && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            && !self.is_in(code);
        if is_code { code } else { "" }
    }
}

/// Returns the letters and digits of a text, in lower case: the characters that encodings keep.
fn bare(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|&byte| (byte as char).to_digit(16));
    let (mut bare, mut at) = (Vec::with_capacity(text.len()), 0);
    while at < text.len() {
        let byte = match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                at += 2;
                (high * 16 + low) as u8
            }
            (byte, _, _) => byte,
        };
        at += 1;
        if byte.is_ascii_alphanumeric() {
            bare.push(byte.to_ascii_lowercase());
        }
    }
    bare
}

#[cfg(test)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;

    const SIGNATURE: &str = "Zm9v+YmFy/cXV4/eHl6YWJj==";

    fn carried(url: &str, headers: &[(&'static str, &str)], body: &str) -> Carried {
        let mut request = HttpRequest::new(HttpRequestBody::from(body.to_owned()));
        *request.uri_mut() = url.parse().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let mut carried = Carried::default();
        carried.add(&request);
        carried
    }

    #[test]
    fn what_was_sent_is_in_no_text_that_is_shown() {
        let signed = format!("SharedKey account:{SIGNATURE}");
        let encoded = "Zm9v%2BYmFy%2FcXV4%2FeHl6YWJj%3D%3D";
        let form = ("content-type", "application/x-www-form-urlencoded");
        let batch = ("content-type", "multipart/mixed; boundary=b");
        for carried in [
            carried("http://h/b/x", &[("authorization", &signed)], ""),
            carried("http://h/b/x", &[("x-amz-security-token", SIGNATURE)], ""),
            carried(&format!("http://h/b/x?prefix=run&sig={encoded}"), &[], ""),
            carried("http://h/token", &[form], &format!("grant_type=x&client_secret={encoded}")),
            carried("http://h/b?comp=batch", &[batch], &format!("--b\r\nAuthorization: {signed}\r\n")),
            carried("http://h/b?comp=batch", &[batch], &format!("DELETE /b/x?sig={encoded} HTTP/1.1\r\n")),
        ] {
            let (escaped, cut) = ("Zm9v&#43;YmFy&#x2F;cXV4/eHl6YWJj==", "9v+YmFy/cXV4/eHl6YW");
            for said in [SIGNATURE, encoded, "ZM9V YMFY CXV4 EHL6 YWJJ", escaped, cut] {
                assert_eq!(carried.shown(&format!("found {said}, expected another")), "", "{said}");
            }
            assert_eq!(carried.shown("found Zm9v, expected another"), "found Zm9v, expected another");
            assert_eq!(carried.shown_code("Zm9vYmFycXV4eHl6YWJj"), "");
        }
    }

    #[test]
    fn messages_may_name_what_is_no_secret() {
        let signed = "AWS4-HMAC-SHA256 Credential=k/20240102/us-east-1/s3/aws4_request, \
                      SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=5f2c";
        let headers = [
            ("authorization", signed),
            ("host", "bucket.example.com"),
            ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
            ("x-amz-checksum-algorithm", "CRC64NVME"),
            ("x-amz-date", "20240102T030405Z"),
        ];
        let carried =
            carried("http://h/b/x?uploadId=0123456789abcdef0123&prefix=runs/of-a-model", &headers, "secret body");
        for said in [
            "no upload 0123456789abcdef0123 below runs/of-a-model",
            "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, and x-amz-date not 20240102T030405Z",
            "the CRC64NVME did not match at bucket.example.com",
            "use AWS4-HMAC-SHA256",
        ] {
            assert_eq!(carried.shown(said), said);
        }
        assert_eq!(carried.shown("k/20240102/us-east-1/s3/aws4_request"), "");
    }

    #[test]
    fn texts_are_on_one_line_and_of_printable_characters() {
        let carried = Carried::default();
        assert_eq!(carried.shown(" it&apos;s \"a\\b\"\r\n &lt;x&gt; "), "it's \"a\\b\" <x>");
        assert_eq!(carried.shown("a\x1b[31m\0\u{202e}b"), "a\\u{1b}[31m\\0\\u{202e}b");
        assert_eq!(carried.shown(&"é".repeat(SHOWN)), "é".repeat(SHOWN));
        assert_eq!(carried.shown(&"é".repeat(SHOWN + 1)), "é".repeat(SHOWN) + "…");
        assert_eq!(carried.shown_code("InvalidAccessKeyId.NotFound"), "InvalidAccessKeyId.NotFound");
        for none in ["a b", "a\n", "<a>", &"a".repeat(CODE_BYTES_MAX + 1)] {
            assert_eq!(carried.shown_code(none), "", "{none:?}");
        }
    }
}
