//! The engine's reports as text.

use std::fmt::Write;

use shardfast_engine::{Located, Rewound};
use shardfast_tools::diff::{Diff, DifferenceKind, Elements, ValueDifference};
use shardfast_tools::inspect::{History, KindSummary, LeafSummary, Outline, Status, Summary};
use shardfast_tools::verify::{Finding, Hit, Problem, VerifyReport};
use shardfast_tools::{Copied, Exported, Swept, Synced};

use crate::text::Align::{Left, Right};
use crate::text::{age, count, date, plain, plain_lines, ranks, size, table};

fn leaves(n: u64) -> String {
    count(n, "leaf", "leaves")
}

/// Returns a line on which checkpoint of a run is meant; empty if a checkpoint was named.
pub(crate) fn located(located: &Located) -> String {
    let Some(run) = &located.run else { return String::new() };
    let mut out = format!("{} is a run; its newest committed checkpoint is {}\n", plain(run), plain(&located.url));
    if !located.passed_over.is_empty() {
        let steps: Vec<String> = located.passed_over.iter().map(u64::to_string).collect();
        let _ = writeln!(out, "passed over, not committed: step {}", steps.join(", "));
    }
    out
}

pub(crate) fn history(history: &History, now_ms: u64) -> String {
    let mut out = if history.is_run {
        let committed = history.checkpoints.iter().filter(|line| line.status == Status::Committed).count();
        let steps = count(history.checkpoints.len() as u64, "step", "steps");
        format!("run {}: {steps}, {committed} committed\n", plain(&history.url))
    } else {
        format!("checkpoint {}\n", plain(&history.url))
    };
    let row = |line: &Outline| {
        let status = match line.status {
            Status::Committed if line.pinned.is_some() => "pinned",
            Status::Committed => "committed",
            Status::Incomplete => "incomplete",
            Status::Leaving => "leaving",
            Status::Unreadable => "unreadable",
        };
        let mut row = vec![line.step.map_or_else(|| "-".to_owned(), |step| step.to_string()), status.to_owned()];
        if let Some(holds) = &line.holds {
            row.extend([age(holds.created_unix_ms, now_ms), size(holds.bytes)]);
            row.extend([u64::from(holds.world), holds.leaves, holds.files].map(|n| n.to_string()));
        }
        row
    };
    let rows: Vec<Vec<String>> = history.checkpoints.iter().map(row).collect();
    let head = [
        ("STEP", Right),
        ("STATUS", Left),
        ("AGE", Right),
        ("SIZE", Right),
        ("WORLD", Right),
        ("LEAVES", Right),
        ("FILES", Right),
    ];
    out += &table(&head, &rows);
    for url in &history.abandoned {
        let _ = writeln!(out, "abandoned, in a run of their own: {}", plain(url));
    }
    if let Some(memory) = &history.memory {
        let steps = memory.steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let steps = if steps.is_empty() { "no step".to_owned() } else { format!("steps {steps}") };
        let what = memory.error.as_ref().map_or(steps, |error| format!("not known: {}", plain_lines(error)));
        let _ = writeln!(out, "in the memory of this machine's keeper, {}: {what}", plain(&memory.url));
    }
    for line in &history.checkpoints {
        if let Some(error) = &line.error {
            let _ = writeln!(out, "{}: {}", plain(&line.url), plain_lines(error));
        }
        if let Some(note) = line.pinned.as_deref().filter(|note| !note.is_empty()) {
            let _ = writeln!(out, "{}: pinned: {}", plain(&line.url), plain_lines(note));
        }
    }
    out
}

pub(crate) fn summary(summary: &Summary) -> String {
    let Summary { holds, .. } = summary;
    let mut out = format!("checkpoint {}\n", plain(&summary.url));
    let step = summary.step.map_or_else(String::new, |step| format!(", step {step}"));
    let (saved, world) = (date(holds.created_unix_ms), count(u64::from(holds.world), "rank", "ranks"));
    let _ = writeln!(out, "  saved {saved} by {}{step}, {world}, attempt {}", plain(&holds.writer), holds.attempt);
    let (leaves, files) = (leaves(holds.leaves), count(holds.files, "file", "files"));
    let _ = writeln!(out, "  {leaves} in {files}, {}", size(holds.bytes));
    for (name, note) in &summary.user {
        let _ = writeln!(out, "  {} = {}", plain(name), plain(note));
    }
    for key in &summary.keys {
        let mut said = Vec::new();
        if key.tensors > 0 {
            said.push(format!("{}, {}", count(key.tensors, "tensor", "tensors"), size(key.tensor_bytes)));
        }
        if key.objects > 0 {
            said.push(count(key.objects, "object", "objects"));
        }
        if key.aliases > 0 {
            said.push(count(key.aliases, "alias", "aliases"));
        }
        let _ = writeln!(out, "\n{}: {}", plain(&key.key), said.join("; "));
        let prefix = format!("{}/", key.key);
        let leaves: Vec<&LeafSummary> = summary.leaves.iter().filter(|leaf| leaf.leaf.starts_with(&prefix)).collect();
        if !leaves.is_empty() {
            out += &leaf_table(&prefix, &leaves);
        }
    }
    out
}

fn leaf_table(prefix: &str, leaves: &[&LeafSummary]) -> String {
    let mut rows = Vec::new();
    for leaf in leaves {
        let name = plain(leaf.leaf.strip_prefix(prefix).unwrap_or(&leaf.leaf)).into_owned();
        let layout = plain(&leaf.layout).into_owned();
        match &leaf.kind {
            KindSummary::Tensor { dtype, shape, bytes, regions, files } => {
                let stored = format!("{} in {}", count(*regions, "region", "regions"), count(*files, "file", "files"));
                rows.push(vec![name, (*dtype).to_owned(), format!("{shape:?}"), size(*bytes), stored, layout]);
            }
            KindSummary::Alias { of } => {
                rows.push(vec![
                    name,
                    "alias".into(),
                    String::new(),
                    String::new(),
                    format!("of {}", plain(of)),
                    layout,
                ]);
            }
            KindSummary::Object { bytes, values } => {
                let stored = match values.as_slice() {
                    [one] => ranks(&one.ranks),
                    several => count(several.len() as u64, "value", "values"),
                };
                rows.push(vec![name, "object".into(), String::new(), size(*bytes), stored, layout]);
                let shown = values.iter().filter_map(|value| {
                    let text = value.error.as_ref().map(|error| format!("cannot be read: {}", plain(error)));
                    text.or_else(|| value.text.clone()).map(|text| (ranks(&value.ranks), text))
                });
                let shown: Vec<_> = shown.collect();
                let is_one = shown.len() == 1;
                for (ranks, text) in shown {
                    rows.push(vec![if is_one { format!("  = {text}") } else { format!("  {ranks}: {text}") }]);
                }
            }
        }
    }
    // A value's text stands under its name and may be as long as it likes.
    let (values, columns): (Vec<_>, Vec<_>) = rows.iter().enumerate().partition(|(_, row)| row.len() == 1);
    let columns: Vec<Vec<String>> = columns.into_iter().map(|(_, row)| row.clone()).collect();
    let head = [("NAME", Left), ("DTYPE", Left), ("SHAPE", Left), ("SIZE", Right), ("STORED", Left), ("LAYOUT", Left)];
    let mut lines: Vec<String> = table(&head, &columns).lines().map(str::to_owned).collect();
    for (place, row) in values {
        lines.insert(place + 1, format!("  {}", row[0]));
    }
    lines.join("\n") + "\n"
}

pub(crate) fn report(report: &VerifyReport) -> String {
    if report.is_sound() {
        let (leaves, files) = (leaves(report.leaves), count(report.files, "file", "files"));
        let (blocks, values) = (count(report.blocks, "block", "blocks"), count(report.values, "value", "values"));
        let bytes = size(report.bytes);
        let what = if report.is_stored { "by the checksums that the storage keeps".to_owned() } else { values };
        return format!("{}: sound: {leaves}, {files}, {bytes} in {blocks}, {what}\n", plain(&report.url));
    }
    let mut out = format!(
        "{}: damaged: {}\n",
        plain(&report.url),
        count(report.findings.len() as u64 + report.findings_left_out, "problem", "problems")
    );
    for finding in &report.findings {
        out += &described(finding);
    }
    if report.findings_left_out > 0 {
        let _ = writeln!(out, "  and {} more", report.findings_left_out);
    }
    if !report.leaves_damaged.is_empty() {
        let leaves = leaves(report.leaves_damaged.len() as u64);
        let _ = writeln!(out, "  {leaves} damaged, of {}:", report.leaves);
        for leaf in &report.leaves_damaged {
            let _ = writeln!(out, "    {}", plain(leaf));
        }
    }
    out
}

fn described(finding: &Finding) -> String {
    let what = match finding.problem {
        Problem::Commit => "commit",
        Problem::Manifest => "manifest",
        Problem::Step => "step",
        Problem::Coverage => "coverage",
        Problem::Index => "index",
        Problem::File => "file",
        Problem::Entry => "entry",
        Problem::Block => "block",
        Problem::Unreadable => "unreadable",
        Problem::Value => "value",
    };
    let mut out = format!("  {what}: ");
    if let Some(file) = finding.file.as_ref().filter(|file| !finding.message.contains(file.as_str())) {
        let _ = write!(out, "{}: ", plain(file));
    }
    let _ = writeln!(out, "{}", plain_lines(&finding.message));
    for Hit { leaf, regions, ranks: of_ranks } in &finding.leaves {
        let _ = write!(out, "    {}", plain(leaf));
        for region in regions {
            let _ = write!(out, " {region}");
        }
        if !of_ranks.is_empty() {
            let _ = write!(out, " of {}", ranks(of_ranks));
        }
        out.push('\n');
    }
    out
}

pub(crate) fn diff(diff: &Diff) -> String {
    let mut out = format!("a {}\nb {}\n", plain(&diff.a), plain(&diff.b));
    for difference in &diff.differences {
        let said = match &difference.kind {
            DifferenceKind::OnlyInA => "only in a".to_owned(),
            DifferenceKind::OnlyInB => "only in b".to_owned(),
            DifferenceKind::Kind { a, b } => format!("a has {}, b has {}", plain(a), plain(b)),
            DifferenceKind::Data(elements) => elements_differ(elements),
            DifferenceKind::Value(value) => value_differs(value),
        };
        let _ = writeln!(out, "  {}: {said}", plain(&difference.leaf));
    }
    let _ = writeln!(
        out,
        "{} equal, {} different; {} of tensors compared",
        leaves(diff.equal),
        diff.differences.len(),
        size(diff.bytes)
    );
    out
}

fn elements_differ(elements: &Elements) -> String {
    let Elements { dtype, elements_different, bytes_different, first, .. } = elements;
    let mut out = format!(
        "{elements_different} of {} {dtype} elements differ ({bytes_different} bytes), first at {first:?}",
        elements.elements
    );
    if let Some(max) = elements.max_abs_difference {
        let _ = write!(out, ", by at most {max:e}");
    }
    if elements.non_finite > 0 {
        let _ = write!(out, ", {} not finite", elements.non_finite);
    }
    out
}

fn value_differs(value: &ValueDifference) -> String {
    let side = |side: &Option<String>| side.clone().unwrap_or_else(|| "nothing".to_owned());
    let mut out = String::new();
    if !value.path.is_empty() {
        let _ = write!(out, "at {}: ", plain(&value.path));
    }
    let _ = write!(out, "a has {}, b has {}", side(&value.a), side(&value.b));
    if !value.ranks.is_empty() {
        let _ = write!(out, " ({})", ranks(&value.ranks));
    }
    out
}

pub(crate) fn copied(copied: &Copied) -> String {
    let (from, to) = (plain(&copied.from), plain(&copied.to));
    if copied.was_there && copied.files_mended == 0 {
        return format!("{from} is at {to} already\n");
    }
    if copied.was_there {
        let files = count(copied.files_mended, "file was", "files were");
        return format!(
            "{from} is at {to} already; {files} missing, short or damaged there, and sent again: {}\n",
            size(copied.bytes)
        );
    }
    let found = match copied.files_found {
        0 => String::new(),
        found => format!("; {} there already", count(found, "file was", "files were")),
    };
    let within = match copied.bytes_within {
        0 => String::new(),
        bytes => format!(", {} of them by the service itself", size(bytes)),
    };
    let files = count(copied.files, "file", "files");
    format!("copied {from} to {to}: {files}, {}{within}{found}\n", size(copied.bytes))
}

pub(crate) fn synced(synced: &Synced) -> String {
    let mut out: String = synced.checkpoints.iter().map(copied).collect();
    for step in &synced.incomplete {
        let _ = writeln!(out, "left out: step {step}, which is not committed");
    }
    for step in &synced.left {
        let _ = writeln!(out, "left out: step {step}, which left while it was copied");
    }
    for failed in &synced.failed {
        let _ = writeln!(out, "not copied: step {}: {}", failed.step, plain_lines(&failed.error));
    }
    out
}

pub(crate) fn rewound(rewound: &Rewound) -> String {
    let url = plain(&rewound.url);
    match &rewound.into {
        None => format!("{url}: no committed step behind that one\n"),
        Some(into) => {
            let steps = count(rewound.moved.len() as u64, "step", "steps");
            let named: Vec<String> = rewound.moved.iter().map(u64::to_string).collect();
            format!("{url}: moved {steps} ({}) to {}\n", named.join(", "), plain(into))
        }
    }
}

pub(crate) fn exported(exported: &Exported) -> String {
    let mut out = format!(
        "exported {}, {}, to {}\n",
        count(exported.tensors, "tensor", "tensors"),
        size(exported.tensor_bytes),
        plain(&exported.url)
    );
    let file = |file: &shardfast_tools::export::ExportedFile| {
        vec![plain(&file.name).into_owned(), size(file.bytes), file.tensors.to_string()]
    };
    let rows: Vec<Vec<String>> = exported.files.iter().map(file).collect();
    out += &table(&[("FILE", Left), ("SIZE", Right), ("TENSORS", Right)], &rows);
    if let Some(index) = &exported.index {
        let _ = writeln!(out, "  {}", plain(index));
    }
    for (name, kept) in &exported.tied {
        let _ = writeln!(out, "left out: {}, which is tied to {}", plain(name), plain(kept));
    }
    for object in &exported.objects_left_out {
        let _ = writeln!(out, "left out: {}, which is no tensor", plain(object));
    }
    out
}

pub(crate) fn swept(swept: &Swept, dry: bool) -> String {
    let verb = if dry { "would remove" } else { "removed" };
    let files = count(swept.files.len() as u64, "file", "files");
    let uploads = count(swept.uploads.len() as u64, "unfinished upload", "unfinished uploads");
    let mut out = format!("{}: {verb} {files}, {}, and {uploads}\n", plain(&swept.url), size(swept.bytes));
    for (what, names) in [("file", &swept.files), ("upload", &swept.uploads)] {
        for name in names.iter().filter(|_| dry) {
            let _ = writeln!(out, "  {what} {}", plain(name));
        }
    }
    for url in &swept.young {
        let _ = writeln!(out, "left {}: not committed, but changed lately", plain(url));
    }
    for place in &swept.spared {
        let _ = writeln!(out, "left {}: {}", plain(&place.url), plain_lines(&place.reason));
    }
    out
}
