//! A server without space: a save ends at once and says why, and leaves nothing there.

use std::time::{Duration, Instant};

use shardfast_engine::Kind;
use shardfast_store::testing::servers::Server;

use crate::campaign::{DEADLINE, PATIENT, Place};
use crate::checkpoint::{direct, is_whole, save, store};

/// MiB of space for three checkpoints of 9.5 MiB, what stands beside them, and a part of the next checkpoint. MinIO
/// takes a part if twice its length is free: the 8 MiB of the third checkpoint need 16, whichever of its objects come
/// first. versitygw takes parts as long as there is room, and needs as much again to put them together.
pub(crate) const SPACE_MIB: u32 = 41;

/// MiB of files that lie beside the checkpoints: the 8 MiB of the fourth one find 7.
const BESIDE_MIB: usize = 5;

const SAVES: usize = 3;

pub(crate) fn is_used_up(server: &Server) {
    let places: Vec<Place<'_>> = (0..=SAVES).map(|i| Place::new(server, &format!("space/{i}"))).collect();
    let (last, earlier) = places.split_last().unwrap();
    for place in earlier {
        save(&direct(&place.direct()), DEADLINE).unwrap();
    }
    let beside = direct(&server.s3("beside"));
    beside.put("all", &vec![1; BESIDE_MIB << 20]).unwrap();
    // MinIO looks once a second how much is free.
    std::thread::sleep(Duration::from_secs(2));
    // Twice: what the first one had sent does not fill the place.
    for _ in 0..2 {
        let proxy = last.proxy(None);
        let error = save(&store(&last.through(&proxy), PATIENT), DEADLINE).unwrap_err();
        assert_eq!(error.kind, Kind::Exhausted, "{error}");
        assert!(error.message.contains("s3://") && !error.message.contains("tried"), "{error}");
        let seen = proxy.seen();
        let count = |what: &str, end: &str| {
            seen.iter().filter(|seen| seen.request.what.starts_with(what) && seen.request.what.ends_with(end)).count()
        };
        assert_eq!((count("POST", "?uploads"), count("POST", "?uploadId")), (1, 0), "{seen:?}");
        assert!(count("DELETE", "?uploadId") > 0, "the upload is aborted: {seen:?}");
        assert_eq!(is_whole(&last.direct()), Ok(false));
    }
    assert!(earlier.iter().all(|place| is_whole(&place.direct()) == Ok(true)));
    places[0].remove();
    beside.delete("all").unwrap();
    let began = Instant::now();
    while let Err(error) = save(&direct(&last.direct()), DEADLINE) {
        assert!(error.kind == Kind::Exhausted && began.elapsed() < DEADLINE, "{error}");
        // MinIO gives back what was deleted and aborted every five minutes only.
        let trash = server.dir().join("data/.minio.sys/tmp/.trash");
        std::fs::remove_dir_all(&trash).unwrap();
        std::fs::create_dir(&trash).unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    assert_eq!(is_whole(&last.direct()), Ok(true));
}
