//! Credentials and settings from the files of AWS's tools: `~/.aws/credentials` and `~/.aws/config`.
//!
//! A profile may hold keys, or a command that says them (`credential_process`, whose output is specified in AWS's
//! "Sourcing credentials with an external process"). Both are asked again when they may have changed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use serde::Deserialize;

use crate::{Error, Kind, Result};

/// How long keys of a file are taken to last. It is read again after half of that: other programs may renew them.
const OF_A_FILE: Duration = Duration::from_secs(120);

/// How long before they expire keys are renewed, but for such as last so short that they are used for half of it.
const RENEW_BEFORE: Duration = Duration::from_secs(300);

/// How long keys that have not expired are used on after their renewal failed.
const USE_ON: Duration = Duration::from_secs(10);

/// How long keys are used of which nobody says when they expire.
const NEVER_SAID: Duration = Duration::from_secs(24 * 3600);

/// How long a command may take.
const COMMAND_MAX: Duration = Duration::from_secs(60);

/// Ways to credentials that other tools know and this one does not.
const UNKNOWN_WAYS: [&str; 5] =
    ["role_arn", "sso_session", "sso_start_url", "credential_source", "web_identity_token_file"];

/// A profile, as both files together describe it.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    name: String,
    settings: BTreeMap<String, String>,
}

impl Profile {
    /// The profile that `AWS_PROFILE` names, or `default`; `None` where no file has the latter.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if the named one is nowhere, or has credentials in a way that is not known here.
    pub(super) fn current() -> Result<Option<Profile>> {
        let named = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"].into_iter().find_map(variable);
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let read = |name: &str, file: &str| {
            let home = || Some(PathBuf::from(variable("HOME")?).join(".aws").join(file));
            std::fs::read_to_string(variable(name).map(PathBuf::from).or_else(home)?).ok()
        };
        let mut settings = BTreeMap::new();
        let mut is_there = false;
        let config = read("AWS_CONFIG_FILE", "config").unwrap_or_default();
        let credentials = read("AWS_SHARED_CREDENTIALS_FILE", "credentials").unwrap_or_default();
        // Keys in the file of credentials count more than those beside the settings.
        for (text, section) in
            [(&config, format!("profile {name}")), (&config, name.clone()), (&credentials, name.clone())]
        {
            if let Some(found) = section_of(text, &section) {
                is_there = true;
                settings.extend(found);
            }
        }
        let profile = Profile { name, settings };
        match (named, is_there) {
            (Some(_), false) => Err(profile.fail("neither ~/.aws/config nor ~/.aws/credentials has it")),
            (None, false) => Ok(None),
            _ => profile.checked().map(Some),
        }
    }

    fn checked(self) -> Result<Profile> {
        let unknown = UNKNOWN_WAYS.iter().find(|way| self.settings.contains_key(**way));
        match unknown.filter(|_| !self.has_credentials()) {
            Some(way) => Err(self.fail(&format!(
                "it says {way}, which is not understood here: let `credential_process` or the environment say the keys \
                 (`aws configure export-credentials` prints them)"
            ))),
            None => Ok(self),
        }
    }

    fn fail(&self, why: &str) -> Error {
        Error::new(Kind::Invalid, "open", format!("AWS profile {:?}", self.name), why)
    }

    /// The value of a setting, such as `region`.
    pub(super) fn get(&self, setting: &str) -> Option<&str> {
        self.settings.get(setting).map(String::as_str)
    }

    /// Whether it says how to get keys.
    pub(super) fn has_credentials(&self) -> bool {
        self.get("credential_process").is_some() || self.get("aws_access_key_id").is_some()
    }

    fn keys(&self) -> Option<AwsCredential> {
        Some(AwsCredential {
            key_id: self.get("aws_access_key_id")?.to_owned(),
            secret_key: self.get("aws_secret_access_key")?.to_owned(),
            token: self.get("aws_session_token").map(str::to_owned),
        })
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The settings of a section; indented lines belong to a nested setting, which none of ours is.
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

/// Says the keys of the current profile, renewed when they may have changed.
#[derive(Debug, Default)]
pub(super) struct ProfileCredentials {
    known: Mutex<Option<Known>>,
    /// Held by the request that asks; the others wait for what it finds.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
struct Known {
    credential: Arc<AwsCredential>,
    asked: Instant,
    /// When to ask again.
    until: Instant,
    expires: Instant,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Known")
    }
}

impl ProfileCredentials {
    fn known(&self) -> MutexGuard<'_, Option<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<Arc<AwsCredential>> {
        self.known().as_ref().filter(|known| Instant::now() < known.until).map(|known| Arc::clone(&known.credential))
    }

    /// Forgets keys that are known since before this time: the service does not take them.
    pub(super) fn forget(&self, before: Instant) {
        self.known().take_if(|known| known.asked <= before);
    }
}

#[async_trait::async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        if let Some(credential) = self.current() {
            return Ok(credential);
        }
        let _asking = self.asking.lock().await;
        if let Some(credential) = self.current() {
            return Ok(credential);
        }
        let now = Instant::now();
        let asked = tokio::time::timeout(COMMAND_MAX, tokio::task::spawn_blocking(ask)).await;
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic { store: "S3", source };
        let asked = match asked {
            Err(_) => Err(failed(format!("credential_process took longer than {COMMAND_MAX:?}").into())),
            Ok(Err(error)) => Err(failed(error.into())),
            Ok(Ok(asked)) => asked.map_err(|error| failed(Box::new(error))),
        };
        let mut known = self.known();
        match (asked, &mut *known) {
            (Ok((credential, lasts)), known) => {
                let until = now + lasts.saturating_sub(RENEW_BEFORE).max(lasts / 2);
                let credential = Arc::new(credential);
                *known = Some(Known { credential: Arc::clone(&credential), asked: now, until, expires: now + lasts });
                Ok(credential)
            }
            // What it says now may be different in a moment; these are still good.
            (Err(_), Some(known)) if now < known.expires => {
                known.until = now + USE_ON;
                Ok(Arc::clone(&known.credential))
            }
            (Err(error), _) => Err(error),
        }
    }
}

/// What such a command prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// The keys, and how long they last.
fn ask() -> Result<(AwsCredential, Duration)> {
    let gone = || Error::new(Kind::Invalid, "open", "AWS profile", "its keys have been removed");
    let profile = Profile::current()?.ok_or_else(gone)?;
    let Some(command) = profile.get("credential_process") else {
        return Ok((profile.keys().ok_or_else(|| profile.fail("it has a key without a secret"))?, OF_A_FILE));
    };
    let fail = |why: String| profile.fail(&format!("credential_process {command:?}: {why}"));
    let done =
        Command::new("sh").arg("-c").arg(command).stdin(Stdio::null()).output().map_err(|e| fail(e.to_string()))?;
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
    let lasts = match &printed.expiration {
        None => NEVER_SAID,
        Some(text) => {
            let at = chrono::DateTime::parse_from_rfc3339(text)
                .map_err(|_| fail(format!("expected Expiration as in RFC 3339, found {text:?}")))?;
            let left = SystemTime::from(at).duration_since(SystemTime::now());
            left.map_err(|_| fail(format!("its keys expired at {text}")))?
        }
    };
    let Printed { access_key_id, secret_access_key, session_token, .. } = printed;
    Ok((AwsCredential { key_id: access_key_id, secret_key: secret_access_key, token: session_token }, lasts))
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
