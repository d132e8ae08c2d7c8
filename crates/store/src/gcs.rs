//! `gs://bucket/prefix`: Google Cloud Storage, by its XML interface.
//!
//! Option: `endpoint`, a URL, for another server than Google's. Credentials come from where Google's tools keep them:
//! `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT` and so on, the file that `gcloud auth
//! application-default login` leaves, and the machine's own account.

use std::sync::Arc;

use object_store::Attributes;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use crate::far::{Bucket, FarStore, is_http, once, plain};
use crate::place::Url;
use crate::{Error, Kind, Result, Shared, Store};

/// The options of such a URL.
pub(crate) const OPTIONS: &[&str] = &["endpoint"];

/// Opens `gs://bucket/prefix?option=value`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let invalid = |message: String| Error::new(Kind::Invalid, "open", url.shown(), message);
    let (bucket, prefix) = url.bucket_and_prefix()?;
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(&bucket);
    for (_, endpoint) in url.options()? {
        builder = builder.with_base_url(&endpoint);
    }
    let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    if let Some(endpoint) = endpoint.as_deref().filter(|endpoint| !is_http(endpoint)) {
        return Err(invalid(format!("expected an endpoint such as https://host:port, found {endpoint:?}")));
    }
    let builder = builder.with_client_options(plain(endpoint.as_deref())).with_retry(once());
    let untrusted = endpoint.filter(|endpoint| endpoint != "https://storage.googleapis.com");
    let untrusted = untrusted.map(|endpoint| format!("{endpoint} {bucket}"));
    FarStore::open(url.usual(), &prefix, shared, &|connector| {
        let client = builder.clone().with_http_connector(connector).build();
        let client = client.map_err(|error| invalid(error.to_string()))?;
        Ok(Bucket {
            client: Arc::new(client),
            beyond: None,
            attributes: Attributes::new(),
            untrusted: untrusted.clone(),
            renew: None,
        })
    })
}
