//! Saving, loading, verifying, comparing and exporting a tensor that is ten times as large as the staging budget takes
//! no more memory than that. Alone in its process, since it looks at the process's own peak.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shardfast_engine::{Destination, Engine, Fences, PeerReads, Provider, Result, Sink, State, Want, open, save};
use shardfast_format::{Catalog, DType, Dims, Leaf, LeafBody, LeafName, Region};
use shardfast_tools::{diff, export, verify};

const BUDGET_BYTES: u64 = 16 << 20;
const TENSOR_BYTES: u64 = 160 << 20;
/// The two buffers of a comparison, threads, headers, the manifest.
const BESIDES_BYTES: u64 = 32 << 20;

/// A tensor that is made up as it is asked for.
struct Made;

impl Provider for Made {
    fn bytes(&self) -> u64 {
        TENSOR_BYTES
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut Fences) -> Result<()> {
        out.fill((at >> 20) as u8);
        Ok(())
    }
}

/// Returns the most memory that this process ever had.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Bytes of the program's own file that are mapped: its code, page by page as it runs.
fn program_bytes() -> u64 {
    let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_program, mut bytes) = (false, 0);
    for line in maps.lines() {
        if let Some(kib) = line.strip_prefix("Rss:") {
            let kib: u64 = kib.trim().trim_end_matches(" kB").parse().unwrap();
            bytes += if is_program { kib * 1024 } else { 0 };
        } else if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
            is_program = line.ends_with(&program);
        }
    }
    bytes
}

#[test]
fn memory_is_bounded_by_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let deadline = Duration::from_secs(60);
    let engine = Engine::new(shardfast_coord::solo(), BUDGET_BYTES).unwrap();
    let shape = Dims::from_slice(&[TENSOR_BYTES / 4]);
    let body = LeafBody::Tensor { dtype: DType::F32, parts: vec![Region::whole(&shape)], shape };
    let leaf = Leaf { name: LeafName::new("model", "w"), body, layout: String::new() };
    let state = State {
        catalog: Arc::new(Catalog { leaves: vec![leaf] }),
        providers: vec![vec![Arc::new(Made)]],
        ..State::default()
    };
    let destination = Destination {
        url: place("a"),
        step: None,
        user: BTreeMap::new(),
        prove: shardfast_engine::Prove::default(),
        blocking: false,
    };
    // What a load fills is the program's own memory.
    let mut loaded = vec![1u8; TENSOR_BYTES as usize];
    let (before, program) = (peak_bytes(), program_bytes());
    save(&engine, destination, state, deadline).committed(None).unwrap();

    assert!(verify(&engine, &place("a"), &|_, _| ()).unwrap().is_sound());
    let checkpoint = open(&engine, &place("a"), deadline).unwrap();
    // SAFETY: `loaded` outlives the load and no other code touches it meanwhile.
    #[allow(unsafe_code)]
    let sink = unsafe { Sink::new(loaded.as_mut_ptr() as usize, &[TENSOR_BYTES / 4], &[4], 4) }.unwrap();
    let want = Want { leaf: 0, region: Region::whole(&[TENSOR_BYTES / 4]), sink };
    checkpoint.load(&[want], &[], deadline).unwrap();
    assert!(loaded.iter().enumerate().step_by(4093).all(|(at, &byte)| byte == (at >> 20) as u8));
    let same = diff(&checkpoint, &checkpoint, &|_, _| ()).unwrap();
    assert_eq!((same.bytes, same.differences.len()), (TENSOR_BYTES, 0));
    let exported = export(&checkpoint, &place("out"), "model", u64::MAX).unwrap();
    assert_eq!(exported.tensor_bytes, TENSOR_BYTES);

    let grown = peak_bytes() - before - program_bytes().saturating_sub(program);
    assert!(grown <= BUDGET_BYTES + BESIDES_BYTES, "grown by {} MiB", grown >> 20);
    drop((loaded, engine));
    shared_loads(&place("a"));
}

/// Two ranks that read for each other: messages take half a budget beside it.
fn shared_loads(url: &str) {
    let mut places = [vec![1u8; TENSOR_BYTES as usize], vec![2u8; TENSOR_BYTES as usize]];
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak_bytes();
    std::thread::scope(|threads| {
        for (coord, place) in shardfast_coord::local(2).into_iter().zip(&mut places) {
            let deadline = Duration::from_secs(60);
            threads.spawn(move || {
                let engine = Engine::new(coord, BUDGET_BYTES).unwrap();
                let checkpoint = open(&engine, url, deadline).unwrap();
                // SAFETY: `place` outlives the load and no other code touches it meanwhile.
                #[allow(unsafe_code)]
                let sink = unsafe { Sink::new(place.as_mut_ptr() as usize, &[TENSOR_BYTES / 4], &[4], 4) }.unwrap();
                let want = Want { leaf: 0, region: Region::whole(&[TENSOR_BYTES / 4]), sink };
                let loaded = checkpoint.load_by(PeerReads::Always, None, &[want], &[], deadline).unwrap();
                assert!(loaded.traffic.is_shared && loaded.traffic.bytes_read < TENSOR_BYTES * 6 / 10);
            });
        }
    });
    for place in &places {
        assert!(place.iter().enumerate().step_by(4093).all(|(at, &byte)| byte == (at >> 20) as u8));
    }
    let grown = peak_bytes() - before;
    let most = 2 * (BUDGET_BYTES + BUDGET_BYTES / 2) + BESIDES_BYTES;
    assert!(grown <= most, "grown by {} MiB", grown >> 20);
}
