//! The command's arguments.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Error, Parser, Subcommand};
use shardfast_engine::{TIMEOUT, Timeout};
use shardfast_tools::interval;

const EXIT_CODES: &str = "\
URL is a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; a checkpoint, or a run,
whose newest committed checkpoint is meant.

Exit codes:
  0  fine
  1  diff found a difference, verify found damage, doctor found that nothing can be saved, or an alert of watch fires
  2  usage: the arguments, the URL or a permission must be fixed
  3  there is no such checkpoint, run or key
  4  what is there cannot be read: corrupt, or written by a newer version
  5  anything else: the store cannot be reached or is full, the name is taken";

/// Looks at checkpoints, proves them, compares them, copies them, and writes their tensors as plain safetensors; looks
/// at the machine.
#[derive(Debug, Parser)]
#[command(name = "shardfast", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Fail once no request to the storage has succeeded for so long; each that succeeds begins the time anew
    #[arg(long, global = true, value_name = "SECONDS", value_parser = timeout, allow_hyphen_values = true,
          default_value_t = Seconds(TIMEOUT))]
    pub(crate) timeout: Seconds,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Arguments {
    /// Parses the arguments, the first of which is the command's name.
    pub(crate) fn of(args: impl IntoIterator<Item = OsString>) -> Result<Arguments, Error> {
        let arguments = Arguments::try_parse_from(args)?;
        let other = match &arguments.command {
            Command::Report { trace: Some(_), .. } => "--trace",
            Command::Report { csv: true, .. } => "--csv",
            _ => return Ok(arguments),
        };
        // The option of all commands may stand before the command, where clap does not compare it with those of one.
        if arguments.json {
            let text = format!("the argument '--json' cannot be used with '{other}'\n");
            return Err(Arguments::command().error(ErrorKind::ArgumentConflict, text));
        }
        Ok(arguments)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the steps of a run: committed, incomplete or unreadable, age, size, world
    #[command(after_help = EXIT_CODES)]
    Ls {
        /// A run, or one checkpoint
        url: String,
    },
    /// Show what a checkpoint holds: leaves, dtypes, shapes, sizes, who saved it under which layout
    #[command(after_help = EXIT_CODES)]
    Inspect {
        /// A checkpoint or a run
        url: String,
        /// Only leaves whose key/name fits; * stands for any text, ? for one character
        #[arg(long, value_name = "GLOB")]
        leaf: Option<String>,
        /// Read the values of objects and show them
        #[arg(long)]
        values: bool,
    },
    /// Read every byte of a checkpoint and name every damaged block's tensor
    #[command(after_help = EXIT_CODES)]
    Verify {
        /// A checkpoint or a run
        url: String,
        /// Every committed step of the run, not only the newest
        #[arg(long)]
        all: bool,
        /// Read no data: compare the checksums that S3 keeps of the files
        #[arg(long)]
        stored: bool,
    },
    /// Compare two checkpoints leaf by leaf, whatever layouts they were saved under
    #[command(after_help = EXIT_CODES)]
    Diff {
        /// A checkpoint or a run
        a: String,
        /// Another checkpoint or run
        b: String,
    },
    /// Write whole tensors as safetensors files that open in the Hugging Face stack
    #[command(after_help = EXIT_CODES)]
    Export {
        /// A checkpoint or a run
        url: String,
        /// Directory or URL for the files
        out: String,
        /// Key of the state
        #[arg(long, default_value = "model")]
        key: String,
        /// Most bytes of tensors in a file, such as 500MB or 2GiB; a larger tensor has a file of its own
        #[arg(long, default_value = "5GB", value_parser = size)]
        shard_size: u64,
    },
    /// Copy a checkpoint to another place, in any store; its bytes are proven on the way
    #[command(after_help = EXIT_CODES)]
    Copy {
        /// A checkpoint or a run
        from: String,
        /// Path or URL of the copy: a place of its own
        to: String,
        /// Bytes to read a second at most, such as 100MB; unless it is given, as fast as both stores can
        #[arg(long, value_parser = size)]
        limit: Option<u64>,
        /// Prove the bytes of files that exist already, too, not only their lengths
        #[arg(long)]
        verify: bool,
    },
    /// Copy every committed step of a run that another run does not have
    #[command(after_help = EXIT_CODES)]
    Sync {
        /// Path or URL of a run
        from: String,
        /// Run that gets the steps; its other steps stay
        to: String,
        /// Bytes to read a second at most, such as 100MB; unless it is given, as fast as both stores can
        #[arg(long, value_parser = size)]
        limit: Option<u64>,
        /// Prove the bytes of files that exist already, too, not only their lengths
        #[arg(long)]
        verify: bool,
    },
    /// Say what the saves and loads of a run did on every rank, and what was slow, where and why
    #[command(after_help = EXIT_CODES)]
    Report {
        /// Path or URL of a run
        url: String,
        /// Only the saves and loads of this step
        #[arg(long, value_name = "STEP")]
        step: Option<u64>,
        /// Draw it as one page that needs no network, in a new file
        #[arg(long, value_name = "PAGE.html")]
        out: Option<PathBuf>,
        /// Show the storage's metrics at that time, too: a Prometheus server, and which of its series are the storage's
        #[arg(long, value_name = "http://HOST:PORT/?match={job=\"NAME\"}", conflicts_with_all = ["csv", "trace"])]
        storage: Option<String>,
        /// Mean time between failures of the job, such as 6h: show the time that its saves waste, beside the best
        #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true,
              conflicts_with_all = ["csv", "trace", "step"])]
        mtbf: Option<f64>,
        /// Write a trace of all ranks that Perfetto (ui.perfetto.dev) opens, to a new file
        #[arg(long, value_name = "FILE.json", conflicts_with_all = ["csv", "out"])]
        trace: Option<PathBuf>,
        /// Print a row of comma-separated values for each operation, rank and phase instead of text
        #[arg(long, conflicts_with = "out")]
        csv: bool,
    },
    /// Show what a job saves and loads now, again and again, or the last saves and loads of a run
    #[command(after_help = EXIT_CODES)]
    Top {
        /// http://host:port of rank 0, as SHARDFAST_METRICS says it; or a run
        #[arg(value_name = "http://HOST:PORT|URL")]
        target: String,
        /// Seconds from one look to the next
        #[arg(long, value_name = "SECONDS", value_parser = pause, default_value = "1")]
        every: Duration,
        /// Look once, as without a terminal
        #[arg(long)]
        once: bool,
        /// Show the storage's metrics, too: what MinIO, a NameNode or another server serves for Prometheus
        #[arg(long, value_name = "http://HOST:PORT/PATH")]
        storage: Option<String>,
    },
    /// Say when saves of a run or of a job fail, slow down or stay away, and when that is over
    #[command(after_help = EXIT_CODES)]
    Watch(Watching),
    /// Move the steps of a run behind one out of its way, to a run of their own below it; deletes nothing
    #[command(after_help = EXIT_CODES)]
    Rewind {
        /// Path or URL of a run
        url: String,
        /// The step from which the training goes on; the committed ones behind it move
        #[arg(long, value_name = "STEP")]
        to: u64,
    },
    /// Keep a checkpoint, whatever keep= says; `shardfast ls` shows the pin
    #[command(after_help = EXIT_CODES)]
    Pin {
        /// A checkpoint or a run
        url: String,
        /// Reason for the pin, shown by `shardfast ls`
        #[arg(long, default_value = "")]
        note: String,
        /// Remove the pin instead
        #[arg(long, conflicts_with = "note")]
        remove: bool,
    },
    /// Remove what crashed saves and copies left, and unfinished uploads; never a checkpoint
    #[command(after_help = EXIT_CODES)]
    Sweep {
        /// A run, or the place of one checkpoint
        url: String,
        /// Only print what would be removed
        #[arg(long)]
        dry_run: bool,
        /// Least time without a change, such as 36h or 7d, after which uncommitted files are removed; 6h at least
        #[arg(long, default_value = "24h", value_name = "AGE", value_parser = age)]
        older_than: Duration,
    },
    /// Say how often a job should save, from its size, its rates and how often it fails; reads nothing
    #[command(after_help = EXIT_CODES)]
    Interval(Question),
    /// Keep checkpoints of a run in this machine's memory, or look at the process that does
    #[command(after_help = EXIT_CODES)]
    Keeper {
        #[command(subcommand)]
        asked: Keeping,
    },
    /// Say what saves and loads will use on this machine, what is missing, and what follows from it
    #[command(after_help = EXIT_CODES)]
    Doctor {
        /// Place where checkpoints will be saved; a small file is written there and removed
        #[arg(default_value = ".")]
        path: String,
    },
}

/// A request about the keeper of a run on this machine.
#[derive(Debug, Subcommand)]
pub(crate) enum Keeping {
    /// Start a keeper in the background, unless one runs: a process that outlives the training
    Start {
        /// Path or URL of a run
        url: String,
        /// Time without a process that uses it, such as 10m, after which it sends what only it has to the run's own
        /// place, and ends
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, allow_hyphen_values = true)]
        linger: f64,
    },
    /// Be a keeper, until it was not used for as long as it lingers
    Run {
        /// Path or URL of a run
        url: String,
        /// Time without a process that uses it, as for `start`
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, allow_hyphen_values = true)]
        linger: f64,
        /// Have a session of its own
        #[arg(long, hide = true)]
        detached: bool,
    },
    /// Say what the keeper has, and how much room there is
    Status {
        /// Path or URL of a run
        url: String,
    },
    /// Send what only the keeper has to the run's own place, once no training uses it; the keeper goes on
    Persist {
        /// Path or URL of a run
        url: String,
    },
    /// Have the keeper send what only it has to the run's own place, and end
    Leave {
        /// Path or URL of a run
        url: String,
        /// Time to wait for its end
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, allow_hyphen_values = true)]
        within: f64,
    },
}

/// A run or a job that is watched.
#[derive(Debug, Args)]
pub(crate) struct Watching {
    /// http://host:port of rank 0, as SHARDFAST_METRICS says it; or a run
    #[arg(value_name = "http://HOST:PORT|URL")]
    pub(crate) url: String,
    /// Command for the shell, run for each alert that begins or is over, with SHARDFAST_ALERT, SHARDFAST_ALERT_STATE
    /// (firing or resolved), SHARDFAST_ALERT_SUBJECT, SHARDFAST_ALERT_STEP, SHARDFAST_ALERT_TEXT and
    /// SHARDFAST_ALERT_RUN; it has 10 s
    #[arg(long, value_name = "COMMAND")]
    pub(crate) exec: Option<String>,
    /// From one look to the next, such as 30s or 5m
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time, allow_hyphen_values = true)]
    pub(crate) every: f64,
    /// Look once: exit code 1 if an alert fires, else 0
    #[arg(long, conflicts_with = "every")]
    pub(crate) once: bool,
    /// Share of the median rate below which a save is too slow, at most 1; 0 turns this rule off, or one of the next
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, allow_hyphen_values = true)]
    pub(crate) rate: f64,
    /// Time until the state could change that is too long, such as 2s; unless it is given, ten times the median and
    /// more than 5 s
    #[arg(long, value_name = "TIME", value_parser = time_or_zero, allow_hyphen_values = true)]
    pub(crate) stall: Option<f64>,
    /// Usual intervals between two saves after which a durable checkpoint is overdue, at least 1
    #[arg(long, value_name = "INTERVALS", default_value_t = 3.0, allow_hyphen_values = true)]
    pub(crate) overdue: f64,
    /// Saves in a row in which the same rank, machine or coordinate is slow; a job does not tell it
    #[arg(long, value_name = "SAVES", default_value_t = 3)]
    pub(crate) slow: usize,
    /// Saves that must have room in the storage
    #[arg(long, value_name = "SAVES", default_value_t = 2.0, allow_hyphen_values = true)]
    pub(crate) room: f64,
}

/// A planned job.
#[derive(Debug, Args)]
pub(crate) struct Question {
    /// Parameters of the model, such as 7B, 1.2B or 350M
    #[arg(long, value_parser = parameters)]
    pub(crate) parameters: u64,
    /// Bytes of state for each parameter; 12 are weights and two moments in fp32
    #[arg(long, default_value_t = 12, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) bytes_per_parameter: u64,
    /// Ranks that share the state
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) ranks: u64,
    /// A step without a save, such as 2s or 450ms
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) step: f64,
    /// Mean time between failures of the whole job, such as 6h
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    pub(crate) mtbf: f64,
    /// Bytes that the storage takes of all ranks in a second, such as 20GB
    #[arg(long, value_name = "BYTES", value_parser = size, required_unless_present = "storage_per_rank")]
    pub(crate) storage: Option<u64>,
    /// Bytes that the storage takes of each rank in a second, if that is the limit
    #[arg(long, value_name = "BYTES", value_parser = size, conflicts_with = "storage")]
    pub(crate) storage_per_rank: Option<u64>,
    /// Bytes that a rank copies to host memory in a second
    #[arg(long, value_name = "BYTES", default_value = "10GB", value_parser = size)]
    pub(crate) copy: u64,
    /// Measured cost of a save for the training: 0 if steps hide all of it. Unless it is given, the whole copy, as if
    /// no step hid any of it
    #[arg(long, value_name = "TIME", value_parser = time_or_zero, allow_hyphen_values = true)]
    pub(crate) cost: Option<f64>,
    /// From a failure to the first step after it, such as 5m; unless it is given, restarts take no time
    #[arg(long, value_name = "TIME", value_parser = time_or_zero, allow_hyphen_values = true)]
    pub(crate) restart: Option<f64>,
    /// Fewest steps between two saves
    #[arg(long, default_value_t = 1, value_name = "STEPS")]
    pub(crate) at_least: u64,
    /// Most steps between two saves
    #[arg(long, value_name = "STEPS")]
    pub(crate) at_most: Option<u64>,
}

/// A time that is written in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Seconds(pub(crate) Duration);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

/// Parses a timeout in seconds, as [`Timeout::seconds`].
fn timeout(text: &str) -> Result<Seconds, String> {
    let seconds = text.parse().map_err(|_| "expected a number of seconds, such as 600".to_owned())?;
    Timeout::seconds(seconds).map(Seconds)
}

/// Parses the pause between two looks: a tenth of a second to a day.
fn pause(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected a number of seconds from 0.1 to 86400".to_owned())
}

/// Parses bytes: a number with `B`, `KB`, `MB`, `GB`, `TB` (powers of 1000), `KiB`, `MiB`, `GiB`, `TiB` (of 1024) or
/// nothing.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" | "B" => 1,
        "KB" => 1000,
        "MB" => 1000_u64.pow(2),
        "GB" => 1000_u64.pow(3),
        "TB" => 1000_u64.pow(4),
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        other => return Err(format!("unit {other:?}: expected B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).filter(|&bytes| bytes > 0);
    bytes.ok_or_else(|| "expected a whole number of bytes above zero, such as 500MB or 2GiB".to_owned())
}

/// Parses a time: a whole number with `m`, `h` or `d` for minutes, hours, days.
fn age(text: &str) -> Result<Duration, String> {
    let expected = || "expected a whole number of minutes, hours or days, such as 90m, 36h or 7d".to_owned();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or_else(expected)?);
    let seconds = match unit {
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(expected()),
    };
    let number: u64 = number.parse().map_err(|_| expected())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(expected)
}

/// Parses a time in seconds, as [`interval::seconds`].
fn time(text: &str) -> std::result::Result<f64, String> {
    interval::seconds(text).map_err(|error| error.message)
}

/// Parses a time in seconds, as [`time`], or zero, with or without a unit.
fn time_or_zero(text: &str) -> std::result::Result<f64, String> {
    let number = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text.trim()[number.len()..];
    let is_zero = number.trim_end().parse::<f64>().is_ok_and(|number| number == 0.0);
    let seconds = if is_zero { time(&format!("1{unit}")).map(|_| 0.0) } else { time(text) };
    seconds.map_err(|_| {
        format!("{text:?}: expected a time of zero or more: a number with ms, s, m, h or d, such as 0, 360ms or 5m")
    })
}

/// Parses a number of parameters: with `K`, `M`, `B` or `T` for thousands, millions, billions, trillions, or with
/// nothing.
fn parameters(text: &str) -> std::result::Result<u64, String> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let scale = match unit {
        "" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        _ => f64::NAN,
    };
    let found = number.parse::<f64>().map_or(f64::NAN, |number| (number * scale).round());
    match (1.0..=1e18).contains(&found) {
        true => Ok(found as u64),
        false => Err("expected a number of parameters, such as 7B, 1.2B or 350M".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [("5GB", 5_000_000_000), ("2GiB", 2 << 30), ("17", 17), ("1 KiB", 1024), ("3B", 3)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "0", "-1GB", "5gb", "1.5GB", "18446744073709551615KB", "5GB "] {
            assert_eq!(size(text).is_ok(), text == "5GB ", "{text:?}");
        }
    }

    #[test]
    fn timeouts_are_read() {
        for (text, ms) in [("600", 600_000), ("0.5", 500), ("1e9", 1_000_000_000_000)] {
            assert_eq!(timeout(text), Ok(Seconds(Duration::from_millis(ms))), "{text}");
        }
        for text in ["", "0", "-1", "nan", "inf", "soon", "5s", "1e300"] {
            assert!(timeout(text).unwrap_err().starts_with("expected a number of seconds"), "{text:?}");
        }
    }

    #[test]
    fn ages_are_read() {
        for (text, seconds) in [("90m", 5400), ("24h", 86_400), ("7d", 604_800), ("0h", 0)] {
            assert_eq!(age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "24", "h", "-1h", "1.5h", "1 h", "1w", "18446744073709551615d"] {
            assert!(age(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn times_may_be_zero_where_that_is_one() {
        for (text, seconds) in [("0", 0.0), ("0s", 0.0), (" 0.0 ms", 0.0), ("360ms", 0.36), ("5m", 300.0)] {
            assert_eq!(time_or_zero(text), Ok(seconds), "{text}");
        }
        for text in ["", "s", "-5s", "-1", "0w", "0 0", "nan", "inf", "soon"] {
            let refused = time_or_zero(text).unwrap_err();
            assert!(refused.starts_with(&format!("{text:?}: expected a time of zero or more")), "{refused}");
        }
        assert!(time("0").is_err());
    }

    #[test]
    fn numbers_of_parameters_are_read() {
        for (text, expected) in [("7B", 7_000_000_000), ("1.2B", 1_200_000_000), ("350M", 350_000_000), ("17", 17)] {
            assert_eq!(parameters(text), Ok(expected), "{text}");
        }
        for text in ["", "B", "0", "-7B", "7b", "nan", "inf", "7 billion", "1e30"] {
            assert!(parameters(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_report_has_one_form() {
        let parsed = |line: &str| Arguments::of(line.split(' ').map(OsString::from));
        for line in [
            "shardfast --json report run --csv",
            "shardfast report run --json --csv",
            "shardfast report run --trace a --json",
            "shardfast report run --trace a --csv",
            "shardfast report run --out a --csv",
            "shardfast report run --out a --trace b",
        ] {
            let error = parsed(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{line}: {error}");
        }
        for line in ["report run --csv --step 7", "report run --trace a", "--json report run --out a"] {
            assert!(parsed(&format!("shardfast {line}")).is_ok(), "{line}");
        }
    }
}
