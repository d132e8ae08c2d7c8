//! Holds what a command prints, and its exit code.

use serde::Serialize;

/// The output of a command.
pub(crate) struct Outcome {
    pub(crate) text: String,
    pub(crate) json: String,
    pub(crate) exit_code: i32,
}

/// Makes the output of a command from its text, and from what it prints with `--json`.
pub(crate) fn outcome(text: String, json: &impl Serialize, exit_code: i32) -> Outcome {
    let mut json = serde_json::to_string_pretty(json).expect("reports have text keys and finite numbers only");
    json.push('\n');
    Outcome { text, json, exit_code }
}
