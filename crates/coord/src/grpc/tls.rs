//! Secures connections with certificates: both ends show one, signed by the same authority.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};

use crate::Error;

/// DNS name that every rank's certificate must be valid for. Ranks' addresses are not known when certificates are made;
/// the authority and the job's token prove a rank's identity.
const NAME: &str = "shardfast";

/// A rank's certificate with its key, and the authority that signed the certificates of all ranks.
#[derive(Clone)]
pub struct Tls {
    identity: Identity,
    authority: Certificate,
    /// Paths of certificate, key and authority.
    files: [PathBuf; 3],
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads PEM files. The certificate (with those between it and the authority, if any) must be valid for the DNS
    /// name `shardfast`, for servers and for clients. Keys are RSA, Ed25519, or ECDSA on P-256 or P-384.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the file that cannot be read or has other contents.
    pub fn read(certificate: &Path, key: &Path, authority: &Path) -> Result<Tls, Error> {
        let read = |path: &Path, what: &str, markers: &[&str]| {
            let invalid = |problem: String| Error::Invalid(format!("{}: {problem}", path.display()));
            let text = fs::read_to_string(path).map_err(|error| invalid(format!("{what} cannot be read: {error}")))?;
            let is_there = markers.iter().any(|marker| text.contains(&format!("-----BEGIN {marker}-----")));
            if is_there { Ok(text) } else { Err(invalid(format!("expected {what} in PEM, found none"))) }
        };
        let identity = Identity::from_pem(
            read(certificate, "a certificate", &["CERTIFICATE"])?,
            read(key, "a private key", &["PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY"])?,
        );
        let authority_pem = read(authority, "an authority's certificate", &["CERTIFICATE"])?;
        let files = [certificate, key, authority].map(Path::to_owned);
        Ok(Tls { identity, authority: Certificate::from_pem(authority_pem), files })
    }

    pub(super) fn serve(&self, server: Server) -> Result<Server, Error> {
        let config = ServerTlsConfig::new().identity(self.identity.clone()).client_ca_root(self.authority.clone());
        server.tls_config(config).map_err(|error| self.unusable(&error))
    }

    pub(super) fn connect(&self, endpoint: Endpoint) -> Result<Endpoint, Error> {
        let config = ClientTlsConfig::new()
            .domain_name(NAME)
            .identity(self.identity.clone())
            .ca_certificate(self.authority.clone());
        endpoint.tls_config(config).map_err(|error| self.unusable(&error))
    }

    fn unusable(&self, error: &dyn std::error::Error) -> Error {
        let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        Error::Invalid(format!("{self}: cannot be used together: {cause}"))
    }
}

impl fmt::Display for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [certificate, key, authority] = self.files.each_ref().map(|path| path.display());
        write!(f, "certificate {certificate}, key {key}, authority {authority}")
    }
}

/// Returns advice on what to check when a connection fails.
pub(super) fn hint(tls: Option<&Tls>) -> String {
    match tls {
        Some(tls) => format!("this rank uses {tls}; all ranks need certificates for {NAME:?} from one authority"),
        None => "this rank does not use TLS; the other rank may require it".to_owned(),
    }
}

/// Returns whether a retry is useless, because one end does not accept the other's certificate.
pub(super) fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidData) {
            return true;
        }
        next = error.source();
    }
    false
}
