//! Names a checkpoint's files and entries.

use crate::digits::hex_u64;
use crate::error::Error;
use crate::region::Region;

/// Record that makes a checkpoint exist; published last.
pub const COMMIT: &str = "COMMIT";

/// Record of a checkpoint whose `COMMIT` was taken back; its files are deleted later.
pub const LEAVING: &str = ".leaving";

/// Mark of a checkpoint that retention must keep.
pub const PINNED: &str = ".pinned";

/// Mark of a directory into which a copy is being made.
pub const COPYING: &str = ".copying";

/// Directory of a run that holds what its saves and loads did, one object for each.
pub const TELEMETRY: &str = ".telemetry";

/// Directory of a run that holds an object for each of the newest jobs that saved into it.
pub const JOBS: &str = ".jobs";

/// Longest key, in bytes: fits into one path component of any file system.
pub const KEY_BYTES_MAX: usize = 200;

/// Index of a key's directory, with which the Hugging Face stack opens it.
pub const HUGGING_FACE_INDEX: &str = "model.safetensors.index.json";

/// Digits of the time in a record's name: enough for some three centuries, so that names sort by time.
const RECORD_TIME_DIGITS: usize = 13;

const STEP_PREFIX: &str = "step-";
const MANIFEST_PREFIX: &str = "manifest-";

/// Returns the directory of a step's checkpoint: `step-00001000`. Eight digits at least.
pub fn step_dir(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// Returns the step of a directory that is spelled exactly as by [`step_dir`].
pub fn parse_step_dir(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP_PREFIX)?;
    let step = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())??;
    (step_dir(step) == name).then_some(step)
}

/// Returns the name in [`TELEMETRY`] of the record of a save, or else of a load, that was requested at that time, in
/// milliseconds since 1970: `1700000000000-save-00001000.safetensors`.
pub fn record_name(unix_ms: u64, is_save: bool, step: u64) -> String {
    let verb = if is_save { "save" } else { "load" };
    format!("{unix_ms:0RECORD_TIME_DIGITS$}-{verb}-{step:08}.safetensors")
}

/// Returns the step of a record that is named exactly as by [`record_name`].
pub fn parse_record_name(name: &str) -> Option<u64> {
    let mut parts = name.strip_suffix(".safetensors")?.splitn(3, '-');
    let (unix_ms, verb, step) = (parts.next()?.parse().ok()?, parts.next()?, parts.next()?.parse().ok()?);
    (record_name(unix_ms, verb == "save", step) == name).then_some(step)
}

/// Returns the name in [`TELEMETRY`] of the note that the job of a run ended at that time, in milliseconds since 1970:
/// `1700000000000-end.json`.
pub fn end_name(unix_ms: u64) -> String {
    format!("{unix_ms:0RECORD_TIME_DIGITS$}-end.json")
}

/// Returns whether a name is spelled exactly as by [`end_name`].
pub fn is_end_name(name: &str) -> bool {
    let unix_ms = name.strip_suffix("-end.json").and_then(|digits| digits.parse().ok());
    unix_ms.is_some_and(|unix_ms| end_name(unix_ms) == name)
}

/// Returns the name in [`JOBS`] of a job's object, given its number there and its own name: `00000012-<name>`. Eight
/// digits at least.
pub fn job_name(number: u64, name: &str) -> String {
    format!("{number:08}-{name}")
}

/// Returns number and name of a job whose object is named exactly as by [`job_name`], the name in hexadecimal digits.
pub fn parse_job_name(object: &str) -> Option<(u64, &str)> {
    let (digits, name) = object.split_once('-')?;
    let number = digits.parse().ok().filter(|_| digits.len() <= 12)?;
    let is_name = !name.is_empty() && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (is_name && job_name(number, name) == object).then_some((number, name))
}

/// Returns the manifest's file name: `manifest-<attempt>`, so that two attempts never write the same file.
pub fn manifest_name(attempt: &str) -> String {
    format!("{MANIFEST_PREFIX}{attempt}")
}

/// Returns the path of a data file in its checkpoint: `<key>/<rank>-<index>-<attempt>.safetensors`. The rank has at
/// least five digits; the index, which counts the rank's files under this key, at least three.
///
/// # Errors
/// `Invalid` when [`check_key`] or [`check_attempt`] refuse.
pub fn data_file(key: &str, attempt: &str, rank: u32, index: u32) -> Result<String, Error> {
    check_key(key)?;
    check_attempt(attempt)?;
    Ok(format!("{key}/{rank:05}-{index:03}-{attempt}.safetensors"))
}

/// Returns whether this format writes a file at `path` inside a checkpoint, in any attempt: `COMMIT` or a mark beside
/// it, a manifest, a data file as named by [`data_file`], or a key's index.
pub fn is_own_path(path: &str) -> bool {
    let attempt = |digits: &str| check_attempt(digits).is_ok();
    let number = |digits: &str, digits_min: usize| {
        digits.len() >= digits_min && digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u32>().is_ok()
    };
    let Some((key, file)) = path.split_once('/') else {
        return [COMMIT, LEAVING, PINNED, COPYING].contains(&path)
            || path.strip_prefix(MANIFEST_PREFIX).is_some_and(attempt);
    };
    let is_data = || {
        let mut parts = file.strip_suffix(".safetensors")?.split('-');
        let (rank, index, digits) = (parts.next()?, parts.next()?, parts.next()?);
        Some(number(rank, 5) && number(index, 3) && attempt(digits) && parts.next().is_none())
    };
    check_key(key).is_ok() && (file == HUGGING_FACE_INDEX || is_data().unwrap_or(false))
}

/// Returns the attempt that wrote the manifest or data file at `path` inside a checkpoint; `None` for other paths.
pub fn attempt_of(path: &str) -> Option<&str> {
    let digits = match path.rsplit_once('/') {
        None => path.strip_prefix(MANIFEST_PREFIX)?,
        Some((_, file)) => file.strip_suffix(".safetensors")?.rsplit_once('-')?.1,
    };
    (is_own_path(path) && check_attempt(digits).is_ok()).then_some(digits)
}

/// Returns a tensor's name in a data file: the fully qualified name when `region` is the whole tensor, else name and
/// region: `layers.0.weight[0:4, 8:16]`.
pub fn part_name(name: &str, region: &Region, shape: &[u64]) -> String {
    if region.is_whole(shape) { name.to_owned() } else { format!("{name}{region}") }
}

/// Returns the name in a data file of a value that `rank` wrote, for itself or also for others: `rng@rank3`.
pub fn value_name(name: &str, rank: u32) -> String {
    format!("{name}@rank{rank}")
}

/// Checks a key of the user's state, which names a directory: 1 to 200 bytes, no `/`, `\` or control character, no
/// leading `.`, and neither `COMMIT` nor a possible name of a manifest.
///
/// # Errors
/// `Invalid`, naming the key and the rule.
pub fn check_key(key: &str) -> Result<(), Error> {
    let reason = component_flaw(key).or_else(|| {
        if key.starts_with('.') {
            Some("starts with '.'")
        } else if key == COMMIT || key.starts_with(MANIFEST_PREFIX) {
            Some("is the name of one of the checkpoint's own files")
        } else {
            None
        }
    });
    match reason {
        Some(reason) => Err(Error::Invalid(format!("key {key:?} {reason}"))),
        None => Ok(()),
    }
}

/// Checks an attempt: exactly 16 lowercase hexadecimal digits.
///
/// # Errors
/// `Invalid`, naming what was found.
pub fn check_attempt(attempt: &str) -> Result<(), Error> {
    match hex_u64(attempt.as_bytes()) {
        Some(_) => Ok(()),
        None => Err(Error::Invalid(format!("attempt: expected 16 lowercase hexadecimal digits, found {attempt:?}"))),
    }
}

/// Checks a path inside a checkpoint: components joined by single `/`, each of 1 to 200 bytes, without
/// `\` or control characters, and neither `.` nor `..`.
pub(crate) fn check_path(path: &str) -> Result<(), Error> {
    for component in path.split('/') {
        if let Some(reason) = component_flaw(component) {
            return Err(Error::Invalid(format!("path {path:?}: the component {component:?} {reason}")));
        }
    }
    Ok(())
}

/// Checks a name without `/`, by the rules of [`check_path`].
pub(crate) fn check_file_name(name: &str) -> Result<(), Error> {
    match component_flaw(name) {
        Some(reason) => Err(Error::Invalid(format!("file name {name:?} {reason}"))),
        None => Ok(()),
    }
}

fn component_flaw(component: &str) -> Option<&'static str> {
    if component.is_empty() {
        Some("is empty")
    } else if component.len() > KEY_BYTES_MAX {
        Some("is longer than 200 bytes")
    } else if component == "." || component == ".." {
        Some("would leave its directory")
    } else if component.chars().any(|c| c == '/' || c == '\\' || c.is_control()) {
        Some("holds '/', '\\' or a control character")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_directories_go_both_ways() {
        for step in [0, 1, 1_000, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse_step_dir(&step_dir(step)), Some(step));
        }
        assert_eq!(step_dir(1000), "step-00001000");
        for other in [
            "",
            "step-",
            "step-1000",
            "step-+0001000",
            "step-000001000",
            "step-0000100x",
            "Step-00001000",
            "step-00001000 ",
        ] {
            assert_eq!(parse_step_dir(other), None, "{other:?}");
        }
        assert_eq!(parse_step_dir("step-99999999999999999999"), None);
    }

    #[test]
    fn records_and_ends_of_a_run_are_told_apart() {
        assert_eq!(record_name(1_700_000_000_000, true, 7), "1700000000000-save-00000007.safetensors");
        assert_eq!(parse_record_name("1700000000000-load-00000007.safetensors"), Some(7));
        assert_eq!(end_name(1_700_000_000_000), "1700000000000-end.json");
        assert!(is_end_name("1700000000000-end.json") && is_end_name(&end_name(0)));
        for other in ["", "-end.json", "1-end.json", "+700000000000-end.json", "1700000000000-end", "a-end.json"] {
            assert!(!is_end_name(other), "{other:?}");
        }
        assert_eq!(parse_record_name(&end_name(0)), None);
    }

    #[test]
    fn keys_that_would_leave_or_clash_are_refused() {
        let long = "k".repeat(201);
        for key in
            ["", ".", "..", ".hidden", "a/b", "/a", "a\\b", "a\0", "a\nb", "COMMIT", "manifest-0123456789abcdef", &long]
        {
            let message = data_file(key, "0123456789abcdef", 0, 0).unwrap_err().to_string();
            assert!(message.contains(&format!("{key:?}")), "{message}");
        }
        assert_eq!(
            data_file("model", "0123456789abcdef", 3, 1).unwrap(),
            "model/00003-001-0123456789abcdef.safetensors"
        );
        assert_eq!(
            data_file("ema weights", "0123456789abcdef", 123_456, 1_000).unwrap(),
            "ema weights/123456-1000-0123456789abcdef.safetensors"
        );
        for attempt in ["", "0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeg"] {
            assert!(data_file("model", attempt, 0, 0).is_err(), "{attempt:?}");
        }
    }

    #[test]
    fn own_paths_are_those_that_are_written() {
        let attempt = "0123456789abcdef";
        for (rank, index) in [(0, 0), (7, 12), (123_456, 1_000), (u32::MAX, u32::MAX)] {
            let path = data_file("ema weights", attempt, rank, index).unwrap();
            assert!(is_own_path(&path));
            assert_eq!(attempt_of(&path), Some(attempt));
        }
        assert!(is_own_path(COMMIT) && is_own_path(&manifest_name(attempt)));
        assert!(is_own_path("model/model.safetensors.index.json"));
        assert!([LEAVING, PINNED, COPYING].into_iter().all(is_own_path));
        assert_eq!(attempt_of(&manifest_name(attempt)), Some(attempt));
        for path in [COMMIT, LEAVING, "model/model.safetensors.index.json", "model/x-0123456789abcdef.safetensors"] {
            assert_eq!(attempt_of(path), None, "{path}");
        }
        for other in [
            "",
            "commit",
            "manifest-1",
            "manifest-0123456789abcdef.json",
            "config.json",
            "model.safetensors.index.json",
            "model/model.safetensors",
            "model/00000-000-0123456789abcdef.pt",
            "model/00000-000-0123456789abcdef-1.safetensors",
            "model/0000-000-0123456789abcdef.safetensors",
            "model/00000-000-0123456789ABCDEF.safetensors",
            "model/99999999999-000-0123456789abcdef.safetensors",
            "model/deeper/00000-000-0123456789abcdef.safetensors",
            ".hidden/00000-000-0123456789abcdef.safetensors",
            "model/COMMIT",
            "model/.pinned",
        ] {
            assert!(!is_own_path(other), "{other:?}");
        }
    }

    #[test]
    fn entries_are_named_by_region_only_when_cut() {
        assert_eq!(part_name("w", &Region::whole(&[4, 8]), &[4, 8]), "w");
        assert_eq!(part_name("w", &Region::new(&[0, 4], &[4, 4]), &[4, 8]), "w[0:4, 4:8]");
        assert_eq!(part_name("scalar", &Region::whole(&[]), &[]), "scalar");
        assert_eq!(value_name("rng", 3), "rng@rank3");
    }

    #[test]
    fn paths_stay_inside() {
        for path in ["model/a.safetensors", "a", "a/b/c", "a/.hidden"] {
            check_path(path).unwrap();
        }
        for path in ["", "/", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a\\..\\b", "a/b\0"] {
            assert!(check_path(path).is_err(), "{path:?}");
        }
    }
}
