//! Opens `gs://bucket/prefix`: Google Cloud Storage, by its XML interface.
//!
//! Option: `endpoint`, a URL, for another server than Google's. Credentials come from where Google's tools keep them:
//! `GOOGLE_APPLICATION_CREDENTIALS`, `GOOGLE_SERVICE_ACCOUNT` and so on, the file that `gcloud auth
//! application-default login` leaves, and the machine's own account.

mod uploads;

use std::sync::Arc;

use object_store::Attributes;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};

use crate::place::Url;
use crate::remote::{Bucket, RemoteStore, expect_tls, is_http, once, plain};
use crate::{Error, Kind, Result, Shared, Store};

use uploads::Uploads;

/// Names of the URL's options.
pub(crate) const OPTIONS: &[&str] = &["endpoint"];

/// URL of Google's own service.
const GOOGLE: &str = "https://storage.googleapis.com";

/// Opens the URL `gs://bucket/prefix?option=value`.
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
    let skips = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let is_signed = skips.is_none_or(|skips| ["false", "0", "off", "no", "n", "f"].contains(&&*skips.to_lowercase()));
    if is_signed {
        expect_tls(endpoint.as_deref()).map_err(invalid)?;
    }
    let builder = builder.with_client_options(plain(endpoint.as_deref())).with_retry(once());
    let base = endpoint.clone().unwrap_or_else(|| GOOGLE.to_owned());
    let untrusted = endpoint.filter(|endpoint| endpoint != GOOGLE);
    let untrusted = untrusted.map(|endpoint| format!("{endpoint} {bucket}"));
    RemoteStore::open(url.usual(), &prefix, shared, &|connector| {
        let http = connector.client();
        let client = builder.clone().with_http_connector(connector).build();
        let client = Arc::new(client.map_err(|error| invalid(error.to_string()))?);
        let uploads = Uploads::new(Arc::clone(&client), http, &base, &bucket, is_signed);
        Ok(Bucket {
            client,
            uploads: Some(Arc::new(uploads)),
            extra_api: None,
            attributes: Attributes::new(),
            // The key of an account signs requests for tokens, and the tokens are sent.
            secrets: Vec::new(),
            untrusted: untrusted.clone(),
            renew: None,
        })
    })
}
