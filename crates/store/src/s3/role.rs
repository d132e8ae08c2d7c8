//! Keys of roles, which AWS's Security Token Service (STS) gives.
//!
//! A profile with `role_arn` takes a role. Exactly one of these settings says what proves that it may:
//!
//! - `source_profile`: the keys of another profile, which may take a role itself;
//! - `credential_source`: the keys of the environment, of the instance or of the container;
//! - `web_identity_token_file`: the token in this file.
//!
//! The settings are specified in AWS's "Assume role credential provider", the requests in STS's API reference:
//! <https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html>.

use std::path::PathBuf;
use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use object_store::aws::{AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use serde::Deserialize;

use super::profile::{Files, Lasting, NEVER_SAID, NOT_PRINTABLE, NOWHERE, Profile, can_sign, lasts_until, variable};
use crate::far::xml::percent_encoded;
use crate::far::{Carried, Connector, once, told};
use crate::{Error, Kind, Result};

/// The settings that say what proves that the role may be taken.
const PROOFS: [&str; 3] = ["source_profile", "credential_source", "web_identity_token_file"];

/// Ways to keys that take a person, or a token that another tool keeps.
const SSO: [&str; 2] = ["sso_session", "sso_start_url"];

/// The seconds that STS lets a role's keys last, at least and at most. A role may have a lower maximum of its own.
const DURATION_SECONDS: std::ops::RangeInclusive<u32> = 900..=43_200;

/// Codes of refusals that pass, whatever the status.
const PASSING: [&str; 4] = ["Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError"];

/// How a profile gets its keys: what it begins with, and the roles that are taken then, in this order.
#[derive(Debug)]
pub(super) struct Plan {
    base: Base,
    roles: Vec<Role>,
}

#[derive(Debug)]
enum Base {
    /// The keys of a profile, or those that its command prints.
    Profile(Profile),
    Environment,
    /// The role of the instance or of the container, by the variables that the client library reads for it.
    Machine(&'static str, &'static [&'static str]),
    /// A file whose token proves that the first role may be taken.
    Token(PathBuf),
}

/// A role that a profile takes.
#[derive(Debug)]
struct Role {
    /// The profile's name.
    profile: String,
    arn: String,
    /// The fields of the request that the profile sets.
    fields: Vec<(&'static str, String)>,
}

impl Role {
    fn of(profile: &Profile, arn: &str) -> Result<Role> {
        if profile.get("mfa_serial").is_some() {
            return Err(profile.fail(
                "it says mfa_serial: the role takes a code that a person types, and a job has none: take a role \
                 without it, or let `credential_process` or the environment say the keys",
            ));
        }
        let setting = |name: &str| profile.get(name).map(str::to_owned);
        let mut fields = vec![
            ("RoleArn", arn.to_owned()),
            ("RoleSessionName", setting("role_session_name").unwrap_or_else(|| "shardfast".to_owned())),
        ];
        if let Some(seconds) = setting("duration_seconds") {
            if !seconds.parse().is_ok_and(|seconds| DURATION_SECONDS.contains(&seconds)) {
                let (least, most) = (DURATION_SECONDS.start(), DURATION_SECONDS.end());
                return Err(profile.fail(&format!(
                    "expected duration_seconds from {least} to {most}, as STS allows, found {seconds:?}"
                )));
            }
            fields.push(("DurationSeconds", seconds));
        }
        // A token of a web identity is not asked for it.
        if let (Some(id), None) = (setting("external_id"), profile.get("web_identity_token_file")) {
            fields.push(("ExternalId", id));
        }
        Ok(Role { profile: profile.name().to_owned(), arn: arn.to_owned(), fields })
    }
}

impl Plan {
    /// How this profile gets its keys; `None` if it says nothing about it.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if it, or a profile that it names, says it in a way that cannot be followed.
    pub(super) fn of(profile: &Profile, files: &Files) -> Result<Option<Plan>> {
        let (mut profile, mut roles, mut names) = (profile.clone(), Vec::new(), vec![profile.name().to_owned()]);
        let base = loop {
            // A source's own keys count more than its role: so a profile may be its own source.
            let own = profile.get("role_arn").filter(|_| roles.is_empty() || !profile.has_keys());
            let Some(arn) = own else {
                match (without_role(&profile)?, roles.is_empty()) {
                    (true, _) => break Base::Profile(profile),
                    (false, true) => return Ok(None),
                    (false, false) => {
                        return Err(profile.fail(&format!(
                            "it is the source_profile of {:?} and has neither keys nor a way to them: give it \
                             aws_access_key_id and aws_secret_access_key, credential_process or role_arn",
                            names[names.len() - 2]
                        )));
                    }
                }
            };
            roles.push(Role::of(&profile, arn)?);
            let proofs: Vec<_> = PROOFS.iter().filter_map(|&name| Some((name, profile.get(name)?))).collect();
            match *proofs {
                [("source_profile", name)] => {
                    let is_own = name == profile.name();
                    let known = names.iter().any(|known| known == name);
                    names.push(name.to_owned());
                    if known && !(is_own && profile.has_keys()) {
                        return Err(profile.fail(&format!("source_profile leads in a circle: {}", names.join(", "))));
                    }
                    let missing = || profile.fail(&format!("source_profile {name:?}: {}", NOWHERE));
                    profile = files.profile(name).ok_or_else(missing)?;
                }
                [("credential_source", source)] => break base_of(&profile, source)?,
                [(_, path)] => break Base::Token(PathBuf::from(path)),
                _ => {
                    let found: Vec<_> = proofs.iter().map(|(name, _)| *name).collect();
                    let found = if found.is_empty() { "none".to_owned() } else { found.join(" and ") };
                    return Err(profile.fail(&format!(
                        "it says role_arn: expected one of {} beside it, found {found}",
                        PROOFS.join(", ")
                    )));
                }
            }
        };
        roles.reverse();
        Ok(Some(Plan { base, roles }))
    }

    /// Whether it takes a role with the keys of the environment.
    pub(super) fn needs_environment(&self) -> bool {
        matches!(self.base, Base::Environment)
    }

    /// The keys, and how long they last.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if they are refused, [`Kind::Unavailable`] if STS does not answer or cannot now.
    pub(super) async fn ask(self, sts: &Sts) -> Result<Lasting> {
        let mut roles = self.roles.iter();
        let (mut found, mut by) = match self.base {
            Base::Profile(profile) => {
                let by = format!("the keys of profile {:?}", profile.name());
                (blocking(move || profile.ask()).await?, by)
            }
            Base::Environment => {
                ((of_the_environment(&self.roles)?, NEVER_SAID), "the keys of the environment".to_owned())
            }
            Base::Machine(source, variables) => {
                let keys = sts.of_the_machine(&self.roles, source, variables).await?;
                ((keys, NEVER_SAID), format!("the keys of {source}"))
            }
            Base::Token(path) => {
                // Its way begins with a role.
                let Some(role) = roles.next() else { return Err(internal("a token without a role")) };
                let by = format!("the token of {}", path.display());
                let token = blocking(move || Ok(std::fs::read_to_string(path))).await?;
                let token = token.map_err(|error| role.fail(&by, &error.to_string()))?;
                (sts.ask(role, &Proof::Token(token.trim()), &by).await?, role.keys())
            }
        };
        for role in roles {
            found = sts.ask(role, &Proof::Keys(&found.0), &by).await?;
            by = role.keys();
        }
        Ok(found)
    }
}

/// Whether the profile has keys or says a command that prints them, apart from a role.
fn without_role(profile: &Profile) -> Result<bool> {
    if profile.has_keys() {
        return Ok(true);
    }
    if let Some(way) = SSO.iter().find(|way| profile.get(way).is_some()) {
        return Err(profile.fail(&format!(
            "it says {way}, which is not understood here: let `credential_process` or the environment say the keys \
             (`aws configure export-credentials` prints them)"
        )));
    }
    match PROOFS.iter().find(|proof| profile.get(proof).is_some()) {
        Some(proof) => Err(profile.fail(&format!("it says {proof} without a role_arn: add the role that is taken"))),
        None => Ok(false),
    }
}

fn base_of(profile: &Profile, source: &str) -> Result<Base> {
    match source {
        "Environment" => Ok(Base::Environment),
        "Ec2InstanceMetadata" => {
            Ok(Base::Machine("Ec2InstanceMetadata", &["AWS_METADATA_ENDPOINT", "AWS_IMDSV1_FALLBACK"]))
        }
        "EcsContainer" => Ok(Base::Machine("EcsContainer", &CONTAINER)),
        other => Err(profile.fail(&format!(
            "expected credential_source Environment, Ec2InstanceMetadata or EcsContainer, found {other:?}"
        ))),
    }
}

/// Where a container's keys are.
const CONTAINER: [&str; 3] = [
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
];

fn of_the_environment(roles: &[Role]) -> Result<AwsCredential> {
    let keys = || {
        let (key_id, secret_key) = (variable("AWS_ACCESS_KEY_ID")?, variable("AWS_SECRET_ACCESS_KEY")?);
        Some(AwsCredential { key_id, secret_key, token: variable("AWS_SESSION_TOKEN") })
    };
    keys().ok_or_else(|| {
        let what = "expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, found not both";
        first(roles, "credential_source Environment", what)
    })
}

/// An error of the first role.
fn first(roles: &[Role], by: &str, why: &str) -> Error {
    roles.first().map_or_else(|| internal(why), |role| role.fail(by, why))
}

fn internal(why: &str) -> Error {
    Error::new(Kind::Internal, "open", "AWS profile", why)
}

/// Makes a call that takes its time on a thread of its own.
pub(super) async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(call).await.unwrap_or_else(|error| Err(internal(&error.to_string())))
}

impl Role {
    /// How errors call its keys.
    fn keys(&self) -> String {
        format!("the keys of role {:?}", self.arn)
    }

    /// The error of asking for it by these keys or this token.
    fn fail(&self, by: &str, why: &str) -> Error {
        let profile = format!("AWS profile {:?}", self.profile);
        Error::new(Kind::Invalid, "open", profile, format!("role {:?}, asked for with {by}: {why}", self.arn))
    }
}

/// What proves that a role may be taken.
enum Proof<'a> {
    Keys(&'a AwsCredential),
    Token(&'a str),
}

impl Proof<'_> {
    /// What no error may repeat, sent or not.
    fn secrets(&self) -> impl Iterator<Item = &str> {
        let (one, other) = match self {
            Proof::Keys(keys) => (keys.secret_key.as_str(), keys.token.as_deref()),
            Proof::Token(token) => (*token, None),
        };
        std::iter::once(one).chain(other)
    }
}

/// The Security Token Service, and how it is reached.
#[derive(Debug)]
pub(super) struct Sts {
    pub(super) connector: Connector,
    pub(super) endpoint: String,
    pub(super) region: String,
}

/// Where a region's STS is.
pub(super) fn endpoint_in(region: &str) -> String {
    let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
    format!("https://sts.{region}.amazonaws.com{suffix}")
}

/// An answer to AssumeRole or to AssumeRoleWithWebIdentity.
#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "AssumeRoleResult", alias = "AssumeRoleWithWebIdentityResult")]
    result: Taken,
}

#[derive(Deserialize)]
struct Taken {
    #[serde(rename = "Credentials")]
    keys: Keys,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Keys {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    expiration: String,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(rename = "Error")]
    error: Why,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Why {
    code: String,
    #[serde(default)]
    message: String,
}

impl Sts {
    /// The keys of a role, and how long they last.
    async fn ask(&self, role: &Role, proof: &Proof<'_>, by: &str) -> Result<Lasting> {
        let host = self.endpoint.rsplit(['/', '@']).find(|part| !part.is_empty()).unwrap_or_default();
        let fail = |why: &str| role.fail(by, &format!("{host}: {why}"));
        let passing = |why: &str, wait: Option<Duration>| {
            let wait = Some(wait.unwrap_or_default());
            Error { kind: Kind::Unavailable, wait, ..fail(why) }
        };
        let request = self.request(role, proof).map_err(|why| fail(&why))?;
        let mut carried = Carried::default();
        carried.add(&request);
        proof.secrets().for_each(|secret| carried.hold(secret));
        let answer = self.connector.client().execute(request).await;
        let (parts, body) = answer.map_err(|error| passing(&format!("no answer: {error}"), None))?.into_parts();
        let body = body.bytes().await.map_err(|error| passing(&format!("the answer broke off: {error}"), None))?;
        // It holds secrets: no error repeats it.
        let text = String::from_utf8_lossy(&body);
        if !parts.status.is_success() {
            let (code, why) = refusal(parts.status, &text, &carried);
            return Err(match passes(parts.status, &code) {
                true => passing(&why, wait_of(&parts.headers)),
                false => fail(&why),
            });
        }
        let Answer { result: Taken { keys } } = quick_xml::de::from_str(&text).map_err(|_| {
            fail("expected an answer of STS, with Credentials: does AWS_ENDPOINT_URL_STS name an endpoint of STS?")
        })?;
        let lasts = lasts_until(&keys.expiration).map_err(|why| fail(&why))?;
        let Keys { access_key_id, secret_access_key, session_token, .. } = keys;
        Ok((AwsCredential { key_id: access_key_id, secret_key: secret_access_key, token: Some(session_token) }, lasts))
    }

    fn request(&self, role: &Role, proof: &Proof<'_>) -> std::result::Result<HttpRequest, String> {
        let mut fields = vec![("Version", "2011-06-15")];
        fields.extend(role.fields.iter().map(|(name, value)| (*name, &**value)));
        match proof {
            Proof::Keys(_) => fields.push(("Action", "AssumeRole")),
            Proof::Token(token) => {
                fields.extend([("Action", "AssumeRoleWithWebIdentity"), ("WebIdentityToken", *token)]);
            }
        }
        let form: Vec<_> = fields.iter().map(|(name, value)| format!("{name}={}", percent_encoded(value))).collect();
        let mut request = HttpRequest::new(HttpRequestBody::from(form.join("&")));
        *request.method_mut() = Method::POST;
        let endpoint = self.endpoint.parse();
        *request.uri_mut() = endpoint.map_err(|error| format!("expected the URL of a host: {error}"))?;
        let form = HeaderValue::from_static("application/x-www-form-urlencoded; charset=utf-8");
        request.headers_mut().insert(CONTENT_TYPE, form);
        if let Proof::Keys(keys) = proof {
            if !can_sign(keys) {
                return Err(NOT_PRINTABLE.to_owned());
            }
            let signed = AwsAuthorizer::new(keys, "sts", &self.region).try_authorize(&mut request, None);
            signed.map_err(|error| format!("the request cannot be signed: {error}"))?;
        }
        Ok(request)
    }

    /// The keys that the client library gets from the metadata of the instance, or of the container.
    async fn of_the_machine(&self, roles: &[Role], source: &str, variables: &[&str]) -> Result<AwsCredential> {
        let fail = |why: &str| first(roles, &format!("credential_source {source}"), why);
        let given: Vec<_> = variables.iter().filter_map(|&name| Some((name, variable(name)?))).collect();
        let has = |name: &str| given.iter().any(|(given, _)| *given == name);
        // Without them the library would ask the instance.
        if variables == CONTAINER && !has(CONTAINER[0]) && !(has(CONTAINER[1]) && has(CONTAINER[2])) {
            let [relative, full, token] = CONTAINER;
            return Err(fail(&format!(
                "expected {relative}, or {full} and {token}, in the environment, found neither"
            )));
        }
        // It makes no request of S3.
        let mut builder = AmazonS3Builder::new().with_bucket_name("none").with_retry(once());
        for (name, value) in &given {
            let key = name.to_ascii_lowercase().parse();
            builder = builder.with_config(key.map_err(|error: object_store::Error| fail(&error.to_string()))?, value);
        }
        let client = builder.with_http_connector(self.connector.clone()).build();
        let client = client.map_err(|error| fail(&error.to_string()))?;
        let asked = told(client.credentials().get_credential()).await;
        let keys = asked.map_err(|why| fail(&format!("this machine has no role of its own ({why})")))?;
        Ok(AwsCredential {
            key_id: keys.key_id.clone(),
            secret_key: keys.secret_key.clone(),
            token: keys.token.clone(),
        })
    }
}

/// The code and the text of a refusal.
fn refusal(status: StatusCode, text: &str, carried: &Carried) -> (String, String) {
    let refused = quick_xml::de::from_str(text).map(|Refusal { error }| error);
    let Some(Why { code, message }) = refused.ok().filter(|why| !carried.shown_code(&why.code).is_empty()) else {
        let why = format!("the service answered {status}, without a code of STS: is it the right endpoint?");
        return (String::new(), why);
    };
    // Of a wrong signature AWS repeats in the further lines what was signed, with the session's token.
    let line = carried.shown(message.lines().next().unwrap_or_default());
    let line = line.trim_end_matches('.');
    let said = if line.is_empty() { String::new() } else { format!(": {line}") };
    let remedy = "STS must know who asks, and the role's trust policy allow it";
    let why = format!("the service answered {status}: {code}{said}; {remedy}");
    (code, why)
}

/// Whether the same request may be taken a moment later.
fn passes(status: StatusCode, code: &str) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 429) || PASSING.contains(&code)
}

fn wait_of(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER).and_then(crate::far::wait_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(config: &str) -> Result<Option<Plan>> {
        let keys = "[keys]\naws_access_key_id = k\naws_secret_access_key = hunter2\n";
        let files = Files { config: config.to_owned(), credentials: keys.to_owned() };
        Plan::of(&files.profile("team").unwrap(), &files)
    }

    #[test]
    fn profiles_that_take_a_role_in_no_way_are_refused_by_name() {
        let circle = "role_arn = r\nsource_profile = a\n[profile a]\nrole_arn = s\nsource_profile = team\n";
        for (settings, message) in [
            ("role_arn = r\n", "it says role_arn: expected one of source_profile, credential_source, web_identity"),
            ("role_arn = r\nsource_profile = gone\n", "source_profile \"gone\": neither ~/.aws/config nor"),
            ("role_arn = r\nsource_profile =\n", "found none"),
            (circle, "profile \"a\": source_profile leads in a circle: team, a, team"),
            ("role_arn = r\nsource_profile = team\n", "leads in a circle: team, team"),
            (
                "role_arn = r\nsource_profile = keys\ncredential_source = Environment\n",
                "found source_profile and credential_source",
            ),
            (
                "role_arn = r\nsource_profile = keys\nweb_identity_token_file = t\n",
                "found source_profile and web_identity_token_file",
            ),
            ("role_arn = r\ncredential_source = Ec2\n", "Ec2InstanceMetadata or EcsContainer, found \"Ec2\""),
            ("role_arn = r\nsource_profile = keys\nduration_seconds = 899\n", "from 900 to 43200, as STS"),
            ("role_arn = r\nsource_profile = keys\nduration_seconds = 43201\n", "found \"43201\""),
            ("role_arn = r\nsource_profile = keys\nduration_seconds = 1h\n", "found \"1h\""),
            ("role_arn = r\nsource_profile = keys\nmfa_serial = m\n", "mfa_serial: the role takes a code"),
            (
                "role_arn = r\nsource_profile = bare\n[profile bare]\nregion = x\n",
                "profile \"bare\": it is the source_profile of \"team\" and has neither keys",
            ),
            ("role_arn = r\nsource_profile = sso\n[profile sso]\nsso_session = s\n", "\"sso\": it says sso_session"),
            ("sso_start_url = u\n", "it says sso_start_url, which is not understood here"),
            ("credential_source = Environment\n", "it says credential_source without a role_arn"),
            ("source_profile = keys\n", "it says source_profile without a role_arn"),
        ] {
            let error = plan(&format!("[profile team]\n{settings}")).unwrap_err();
            assert_eq!(error.kind, Kind::Invalid, "{error}");
            assert!(error.to_string().contains(message), "{message:?} in {error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn keys_beside_a_role_are_those_of_its_source() {
        let own = "aws_access_key_id = k\naws_secret_access_key = s\n";
        let roles = |settings: &str| plan(&format!("[profile team]\n{settings}")).unwrap().map(|plan| plan.roles.len());
        assert_eq!(roles("region = x\n"), None);
        assert_eq!(roles(own), Some(0));
        assert_eq!(roles(&format!("{own}role_arn = r\nsource_profile = team\n")), Some(1));
        let chain = "role_arn = r\nsource_profile = a\n[profile a]\nrole_arn = s\nsource_profile = keys\n";
        assert_eq!(roles(chain), Some(2));
        // Keys of a source count more than its role.
        assert_eq!(roles(&format!("{chain}{own}")), Some(1));
    }

    #[test]
    fn the_service_of_a_region_is_in_its_partition() {
        assert_eq!(endpoint_in("eu-west-1"), "https://sts.eu-west-1.amazonaws.com");
        assert_eq!(endpoint_in("cn-north-1"), "https://sts.cn-north-1.amazonaws.com.cn");
    }
}
