//! The `shardfast` binary.

use std::ffi::OsString;
use std::process::exit;

fn main() {
    let me: Vec<OsString> = std::env::current_exe().into_iter().map(Into::into).collect();
    exit(shardfast_cli::run(std::env::args_os(), &me, Default::default));
}
