//! Opens `s3://bucket/prefix`: Amazon S3, and services with its protocol.
//!
//! Options: `endpoint` (a URL, for other services than Amazon's), `region`, `storage_class` of new objects, and
//! `addressing`: `path` (`https://endpoint/bucket/name`, the default with an endpoint) or `virtual`
//! (`https://bucket.endpoint/name`). Other settings come from where the tools of AWS keep them, in this order: the
//! environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL_S3`, `AWS_REGION` and so on), web identity, the profile that
//! `AWS_PROFILE` names, and the roles of containers and instances.

mod credentials;
mod extra_api;
mod profile;

use std::sync::Arc;

use http::HeaderValue;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider, Checksum};
use object_store::{Attribute, Attributes};

use crate::place::Url;
use crate::remote::{Bucket, ListUploads, RemoteStore, Renew, is_http, once};
use crate::{Error, Kind, Result, Shared, Store};

use credentials::ProfileCredentials;
use extra_api::ExtraApiClient;
use profile::{Files, Profile};

/// Names of the URL's options.
pub(crate) const OPTIONS: &[&str] = &["addressing", "endpoint", "region", "storage_class"];

/// Region of a bucket if none is given.
const REGION: &str = "us-east-1";

/// Opens the URL `s3://bucket/prefix?option=value`.
pub(crate) fn open_url(url: Url<'_>, shared: &Arc<Shared>) -> Result<Arc<dyn Store>> {
    let invalid = |message: String| Error::new(Kind::Invalid, "open", url.shown(), message);
    let (bucket, prefix) = url.bucket_and_prefix()?;
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(&bucket);
    let mut attributes = Attributes::new();
    let mut addressing = None;
    for (name, value) in url.options()? {
        match name.as_str() {
            // The variable for S3 alone would count more than the endpoint for all services.
            "endpoint" => builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, value),
            "region" => builder = builder.with_region(value),
            "storage_class" => _ = attributes.insert(Attribute::StorageClass, value.into()),
            _ => addressing = Some(value),
        }
    }
    builder = match addressing.as_deref() {
        None => builder,
        Some("path") => builder.with_virtual_hosted_style_request(false),
        Some("virtual") => builder.with_virtual_hosted_style_request(true),
        Some(other) => {
            return Err(invalid(format!("expected addressing=path or addressing=virtual, found {other:?}")));
        }
    };
    let files = Files::read();
    let profile = Profile::current(&files)?;
    let setting = |name: &str| profile.as_ref().and_then(|profile| profile.get(name));
    if builder.get_config_value(&AmazonS3ConfigKey::Region).is_none() {
        builder = builder.with_region(setting("region").unwrap_or(REGION));
    }
    if let (None, Some(endpoint)) = (endpoint_of(&builder), setting("endpoint_url")) {
        builder = builder.with_endpoint(endpoint);
    }
    let is_given = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"].iter().any(|name| std::env::var(name).is_ok());
    let of_profile = profile.as_ref().is_some_and(|profile| match is_given {
        false => profile.gives_keys(),
        // Keys of the environment count more, unless the profile that is asked for takes its role with them.
        true => Profile::named().is_some() && profile.takes_role_with_environment(),
    });
    let keys = [AmazonS3ConfigKey::SecretAccessKey, AmazonS3ConfigKey::Token];
    let secrets: Vec<_> = keys.iter().filter_map(|key| builder.get_config_value(key)).collect();
    let region = builder.get_config_value(&AmazonS3ConfigKey::Region).unwrap_or_else(|| REGION.to_owned());
    can_sign(&builder).map_err(invalid)?;
    let is_fixed = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_some();
    let endpoint = endpoint_of(&builder);
    if let Some(endpoint) = endpoint.as_deref().filter(|endpoint| !is_http(endpoint)) {
        return Err(invalid(format!("expected an endpoint such as https://host:port, found {endpoint:?}")));
    }
    // A user who writes http: means it.
    let is_plain = endpoint.as_deref().is_some_and(|endpoint| endpoint.starts_with("http:"));
    let other = endpoint.filter(|endpoint| !is_amazon(endpoint));
    let untrusted = other.map(|endpoint| format!("{endpoint} {bucket}"));
    let service = service_of(endpoint_of(&builder));
    // Each client would begin a session of its own, or send a checksum of another kind, too.
    let is_express = builder.get_config_value(&AmazonS3ConfigKey::S3Express).is_some_and(|value| value == "true");
    let is_payer = builder.get_config_value(&AmazonS3ConfigKey::RequestPayer).is_some_and(|value| value == "true");
    let is_one_client = is_express || builder.get_config_value(&AmazonS3ConfigKey::Checksum).is_some();
    let builder = builder
        .with_allow_http(is_plain)
        // The checksum of each part is signed; another pass over its bytes would say nothing more.
        .with_unsigned_payload(true)
        .with_retry(once());
    RemoteStore::open(url.usual(), &prefix, shared, &|connector| {
        let http = connector.client();
        let mut builder = builder.clone();
        let mut renew = is_fixed.then(|| Arc::new(|_| false) as Renew);
        if of_profile {
            let credentials = Arc::new(ProfileCredentials::default());
            builder = builder.with_credentials(Arc::clone(&credentials) as AwsCredentialProvider);
            renew = Some(Arc::new(move |before| {
                credentials.forget(before);
                true
            }));
        }
        let unsummed = builder.with_http_connector(connector);
        let summed = unsummed.clone().with_checksum_algorithm(Checksum::CRC64NVME);
        let client = Arc::new(summed.build().map_err(|error| invalid(error.to_string()))?);
        let unsummed = (!is_one_client).then_some(unsummed);
        let place = (service.clone(), bucket.clone());
        let extra_api = ExtraApiClient::new(Arc::clone(&client), unsummed, http, place, region.clone(), is_payer);
        let extra_api = Arc::new(extra_api);
        let uploads: Arc<dyn ListUploads> = Arc::clone(&extra_api) as _;
        let (attributes, secrets, untrusted) = (attributes.clone(), secrets.clone(), untrusted.clone());
        Ok(Bucket { client, uploads: Some(uploads), extra_api: Some(extra_api), attributes, secrets, untrusted, renew })
    })
}

/// Checks that requests can be signed. Refuses half of a pair of keys, and values that no header can hold: the client
/// library panics over them.
fn can_sign(builder: &AmazonS3Builder) -> std::result::Result<(), String> {
    for (key, what) in [
        (AmazonS3ConfigKey::Region, "a region"),
        (AmazonS3ConfigKey::AccessKeyId, "AWS_ACCESS_KEY_ID"),
        (AmazonS3ConfigKey::Token, "AWS_SESSION_TOKEN"),
    ] {
        if builder.get_config_value(&key).is_some_and(|value| HeaderValue::from_str(&value).is_err()) {
            return Err(format!("expected {what} of printable characters, found others"));
        }
    }
    let has = |key| builder.get_config_value(&key).is_some();
    match (has(AmazonS3ConfigKey::AccessKeyId), has(AmazonS3ConfigKey::SecretAccessKey)) {
        (true, false) => {
            Err("no credentials: AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not: set both".to_owned())
        }
        (false, true) => {
            Err("no credentials: AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not: set both".to_owned())
        }
        _ => Ok(()),
    }
}

fn endpoint_of(builder: &AmazonS3Builder) -> Option<String> {
    let keys = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    keys.iter().find_map(|key| builder.get_config_value(key))
}

/// Returns a name that is equal for buckets between which a service copies: Amazon's across its regions, another one's
/// by endpoint.
fn service_of(endpoint: Option<String>) -> String {
    endpoint.filter(|endpoint| !is_amazon(endpoint)).unwrap_or_else(|| "amazon".to_owned())
}

/// Returns whether an endpoint is Amazon's own.
fn is_amazon(endpoint: &str) -> bool {
    let host = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let host = host.split(['/', ':']).next().unwrap_or(host);
    host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn")
}
