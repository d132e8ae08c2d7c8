//! Lists uploads that are begun and not completed, which the client library does not list.

use std::sync::Arc;
use std::time::SystemTime;

use http::header::AUTHORIZATION;
use http::{HeaderValue, Method};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use object_store::gcp::GoogleCloudStorage;

use crate::remote::ListUploads;
use crate::remote::xml::{self, UploadList, percent_encoded};

/// Name of this service in the client library's errors.
const SERVICE: &str = "GCS";

/// Lists of a bucket.
pub(super) struct Uploads {
    client: Arc<GoogleCloudStorage>,
    http: HttpClient,
    /// URL of the bucket.
    url: String,
    /// `true` if requests carry credentials.
    is_signed: bool,
}

impl Uploads {
    /// Makes the lists of a bucket of the service at `base`, with the credentials of this client.
    pub(super) fn new(
        client: Arc<GoogleCloudStorage>,
        http: HttpClient,
        base: &str,
        bucket: &str,
        is_signed: bool,
    ) -> Uploads {
        let url = format!("{}/{}", base.trim_end_matches('/'), percent_encoded(bucket));
        Uploads { client, http, url, is_signed }
    }

    /// Returns the text of the service's answer to this query of the bucket.
    async fn ask(&self, query: &[(&str, &str)]) -> object_store::Result<String> {
        let query: Vec<_> = query.iter().map(|(name, value)| format!("{name}={}", percent_encoded(value))).collect();
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = Method::GET;
        let url = format!("{}?{}", self.url, query.join("&"));
        *request.uri_mut() = url.parse().map_err(|error: http::uri::InvalidUri| xml::other(SERVICE, error))?;
        if self.is_signed {
            let credential = self.client.credentials().get_credential().await?;
            // An account that needs no token has an empty one.
            if !credential.bearer.is_empty() {
                let bearer = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
                request.headers_mut().insert(AUTHORIZATION, bearer.map_err(|error| xml::other(SERVICE, error))?);
            }
        }
        xml::text(SERVICE, xml::answer(&self.http, SERVICE, request).await?).await
    }
}

#[async_trait::async_trait]
impl ListUploads for Uploads {
    async fn uploads(&self, prefix: &str) -> object_store::Result<Vec<(String, String, SystemTime)>> {
        let mut list = UploadList::new(SERVICE, prefix);
        loop {
            let answer = self.ask(&list.query()).await?;
            if !list.take(&answer)? {
                return Ok(list.found);
            }
        }
    }
}
