//! Texts of bounded length, kept where they are without memory of their own.

use std::fmt;

/// Digits that are kept of a long run of them.
const DIGITS_KEPT: usize = 6;

/// A text of at most `N` bytes.
#[derive(Clone, Copy)]
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Text<N> {
    /// Keeps the beginning of a text that is too long.
    pub(crate) fn head(text: &str) -> Text<N> {
        let mut end = text.len().min(N);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        Text::of(&text[..end])
    }

    /// Keeps of a text that is too long its beginning and its end, with `…` between them.
    pub(crate) fn shortened(text: &str) -> Text<N> {
        Text::of(&shortened(text, N))
    }

    /// Keeps of a name that is too long its end, and of a long run of hexadecimal digits in that the beginning: all
    /// files of a save share theirs, and their numbers stand before it.
    pub(crate) fn name(name: &str) -> Text<N> {
        if name.len() <= N {
            return Text::of(name);
        }
        let digits = name.rfind('-').map_or(0, |dash| dash + 1);
        let length = name[digits..].bytes().take_while(u8::is_ascii_hexdigit).count();
        let (first, last) = if length > DIGITS_KEPT && name.len() - digits - length < N / 2 {
            (&name[..digits + DIGITS_KEPT], &name[digits + length..])
        } else {
            (name, "")
        };
        let mark = if last.is_empty() { "" } else { "…" };
        let mut start = (first.len() + mark.len() + last.len()).saturating_sub(N);
        while !first.is_char_boundary(start) {
            start += 1;
        }
        let (mut bytes, mut length) = ([0; N], 0);
        for part in [&first[start..], mark, last] {
            bytes[length..length + part.len()].copy_from_slice(part.as_bytes());
            length += part.len();
        }
        Text { bytes, length }
    }

    fn of(text: &str) -> Text<N> {
        let mut bytes = [0; N];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Text { bytes, length: text.len() }
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

/// Mark of a cut in a text.
const CUT: char = '…';

/// Returns a text of at most that many bytes: of a longer one the beginning and the end, which says what to do, with
/// `…` between them.
pub(crate) fn shortened(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let kept = bytes_max.saturating_sub(CUT.len_utf8());
    let (mut end, mut start) = (kept - kept / 3, text.len() - kept / 3);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    while !text.is_char_boundary(start) {
        start += 1;
    }
    if bytes_max < CUT.len_utf8() { String::new() } else { format!("{}{CUT}{}", &text[..end], &text[start..]) }
}

/// Returns the part of a text before its cut, if it has one.
pub(crate) fn head_of(text: &str) -> &str {
    text.split(CUT).next().unwrap_or_default()
}

/// Returns a list or an object as JSON.
pub(crate) fn list(of: impl serde::Serialize) -> String {
    serde_json::to_string(&of).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(Text::<5>::head("abäöc").as_str(), "abä");
        assert_eq!(Text::<4>::name("abäöc").as_str(), "öc");
        assert_eq!(Text::<9>::name("").as_str(), "");
        assert_eq!(Text::<2>::head("ab").as_str(), "ab");
    }

    #[test]
    fn a_cut_is_marked_and_the_end_is_kept() {
        assert_eq!(shortened("disk full", 9), "disk full");
        let cut = shortened("write model/00001: expected room for 1054720 bytes, found 4096; free some", 48);
        assert_eq!(cut, "write model/00001: expected ro…4096; free some");
        for length in 0..20 {
            let cut = Text::<20>::shortened(&"ä".repeat(length));
            assert_eq!(cut.as_str().contains('…'), length > 10, "{length}: {cut:?}");
            assert!(cut.as_str().len() <= 20, "{length}: {cut:?}");
            assert!(shortened("äöüäöü", length).len() <= length);
        }
        assert_eq!((head_of("a…b"), head_of("ab")), ("a", "ab"));
    }

    #[test]
    fn a_long_name_keeps_what_tells_it_from_others() {
        let file = |key: &str| format!("{key}/00003-000-{}.safetensors", "0123456789abcdef".repeat(2));
        assert_eq!(Text::<48>::name(&file("model")).as_str(), "model/00003-000-012345….safetensors");
        let long = file("a/very/long/key/of/some/state/with/words");
        assert_eq!(Text::<48>::name(&long).as_str(), "state/with/words/00003-000-012345….safetensors");
        for length in 0..80 {
            for name in [format!("{}-{}", "ä".repeat(length), "f".repeat(length)), "-a".repeat(length)] {
                assert!(Text::<48>::name(&name).as_str().len() <= 48, "{name}");
            }
        }
    }
}
