//! Tests checksums that the source of a write knows.

use std::sync::{Arc, Mutex};

use shardfast_store::testing::conformance::buffer;
use shardfast_store::testing::sims3::SimS3;
use shardfast_store::{Error, Kind, Next, Parts, Result, Shared, Write, Writes, open_on};

const PART: &[u8] = b"123456789";

/// CRC-64 of [`PART`], as the catalogue of CRC algorithms gives it.
const CRC64: u64 = 0xae8b_1486_0a79_9888;

struct Given<'a>(Mutex<Vec<Write<'a>>>);

impl<'a> Writes<'a> for Given<'a> {
    fn next(&self, _: bool) -> Next<'a> {
        self.0.lock().unwrap().pop().map_or(Next::End, Next::Write)
    }

    fn failed(&self, _: Write<'a>, error: Error) -> Result<()> {
        Err(error)
    }
}

#[test]
fn the_service_compares_a_part_with_the_checksum_of_its_source() {
    let parts = Parts { bytes_min: PART.len() as u64, bytes_max: PART.len() as u64, count_max: 10 };
    let shared = Arc::new(Shared::simulated_in_parts(SimS3::default(), parts, 1, 1));
    let store = open_on("s3://simulated/sums?endpoint=http://simulated", &shared).unwrap();
    let mut object = store.create("object", 2 * PART.len() as u64).unwrap();
    let write = |number: usize, crc64| {
        let offset = (number * PART.len()) as u64;
        let write = Write { object: &*object, offset, buffers: vec![buffer(PART)], bytes: PART.len(), number, crc64 };
        store.write_all(&Given(Mutex::new(vec![write])))
    };
    write(0, None).unwrap();
    // As if a bit had turned in memory after the source computed it.
    assert_eq!(write(1, Some(CRC64 ^ 1)).unwrap_err().kind, Kind::Unavailable);
    write(1, Some(CRC64)).unwrap();
    object.finish().unwrap();
    assert_eq!(store.read("object", 100).unwrap(), [PART, PART].concat());
}
