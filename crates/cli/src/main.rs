//! The `shardfast` binary.

use std::process::exit;

fn main() {
    exit(shardfast_cli::run(std::env::args_os(), Default::default));
}
