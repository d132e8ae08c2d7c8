//! Lists objects and uploads.
//!
//! A bucket may hold objects of other programs with names that no store uses, such as `run//x`, `run/x/` or `run/./x`.
//! The client library fails a whole list that has one of them, or confuses names: `run/x/` with `run/x`, which a
//! deletion would then remove. So [`Lists`] removes these entries from each answer before the library reads it. The
//! store neither lists nor deletes them.

use std::ops::Range;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use http::Method;
use http::header::CONTENT_LENGTH;
use object_store::ObjectMeta;
use object_store::client::{HttpClient, HttpError, HttpRequest, HttpResponse, HttpResponseBody, HttpService};
use object_store::path::Path;
use quick_xml::Reader;
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesRef, BytesStart, Event};

use super::{Place, delete_each};
use crate::observe::Action;
use crate::{Entry, Kind, Result, Upload, name};

impl Place {
    /// Lists a directory, by name.
    pub(super) fn list(&self, dir: &str) -> Result<Vec<Entry>> {
        let prefix = self.dir(Action::List, dir)?;
        let found = self.call_twice(Action::List, dir, || self.client().list_with_delimiter(prefix.as_ref()))?;
        let named = |path: &Path| {
            let name = path.filename()?;
            name::flaw(name).is_none().then(|| name.to_owned())
        };
        let dirs = found.common_prefixes.iter().filter_map(named);
        let dirs = dirs.map(|name| Entry { name, is_dir: true, is_link: false, bytes: 0, modified: None });
        let object = |object: &ObjectMeta| {
            let (name, modified) = (named(&object.location)?, Some(object.last_modified.into()));
            Some(Entry { name, is_dir: false, is_link: false, bytes: object.size, modified })
        };
        let objects = found.objects.iter().filter_map(object);
        let mut entries: Vec<Entry> = dirs.chain(objects).collect();
        if entries.is_empty() {
            return Err(self.fail(Kind::NotFound, Action::List, dir, "no such directory"));
        }
        entries.sort_by(|a, b| (&a.name, a.is_dir).cmp(&(&b.name, b.is_dir)));
        Ok(entries)
    }

    /// Deletes all objects below a directory.
    pub(super) fn delete_tree(&self, dir: &str) -> Result<()> {
        name::check(Action::DeleteTree.word(), &self.url, dir)?;
        let prefix = self.dir(Action::DeleteTree, dir)?;
        let below = self.client().list(prefix.as_ref()).map_ok(|object| object.location).boxed();
        self.call(Action::DeleteTree, dir, delete_each(self.client(), below))
    }

    /// Lists uploads that are begun and not completed.
    pub(super) fn uploads(&self) -> Result<Vec<Upload>> {
        let Some(list) = &self.bucket.uploads else {
            let message = "uploads that were not completed cannot be listed here: give the bucket a lifecycle rule \
                           that aborts them, unless the service does it by itself";
            return Err(self.fail(Kind::Unsupported, Action::Uploads, "", message));
        };
        let found = self.call_twice(Action::Uploads, "", || list.uploads(&self.prefix))?;
        let own = |(path, id, begun): (String, String, SystemTime)| {
            let name = path.strip_prefix(&self.prefix).filter(|name| name::flaw(name).is_none())?.to_owned();
            Some(Upload { name, id, begun })
        };
        Ok(found.into_iter().filter_map(own).collect())
    }
}

/// Returns whether a request asks for a list. All services list by a `GET` of the bucket with a prefix or a kind of
/// list.
pub(super) fn is_list(method: &Method, query: &str) -> bool {
    let lists = |part: &str| part.starts_with("list-type=") || matches!(part, "comp=list" | "uploads=");
    *method == Method::GET && query.split('&').any(lists)
}

/// HTTP service that removes entries with names that no store uses from answers to lists.
#[derive(Debug)]
pub(super) struct Lists(pub(super) HttpClient);

#[async_trait::async_trait]
impl HttpService for Lists {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let is_list = is_list(request.method(), request.uri().query().unwrap_or_default());
        let response = self.0.execute(request).await?;
        if !is_list || !response.status().is_success() {
            return Ok(response);
        }
        let (mut parts, body) = response.into_parts();
        let body = without_foreign(body.bytes().await?);
        parts.headers.remove(CONTENT_LENGTH);
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(body)))
    }
}

/// Form of a list's entry: its element, and the one within that names it. The name of a directory ends in `/`.
struct Form {
    entry: &'static [u8],
    name: &'static [u8],
    is_dir: bool,
}

/// Forms of S3 and Google Cloud Storage, then those of Azure.
const FORMS: [Form; 5] = [
    Form { entry: b"Contents", name: b"Key", is_dir: false },
    Form { entry: b"CommonPrefixes", name: b"Prefix", is_dir: true },
    Form { entry: b"Upload", name: b"Key", is_dir: false },
    Form { entry: b"Blob", name: b"Name", is_dir: false },
    Form { entry: b"BlobPrefix", name: b"Name", is_dir: true },
];

/// Returns an answer to a list without the entries whose names no store uses. An answer that is no list stays as it is:
/// the client library reports the error.
fn without_foreign(answer: Bytes) -> Bytes {
    // Azure's answers begin with a mark of their encoding, which positions do not count.
    let answer = match answer.strip_prefix(b"\xef\xbb\xbf") {
        Some(rest) => answer.slice_ref(rest),
        None => answer,
    };
    let Ok(foreign) = foreign_entries(&answer) else { return answer };
    if foreign.is_empty() {
        return answer;
    }
    let mut kept = Vec::with_capacity(answer.len());
    let mut from = 0;
    for entry in foreign {
        kept.extend_from_slice(&answer[from..entry.start]);
        from = entry.end;
    }
    kept.extend_from_slice(&answer[from..]);
    kept.into()
}

/// Returns the byte ranges of the entries whose names no store uses.
fn foreign_entries(answer: &[u8]) -> quick_xml::Result<Vec<Range<usize>>> {
    let mut reader = Reader::from_reader(answer);
    reader.config_mut().expand_empty_elements = true;
    let mut foreign = Vec::new();
    loop {
        let start = reader.buffer_position() as usize;
        match reader.read_event()? {
            Event::Eof => return Ok(foreign),
            Event::Start(tag) => {
                let form = FORMS.iter().find(|form| tag.local_name().as_ref() == form.entry);
                if let Some(form) = form
                    && !is_own(&mut reader, form)?
                {
                    foreign.push(start..reader.buffer_position() as usize);
                }
            }
            _ => {}
        }
    }
}

/// Reads an entry to its end; returns whether a store may use its name, or it has none.
fn is_own(reader: &mut Reader<&[u8]>, form: &Form) -> quick_xml::Result<bool> {
    let (mut depth, mut is_own) = (0, true);
    loop {
        match reader.read_event()? {
            Event::Start(tag) if depth == 0 && tag.local_name().as_ref() == form.name => {
                let name = text(reader, &tag)?;
                let name = name.as_deref().map(|name| match form.is_dir {
                    true => name.strip_suffix('/').unwrap_or(name),
                    false => name,
                });
                is_own &= name.is_some_and(|name| name::flaw(name).is_none());
            }
            Event::Start(_) => depth += 1,
            Event::End(_) if depth == 0 => return Ok(is_own),
            Event::End(_) => depth -= 1,
            // Elements without an end are no valid answer.
            Event::Eof => return Ok(true),
            _ => {}
        }
    }
}

/// Reads an element to its end; returns its text, if that can be decoded.
fn text(reader: &mut Reader<&[u8]>, tag: &BytesStart<'_>) -> quick_xml::Result<Option<String>> {
    // Azure encodes names that XML cannot hold, and says so. The client library does not decode them.
    let is_encoded = |attribute: quick_xml::events::attributes::Attribute<'_>| {
        attribute.key.local_name().as_ref() == b"Encoded" && &*attribute.value == b"true"
    };
    let mut text = (!tag.attributes().flatten().any(is_encoded)).then(String::new);
    let mut depth = 0;
    loop {
        let part = match reader.read_event()? {
            Event::Text(part) => part.decode().ok(),
            Event::CData(part) => part.decode().ok(),
            Event::GeneralRef(entity) => resolved(&entity).map(Into::into),
            Event::Start(_) => {
                depth += 1;
                None
            }
            Event::End(_) if depth == 0 => return Ok(text),
            Event::End(_) => {
                depth -= 1;
                continue;
            }
            Event::Eof => return Ok(None),
            _ => continue,
        };
        text = text.zip(part).map(|(text, part)| text + &part);
    }
}

/// Returns the characters that a reference such as `&amp;` or `&#10;` stands for.
fn resolved(entity: &BytesRef<'_>) -> Option<String> {
    match entity.resolve_char_ref() {
        Ok(Some(c)) => Some(c.to_string()),
        Ok(None) => resolve_predefined_entity(&entity.decode().ok()?).map(str::to_owned),
        // A character that XML forbids.
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(answer: &str) -> String {
        String::from_utf8(without_foreign(Bytes::copy_from_slice(answer.as_bytes())).to_vec()).unwrap()
    }

    const FOREIGN: [&str; 12] = [
        "run//x",
        "run/x/",
        "run/./x",
        "run/../x",
        "/run/x",
        "run/a\\b",
        "run/a\nb",
        "run/a&#1;b",
        "run/&#0;",
        "run/&x;",
        "run/<b/>",
        "",
    ];

    #[test]
    fn entries_with_names_that_no_store_gives_are_taken_out() {
        let long = format!("run/{}", "x".repeat(256));
        for foreign in FOREIGN.into_iter().chain([&*long]) {
            let next = "<NextContinuationToken>run/z&amp;</NextContinuationToken>";
            let object = |key: &str| format!("<Contents>\n<Key>{key}</Key><Size>1</Size></Contents>");
            let upload = |key: &str| format!("<Upload><UploadId>1</UploadId><Key>{key}</Key></Upload>");
            let blob = |key: &str| format!("<Blob><Name>{key}</Name><Properties><Name>x//</Name></Properties></Blob>");
            for entry in [&object as &dyn Fn(&str) -> String, &upload, &blob] {
                let (first, last) = (entry("run/a b"), entry("run/%2F&amp;&#233;é"));
                let answer = |odd: &str| format!("<?xml version='1.0'?>\n<L>{first}{odd}{last}{next}</L>\n");
                assert_eq!(kept(&answer(&entry(foreign))), answer(""), "{foreign}");
            }
            let dir = |name: &str| format!("<CommonPrefixes><Prefix>{name}/</Prefix></CommonPrefixes>");
            let blobs = |name: &str| format!("<BlobPrefix><Name>{name}/</Name></BlobPrefix>");
            for entry in [&dir as &dyn Fn(&str) -> String, &blobs] {
                let answer = |odd: &str| format!("<L><Prefix>run//</Prefix>{}{odd}{next}</L>", entry("run/a"));
                assert_eq!(kept(&answer(&entry(foreign))), answer(""), "{foreign}/");
            }
        }
    }

    #[test]
    fn answers_without_such_entries_stay_as_they_are() {
        for answer in [
            "",
            "<html>Sign in",
            "<L><Contents><Key>a</Key></Contents><CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes></L>",
            "<L><Contents><Key><![CDATA[a&b]]></Key></Contents><Contents/></L>",
            "<L><Contents><Key>a//b</Key></Contents><Contents><Key>c</Contents></L>",
            "<L><Contents><Key>a//b</Key>",
        ] {
            assert_eq!(kept(answer), answer);
        }
    }

    #[test]
    fn names_that_azure_encodes_are_taken_out_and_the_mark_of_its_encoding() {
        let answer = "\u{feff}<R><Blob><Name Encoded=\"true\">a%EF%BF%BF</Name></Blob><Blob><Name>b</Name></Blob></R>";
        assert_eq!(kept(answer), "<R><Blob><Name>b</Name></Blob></R>");
    }
}
