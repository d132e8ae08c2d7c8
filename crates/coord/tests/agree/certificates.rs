//! Tests TLS: a rank without a certificate of the job's authority is refused, with the file to look at.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use shardfast_coord::grpc::{Membership, Place, Tls};
use shardfast_coord::{Coord, Error};
use tempfile::TempDir;

use crate::{LONG, each, everyone, membership, promptly, star, tree};

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
}

impl Authority {
    fn new(directory: &Path, name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = directory.join(format!("{name}.pem"));
        fs::write(&file, issuer.pem()).unwrap();
        Authority { issuer, file }
    }

    /// Returns the files of a certificate for that name, and of its key.
    fn sign(&self, directory: &Path, name: &str) -> [PathBuf; 2] {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        let files = ["certificate", "key"].map(|what| directory.join(format!("{name}-{what}.pem")));
        fs::write(&files[0], certificate.pem()).unwrap();
        fs::write(&files[1], key.serialize_pem()).unwrap();
        files
    }
}

fn read([certificate, key]: &[PathBuf; 2], authority: &Authority) -> Tls {
    Tls::read(certificate, key, &authority.file).unwrap()
}

fn with(tls: Option<&Tls>, member: Membership) -> Membership {
    Membership { tls: tls.cloned(), ..member }
}

fn serve(tls: Option<&Tls>) -> (Arc<dyn Coord>, String) {
    let place = Place::open(with(tls, membership(star(2), 0)), 0).unwrap();
    let address = place.address().unwrap().to_owned();
    (place.join(None, LONG).unwrap(), address)
}

fn join(tls: Option<&Tls>, address: &str) -> Result<Arc<dyn Coord>, Error> {
    Place::open(with(tls, membership(star(2), 1)), 0)?.join(Some(address), Duration::from_secs(2))
}

#[test]
fn ranks_with_certificates_of_one_authority_agree() {
    let directory = TempDir::new().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = read(&authority.sign(directory.path(), "shardfast"), &authority);
    let mut addresses = Vec::new();
    let ranks: Vec<_> = (0..4)
        .map(|rank| {
            let place = Place::open(with(Some(&tls), membership(tree(4), rank)), 0).unwrap();
            addresses.push(place.address().map(ToOwned::to_owned));
            let parent = place.find_parent(addresses[0].as_deref().unwrap(), LONG).ok();
            place.join(parent.as_deref(), LONG).unwrap()
        })
        .collect();
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1, 2, 3]); 4]);
}

#[test]
fn whoever_shows_no_certificate_of_the_authority_is_refused_and_told_why() {
    let directory = TempDir::new().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| {
        fs::create_dir(directory.path().join(name)).unwrap();
        Authority::new(&directory.path().join(name), "authority")
    });
    let [our_files, their_files] = [(&ours, "ours"), (&theirs, "theirs")]
        .map(|(authority, name)| authority.sign(&directory.path().join(name), "shardfast"));
    let our_tls = read(&our_files, &ours);
    let error = |tls: Option<&Tls>, address: &str| promptly(|| join(tls, address)).err().unwrap().to_string();
    let names = |message: &str, file: &Path| message.contains(file.to_str().unwrap());

    let (_root, address) = serve(Some(&our_tls));
    // Its authority does not know rank 0.
    let message = error(Some(&read(&their_files, &theirs)), &address);
    assert!(message.starts_with(&format!("rank 1: the TLS handshake with rank 0 at {address} failed: ")), "{message}");
    assert!(message.contains("invalid peer certificate") && names(&message, &theirs.file), "{message}");
    // Rank 0's authority does not know it.
    let message = error(Some(&read(&their_files, &ours)), &address);
    assert!(names(&message, &their_files[0]) && names(&message, &ours.file), "{message}");
    // A certificate for another name is refused.
    let stranger = read(&ours.sign(directory.path(), "elsewhere"), &ours);
    let (_stranger, elsewhere) = serve(Some(&stranger));
    let message = error(Some(&our_tls), &elsewhere);
    assert!(message.contains("not valid for name"), "{message}");
    // None at all, on either side.
    let message = error(None, &address);
    assert!(message.contains("this rank does not use TLS; the other rank may require it"), "{message}");
    let (_plain, plain) = serve(None);
    let message = error(Some(&our_tls), &plain);
    assert!(message.contains(&format!("rank 0 at {plain}")) && names(&message, &our_files[0]), "{message}");

    let ranks = [_root, join(Some(&our_tls), &address).unwrap()];
    assert_eq!(each(&ranks, |coord| everyone(coord, "plan", LONG)), vec![Ok(vec![0, 1]); 2]);
}

#[test]
fn files_that_are_not_what_they_should_be_are_named() {
    let directory = TempDir::new().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let [certificate, key] = authority.sign(directory.path(), "shardfast");
    let [_, other_key] = authority.sign(directory.path(), "other");
    let (nothing, text) = (directory.path().join("nothing"), directory.path().join("text"));
    fs::write(&text, "no PEM").unwrap();
    let problem = |certificate: &Path, key: &Path, authority: &Path| {
        let tls = Tls::read(certificate, key, authority).and_then(|tls| {
            Place::open(with(Some(&tls), membership(star(2), 0)), 0)?;
            Ok(())
        });
        match tls.unwrap_err() {
            Error::Invalid(message) => message,
            error => panic!("{error}"),
        }
    };
    let message = problem(&nothing, &key, &authority.file);
    assert!(message.starts_with(&format!("{}: a certificate cannot be read: No such file", nothing.display())));
    let message = problem(&certificate, &text, &authority.file);
    assert_eq!(message, format!("{}: expected a private key in PEM, found none", text.display()));
    let message = problem(&certificate, &key, &text);
    assert_eq!(message, format!("{}: expected an authority's certificate in PEM, found none", text.display()));
    let message = problem(&certificate, &other_key, &authority.file);
    assert!(message.contains(other_key.to_str().unwrap()) && message.contains("cannot be used together"), "{message}");
}
