//! Reads credentials and settings from the files of AWS's tools: `~/.aws/credentials` and `~/.aws/config`.
//!
//! A profile may hold keys, or a command that prints them (`credential_process`, whose output is specified in AWS's
//! "Sourcing credentials with an external process"). Roles, SSO and codes of MFA are left to AWS's own command, which
//! prints the keys in the same form: `aws configure export-credentials`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use http::HeaderValue;
use object_store::aws::AwsCredential;
use serde::Deserialize;

use crate::{Error, Kind, Result};

/// Time for which keys of a file count as valid. It is read again after half of that: other programs may renew them.
const OF_A_FILE: Duration = Duration::from_secs(120);

/// Time for which keys without an expiration are used.
const NEVER_SAID: Duration = Duration::from_secs(24 * 3600);

/// Reason why there is no such profile.
const NOWHERE: &str = "neither ~/.aws/config nor ~/.aws/credentials has it";

/// Settings of a profile whose keys AWS's command finds.
const OF_ROLES: [&str; 3] = ["role_arn", "source_profile", "credential_source"];
const OF_SSO: [&str; 2] = ["sso_session", "sso_start_url"];

/// Advice for a profile whose keys the command cannot find.
const OTHERWISE: &str = "let `credential_process` or the environment give the keys (of a web identity: AWS_ROLE_ARN \
                         and AWS_WEB_IDENTITY_TOKEN_FILE)";

/// Keys, and the time that they last.
pub(super) type Lasting = (AwsCredential, Duration);

/// Contents of both files, as they are now; empty if they are absent.
pub(super) struct Files {
    pub(super) config: String,
    pub(super) credentials: String,
}

impl Files {
    /// Reads both files from the paths in the environment, or from `~/.aws`.
    pub(super) fn read() -> Files {
        let read = |name: &str, file: &str| {
            let home = || Some(PathBuf::from(variable("HOME")?).join(".aws").join(file));
            let path = variable(name).map(PathBuf::from).or_else(home);
            path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
        };
        Files {
            config: read("AWS_CONFIG_FILE", "config"),
            credentials: read("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        }
    }

    /// Returns the profile of this name; `None` if neither file has it.
    pub(super) fn profile(&self, name: &str) -> Option<Profile> {
        let mut found: Option<BTreeMap<String, String>> = None;
        // Keys in the file of credentials count more than those beside the settings.
        for (text, section) in [
            (&self.config, format!("profile {name}")),
            (&self.config, name.to_owned()),
            (&self.credentials, name.to_owned()),
        ] {
            if let Some(settings) = section_of(text, &section) {
                found.get_or_insert_default().extend(settings);
            }
        }
        Some(Profile { name: name.to_owned(), settings: found? })
    }
}

/// A profile, as both files together describe it.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    name: String,
    settings: BTreeMap<String, String>,
}

impl Profile {
    /// Returns the profile that `AWS_PROFILE` names, or `default`; `None` if no file has the latter.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if no file has the named one.
    pub(super) fn current(files: &Files) -> Result<Option<Profile>> {
        let Some(name) = Profile::named() else { return Ok(files.profile("default")) };
        let nowhere = || Profile { name: name.clone(), settings: BTreeMap::new() }.fail(NOWHERE);
        files.profile(&name).map(Some).ok_or_else(nowhere)
    }

    /// Returns the name of the profile that the environment asks for.
    pub(super) fn named() -> Option<String> {
        ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"].into_iter().find_map(variable)
    }

    /// Makes an error of this profile.
    pub(super) fn fail(&self, why: &str) -> Error {
        Error::new(Kind::Invalid, "open", format!("AWS profile {:?}", self.name), why)
    }

    /// Returns the value of a setting, such as `region`.
    pub(super) fn get(&self, setting: &str) -> Option<&str> {
        self.settings.get(setting).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns whether the profile has keys or says how to obtain them.
    pub(super) fn gives_keys(&self) -> bool {
        self.left_to_aws().is_some() || self.has_keys()
    }

    /// Returns whether the profile takes a role with the keys of the environment.
    pub(super) fn takes_role_with_environment(&self) -> bool {
        self.get("role_arn").is_some() && self.get("credential_source") == Some("Environment")
    }

    fn has_keys(&self) -> bool {
        self.get("credential_process").is_some() || self.get("aws_access_key_id").is_some()
    }

    /// Returns the setting for which AWS's command finds the keys. A role has priority over keys, and keys over SSO.
    fn left_to_aws(&self) -> Option<&'static str> {
        let first = |settings: &[&'static str]| settings.iter().copied().find(|setting| self.get(setting).is_some());
        first(&OF_ROLES).or_else(|| first(&OF_SSO).filter(|_| !self.has_keys()))
    }

    fn keys(&self) -> Option<AwsCredential> {
        Some(AwsCredential {
            key_id: self.get("aws_access_key_id")?.to_owned(),
            secret_key: self.get("aws_secret_access_key")?.to_owned(),
            token: self.get("aws_session_token").map(str::to_owned),
        })
    }
}

/// Returns the value of an environment variable, if it is not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the settings of a section; indented lines belong to a nested setting, which is never one of ours.
fn section_of(text: &str, section: &str) -> Option<BTreeMap<String, String>> {
    let mut found: Option<BTreeMap<String, String>> = None;
    let mut is_inside = false;
    for line in text.lines().filter(|line| !line.starts_with([' ', '\t', '#', ';'])) {
        if let Some(name) = line.trim().strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            is_inside = name.split_whitespace().eq(section.split_whitespace());
            if is_inside {
                found.get_or_insert_default();
            }
        } else if let (true, Some((name, value)), Some(found)) = (is_inside, line.split_once('='), &mut found) {
            found.insert(name.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}

/// Output of such a command.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// Reason why keys cannot be used.
pub(super) const NOT_PRINTABLE: &str = "expected a key and a token of printable characters, found others";

/// Returns whether a request can be signed with these keys: the client library panics if a header cannot hold them.
pub(super) fn can_sign(keys: &AwsCredential) -> bool {
    let mut sent = std::iter::once(&keys.key_id).chain(&keys.token);
    sent.all(|sent| HeaderValue::from_str(sent).is_ok())
}

impl Profile {
    /// Returns the profile's keys, or those that its command or AWS's prints, and how long they last.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if a key has no secret, or the command fails or prints something else.
    pub(super) fn ask(&self) -> Result<Lasting> {
        if let Some(setting) = self.left_to_aws() {
            let said = format!("it says {setting}: `aws configure export-credentials --profile {}`", self.name);
            let mut command = Command::new("aws");
            command.args(["configure", "export-credentials", "--profile", &self.name, "--format", "process"]);
            return self.printed_by(command, &said, &format!("; it needs AWS CLI 2: without it, {OTHERWISE}"));
        }
        let Some(command) = self.get("credential_process") else {
            return Ok((self.keys().ok_or_else(|| self.fail("it has a key without a secret"))?, OF_A_FILE));
        };
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command);
        self.printed_by(shell, &format!("credential_process {command:?}"), "")
    }

    /// Runs a command that prints keys; errors call it `said` and end with the remedy.
    fn printed_by(&self, mut command: Command, said: &str, remedy: &str) -> Result<Lasting> {
        let fail = |why: String| self.fail(&format!("{said}: {why}{remedy}"));
        let done = command.stdin(Stdio::null()).output().map_err(|error| fail(error.to_string()))?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(fail(format!("{}: {}", done.status, said.trim().lines().last().unwrap_or_default())));
        }
        // The output holds secrets: no error repeats it.
        let printed: Printed = serde_json::from_slice(&done.stdout)
            .map_err(|_| fail("expected JSON with Version, AccessKeyId and SecretAccessKey".to_owned()))?;
        if printed.version != 1 {
            return Err(fail(format!("expected Version 1, found {}", printed.version)));
        }
        let lasts = printed.expiration.as_deref().map_or(Ok(NEVER_SAID), lasts_until).map_err(fail)?;
        let Printed { access_key_id, secret_access_key, session_token, .. } = printed;
        Ok((AwsCredential { key_id: access_key_id, secret_key: secret_access_key, token: session_token }, lasts))
    }
}

/// Returns how long keys last that expire at `expiration`, a time as in RFC 3339; else what is wrong with it.
fn lasts_until(expiration: &str) -> std::result::Result<Duration, String> {
    let at = chrono::DateTime::parse_from_rfc3339(expiration)
        .map_err(|_| format!("expected Expiration as in RFC 3339, found {expiration:?}"))?;
    let left = SystemTime::from(at).duration_since(SystemTime::now());
    left.map_err(|_| format!("its keys expired at {expiration}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_found_by_name_and_nested_settings_are_not_taken_for_them() {
        let text = "# keys\n[default]\nregion = eu-west-1\n[profile  team]\nAWS_Access_Key_Id=A=B\ns3 =\n  \
                    region = no\n[profile other]\nregion = us-east-2\n";
        assert_eq!(section_of(text, "default").unwrap()["region"], "eu-west-1");
        let team = section_of(text, "profile team").unwrap();
        assert_eq!((team["aws_access_key_id"].as_str(), team.contains_key("region")), ("A=B", false));
        assert!(section_of(text, "team").is_none());
    }
}
