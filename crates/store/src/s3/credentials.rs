//! Provides the keys of the current profile, renewed when they may have changed: one request asks, the others wait for
//! it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

use super::profile::{Files, Lasting, NOT_PRINTABLE, Profile, can_sign};
use crate::{Error, Kind, Result};

/// Time before expiry at which keys are renewed; keys that last shorter are used for half of their time.
const RENEW_BEFORE: Duration = Duration::from_secs(300);

/// Time for which keys that have not expired are still used after their renewal failed.
const USE_ON: Duration = Duration::from_secs(10);

/// Time limit of a command that prints keys.
const ASKING_MAX: Duration = Duration::from_secs(60);

/// Provider of the current profile's keys, renewed when they may have changed.
#[derive(Debug, Default)]
pub(super) struct ProfileCredentials {
    known: Mutex<Option<Known>>,
    /// Lock of the request that asks; the others wait for its result.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
struct Known {
    credential: Arc<AwsCredential>,
    asked: Instant,
    /// Time at which to ask again.
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

    /// Forgets keys obtained before this time, since the service rejects them.
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
        let asked = tokio::time::timeout(ASKING_MAX, tokio::task::spawn_blocking(ask)).await;
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic { store: "S3", source };
        let asked = match asked {
            Err(_) => Err(failed(format!("asking for the profile's keys took longer than {ASKING_MAX:?}").into())),
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
            // The answer may be different in a moment; these keys are still valid.
            (Err(_), Some(known)) if now < known.expires => {
                known.until = now + USE_ON;
                Ok(Arc::clone(&known.credential))
            }
            (Err(error), _) => Err(error),
        }
    }
}

/// Returns the keys of the current profile, as the files are now.
fn ask() -> Result<Lasting> {
    let gone = || Error::new(Kind::Invalid, "open", "AWS profile", "its keys have been removed");
    let profile = Profile::current(&Files::read())?.filter(Profile::gives_keys).ok_or_else(gone)?;
    let found = profile.ask()?;
    if can_sign(&found.0) { Ok(found) } else { Err(profile.fail(NOT_PRINTABLE)) }
}
