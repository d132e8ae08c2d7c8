//! Implements operations of S3 that the client library does not offer.
//!
//! The client library knows an object's URL and signs such a request. Here it is sent, and its answer read.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody, HttpResponse};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use object_store::{Attribute, Attributes, ClientOptions, Error as ClientError, PutPayload};
use serde::{Deserialize, Serialize};

use crate::remote::xml::{self, UploadList, percent_encoded};
use crate::remote::{ExtraApi, ListUploads};

/// Name of this service in the client library's errors.
const SERVICE: &str = "S3";

/// Validity of the signature of a URL, which is not sent.
const VALID: Duration = Duration::from_secs(15 * 60);

pub(super) struct ExtraApiClient {
    client: Arc<AmazonS3>,
    /// Builder of the same client without checksums of its own; `None` if one client must do for all.
    unsummed: Option<AmazonS3Builder>,
    http: HttpClient,
    /// Service and bucket.
    place: (String, String),
    region: String,
    /// `true` if the requester pays.
    is_payer: bool,
}

impl ExtraApiClient {
    pub(super) fn new(
        client: Arc<AmazonS3>,
        unsummed: Option<AmazonS3Builder>,
        http: HttpClient,
        place: (String, String),
        region: String,
        is_payer: bool,
    ) -> ExtraApiClient {
        let unsummed = unsummed.map(|builder| builder.with_credentials(Arc::clone(client.credentials())));
        ExtraApiClient { client, unsummed, http, place, region, is_payer }
    }

    /// Makes a request for an object, or for the bucket if the path is empty. An answer without success is an error
    /// with the answer's text.
    async fn ask(
        &self,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        headers: HeaderMap,
    ) -> object_store::Result<HttpResponse> {
        // The library returns an object's address in a URL that it signs. Proxies write URLs into their logs: the
        // signature, and the token of a session, go into headers instead.
        let options = SignedUrlOptions::new().with_query(query.iter().copied());
        let mut url = self.client.signed_url_opts(method.clone(), path, VALID, &options).await?;
        let own = |pair: &&str| !pair.starts_with("X-Amz-") && !pair.starts_with("x-amz-");
        let own: Vec<&str> = url.query().unwrap_or_default().split('&').filter(own).collect();
        let own = (!own.concat().is_empty()).then(|| own.join("&"));
        url.set_query(own.as_deref());
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        *request.uri_mut() = url.as_str().parse().map_err(other)?;
        *request.headers_mut() = headers;
        let keys = self.client.credentials().get_credential().await?;
        AwsAuthorizer::new(&keys, "s3", &self.region)
            .with_request_payer(self.is_payer)
            .try_authorize(&mut request, None)?;
        xml::answer(&self.http, SERVICE, request).await
    }
}

async fn text(response: HttpResponse) -> object_store::Result<String> {
    xml::text(SERVICE, response).await
}

fn other(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
    xml::other(SERVICE, source)
}

/// Returns the header that names the source of a copy, `bucket/path`, percent-encoded.
fn copied(source: &str) -> object_store::Result<(HeaderName, HeaderValue)> {
    let encoded = HeaderValue::from_str(&percent_encoded(source)).map_err(other)?;
    Ok((HeaderName::from_static("x-amz-copy-source"), encoded))
}

/// Answer of a service to a copy that it has made. It may send an error after the status of success.
#[derive(Deserialize)]
struct Made {
    #[serde(rename = "ETag")]
    e_tag: String,
    #[serde(rename = "ChecksumCRC64NVME")]
    crc64nvme: Option<String>,
}

impl Made {
    /// Parses an answer to a copy.
    fn of(answer: String) -> object_store::Result<Made> {
        // The text of an error describes it; any other text is not repeated.
        let is_error = answer.contains("<Code>");
        quick_xml::de::from_str(&answer).map_err(|error| if is_error { other(answer) } else { other(error) })
    }
}

/// Format of a part's id in the client library, in its pinned version, if parts have checksums.
#[derive(Serialize)]
struct PartMetadata {
    e_tag: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    checksum_crc64nvme: Option<String>,
}

#[async_trait::async_trait]
impl ListUploads for ExtraApiClient {
    async fn uploads(&self, prefix: &str) -> object_store::Result<Vec<(String, String, SystemTime)>> {
        let mut list = UploadList::new(SERVICE, prefix);
        loop {
            let answer = self.ask(Method::GET, &Path::default(), &list.query(), HeaderMap::new()).await?;
            if !list.take(&text(answer).await?)? {
                return Ok(list.found);
            }
        }
    }
}

#[async_trait::async_trait]
impl ExtraApi for ExtraApiClient {
    async fn kept_crc64(&self, path: &Path) -> object_store::Result<Option<u64>> {
        let mode = (HeaderName::from_static("x-amz-checksum-mode"), HeaderValue::from_static("ENABLED"));
        let answer = self.ask(Method::HEAD, path, &[], HeaderMap::from_iter([mode])).await?;
        let said = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        // This algorithm is of whole objects always, in parts or not.
        let Some(crc) = said("x-amz-checksum-crc64nvme") else { return Ok(None) };
        let bytes = BASE64_STANDARD.decode(crc).map_err(other)?;
        let bytes = bytes.try_into().map_err(|_| other(format!("expected a CRC-64 of eight bytes, found {crc:?}")))?;
        Ok(Some(u64::from_be_bytes(bytes)))
    }

    fn place(&self) -> (String, String) {
        self.place.clone()
    }

    async fn copy(&self, source: &str, path: &Path, attributes: &Attributes) -> object_store::Result<()> {
        let algorithm = (HeaderName::from_static("x-amz-checksum-algorithm"), HeaderValue::from_static("CRC64NVME"));
        let mut headers = HeaderMap::from_iter([copied(source)?, algorithm]);
        if let Some(class) = attributes.get(&Attribute::StorageClass) {
            let class = HeaderValue::from_str(class).map_err(other)?;
            headers.insert(HeaderName::from_static("x-amz-storage-class"), class);
        }
        let answer = text(self.ask(Method::PUT, path, &[], headers).await?).await?;
        Made::of(answer).map(|_| ())
    }

    async fn put_part(
        &self,
        path: &Path,
        upload: &str,
        number: usize,
        payload: PutPayload,
        crc64: u64,
    ) -> object_store::Result<PartId> {
        let Some(unsummed) = &self.unsummed else {
            return self.client.put_part(path, &upload.to_owned(), number, payload).await;
        };
        let crc64 = BASE64_STANDARD.encode(crc64.to_be_bytes());
        let header = HeaderValue::from_str(&crc64).map_err(other)?;
        let headers = HeaderMap::from_iter([(HeaderName::from_static("x-amz-checksum-crc64nvme"), header)]);
        // The client library signs the headers that all requests of a client carry: so this part has its own client.
        let options = ClientOptions::new().with_default_headers(headers);
        let client = unsummed.clone().with_client_options(options).build()?;
        let sent = client.put_part(path, &upload.to_owned(), number, payload).await?;
        let part = PartMetadata { e_tag: sent.content_id, checksum_crc64nvme: Some(crc64) };
        Ok(PartId { content_id: quick_xml::se::to_string(&part).map_err(other)? })
    }

    async fn copy_part(
        &self,
        source: &str,
        path: &Path,
        upload: &str,
        number: usize,
        range: Range<u64>,
    ) -> object_store::Result<PartId> {
        let range = HeaderValue::from_str(&format!("bytes={}-{}", range.start, range.end - 1)).map_err(other)?;
        let range = (HeaderName::from_static("x-amz-copy-source-range"), range);
        let number = (number + 1).to_string();
        let query = [("partNumber", &*number), ("uploadId", upload)];
        let headers = HeaderMap::from_iter([copied(source)?, range]);
        let made = Made::of(text(self.ask(Method::PUT, path, &query, headers).await?).await?)?;
        let part = PartMetadata { e_tag: made.e_tag, checksum_crc64nvme: made.crc64nvme };
        Ok(PartId { content_id: quick_xml::se::to_string(&part).map_err(other)? })
    }
}
