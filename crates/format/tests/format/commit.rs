use shardfast_format::{Commit, Error, crc64};

use crate::sample;

fn signed(body: &str) -> Vec<u8> {
    format!("{body}crc64 {:016x}\n", crc64(body.as_bytes())).into_bytes()
}

fn body(version: &str, more: &str) -> String {
    let digest = "ab".repeat(32);
    format!(
        "shardfast {version}\nattempt 0123456789abcdef\nmanifest manifest-0123456789abcdef\nmanifest_bytes 77\n\
         manifest_sha256 {digest}\n{more}"
    )
}

#[test]
fn a_record_comes_back() {
    let manifest = sample::manifest().encode();
    let commit = sample::commit(&manifest);
    assert_eq!(Commit::decode(&commit.encode()).unwrap(), commit);
    commit.verify(&manifest).unwrap();
}

#[test]
fn every_flipped_bit_of_the_record_is_caught() {
    let record = sample::commit(&sample::manifest().encode()).encode();
    for bit in 0..record.len() * 8 {
        let mut damaged = record.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(Commit::decode(&damaged), Err(Error::Corrupt(_))), "bit {bit}");
    }
}

#[test]
fn every_truncation_and_addition_is_caught() {
    let record = sample::commit(&sample::manifest().encode()).encode();
    for length in 0..record.len() {
        assert!(matches!(Commit::decode(&record[..length]), Err(Error::Corrupt(_))), "{length} bytes");
    }
    for more in ["\n", " ", "x", "\0", "crc64 0000000000000000\n"] {
        let longer = [&record[..], more.as_bytes()].concat();
        assert!(matches!(Commit::decode(&longer), Err(Error::Corrupt(_))), "{more:?}");
    }
    assert!(Commit::decode(&vec![b'\n'; 5000]).is_err());
}

#[test]
fn every_flipped_bit_of_the_manifest_is_caught() {
    let manifest = sample::manifest().encode();
    let commit = sample::commit(&manifest);
    let mut damaged = manifest.clone();
    for bit in 0..manifest.len() * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(commit.verify(&damaged), Err(Error::Corrupt(_))), "bit {bit}");
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(commit.verify(&manifest[..manifest.len() - 1]).is_err());
    assert!(commit.verify(&[&manifest[..], b" "].concat()).is_err());
}

#[test]
fn another_major_version_names_the_upgrade() {
    let error = Commit::decode(&signed("shardfast 2.3\nwhatever this will mean\n")).unwrap_err();
    let expected = "COMMIT: expected format 1.x, found 2.3; upgrade shardfast";
    assert_eq!(error, Error::Unsupported(expected.to_owned()));
    let error = Commit::decode(&signed(&body("0.9", ""))).unwrap_err();
    assert!(matches!(&error, Error::Unsupported(message) if message.contains("older shardfast")), "{error}");
}

#[test]
fn only_a_later_minor_version_may_add_lines() {
    let commit = Commit::decode(&signed(&body("1.7", "colour blue\n"))).unwrap();
    assert_eq!((commit.major, commit.minor, commit.manifest_bytes), (1, 7, 77));
    assert!(Commit::decode(&signed(&body("1.0", ""))).is_ok());
    assert!(Commit::decode(&signed(&body("1.0", "colour blue\n"))).is_err());
}

#[test]
fn a_signed_record_that_no_writer_writes_is_corrupt() {
    let good = body("1.0", "");
    let digest = "ab".repeat(32);
    let cases = [
        good.replace("shardfast 1.0", "shardfast 01.0"),
        good.replace("shardfast 1.0", "shardfast 1"),
        good.replace("shardfast", "slowfast"),
        good.replace("attempt 0123456789abcdef", "attempt 0123456789ABCDEF"),
        good.replace("attempt 0", "attempt  0"),
        good.replace("manifest manifest-0123456789abcdef", "manifest ../manifest-0123456789abcdef"),
        good.replace("manifest manifest-0123456789abcdef", "manifest "),
        good.replace("manifest_bytes 77", "manifest_bytes 077"),
        good.replace("manifest_bytes 77", "manifest_bytes +77"),
        good.replace("manifest_bytes 77", "manifest_bytes 18446744073709551616"),
        good.replace(&digest, &digest.to_uppercase()),
        good.replace(&digest, &digest[1..]),
        good.replace('\n', "\r\n"),
        good.trim_end().to_owned(),
        String::new(),
    ];
    for case in cases {
        let found = Commit::decode(&signed(&case));
        assert!(matches!(found, Err(Error::Corrupt(_))), "{case:?}: {found:?}");
    }
}
