//! Opens `az://container/prefix`: Azure Blob Storage.
//!
//! Options: `account`, and `endpoint`, a URL, for another server than Azure's. Other settings and all credentials come
//! from where Azure's tools keep them: the environment (`AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`,
//! `AZURE_CLIENT_ID` and so on), workload identity, and the machine's own identity.

use std::sync::Arc;

use object_store::Attributes;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use crate::place::Url;
use crate::remote::{Bucket, RemoteStore, expect_tls, is_http, once, plain};
use crate::{Error, Kind, Result, Shared, Store};

/// Names of the URL's options.
pub(crate) const OPTIONS: &[&str] = &["account", "endpoint"];

/// Opens the URL `az://container/prefix?option=value`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let invalid = |message: String| Error::new(Kind::Invalid, "open", url.shown(), message);
    let (container, prefix) = url.bucket_and_prefix()?;
    let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(&container);
    for (name, value) in url.options()? {
        builder = if name == "account" { builder.with_account(value) } else { builder.with_endpoint(value) };
    }
    let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
    if let Some(endpoint) = endpoint.as_deref().filter(|endpoint| !is_http(endpoint)) {
        return Err(invalid(format!("expected an endpoint such as https://host:port/account, found {endpoint:?}")));
    }
    // A key signs, and is not sent.
    let is_token = builder.get_config_value(&AzureConfigKey::AccessKey).is_none();
    let skips = builder.get_config_value(&AzureConfigKey::SkipSignature).is_some_and(|skips| skips == "true");
    let is_emulator = builder.get_config_value(&AzureConfigKey::UseEmulator).is_some_and(|it| it == "true");
    if is_token && !skips && !is_emulator {
        expect_tls(endpoint.as_deref()).map_err(invalid)?;
    }
    let keys = [AzureConfigKey::AccessKey, AzureConfigKey::ClientSecret, AzureConfigKey::SasKey, AzureConfigKey::Token];
    let secrets: Vec<_> = keys.iter().filter_map(|key| builder.get_config_value(key)).collect();
    let builder = builder.with_client_options(plain(endpoint.as_deref())).with_retry(once());
    let untrusted = endpoint.map(|endpoint| format!("{endpoint} {container}"));
    RemoteStore::open(url.usual(), &prefix, shared, &|connector| {
        let client = builder.clone().with_http_connector(connector).build();
        let client = client.map_err(|error| invalid(error.to_string()))?;
        Ok(Bucket {
            client: Arc::new(client),
            uploads: None,
            extra_api: None,
            attributes: Attributes::new(),
            secrets: secrets.clone(),
            untrusted: untrusted.clone(),
            renew: None,
        })
    })
}
