//! What the XML interfaces of S3 and of Google Cloud Storage have in common, and the client library does not offer.

/// The text with every byte percent-encoded but letters, digits and `-._~/`: for queries, forms and headers.
pub(crate) fn percent_encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes().fold(String::new(), |mut out, byte| {
        match is_plain(byte) {
            true => out.push(byte.into()),
            false => out += &format!("%{byte:02X}"),
        }
        out
    })
}
