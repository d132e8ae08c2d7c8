//! Numbers, times and tables as people read them.

use std::borrow::Cow;
use std::fmt::Write;
use std::ops::Range;

/// Columns by which what follows of a broken line is indented.
const HANGING: usize = 4;

/// Formats a size: `17 B`, `1.5 KiB`, `12.3 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be written as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Draws a bar of that many cells, a share of which is full: `[###...]`.
pub(crate) fn bar(share: f64, cells: usize) -> String {
    let full = ((share.clamp(0.0, 1.0) * cells as f64).round() as usize).min(cells);
    format!("[{}{}]", "#".repeat(full), ".".repeat(cells - full))
}

/// Formats a count: `1 leaf`, `2 leaves`.
pub(crate) fn count(n: u64, one: &str, many: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {many}") }
}

/// Formats the time since then: `5 s`, `3 min`, `2 h`, `40 d`.
pub(crate) fn age(then_ms: u64, now_ms: u64) -> String {
    match now_ms.saturating_sub(then_ms) / 1000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// Formats a time with three digits: `0.25 ms`, `12 s`, `2 min`, `6 h`, `2 d`.
pub(crate) fn duration(seconds: f64) -> String {
    let units = [(86_400.0, 2.0, "d"), (3600.0, 2.0, "h"), (60.0, 2.0, "min"), (1.0, 1.0, "s")];
    let unit = units.into_iter().find(|(size, least, _)| seconds >= size * least);
    let (value, unit) = unit.map_or((seconds * 1e3, "ms"), |(size, _, unit)| (seconds / size, unit));
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

/// Formats a date: `2026-01-31 13:05:09 UTC`.
pub(crate) fn date(unix_ms: u64) -> String {
    let (days, second) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Years that begin in March, so that the leap day is the last of its year, in eras of 400 (Hinnant,
    // "civil_from_days").
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day_of_month:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Formats ranks: `rank 3`, `ranks 0-2, 7`.
pub(crate) fn ranks(ranges: &[Range<u32>]) -> String {
    let word = match ranges {
        [one] if one.len() == 1 => "rank ",
        _ => "ranks ",
    };
    let said = ranges.iter().map(|range| match range.len() {
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    });
    word.to_owned() + &said.collect::<Vec<_>>().join(", ")
}

/// Returns text from a checkpoint on one line, without characters that control a terminal or the order of its text.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    if text.chars().any(controls) { Cow::Owned(escaped(text, |_| false)) } else { Cow::Borrowed(text) }
}

/// Returns text of several lines without other control characters.
pub(crate) fn plain_lines(text: &str) -> String {
    escaped(text, |c| c == '\n')
}

/// Breaks lines that are wider than a terminal of that many columns: between words, but not behind a number, which
/// stays with its unit. Lines that follow are indented; a word that is wider than a line is broken anywhere.
pub(crate) fn wrapped(text: &str, columns: usize) -> String {
    let width = |text: &str| text.chars().map(cells).sum::<usize>();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let line = line.trim_end_matches(' ');
        let words = line.trim_start_matches(' ');
        let lead = if line.len() - words.len() < columns { line.len() - words.len() } else { 0 };
        let indent = if lead + HANGING < columns / 2 { lead.max(HANGING) } else { 0 };
        let mut at = lead;
        out.extend(std::iter::repeat_n(' ', lead));
        for (gap, piece) in pieces(words) {
            if at + gap + width(piece) <= columns {
                out.extend(std::iter::repeat_n(' ', gap));
                at += gap;
            } else if at > indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                at = indent;
            }
            for c in piece.chars() {
                if at + cells(c) > columns {
                    out.push('\n');
                    at = 0;
                }
                out.push(c);
                at += cells(c);
            }
        }
        out.push('\n');
    }
    out
}

/// Returns the pieces between which a line may be broken, each with the number of spaces in front of it.
fn pieces(line: &str) -> Vec<(usize, &str)> {
    let mut found: Vec<(usize, Range<usize>)> = Vec::new();
    let (mut at, mut is_number) = (0, false);
    while at < line.len() {
        let word = line[at..].trim_start_matches(' ');
        let start = line.len() - word.len();
        let end = start + word.find(' ').unwrap_or(word.len());
        match found.last_mut() {
            Some((_, last)) if is_number && start - at == 1 => last.end = end,
            _ => found.push((start - at, start..end)),
        }
        is_number = word.starts_with(|c: char| c.is_ascii_digit());
        at = end;
    }
    found.into_iter().map(|(gap, piece)| (gap, &line[piece])).collect()
}

/// Returns the columns that a character takes at most.
fn cells(c: char) -> usize {
    if c < '\u{1100}' { 1 } else { 2 }
}

/// Returns whether a character moves the cursor or reorders what stands around it instead of being text.
fn controls(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, is_kept: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if controls(c) && !is_kept(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows under a head, each column as wide as it must be, indented by two.
pub(crate) fn table(head: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|(title, _)| title.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let titles = head.iter().map(|(title, _)| (*title).to_owned()).collect();
    for row in std::iter::once(&titles).chain(rows) {
        let mut line = String::new();
        for ((cell, &width), (_, align)) in row.iter().zip(&widths).zip(head) {
            let _ = match align {
                Align::Left => write!(line, "  {cell:<width$}"),
                Align::Right => write!(line, "  {cell:>width$}"),
            };
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_readable() {
        for (bytes, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (5_000_000_000, "4.7 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size(bytes), expected);
        }
        for (seconds, expected) in [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")] {
            assert_eq!(age(1_000_000, 1_000_000 + seconds * 1000), expected);
        }
        assert_eq!(age(5, 0), "0 s");
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_767_225_599, "2025-12-31 23:59:59 UTC"),
            (4_102_444_800, "2100-01-01 00:00:00 UTC"),
        ] {
            assert_eq!(date(seconds * 1000), expected);
        }
    }

    #[test]
    fn durations_are_readable() {
        for (seconds, expected) in [
            (0.0, "0 ms"),
            (0.00025, "0.25 ms"),
            (0.45, "450 ms"),
            (1.0, "1 s"),
            (119.0, "119 s"),
            (190.4, "3.17 min"),
            (21_600.0, "6 h"),
            (172_800.0, "2 d"),
            (1e9, "11574 d"),
        ] {
            assert_eq!(duration(seconds), expected);
        }
    }

    #[test]
    fn counts_and_ranks_are_grammar() {
        assert_eq!(count(1, "leaf", "leaves"), "1 leaf");
        assert_eq!(count(0, "leaf", "leaves"), "0 leaves");
        assert_eq!(ranks(std::slice::from_ref(&(3..4))), "rank 3");
        assert_eq!(ranks(&[0..3, 7..8]), "ranks 0-2, 7");
    }

    #[test]
    fn a_terminal_has_nothing_to_obey() {
        assert_eq!(plain("a\x1b[31m\n\u{9b}b"), "a\\u{1b}[31m\\n\\u{9b}b");
        assert_eq!(plain("ünï"), "ünï");
        assert_eq!(plain("a\u{202e}gnp\u{2066}\u{200f}"), "a\\u{202e}gnp\\u{2066}\\u{200f}");
        assert_eq!(plain("\u{200d}\u{2029}\u{202f}\u{2065}\u{206a}"), "\u{200d}\u{2029}\u{202f}\u{2065}\u{206a}");
        assert_eq!(plain_lines("a\nb\r"), "a\nb\\r");
    }

    #[test]
    fn lines_are_broken_where_a_reader_would() {
        let text = "run a: 3 saves of 12.0 GiB  1.9 GiB/s\n\n  rank 1  ok\n";
        assert_eq!(wrapped(text, 80), text);
        let narrow = "run a: 3 saves of\n    12.0 GiB\n    1.9 GiB/s\n\n  rank 1  ok\n";
        assert_eq!(wrapped(text, 21), narrow, "a number stays with its unit");
        assert_eq!(wrapped("s3://bucket/run", 6), "s3://b\nucket/\nrun\n");
        assert_eq!(wrapped("日本語", 4), "日本\n語\n");
        for columns in 1..90 {
            let wrapped = wrapped(&format!("{text}  {}  ", "x".repeat(50)), columns);
            assert!(wrapped.lines().all(|line| line.chars().count() <= columns), "{columns}: {wrapped}");
            let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            assert_eq!(letters(&wrapped), letters(&format!("{text}{}", "x".repeat(50))));
        }
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["ä".to_owned(), "5".to_owned()], vec!["bcd".to_owned(), "10".to_owned()]];
        assert_eq!(table(&[("X", Align::Left), ("N", Align::Right)], &rows), "  X     N\n  ä     5\n  bcd  10\n");
    }
}
