//! Interprets a service's refusal for the caller. An error shows the status of the answer, and the service's code and
//! message, without the values that the requests [carried](super::carried).

use std::error::Error as _;
use std::time::Duration;

use http::StatusCode;
use object_store::client::HttpError;

use super::network::Answer;
use crate::{Error, Kind};

/// Hosts at which instances of a cloud ask for their own credentials.
const METADATA_HOSTS: [&str; 3] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal"];

/// Returns the error of a call that the client library failed, by the service's answer.
pub(super) fn of(op: &'static str, place: String, error: &object_store::Error, answer: &Answer) -> Error {
    // Credentials are missing: the service was not asked.
    if let Some(own) = causes(error).find_map(|cause| cause.downcast_ref::<Error>()) {
        return Error { wait: own.wait, ..Error::new(own.kind, op, place, own.to_string()) };
    }
    let text = error.to_string();
    let (code, said) = (answer.carried.shown_code(tag(&text, "Code")), tag(&text, "Message"));
    let is_full = NO_SPACE.iter().any(|full| said.contains(full));
    if let Some(status @ (StatusCode::NOT_FOUND | StatusCode::GONE)) = answer.status
        && code.is_empty()
        && !(answer.is_head && answer.is_of_service)
    {
        let what = format!("{} answered {status} without saying what is absent, as a gateway does", answer.host);
        let wait = lasting(Kind::Unavailable, answer);
        return Error { wait, ..Error::new(Kind::Unavailable, op, place, what) };
    }
    let (status, kind) = match answer.status {
        Some(status) if !status.is_success() && is_full => (status, Kind::Exhausted),
        Some(status) if !status.is_success() => (status, kind_of(status, code)),
        // A service that fails after it has sent its status puts the error into the body.
        Some(status) if !code.is_empty() => (status, kind_of(StatusCode::INTERNAL_SERVER_ERROR, code)),
        _ => return unanswered(op, place, error, answer),
    };
    let mut message = match (code, &*answer.carried.shown(said)) {
        ("", _) => format!("the service answered {status}"),
        (code, "") => format!("the service answered {status}: {code}"),
        (code, said) => format!("the service answered {status}: {code}: {said}"),
    };
    if METADATA_HOSTS.contains(&answer.host.as_str()) {
        return Error::new(Kind::Invalid, op, place, format!("{NO_CREDENTIALS} ({message})"));
    }
    message += remedy(status, code);
    Error { wait: lasting(kind, answer), ..Error::new(kind, op, place, message) }
}

/// Returns the text of the element `name` in the service's answer.
fn tag<'a>(text: &'a str, name: &str) -> &'a str {
    let within = || text.split_once(&format!("<{name}>"))?.1.split_once(&format!("</{name}>"));
    within().map_or("", |(value, _)| value.trim())
}

/// Returns whether the service rejects the credentials: they have expired, or it never knew them.
pub(super) fn refuses_credentials(error: &object_store::Error, answer: &Answer) -> bool {
    match (answer.status.map(|status| status.as_u16()), tag(&error.to_string(), "Code")) {
        (_, "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" | "InvalidAccessKeyId") => true,
        (status, _) => status == Some(401),
    }
}

const NO_CREDENTIALS: &str = "no credentials: neither the environment nor a profile has any, and this machine has no \
                              role of its own";

/// Messages with which servers that keep objects in files pass on that the disk is full, as an error of their own.
const NO_SPACE: [&str; 2] = ["no space left on device", "disk quota exceeded"];

/// Returns the error of a call that got no answer, or an invalid one.
fn unanswered(op: &'static str, place: String, error: &object_store::Error, answer: &Answer) -> Error {
    // The innermost cause describes the failure; the errors around it repeat it, with the URL.
    let cause = causes(error).last().map_or_else(|| error.to_string(), ToString::to_string);
    // It may have words of the answer.
    let cause = match answer.carried.shown(&cause) {
        shown if shown.is_empty() => "not shown, since it repeats the request".to_owned(),
        shown => shown,
    };
    if METADATA_HOSTS.contains(&answer.host.as_str()) {
        return Error::new(Kind::Invalid, op, place, format!("{NO_CREDENTIALS} ({cause})"));
    }
    match answer.status {
        Some(_) if causes(error).any(|cause| cause.is::<HttpError>()) => {
            let message = format!("the answer of {} broke off: {cause}", answer.host);
            Error { wait: lasting(Kind::Unavailable, answer), ..Error::new(Kind::Unavailable, op, place, message) }
        }
        Some(_) => {
            let what = "this is no answer of such a service; is the endpoint right?";
            Error::new(Kind::Invalid, op, place, format!("{}: {what} ({cause})", answer.host))
        }
        None if answer.host.is_empty() => Error::new(Kind::Invalid, op, place, cause),
        None => {
            let message = format!("no answer from {}: {cause}", answer.host);
            Error { wait: lasting(Kind::Unavailable, answer), ..Error::new(Kind::Unavailable, op, place, message) }
        }
    }
}

fn causes<'a>(error: &'a object_store::Error) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&error| error.source())
}

/// Returns the time to wait, if the service cannot be reached now and may stay away for a while.
fn lasting(kind: Kind, answer: &Answer) -> Option<Duration> {
    (kind == Kind::Unavailable).then(|| answer.wait.unwrap_or_default())
}

fn kind_of(status: StatusCode, code: &str) -> Kind {
    match (status.as_u16(), code) {
        (_, "NoSuchBucket" | "ContainerNotFound") => Kind::Invalid,
        (_, "QuotaExceeded" | "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded") | (507, _) => Kind::Exhausted,
        (_, "RequestTimeout" | "SlowDown" | "Throttling" | "ServerBusy" | "ExpiredToken" | "TokenRefreshRequired") => {
            Kind::Unavailable
        }
        // The body changed on its way, or a part of it is missing.
        (_, "BadDigest" | "InvalidDigest" | "XAmzContentChecksumMismatch" | "IncompleteBody") => Kind::Unavailable,
        // So did a list of parts, which has no checksum.
        (_, "MalformedXML" | "InvalidPart" | "InvalidPartOrder") => Kind::Unavailable,
        (_, "EntityTooLarge") => Kind::Exhausted,
        (404 | 410, _) => Kind::NotFound,
        (412 | 416, _) => Kind::Corrupt,
        (408 | 409 | 425 | 429 | 500..=599, _) => match status {
            StatusCode::NOT_IMPLEMENTED => Kind::Unsupported,
            _ => Kind::Unavailable,
        },
        _ => Kind::Invalid,
    }
}

/// Returns advice for the user, if there is any.
fn remedy(status: StatusCode, code: &str) -> &'static str {
    match (status.as_u16(), code) {
        (_, "NoSuchBucket" | "ContainerNotFound") => "; make it first: no bucket is made here",
        (_, "RequestTimeTooSkewed") => "; set this machine's clock",
        (301 | 307 | 308, _) | (_, "AuthorizationHeaderMalformed" | "PermanentRedirect") => {
            "; is it the bucket's region and endpoint?"
        }
        (401 | 403, _) => "; the credentials do not allow it",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(status: u16, code: &str) -> Error {
        let source = format!("Error performing PUT http://h/secret-in-url?sig=1 <Error><Code>{code}</Code></Error>");
        let error = object_store::Error::Generic { store: "S3", source: source.into() };
        let status = Some(StatusCode::from_u16(status).unwrap());
        let answer = Answer { status, wait: Some(Duration::from_secs(3)), host: "h".into(), ..Answer::default() };
        of("put", "s3://b/x".into(), &error, &answer)
    }

    #[test]
    fn a_full_disk_behind_a_server_is_no_failure_that_passes() {
        let text = "<Code>InternalError</Code><Message>try again: cause(no space left on device)</Message>";
        let error = object_store::Error::Generic { store: "S3", source: text.into() };
        let answer = Answer { status: Some(StatusCode::INTERNAL_SERVER_ERROR), host: "h".into(), ..Answer::default() };
        let error = of("put", "s3://b/x".into(), &error, &answer);
        assert_eq!((error.kind, error.wait), (Kind::Exhausted, None));
    }

    #[test]
    fn absent_is_what_the_service_says_is_absent() {
        let error = object_store::Error::Generic { store: "S3", source: "Server returned 404: <html>".into() };
        for (is_head, is_of_service, kind) in [
            (true, true, Kind::NotFound),
            (true, false, Kind::Unavailable),
            (false, true, Kind::Unavailable),
            (false, false, Kind::Unavailable),
        ] {
            let status = Some(StatusCode::NOT_FOUND);
            let answer = Answer { status, is_head, is_of_service, host: "h".into(), ..Answer::default() };
            assert_eq!(of("open", "s3://b/COMMIT".into(), &error, &answer).kind, kind, "{is_head} {is_of_service}");
        }
    }

    #[test]
    fn refusals_are_told_apart_and_no_url_is_repeated() {
        for (status, code, kind) in [
            (404, "NoSuchKey", Kind::NotFound),
            (404, "", Kind::Unavailable),
            (410, "", Kind::Unavailable),
            (404, "NoSuchBucket", Kind::Invalid),
            (403, "AccessDenied", Kind::Invalid),
            (403, "RequestTimeTooSkewed", Kind::Invalid),
            (503, "SlowDown", Kind::Unavailable),
            (429, "", Kind::Unavailable),
            (409, "ConditionalRequestConflict", Kind::Unavailable),
            (500, "InternalError", Kind::Unavailable),
            (501, "NotImplemented", Kind::Unsupported),
            (507, "XMinioStorageFull", Kind::Exhausted),
            (507, "", Kind::Exhausted),
            (403, "QuotaExceeded", Kind::Exhausted),
            (412, "PreconditionFailed", Kind::Corrupt),
            (400, "XAmzContentChecksumMismatch", Kind::Unavailable),
            (400, "InvalidPart", Kind::Unavailable),
            (200, "InternalError", Kind::Unavailable),
            (301, "PermanentRedirect", Kind::Invalid),
        ] {
            let error = found(status, code);
            assert_eq!(error.kind, kind, "{status} {code}: {error}");
            assert!(error.message.contains(&status.to_string()) && error.message.contains(code), "{error}");
            assert!(!error.to_string().contains("secret-in-url"), "{error}");
            let waits = (kind == Kind::Unavailable).then_some(Duration::from_secs(3));
            assert_eq!(error.wait, waits, "{status} {code}");
        }
    }
}
