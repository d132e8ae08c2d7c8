//! What S3 offers and the client library does not.
//!
//! The client library signs such a request: its URL, its query and its headers. Here it is sent, and its answer read.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chrono::DateTime;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use object_store::Error as ClientError;
use object_store::aws::AmazonS3;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody, HttpResponse};
use object_store::path::Path;
use object_store::signer::{SignedUrlOptions, Signer};
use serde::Deserialize;

use crate::far::Beyond;

/// How long a signature is valid: as long as a request may last.
const VALID: Duration = Duration::from_secs(15 * 60);

pub(super) struct BeyondClient {
    client: Arc<AmazonS3>,
    http: HttpClient,
}

impl BeyondClient {
    pub(super) fn new(client: Arc<AmazonS3>, http: HttpClient) -> BeyondClient {
        BeyondClient { client, http }
    }

    /// Makes a request for an object, or for the bucket where the path is empty. An answer without success is an error
    /// whose text is the answer's.
    async fn ask(
        &self,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        headers: HeaderMap,
    ) -> object_store::Result<HttpResponse> {
        let mut options = SignedUrlOptions::new().with_query(query.iter().copied());
        options.signed_headers = headers.clone();
        let url = self.client.signed_url_opts(method.clone(), path, VALID, &options).await?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        *request.uri_mut() = url.as_str().parse().map_err(other)?;
        *request.headers_mut() = headers;
        let response = self.http.execute(request).await.map_err(other)?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(other(text(response).await?))
    }
}

async fn text(response: HttpResponse) -> object_store::Result<String> {
    let bytes = response.into_body().bytes().await.map_err(other)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn other(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
    ClientError::Generic { store: "S3", source: source.into() }
}

/// An answer to ListMultipartUploads.
/// <https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListMultipartUploads.html>
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    #[serde(default)]
    is_truncated: bool,
    next_key_marker: Option<String>,
    next_upload_id_marker: Option<String>,
    #[serde(default, rename = "Upload")]
    uploads: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    #[serde(rename = "Key")]
    key: String,
    #[serde(rename = "UploadId")]
    id: String,
    #[serde(rename = "Initiated")]
    begun: String,
}

#[async_trait::async_trait]
impl Beyond for BeyondClient {
    async fn uploads(&self, prefix: &str) -> object_store::Result<Vec<(String, String, SystemTime)>> {
        let (mut found, mut markers) = (Vec::new(), (String::new(), String::new()));
        loop {
            let mut query = vec![("uploads", ""), ("prefix", prefix)];
            if !markers.0.is_empty() {
                query.extend([("key-marker", &*markers.0), ("upload-id-marker", &*markers.1)]);
            }
            let response = self.ask(Method::GET, &Path::default(), &query, HeaderMap::new()).await?;
            let page: Page = quick_xml::de::from_str(&text(response).await?).map_err(other)?;
            for Listed { key, id, begun } in page.uploads {
                let begun = DateTime::parse_from_rfc3339(&begun).map_err(other)?;
                found.push((key, id, begun.into()));
            }
            let next = (page.next_key_marker.unwrap_or_default(), page.next_upload_id_marker.unwrap_or_default());
            // A server that repeats a page would keep this going for ever.
            if !page.is_truncated || next == markers {
                return Ok(found);
            }
            markers = next;
        }
    }

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
}
