//! Tests of encodings and of what is remembered while one is made.

use super::*;

/// Returns the encoding of a value given as Python code.
fn encoded(py: Python<'_>, code: &std::ffi::CStr) -> PyResult<Arc<Encoded>> {
    let value = py.eval(code, None, None)?;
    Ok(Value::new(&value, None, "here")?.encoded)
}

fn whole(encoded: &Encoded) -> Vec<u8> {
    encoded.pieces.iter().map(Piece::as_slice).collect::<Vec<_>>().concat()
}

#[test]
fn any_range_of_an_encoding_is_filled_from_its_pieces() {
    Python::initialize();
    let encoded = Python::attach(|py| encoded(py, c"['a', b'b' * 5000, 3, b'c' * 4096, {}]")).unwrap();
    assert_eq!(encoded.pieces.len(), 5, "two are held and not copied");
    let whole = whole(&encoded);
    assert_eq!(encoded.bytes(), whole.len() as u64);
    for at in [0, 1, 3, 100, 5000, 5008, 5020, whole.len() - 1, whole.len()] {
        for end in [at, at + 1, at + 4, 5005, 5030, whole.len()] {
            if let Some(expected) = whole.get(at..end) {
                let mut out = vec![0; expected.len()];
                encoded.fill(at as u64, &mut out, &mut Fences::default()).unwrap();
                assert_eq!(out, expected, "{at}..{end}");
            }
        }
    }
}

#[test]
fn an_attempt_that_fails_leaves_no_trace() {
    Python::initialize();
    Python::attach(|py| {
        // An int that is too large is encoded in another way, after what stands around it was tried.
        let code = c"[1, {'k': [b'x' * 5000, (2, {'k': 10**30})], 'l': 'm'}]";
        let encoded = whole(&encoded(py, code).unwrap());
        let back = decode(py, &encoded).unwrap();
        let expected = c"[1, {'k': [b'x' * 5000, None], 'l': 'm'}]";
        let expected = py.eval(expected, None, None).unwrap();
        let tuple = back.get_item(1).unwrap().get_item("k").unwrap();
        let tagged = tuple.get_item(1).unwrap().cast_into::<Tagged>().unwrap();
        let inner = tagged.get().value(py);
        assert!(inner.bind(py).eq(py.eval(c"[2, {'k': 10**30}]", None, None).unwrap()).unwrap());
        tuple.set_item(1, py.None()).unwrap();
        assert!(back.eq(expected).unwrap());
    });
}

#[test]
fn keys_are_known_for_a_stretch_and_by_their_addresses() {
    let mut keys = Keys::new();
    keys.put(0x1000, b"one");
    assert_eq!(keys.get(0x1000).map(|key| &key.encoded[..key.bytes]), Some(&b"one"[..]));
    let same_place = 0x1000 + 64 * 16;
    assert!(keys.get(same_place).is_none());
    keys.put(same_place, b"two");
    assert!(keys.get(0x1000).is_none());
    keys.put(0x1010, &[0; 33]);
    assert!(keys.get(0x1010).is_none(), "too long");
    keys.stretch += 1;
    assert!(keys.get(same_place).is_none(), "something may have been freed");
}
