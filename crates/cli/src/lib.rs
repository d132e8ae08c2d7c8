//! The shardfast command: arguments in, engine calls, text out.
//!
//! [`run`] is the whole of it; the binary and the Python package both call it. This crate's `README.md` describes the
//! output with `--json`, and the exit codes.

mod args;
mod commands;
mod describe;
mod doctor;
mod interval;
mod keeper;
mod outcome;
mod report;
mod text;
mod top;
mod wasted;
mod watch;

use std::ffi::OsString;
use std::io::{self, Write};

use shardfast_engine::{Kind, Timeout};

use args::Arguments;
pub use doctor::{Finding, Host, Status};
pub use keeper::{
    dismiss as dismiss_keeper, process as keeper_process, start_process as start_keeper, users as keeper_users,
};
pub use shardfast_tools::drain::memory_place;

/// Exit code if nothing is wrong and nothing differs.
const FINE: i32 = 0;
/// Exit code if `diff` found a difference, `verify` damage, `doctor` that nothing can be saved, or `watch` an alert.
const FOUND: i32 = 1;
/// Exit code if the call must be fixed: arguments, a URL, a permission.
const USAGE: i32 = 2;
/// Exit code if there is no such checkpoint, run or key.
const NOT_FOUND: i32 = 3;
/// Exit code if a checkpoint cannot be read: corrupt, or of a newer version.
const UNREADABLE: i32 = 4;
/// Exit code if the store cannot be reached or is full, or the name is taken.
const OTHER: i32 = 5;

/// Runs the command with these arguments, the first of which is its name, and returns its exit code. Prints to the
/// process's own standard output and error. `me` is the program that runs this command again, with its first arguments;
/// `host` returns the caller's own findings, if the command reports them.
pub fn run(args: impl IntoIterator<Item = OsString>, me: &[OsString], host: impl FnOnce() -> Host) -> i32 {
    let arguments = match Arguments::of(args) {
        Ok(arguments) => arguments,
        Err(error) => {
            // The terminal is closed: no error can be shown.
            let _ = error.print();
            return error.exit_code();
        }
    };
    let outcome =
        match commands::run(arguments.command, arguments.json, Timeout::of_call(arguments.timeout.0), me, host) {
            Ok(outcome) => outcome,
            Err(error) => {
                let _ =
                    writeln!(io::stderr(), "shardfast: {}: {}", error.kind.name(), text::plain_lines(&error.message));
                return exit_code(error.kind);
            }
        };
    let printed = if arguments.json { outcome.json } else { outcome.text };
    match io::stdout().lock().write_all(printed.as_bytes()).and_then(|()| io::stdout().flush()) {
        // A reader that closes the pipe (`| head`) has read enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr(), "shardfast: Unavailable: the output cannot be written: {error}");
            OTHER
        }
        _ => outcome.exit_code,
    }
}

fn exit_code(kind: Kind) -> i32 {
    match kind {
        Kind::NotFound => NOT_FOUND,
        Kind::Corrupt | Kind::Unsupported => UNREADABLE,
        Kind::Invalid => USAGE,
        Kind::Conflict | Kind::Exhausted | Kind::Unavailable | Kind::Cancelled | Kind::Internal => OTHER,
    }
}
