//! Implements requests of the XML interfaces of S3 and Google Cloud Storage that the client library does not offer.

use std::time::SystemTime;

use chrono::DateTime;
use object_store::client::{HttpClient, HttpRequest, HttpResponse};
use object_store::{Error as ClientError, Result};
use serde::Deserialize;

/// Sends a request to a service, `S3` or `GCS`. An answer without success is an error with the answer's text.
pub(crate) async fn answer(http: &HttpClient, service: &'static str, request: HttpRequest) -> Result<HttpResponse> {
    let response = http.execute(request).await.map_err(|error| other(service, error))?;
    if response.status().is_success() {
        return Ok(response);
    }
    Err(other(service, text(service, response).await?))
}

/// Returns the text of an answer.
pub(crate) async fn text(service: &'static str, response: HttpResponse) -> Result<String> {
    let bytes = response.into_body().bytes().await.map_err(|error| other(service, error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Makes the error of a service.
pub(crate) fn other(service: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
    ClientError::Generic { store: service, source: source.into() }
}

/// Percent-encodes every byte but letters, digits and `-._~/`: for queries, forms and headers.
pub(crate) fn percent_encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes().fold(String::new(), |mut out, byte| {
        match is_plain(byte) {
            true => out.push(byte.into()),
            false => out += &format!("%{byte:02X}"),
        }
        out
    })
}

/// Uploads below a prefix of a bucket, listed page by page.
/// <https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListMultipartUploads.html>,
/// <https://cloud.google.com/storage/docs/xml-api/get-bucket-uploads>
pub(crate) struct UploadList<'a> {
    service: &'static str,
    prefix: &'a str,
    /// Key and upload after which the next page begins; empty for the first.
    markers: (String, String),
    /// Path, id and time of beginning of each upload.
    pub(crate) found: Vec<(String, String, SystemTime)>,
}

/// A page of such a list.
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

impl<'a> UploadList<'a> {
    pub(crate) fn new(service: &'static str, prefix: &'a str) -> UploadList<'a> {
        UploadList { service, prefix, markers: Default::default(), found: Vec::new() }
    }

    /// Returns the query of the bucket for the next page.
    pub(crate) fn query(&self) -> Vec<(&str, &str)> {
        let mut query = vec![("uploads", ""), ("prefix", self.prefix)];
        if !self.markers.0.is_empty() {
            query.extend([("key-marker", &*self.markers.0), ("upload-id-marker", &*self.markers.1)]);
        }
        query
    }

    /// Adds the answer to that query; returns whether there is another page.
    pub(crate) fn take(&mut self, answer: &str) -> Result<bool> {
        let page: Page = quick_xml::de::from_str(answer).map_err(|error| other(self.service, error))?;
        for Listed { key, id, begun } in page.uploads {
            let begun = DateTime::parse_from_rfc3339(&begun).map_err(|error| other(self.service, error))?;
            self.found.push((key, id, begun.into()));
        }
        let next = (page.next_key_marker.unwrap_or_default(), page.next_upload_id_marker.unwrap_or_default());
        // Ends the list if a server repeats a page, which would continue for ever.
        let goes_on = page.is_truncated && next != self.markers;
        self.markers = next;
        Ok(goes_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(upload: &str, next: &str) -> String {
        let upload = format!("<Key>run/{upload}</Key><UploadId>{upload}</UploadId>");
        let begun = "<Initiated>2024-02-03T04:05:06.789Z</Initiated>";
        let more = format!("<NextKeyMarker>run/{next}</NextKeyMarker><NextUploadIdMarker>{next}</NextUploadIdMarker>");
        format!(
            "<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Bucket>b</Bucket>{more}\
             <IsTruncated>{}</IsTruncated><Upload>{upload}{begun}</Upload></ListMultipartUploadsResult>",
            !next.is_empty()
        )
    }

    #[test]
    fn each_page_begins_behind_the_one_before() {
        let mut list = UploadList::new("GCS", "run/");
        assert_eq!(list.query(), [("uploads", ""), ("prefix", "run/")]);
        assert!(list.take(&page("a", "a")).unwrap());
        let second = [("uploads", ""), ("prefix", "run/"), ("key-marker", "run/a"), ("upload-id-marker", "a")];
        assert_eq!(list.query(), second);
        assert!(!list.take(&page("b", "")).unwrap());
        let found: Vec<_> = list.found.iter().map(|(path, id, _)| (&**path, &**id)).collect();
        assert_eq!(found, [("run/a", "a"), ("run/b", "b")]);
        let begun = list.found[0].2.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(begun.as_millis(), 1_706_933_106_789);
    }

    #[test]
    fn a_page_that_comes_again_ends_the_list_and_what_is_none_is_an_error() {
        let mut list = UploadList::new("GCS", "");
        assert!(list.take(&page("a", "a")).unwrap());
        assert!(!list.take(&page("a", "a")).unwrap());
        assert!(list.take("<!DOCTYPE html><html><body>Sign in</body>").is_err());
        assert!(list.take(&page("a", "").replace("2024-", "")).is_err());
    }
}
