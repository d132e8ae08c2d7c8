//! Texts of bounded length, kept where they are without memory of their own.

use std::fmt;

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

    /// Keeps the end of a text that is too long.
    pub(crate) fn tail(text: &str) -> Text<N> {
        let mut start = text.len().saturating_sub(N);
        while !text.is_char_boundary(start) {
            start += 1;
        }
        Text::of(&text[start..])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(Text::<5>::head("abäöc").as_str(), "abä");
        assert_eq!(Text::<4>::tail("abäöc").as_str(), "öc");
        assert_eq!(Text::<9>::tail("").as_str(), "");
        assert_eq!(Text::<2>::head("ab").as_str(), "ab");
    }
}
