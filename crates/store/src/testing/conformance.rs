//! Tests the contract of [`Store`], which every backend must pass.
//!
//! A backend's test is one call of [`check`].

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::noted::{Noted, Seen};
use crate::{Action, Buffer, Entry, Error, Kind, Next, ObjectWriter, Pieces, Requests, Result, Store, Write, Writes};

/// Checks a backend against the contract. `open` opens the store of a given name: the same store for the same name, an
/// empty one for a new name.
///
/// # Panics
/// If the backend does not keep the contract.
pub fn check(open: impl Fn(&str) -> Arc<dyn Store>) {
    check_remembering(open, Duration::ZERO);
}

/// Checks a backend like [`check`] whose clients may take a name for that of its former object for some time, where
/// that object lives on under another name.
///
/// # Panics
/// If the backend does not keep the contract.
pub fn check_remembering(open: impl Fn(&str) -> Arc<dyn Store>, remembered: Duration) {
    let two = |name: &str| [open(name), open(name)];
    reading_creates_nothing(&two("reading"));
    names_are_checked(&*open("names"));
    objects_keep_their_bytes(&two("objects"));
    objects_are_written_by_many_threads(&*open("threads"));
    many_objects_are_written_at_a_time(&*open("many"));
    writes_that_fail_come_back(&*open("failed"));
    taken_names_conflict(&two("taken"));
    the_unfinished_leave_with_their_writer(&*open("unfinished"));
    wrong_writes_are_refused(&*open("writes"));
    reads_are_exact(&*open("reads"));
    put_replaces_whole_objects(&two("put"));
    second_names_are_as_good_as_the_first(&two("second"), remembered);
    one_publisher_wins(&two("publish"));
    directories_are_listed(&*open("list"));
    sizes_are_those_of_now(&two("sizes"));
    what_is_deleted_is_gone(&two("delete"));
    only_what_is_named_is_deleted(&two("delete-all"));
    a_store_below_a_store_shares_its_objects(&open);
}

/// Tests that the store at `url` reports each operation once, with its object, its bytes and its failure.
pub fn check_reports(url: &str) {
    let (store, noted) = Noted::open(url).unwrap();
    let contents = pattern(9, 100_000);
    let takes_requests = store.service().is_some();
    let expect = |action, object: &str, bytes: Range<u64>, failure: Option<Kind>| {
        let seen = noted.take();
        let own: Vec<&Seen> = seen.iter().filter(|seen| seen.action == action && seen.object == object).collect();
        let moved = own.iter().map(|seen| seen.bytes).sum::<u64>();
        assert!(!own.is_empty() && bytes.contains(&moved), "{action:?} {object}, {bytes:?} bytes: {seen:?}");
        assert!(own.iter().any(|seen| seen.failure == failure), "{action:?} {object}, {failure:?}: {seen:?}");
        let asked = seen.iter().all(|seen| (seen.requests != Requests::default()) == takes_requests);
        assert!(asked, "requests: {seen:?}");
    };
    write_object(&*store, "d/object", &contents).unwrap();
    // The last write may be padded.
    expect(Action::Write, "d/object", 100_000..100_000 + 4096, None);
    let (object, head) = store.open_head("d/object", 10).unwrap();
    assert_eq!(head, contents[..10]);
    expect(Action::Open, "d/object", 10..11, None);
    object.read_at(5, &mut [0; 50]).unwrap();
    expect(Action::Read, "d/object", 50..51, None);
    store.put("d/small", &contents[..7]).unwrap();
    expect(Action::Put, "d/small", 7..8, None);
    store.publish("d/once", &contents[..9]).unwrap();
    expect(Action::Publish, "d/once", 9..10, None);
    assert!(store.publish("d/once", &contents[..9]).is_err());
    let failed = noted.take();
    assert!(failed.iter().any(|seen| seen.action == Action::Publish && seen.failure.is_some()), "{failed:?}");
    assert!(store.size("none").is_err());
    expect(Action::Open, "none", 0..1, Some(Kind::NotFound));
    store.list("d").unwrap();
    expect(Action::List, "d", 0..1, None);
    store.delete("d/small").unwrap();
    expect(Action::Delete, "d/small", 0..1, None);
    store.delete_tree("d").unwrap();
    expect(Action::DeleteTree, "d", 0..1, None);
}

/// Writes and finishes an object as the contract demands: in aligned pieces, the last one padded, in reverse order.
///
/// # Errors
/// The store's error.
pub fn write_object(store: &dyn Store, name: &str, contents: &[u8]) -> Result<()> {
    let mut object = store.create(name, contents.len() as u64)?;
    let third = contents.len().div_ceil(3).next_multiple_of(4096).max(4096);
    let piece_bytes = piece_bytes(store, contents.len(), third);
    let pieces = contents.chunks(piece_bytes).enumerate();
    let pieces = pieces.map(|(index, piece)| ((index * piece_bytes) as u64, Aligned::new(piece, object.alignment())));
    store.write_all(&OfOne { object: &*object, left: Mutex::new(pieces.collect()) })?;
    object.finish()
}

/// Returns the length of a write into an object of `bytes` bytes: `any`, if the store takes any.
fn piece_bytes(store: &dyn Store, bytes: usize, any: usize) -> usize {
    match store.needs().pieces {
        Pieces::Any => any,
        Pieces::Parts(parts) => parts.of(bytes as u64) as usize,
    }
}

/// Memory aligned for an object, padded with zeros.
struct Aligned {
    storage: Box<[u8]>,
    start: usize,
    bytes: usize,
}

impl Aligned {
    fn new(contents: &[u8], alignment: usize) -> Aligned {
        let bytes = contents.len().next_multiple_of(alignment);
        let mut storage = vec![0; bytes + alignment].into_boxed_slice();
        let start = storage.as_ptr().align_offset(alignment);
        storage[start..start + contents.len()].copy_from_slice(contents);
        Aligned { storage, start, bytes }
    }
}

// SAFETY: a box's contents stay where they are, and nothing writes these.
#[allow(unsafe_code)]
unsafe impl Buffer for Aligned {
    fn bytes(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.bytes]
    }

    fn number(&self) -> Option<u32> {
        None
    }
}

/// Returns a buffer with these bytes.
pub fn buffer(bytes: &[u8]) -> Box<dyn Buffer> {
    Box::new(Aligned::new(bytes, 1))
}

/// Source of the pieces of one object, the last one first.
struct OfOne<'a> {
    object: &'a dyn ObjectWriter,
    left: Mutex<Vec<(u64, Aligned)>>,
}

impl<'a> Writes<'a> for OfOne<'a> {
    fn next(&self, wait: bool) -> Next<'a> {
        match self.left.lock().unwrap().pop() {
            Some((offset, piece)) if !piece.bytes().is_empty() => {
                let bytes = piece.bytes().len();
                let (object, buffers): (_, Vec<Box<dyn Buffer>>) = (self.object, vec![Box::new(piece)]);
                Next::Write(Write { object, offset, buffers, bytes, number: 0, crc64: None })
            }
            Some(_) if !wait => Next::Later,
            _ => Next::End,
        }
    }

    fn failed(&self, _: Write<'a>, error: Error) -> Result<()> {
        Err(error)
    }
}

/// Returns `length` bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let word = |i: u64| (i ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes();
    (0..length.div_ceil(8) as u64).flat_map(word).take(length).collect()
}

fn write_piece(object: &dyn ObjectWriter, offset: u64, piece: &[u8]) -> Result<()> {
    object.write_at(offset, Aligned::new(piece, object.alignment()).bytes())
}

fn read(store: &dyn Store, name: &str) -> Vec<u8> {
    store.read(name, u64::MAX).unwrap()
}

fn kind<T>(result: Result<T>) -> Option<Kind> {
    result.err().map(|error| {
        assert!(!error.message.is_empty() && !error.name.is_empty(), "{error:?}");
        error.kind
    })
}

fn reading_creates_nothing([store, other]: &[Arc<dyn Store>; 2]) {
    assert_eq!(kind(store.list("")), Some(Kind::NotFound));
    assert_eq!(kind(store.list("dir")), Some(Kind::NotFound));
    assert_eq!(kind(store.open("dir/object")), Some(Kind::NotFound));
    assert_eq!(kind(store.read("object", 10)), Some(Kind::NotFound));
    store.delete("dir/object").unwrap();
    store.delete_tree("dir").unwrap();
    assert_eq!(kind(other.list("")), Some(Kind::NotFound));
}

fn names_are_checked(store: &dyn Store) {
    let long = "x".repeat(256);
    for bad in ["", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "./a", "a\0", "a\nb", "a\\b", &long] {
        let refused = [
            kind(store.create(bad, 1)),
            kind(store.open(bad)),
            kind(store.read(bad, 1)),
            kind(store.put(bad, b"x")),
            kind(store.publish(bad, b"x")),
            kind(store.sync(&["good", bad])),
            kind(store.delete(bad)),
            kind(store.delete_tree(bad)),
        ];
        assert_eq!(refused, [Some(Kind::Invalid); 8], "{bad:?}");
        assert!(bad.is_empty() || kind(store.list(bad)) == Some(Kind::Invalid), "{bad:?}");
    }
    let longest = "y".repeat(255);
    for good in ["...", ".hidden", "a b", "ünï-😀", "%41", "a:b", "~", &longest] {
        write_object(store, good, good.as_bytes()).unwrap();
        assert_eq!(read(store, good), good.as_bytes());
    }
    assert_eq!(store.list("").unwrap().len(), 8);
}

fn objects_keep_their_bytes([store, other]: &[Arc<dyn Store>; 2]) {
    let lengths = [0, 1, 511, 4095, 4096, 4097, 12_288, 100_001];
    let names: Vec<String> = lengths.iter().map(|length| format!("a/{}/{length}", length % 2)).collect();
    for (name, &length) in names.iter().zip(&lengths) {
        write_object(&**store, name, &pattern(7, length)).unwrap();
    }
    store.sync(&names.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    store.sync(&[]).unwrap();
    for (name, &length) in names.iter().zip(&lengths) {
        assert_eq!(other.open(name).unwrap().bytes(), length as u64);
        assert_eq!(read(&**other, name), pattern(7, length), "{name}");
    }
    if let Pieces::Parts(_) = store.needs().pieces {
        let mut object = store.create("gaps", 20_000).unwrap();
        assert_eq!(kind(object.finish()), Some(Kind::Invalid), "a part was never written");
        return;
    }
    // Bytes that were never written read as zeros.
    let mut object = store.create("gaps", 20_000).unwrap();
    write_piece(&*object, 8192, &[9; 4096]).unwrap();
    object.finish().unwrap();
    let mut expected = vec![0; 20_000];
    expected[8192..12_288].fill(9);
    assert_eq!(read(&**other, "gaps"), expected);
}

fn objects_are_written_by_many_threads(store: &dyn Store) {
    let piece = piece_bytes(store, 1, 8192);
    let contents = pattern(3, if piece > 8192 { 2 * piece } else { 40 * piece } + 77);
    let mut object = store.create("big", contents.len() as u64).unwrap();
    let next = AtomicUsize::new(0);
    let pieces: Vec<&[u8]> = contents.chunks(piece).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let offset = piece.as_ptr().addr() - contents.as_ptr().addr();
                    write_piece(&*object, offset as u64, piece).unwrap();
                }
            });
        }
    });
    object.finish().unwrap();
    let reader = store.open("big").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (reader, contents) = (&reader, &contents);
            scope.spawn(move || {
                for offset in (thread * 1000..contents.len() - 5000).step_by(contents.len() / 33 + 1) {
                    let mut buf = vec![0; 5000];
                    reader.read_at(offset as u64, &mut buf).unwrap();
                    assert_eq!(buf, contents[offset..offset + 5000]);
                }
            });
        }
    });
}

/// Tests several objects in more pieces than any store has in flight, some of which come late.
fn many_objects_are_written_at_a_time(store: &dyn Store) {
    struct Mixed<'a> {
        objects: &'a [Box<dyn ObjectWriter>],
        contents: &'a [Vec<u8>],
        next: AtomicUsize,
        piece: usize,
    }
    impl<'a> Writes<'a> for Mixed<'a> {
        fn next(&self, wait: bool) -> Next<'a> {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number % 7 == 6 && !wait {
                self.next.fetch_sub(1, Ordering::Relaxed);
                return Next::Later;
            }
            let (object, index) = (number % self.objects.len(), number / self.objects.len());
            let Some(piece) = self.contents[object].chunks(self.piece).nth(index) else { return Next::End };
            let object = &*self.objects[object];
            let buffer = Aligned::new(piece, object.alignment());
            let bytes = buffer.bytes().len();
            let buffers: Vec<Box<dyn Buffer>> = vec![Box::new(buffer)];
            Next::Write(Write { object, offset: (index * self.piece) as u64, buffers, bytes, number, crc64: None })
        }

        fn failed(&self, _: Write<'a>, error: Error) -> Result<()> {
            Err(error)
        }
    }
    let many = |piece: usize| if piece > 8192 { 3 * piece - 77 } else { 20 * piece - 77 };
    let piece = piece_bytes(store, 1, 8192);
    let contents: Vec<Vec<u8>> = (0..3).map(|seed| pattern(seed, many(piece))).collect();
    let names = ["x/0", "x/1", "y"];
    let create = |(name, contents): (&&str, &Vec<u8>)| store.create(name, contents.len() as u64).unwrap();
    let objects: Vec<_> = names.iter().zip(&contents).map(create).collect();
    store.write_all(&Mixed { objects: &objects, contents: &contents, next: AtomicUsize::new(0), piece }).unwrap();
    objects.into_iter().for_each(|mut object| object.finish().unwrap());
    for (name, contents) in names.iter().zip(&contents) {
        assert_eq!(read(store, name), *contents, "{name}");
    }
    // A failure is the last thing that is done.
    let object = store.create("short", 4096).unwrap();
    let pieces = Mutex::new(vec![(0, Aligned::new(&[1], 4096)), (8192, Aligned::new(&[1], 4096))]);
    assert_eq!(kind(store.write_all(&OfOne { object: &*object, left: pieces })), Some(Kind::Invalid));
}

/// Tests that a failed write is returned unchanged, and that the write that replaces it is taken and made.
fn writes_that_fail_come_back(store: &dyn Store) {
    type CameBack = (usize, Vec<Box<dyn Buffer>>);
    struct Failing<'a> {
        object: &'a dyn ObjectWriter,
        piece: usize,
        pieces: usize,
        contents: &'a [u8],
        left: Mutex<Vec<usize>>,
        came_back: Mutex<Vec<CameBack>>,
    }
    impl<'a> Failing<'a> {
        fn write(&self, number: usize, offset: usize, buffers: Vec<Box<dyn Buffer>>) -> Next<'a> {
            let (object, offset, bytes) = (self.object, offset as u64, self.piece);
            Next::Write(Write { object, offset, buffers, bytes, number, crc64: None })
        }
    }
    impl<'a> Writes<'a> for Failing<'a> {
        fn next(&self, _: bool) -> Next<'a> {
            if let Some((number, buffers)) = self.came_back.lock().unwrap().pop() {
                return self.write(number, number * self.piece, buffers);
            }
            let Some(number) = self.left.lock().unwrap().pop() else { return Next::End };
            let piece = &self.contents[number * self.piece..(number + 1) * self.piece];
            let beyond = if number.is_multiple_of(3) { self.pieces } else { 0 };
            let buffer = Aligned::new(piece, self.object.alignment());
            self.write(number, (number + beyond) * self.piece, vec![Box::new(buffer)])
        }

        fn failed(&self, write: Write<'a>, error: Error) -> Result<()> {
            assert_eq!(error.kind, Kind::Invalid);
            assert_eq!(write.offset as usize, (write.number + self.pieces) * self.piece);
            assert_eq!(write.bytes, self.piece);
            self.came_back.lock().unwrap().push((write.number, write.buffers));
            Ok(())
        }
    }
    let piece = piece_bytes(store, 1, 4096);
    let pieces = if piece > 4096 { 3 } else { 12 };
    let contents = pattern(9, pieces * piece);
    let mut object = store.create("failed", contents.len() as u64).unwrap();
    let (left, came_back) = (Mutex::new((0..pieces).collect()), Mutex::default());
    store.write_all(&Failing { object: &*object, piece, pieces, contents: &contents, left, came_back }).unwrap();
    object.finish().unwrap();
    assert_eq!(read(store, "failed"), contents);
}

fn taken_names_conflict([store, other]: &[Arc<dyn Store>; 2]) {
    write_object(&**store, "d/first", b"first").unwrap();
    // Some backends detect it only at the end.
    if store.needs().refuses_taken_names {
        assert_eq!(kind(write_object(&**other, "d/first", b"second")), Some(Kind::Conflict));
    }
    let refused = other.publish("d/first", b"third").unwrap_err();
    assert_eq!(refused.kind, Kind::Conflict, "{refused}");
    assert_eq!(read(&**store, "d/first"), b"first");
    assert_eq!(store.list("d").unwrap().len(), 1);
}

fn the_unfinished_leave_with_their_writer(store: &dyn Store) {
    write_object(store, "d/other", b"other").unwrap();
    let piece = piece_bytes(store, 1, 4096);
    let object = store.create("d/dropped", piece as u64 + 904).unwrap();
    write_piece(&*object, 0, &pattern(1, piece)).unwrap();
    drop(object);
    assert_eq!(kind(store.open("d/dropped")), Some(Kind::NotFound));
    assert_eq!(store.list("d").unwrap().len(), 1);
    write_object(store, "d/dropped", b"again").unwrap();
    assert_eq!(read(store, "d/dropped"), b"again");
}

fn wrong_writes_are_refused(store: &dyn Store) {
    let mut object = store.create("o", 5000).unwrap();
    let alignment = object.alignment();
    assert!(alignment.is_power_of_two() && alignment <= 4096);
    for offset in [8192, 1 << 40, !4095] {
        assert_eq!(kind(write_piece(&*object, offset, &[1; 4096])), Some(Kind::Invalid), "{offset}");
    }
    if alignment > 1 {
        let storage = vec![0; 4 * alignment];
        let start = storage.as_ptr().align_offset(alignment);
        let wrong = [
            (1, &storage[start..][..alignment]),
            (0, &storage[start + 1..][..alignment]),
            (0, &storage[start..][..alignment - 1]),
        ];
        for (offset, bytes) in wrong {
            assert_eq!(kind(object.write_at(offset, bytes)), Some(Kind::Invalid));
        }
    }
    write_piece(&*object, 0, &[1; 5000]).unwrap();
    object.finish().unwrap();
    assert_eq!(read(store, "o"), [1; 5000]);
    assert_eq!(kind(store.create("huge", u64::MAX)), Some(Kind::Exhausted));
    assert_eq!(kind(store.open("huge")), Some(Kind::NotFound));
}

fn reads_are_exact(store: &dyn Store) {
    let contents = pattern(5, 10_000);
    write_object(store, "o", &contents).unwrap();
    let reader = store.open("o").unwrap();
    assert_eq!(reader.bytes(), 10_000);
    for (offset, length) in [(0, 10_000), (1, 1), (9_999, 1), (10_000, 0), (4095, 2), (0, 0)] {
        let mut buf = vec![0; length];
        reader.read_at(offset as u64, &mut buf).unwrap();
        assert_eq!(buf, contents[offset..offset + length]);
    }
    for (offset, length) in [(0, 10_001), (9_999, 2), (10_000, 1), (1 << 40, 1), (u64::MAX, 1), (u64::MAX, 2)] {
        assert_eq!(kind(reader.read_at(offset, &mut vec![0; length])), Some(Kind::Corrupt), "{offset} {length}");
    }
    assert_eq!(store.read("o", 10_000).unwrap(), contents);
    assert_eq!(kind(store.read("o", 9_999)), Some(Kind::Invalid));
    for head_bytes in [0, 1, 9_999, 10_000, 10_001, u64::MAX] {
        let (object, head) = store.open_head("o", head_bytes).unwrap();
        assert_eq!(object.bytes(), 10_000);
        assert_eq!(head, contents[..head_bytes.min(10_000) as usize]);
    }
    // Ranges with gaps, one beside the other, overlapping, and none.
    let places: [&[(usize, usize)]; 5] =
        [&[(0, 10), (5000, 3000)], &[(7, 4096), (4103, 9)], &[(10, 5000), (20, 30), (4000, 2000)], &[(9999, 1)], &[]];
    for places in places {
        let mut buffers: Vec<Vec<u8>> = places.iter().map(|&(_, length)| vec![0; length]).collect();
        let mut ranges: Vec<(u64, &mut [u8])> =
            places.iter().zip(&mut buffers).map(|(&(at, _), buffer)| (at as u64, &mut buffer[..])).collect();
        reader.read_ranges(&mut ranges).unwrap();
        for (&(at, length), buffer) in places.iter().zip(&buffers) {
            assert!(*buffer == contents[at..at + length], "{places:?}");
        }
    }
    let (mut first, mut second) = ([0; 10], [0; 10]);
    let mut beyond = [(0, &mut first[..]), (9_995, &mut second[..])];
    assert_eq!(kind(reader.read_ranges(&mut beyond)), Some(Kind::Corrupt));
}

fn put_replaces_whole_objects([store, other]: &[Arc<dyn Store>; 2]) {
    store.put("d/o", b"").unwrap();
    assert_eq!(read(&**other, "d/o"), b"");
    store.put("d/o", &[0; 3000]).unwrap();
    let open = store.open("d/o").unwrap();
    std::thread::scope(|scope| {
        for value in [1, 2] {
            scope.spawn(move || (0..20).for_each(|_| store.put("d/o", &vec![value; 3000 * value as usize]).unwrap()));
        }
        scope.spawn(move || {
            for _ in 0..100 {
                let bytes = read(&**other, "d/o");
                assert_eq!(bytes.len(), 3000 * usize::from(bytes[0]).max(1));
                assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a mixture of two objects");
            }
        });
    });
    let mut buf = vec![1; 3000];
    match open.read_at(0, &mut buf) {
        Ok(()) => assert_eq!(buf, [0; 3000], "an open object does not change"),
        Err(error) => assert_eq!(error.kind, Kind::Corrupt, "it was replaced: {error}"),
    }
    assert_eq!(store.list("d").unwrap().len(), 1);
}

fn second_names_are_as_good_as_the_first([store, other]: &[Arc<dyn Store>; 2], remembered: Duration) {
    let [first, second] = [1, 2].map(|seed| pattern(seed, 70_000));
    write_object(&**store, "dir/first", &first).unwrap();
    let named = |from: &str, name: &str| store.also_named(from, name, first.len() as u64);
    match named("dir/first", "dir/second") {
        Err(error) if error.kind == Kind::Unsupported => return,
        done => done.unwrap(),
    }
    let read = |name: &str| other.read(name, u64::MAX).unwrap();
    assert!(read("dir/first") == first && read("dir/second") == first);
    named("dir/first", "dir/second").unwrap();
    write_object(&**store, "dir/other", &second).unwrap();
    named("dir/other", "dir/second").unwrap();
    std::thread::sleep(remembered);
    assert!(read("dir/second") == second && read("dir/first") == first, "another object has the name");
    named("dir/other", "else/where").unwrap();
    store.delete("dir/other").unwrap();
    assert!(read("dir/second") == second && read("else/where") == second);
    let left: Vec<String> = store.list("dir").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(left, ["first", "second"]);
    assert_eq!(named("dir/other", "dir/third").unwrap_err().kind, Kind::NotFound);
}

fn one_publisher_wins(stores: &[Arc<dyn Store>; 2]) {
    stores[0].can_publish().unwrap();
    for round in 0..20 {
        let name = format!("d/{round}");
        let won: Vec<Result<()>> = std::thread::scope(|scope| {
            let publish = |id: u8| {
                let (store, name) = (&stores[usize::from(id) % 2], &name);
                scope.spawn(move || store.publish(name, &vec![id; 2000]))
            };
            (0..4).map(publish).collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let winners: Vec<u8> = (0..4).filter(|&id| won[usize::from(id)].is_ok()).collect();
        assert_eq!(winners.len(), 1, "{won:?}");
        assert!(won.into_iter().filter_map(kind).all(|kind| kind == Kind::Conflict));
        assert_eq!(read(&*stores[1], &name), vec![winners[0]; 2000]);
    }
    assert_eq!(stores[0].list("d").unwrap().len(), 20, "no temporary objects are left");
    stores[0].delete("d/0").unwrap();
    stores[1].publish("d/0", b"again").unwrap();
}

fn directories_are_listed(store: &dyn Store) {
    for name in ["b/x", "b/y/z", "a", "c-d", "c0", "c/q"] {
        write_object(store, name, name.as_bytes()).unwrap();
    }
    let file = |name: &str, bytes| Entry { name: name.into(), is_dir: false, is_link: false, bytes, modified: None };
    let dir = |name: &str| Entry { name: name.into(), is_dir: true, is_link: false, bytes: 0, modified: None };
    let list = |dir: &str| -> Vec<Entry> {
        let entries = store.list(dir).unwrap();
        assert!(entries.iter().all(|entry| entry.is_dir || entry.modified.is_some()), "an object has a time");
        entries.into_iter().map(|entry| Entry { modified: None, ..entry }).collect()
    };
    assert_eq!(list(""), [file("a", 1), dir("b"), dir("c"), file("c-d", 3), file("c0", 2)]);
    assert_eq!(list("b"), [file("x", 3), dir("y")]);
    assert_eq!(list("b/y"), [file("z", 5)]);
    assert_eq!(kind(store.list("d")), Some(Kind::NotFound));
    let is_no_object = |found: Option<Kind>| matches!(found, Some(Kind::NotFound | Kind::Corrupt));
    assert!(is_no_object(kind(store.open("b"))) && is_no_object(kind(store.size("b"))), "a directory is no object");
}

fn sizes_are_those_of_now([store, other]: &[Arc<dyn Store>; 2]) {
    assert_eq!(kind(store.size("dir/object")), Some(Kind::NotFound));
    for bytes in [0, 1, 5000] {
        let name = format!("dir/{bytes}");
        write_object(&**store, &name, &pattern(1, bytes)).unwrap();
        assert_eq!(other.size(&name), Ok(bytes as u64));
        other.delete(&name).unwrap();
        assert_eq!(kind(store.size(&name)), Some(Kind::NotFound));
    }
}

fn only_what_is_named_is_deleted([store, other]: &[Arc<dyn Store>; 2]) {
    for name in ["step/COMMIT", "step/a/1", "step/a/2", "step/a/b/3", "step/c/4", "step-2/a"] {
        write_object(&**store, name, name.as_bytes()).unwrap();
    }
    let dirs = ["step", "step/a", "step/a/b", "step/c", "step/none"];
    for _ in 0..2 {
        store.delete_all(&["step/a/1", "step/a/b/3", "step/c/4", "step/none/5"], &dirs).unwrap();
        let names =
            |dir: &str| -> Vec<String> { other.list(dir).unwrap().into_iter().map(|entry| entry.name).collect() };
        assert_eq!((names("step"), names("step/a")), (vec!["COMMIT".into(), "a".into()], vec!["2".into()]));
        assert_eq!(kind(other.list("step/c")), Some(Kind::NotFound), "it is empty");
    }
    store.delete_all(&["step/COMMIT", "step/a/2"], &dirs).unwrap();
    assert_eq!(kind(other.list("step")), Some(Kind::NotFound));
    assert_eq!(read(&**other, "step-2/a"), b"step-2/a");
}

fn what_is_deleted_is_gone([store, other]: &[Arc<dyn Store>; 2]) {
    for name in ["step/COMMIT", "step/a/1", "step/a/b/2", "step-2/a", "stepping"] {
        write_object(&**store, name, name.as_bytes()).unwrap();
    }
    for _ in 0..2 {
        store.delete("step/COMMIT").unwrap();
        assert_eq!(kind(other.open("step/COMMIT")), Some(Kind::NotFound));
    }
    for _ in 0..2 {
        store.delete_tree("step").unwrap();
        assert_eq!(kind(other.list("step")), Some(Kind::NotFound));
    }
    let left: BTreeSet<String> = other.list("").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(left, BTreeSet::from(["step-2".into(), "stepping".into()]));
    write_object(&**store, "step/a/1", b"again").unwrap();
    assert_eq!(read(&**other, "step/a/1"), b"again");
}

fn a_store_below_a_store_shares_its_objects(open: &impl Fn(&str) -> Arc<dyn Store>) {
    let (run, step) = (open("run"), open("run/step"));
    write_object(&*step, "model/data", b"bytes").unwrap();
    step.publish("COMMIT", b"done").unwrap();
    assert_eq!(read(&*run, "step/model/data"), b"bytes");
    assert_eq!(run.list("").unwrap().len(), 1);
    assert_eq!(kind(run.publish("step/COMMIT", b"again")), Some(Kind::Conflict));
    assert_eq!(step.url(), crate::join(run.url(), "step"));
}
