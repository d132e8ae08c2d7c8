//! Reads the delegation tokens that Hadoop gives its jobs, in a file that `HADOOP_TOKEN_FILE_LOCATION` names.
//!
//! The format is that of [`Credentials`]: `HDTS`, a byte, and lists of tokens, as Hadoop's `Writable` (0) or in
//! protobuf (1). The client library reads the file, too, and panics where it is damaged.
//!
//! [`Credentials`]: https://hadoop.apache.org/docs/stable/api/org/apache/hadoop/security/Credentials.html

use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use prost::Message;

/// Variable with the file's path.
const VARIABLE: &str = "HADOOP_TOKEN_FILE_LOCATION";

const MAGIC: &[u8] = b"HDTS";

/// Kind of the tokens of NameNodes.
const KIND: &str = "HDFS_DELEGATION_TOKEN";

/// A token, as protobuf has it.
#[derive(Clone, PartialEq, Message)]
struct Token {
    #[prost(bytes = "vec", tag = "1")]
    identifier: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    password: Vec<u8>,
    #[prost(string, tag = "3")]
    kind: String,
    #[prost(string, tag = "4")]
    service: String,
}

#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(message, optional, tag = "2")]
    token: Option<Token>,
}

#[derive(Clone, PartialEq, Message)]
struct Credentials {
    #[prost(message, repeated, tag = "1")]
    tokens: Vec<Named>,
}

/// Returns the token for the NameNodes of `authority`, as a URL has it; `None` if no file is named, or if it has none.
///
/// # Errors
/// A message that names the file, if it cannot be read or its token has expired.
pub(super) fn of(authority: &str) -> Result<Option<String>, String> {
    match std::env::var_os(VARIABLE).map(PathBuf::from) {
        Some(path) => read(&path, authority).map_err(|what| format!("{VARIABLE} names {}: {what}", path.display())),
        None => Ok(None),
    }
}

fn read(path: &Path, authority: &str) -> Result<Option<String>, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let tokens = parse(&bytes).ok_or("expected a file of Hadoop's tokens, found something else, or a damaged one")?;
    let of_pair = format!("ha-hdfs:{authority}");
    let at =
        authority.to_socket_addrs().map(|all| all.map(|at| at.to_string()).collect::<Vec<_>>()).unwrap_or_default();
    let is_its = |token: &Token| {
        token.kind == KIND && (token.service == of_pair || token.service == authority || at.contains(&token.service))
    };
    let Some(token) = tokens.iter().find(|token| is_its(token)) else { return Ok(None) };
    let expires_ms = expires_ms(&token.identifier).ok_or("the token's identifier is damaged")?;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    if u128::from(expires_ms) <= now_ms {
        let ago_s = (now_ms - u128::from(expires_ms)) / 1000;
        return Err(format!("expected a token that is valid, found one that expired {ago_s} s ago: get a new one"));
    }
    let mut plain = Vec::new();
    for part in [&token.identifier, &token.password, token.kind.as_bytes(), token.service.as_bytes()] {
        put_length(&mut plain, part.len());
        plain.extend_from_slice(part);
    }
    Ok(Some(BASE64_URL_SAFE_NO_PAD.encode(plain)))
}

/// Returns the tokens of a file; `None` if it is damaged.
fn parse(bytes: &[u8]) -> Option<Vec<Token>> {
    let (format, mut rest) = bytes.strip_prefix(MAGIC)?.split_first()?;
    match format {
        0 => {
            let count = number(&mut rest)?;
            (0..count).map(|_| parse_one(&mut rest)).collect()
        }
        1 => Credentials::decode_length_delimited(rest)
            .ok()
            .map(|all| all.tokens.into_iter().filter_map(|named| named.token).collect()),
        _ => None,
    }
}

fn parse_one(rest: &mut &[u8]) -> Option<Token> {
    let _alias = field(rest)?;
    let (identifier, password) = (field(rest)?.to_vec(), field(rest)?.to_vec());
    let mut text = || String::from_utf8(field(rest)?.to_vec()).ok();
    Some(Token { identifier, password, kind: text()?, service: text()? })
}

/// Returns until when a token can be renewed, at most, in milliseconds since 1970. Its identifier holds a version,
/// three names, the times of its issue and of its end, and more.
fn expires_ms(identifier: &[u8]) -> Option<u64> {
    let mut rest = identifier.strip_prefix(&[0])?;
    for _ in 0..3 {
        field(&mut rest)?;
    }
    number(&mut rest)?;
    number(&mut rest)
}

/// Takes bytes that follow their length.
fn field<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(number(rest)?).ok()?;
    rest.split_off(..length)
}

/// Takes a number of Hadoop's `WritableUtils`; `None` for a negative one.
fn number(rest: &mut &[u8]) -> Option<u64> {
    let first = rest.split_off_first()?.cast_signed();
    match first {
        0.. => Some(first.cast_unsigned().into()),
        -120..=-113 => {
            let bytes = rest.split_off(..usize::try_from(-112 - i32::from(first)).ok()?)?;
            Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
        }
        _ => None,
    }
}

/// Appends a length as Hadoop's `WritableUtils` has it.
fn put_length(into: &mut Vec<u8>, length: usize) {
    match u8::try_from(length) {
        Ok(length @ ..=127) => into.push(length),
        _ => {
            let bytes = length.to_be_bytes();
            let bytes = &bytes[(length.leading_zeros() / 8) as usize..];
            into.push((-112_i8 - bytes.len() as i8).cast_unsigned());
            into.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a file with one token, as a `Writable`.
    fn file(expires_ms: u64, service: &str) -> Vec<u8> {
        let mut identifier = vec![0];
        for name in ["saver", "renewer", ""] {
            put_length(&mut identifier, name.len());
            identifier.extend_from_slice(name.as_bytes());
        }
        for time_ms in [1, expires_ms] {
            put_length(&mut identifier, time_ms as usize);
        }
        let mut bytes = [MAGIC, &[0, 1]].concat();
        for part in [b"alias", identifier.as_slice(), &[7; 300], KIND.as_bytes(), service.as_bytes()] {
            put_length(&mut bytes, part.len());
            bytes.extend_from_slice(part);
        }
        bytes.push(0); // secrets
        bytes
    }

    #[test]
    fn a_file_is_read_or_refused_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let read_of = |bytes: &[u8], authority: &str| {
            std::fs::write(&path, bytes).unwrap();
            read(&path, authority)
        };
        let whole = file(1 << 42, "ha-hdfs:training");
        let token = read_of(&whole, "training").unwrap().unwrap();
        let plain = BASE64_URL_SAFE_NO_PAD.decode(token).unwrap();
        assert!(whole.windows(plain.len()).any(|found| found == plain));
        assert_eq!(read_of(&whole, "other"), Ok(None));
        assert!(read_of(&file(1 << 42, "127.0.0.1:8020"), "127.0.0.1:8020").unwrap().is_some());
        let token = parse(&whole).unwrap().remove(0);
        let all = Credentials { tokens: vec![Named { token: Some(token.clone()) }] };
        let newer = [MAGIC, &[1], &all.encode_length_delimited_to_vec()].concat();
        assert_eq!(parse(&newer), Some(vec![token]));

        let expired = read_of(&file(1000, "ha-hdfs:training"), "training").unwrap_err();
        assert!(expired.contains("that expired"), "{expired}");
        for length in 0..whole.len() - 1 {
            assert_eq!(parse(&whole[..length]), None, "{length} bytes");
        }
        for length in 0..newer.len() {
            assert_eq!(parse(&newer[..length]), None, "{length} bytes");
        }
        assert!(read_of(&[MAGIC, &[2]].concat(), "training").is_err());
        assert!(read(&dir.path().join("none"), "training").unwrap_err().contains("No such file"));
    }
}
