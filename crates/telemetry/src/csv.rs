//! Writes the times of all ranks as a table of comma-separated values (RFC 4180), for other programs.

use std::fmt::Write as _;

use crate::object::{Collected, word};
use crate::report::Operation;
use crate::verdicts::spans;

const COLUMNS: [&str; 11] = [
    "operation",
    "step",
    "outcome",
    "began_unix_ms",
    "ranks",
    "rank",
    "machine",
    "local_rank",
    "phase",
    "began_ms",
    "took_ms",
];

/// Returns the row of the columns' names.
pub(crate) fn head() -> String {
    COLUMNS.join(",") + "\n"
}

/// Adds the rows of an operation: one for each rank and each phase that any rank has ended. Times are empty for a rank
/// that has not.
pub(crate) fn rows(table: &mut String, collected: &Collected, operation: &Operation) {
    let verb = word(collected.verb);
    let all = spans(collected);
    for (rank, said) in collected.ranks.iter().enumerate() {
        let machine = said.as_ref().map(|said| quoted(&said.place.machine)).unwrap_or_default();
        let local = said.as_ref().and_then(|said| said.place.local_rank).map(|local| local.to_string());
        for (phase, spans) in all.iter().filter(|(_, spans)| spans.iter().any(Option::is_some)) {
            let (step, outcome, began) = (collected.step, operation.outcome, collected.began_unix_ms);
            let local = local.as_deref().unwrap_or_default();
            let world = collected.ranks.len();
            let _ = write!(table, "{verb},{step},{outcome},{began},{world},{rank},{machine},{local},{phase},");
            let _ = match spans[rank] {
                Some((from, to)) => writeln!(table, "{:.3},{:.3}", f64::from(from) / 1e3, f64::from(to - from) / 1e3),
                None => writeln!(table, ","),
            };
        }
    }
}

/// Returns a text as a field: in quotes if it has a comma, a quote or an end of a line. Other control characters, which
/// a terminal would obey, become spaces.
fn quoted(text: &str) -> String {
    let harmless = |c: char| if c.is_control() && !matches!(c, '\r' | '\n') { ' ' } else { c };
    let text: String = text.chars().map(harmless).collect();
    match text.contains([',', '"', '\r', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::tests::collected;
    use crate::report::operation;

    #[test]
    fn a_table_has_a_row_for_each_rank_and_phase() {
        let mut collected = collected(3);
        collected.ranks[1].as_mut().unwrap().place.machine = "a \"b\",\u{1b}[1m\nc".to_owned();
        let mut table = head();
        rows(&mut table, &collected, &operation(&collected));
        let phases = 8;
        assert_eq!(table.matches("\nsave,4000,failed,1700000000123,3,").count(), 3 * phases);
        assert!(table.contains(",3,0,node-0,0,copy,0.000,3.000\n"), "{table}");
        assert!(table.contains(",1,\"a \"\"b\"\", [1m\nc\",1,write,"), "{table}");
        // Of a rank that said nothing there are no times.
        assert_eq!(table.matches(",3,2,,,").count(), phases);
        let undescribed_on_rank_0 = 1;
        assert_eq!(table.matches(",,\n").count(), phases + undescribed_on_rank_0);
    }
}
