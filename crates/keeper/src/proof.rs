//! Proves to each other that two keepers belong to one job.
//!
//! # Protocol
//! 1. The accepting side sends 16 random bytes.
//! 2. The connecting side answers with `MAGIC`, 16 random bytes of its own and a proof: a keyed SHA-256 of all of them.
//! 3. The accepting side answers with a proof of its own. The key is not sent. A side without a valid proof is
//!    disconnected and learns nothing.

use std::io;

use sha2::{Digest, Sha256};
use shardfast_store::keeper::wire::{Carrier, Key};

/// First bytes of the connecting side; the last digit grows with every change of the protocol.
const MAGIC: [u8; 8] = *b"sfkeep1\n";

const NONCE_BYTES: usize = 16;
const PROOF_BYTES: usize = 32;

/// Nonces of a connection: of the accepting side, and of the connecting one.
type Nonces = [[u8; NONCE_BYTES]; 2];

/// Proves this side to the keeper that it has connected to, and expects its proof.
pub(crate) fn connect(link: &impl Carrier, key: &Key) -> io::Result<()> {
    let mut theirs = [0; NONCE_BYTES];
    link.fill(&mut theirs)?;
    let nonces = [theirs, nonce()?];
    link.put(&[&MAGIC[..], &nonces[1], &proof(key, b"connect", &nonces)].concat())?;
    expect(link, &proof(key, b"accept", &nonces))
}

/// Expects the proof of the side that has connected, and proves this one.
pub(crate) fn accept(link: &impl Carrier, key: &Key) -> io::Result<()> {
    let (ours, mut magic, mut theirs) = (nonce()?, [0; MAGIC.len()], [0; NONCE_BYTES]);
    link.put(&ours)?;
    link.fill(&mut magic)?;
    if magic != MAGIC {
        return Err(foreign());
    }
    link.fill(&mut theirs)?;
    let nonces = [ours, theirs];
    expect(link, &proof(key, b"connect", &nonces))?;
    link.put(&proof(key, b"accept", &nonces))
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "it does not belong to this job")
}

/// Receives a proof, and compares it in a time that tells nothing of where it differs.
fn expect(link: &impl Carrier, expected: &[u8; PROOF_BYTES]) -> io::Result<()> {
    let mut found = [0; PROOF_BYTES];
    link.fill(&mut found)?;
    let differs = found.iter().zip(expected).fold(0, |differs, (a, b)| differs | (a ^ b));
    if std::hint::black_box(differs) == 0 { Ok(()) } else { Err(foreign()) }
}

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

/// Returns a keyed hash. Hashed twice, so that nothing can be appended.
fn proof(key: &Key, role: &[u8], nonces: &Nonces) -> [u8; PROOF_BYTES] {
    let inner =
        Sha256::new().chain_update(key).chain_update(MAGIC).chain_update(nonces.as_flattened()).chain_update(role);
    Sha256::new().chain_update(key).chain_update(inner.finalize()).finalize().into()
}
