//! Reads items of lists and dicts without counting references: under the stable interface each count is a call, which
//! costs more than the read.

#![allow(unsafe_code)] // uses references that are not counted

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{Borrowed, ffi};

use crate::near;

/// So many items ahead of the one that is looked at, an item of a list is fetched into the cache; if it is a dict, half
/// as many ahead its table, and a quarter as many ahead its values.
const ITEMS_AHEAD: usize = 32;

/// So many entries ahead of the one that is looked at, the key and the value of an entry of a dict are fetched.
const ENTRIES_AHEAD: usize = 16;

/// Gives `take` the items of a list from the front on, while it returns `true`. Returns how many it took.
///
/// # Safety
/// `take` runs no code of the program and lets no other thread run it: no item of the list may be freed.
pub(crate) unsafe fn items_while<'py>(
    list: &Bound<'py, PyList>,
    mut take: impl FnMut(&Bound<'py, PyAny>) -> bool,
) -> usize {
    let count = list.len();
    let mut ring = [std::ptr::null_mut(); ITEMS_AHEAD];
    let mut next = 0; // read from the list once: a further read costs more than keeping it
    for index in 0..count {
        while next < count.min(index + ITEMS_AHEAD) {
            // SAFETY: the list has such an item, and keeps it, as the caller promises.
            let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), next as ffi::Py_ssize_t) };
            near::fetch(item);
            ring[next % ITEMS_AHEAD] = item;
            next += 1;
        }
        if index + ITEMS_AHEAD / 2 < next {
            // SAFETY: it is an item of the list.
            unsafe { near::fetch_table(ring[(index + ITEMS_AHEAD / 2) % ITEMS_AHEAD]) };
        }
        if index + ITEMS_AHEAD / 4 < next {
            // SAFETY: it is an item of the list.
            unsafe { near::fetch_values(ring[(index + ITEMS_AHEAD / 4) % ITEMS_AHEAD]) };
        }
        // SAFETY: as above.
        let item = unsafe { Borrowed::from_ptr(list.py(), ring[index % ITEMS_AHEAD]) };
        if !take(&item) {
            return index;
        }
    }
    count
}

/// [`items_while`] of a tuple.
///
/// # Safety
/// As of [`items_while`].
pub(crate) unsafe fn parts_while<'py>(
    tuple: &Bound<'py, PyTuple>,
    mut take: impl FnMut(&Bound<'py, PyAny>) -> bool,
) -> usize {
    for index in 0..tuple.len() {
        // SAFETY: the tuple has such an item, and keeps it.
        let item = unsafe {
            let item = ffi::PyTuple_GetItem(tuple.as_ptr(), index as ffi::Py_ssize_t);
            Borrowed::from_ptr(tuple.py(), item)
        };
        if !take(&item) {
            return index;
        }
    }
    tuple.len()
}

/// Gives `take` the keys and values of a dict in order, while it returns `true`. Returns how many it took.
///
/// # Safety
/// As of [`items_while`].
pub(crate) unsafe fn entries_while<'py>(
    dict: &Bound<'py, PyDict>,
    mut take: impl FnMut(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> bool,
) -> usize {
    let count = dict.len();
    let mut ring = [(std::ptr::null_mut(), std::ptr::null_mut()); ENTRIES_AHEAD];
    let (mut at, mut next, mut taken) = (0, 0, 0);
    while taken < count {
        while next < count.min(taken + ENTRIES_AHEAD) {
            let (key, value) = &mut ring[next % ENTRIES_AHEAD];
            // SAFETY: it is a dict, which does not change meanwhile, as the caller promises.
            if unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut at, key, value) } == 0 {
                return taken;
            }
            near::fetch(*key);
            near::fetch(*value);
            next += 1;
        }
        let (key, value) = ring[taken % ENTRIES_AHEAD];
        // SAFETY: an entry's key and value are there, and the dict keeps both while `take` looks.
        let (key, value) = unsafe { (Borrowed::from_ptr(dict.py(), key), Borrowed::from_ptr(dict.py(), value)) };
        if !take(&key, &value) {
            break;
        }
        taken += 1;
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shorter than, as long as, and longer than what is fetched ahead.
    const COUNTS: [usize; 9] = [0, 1, 15, 16, 17, 31, 32, 33, 200];

    /// Dicts of one entry each, which nothing else refers to.
    fn dicts(py: Python<'_>, count: usize) -> Vec<Bound<'_, PyDict>> {
        (0..count)
            .map(|number| {
                let dict = PyDict::new(py);
                dict.set_item(number, number).unwrap();
                dict
            })
            .collect()
    }

    /// Calls `walk` with a function to take items, which stops before the item `stop`. Expects that it was given the
    /// `expected` objects from the front on, and that no reference was counted.
    fn expect_walk(
        expected: &[Bound<'_, PyAny>],
        stop: usize,
        walk: impl FnOnce(&mut dyn FnMut(&Bound<'_, PyAny>) -> bool) -> usize,
    ) {
        // SAFETY: they are live objects.
        let count = |object: &Bound<'_, PyAny>| unsafe { ffi::Py_REFCNT(object.as_ptr()) };
        let counts = |objects: &[Bound<'_, PyAny>]| objects.iter().map(count).collect::<Vec<_>>();
        let before = counts(expected);
        let mut met = Vec::new();
        let taken = walk(&mut |item| {
            let is_taken = met.len() < stop;
            if is_taken {
                met.push(item.as_ptr());
            }
            is_taken
        });
        assert_eq!(taken, stop.min(expected.len()));
        assert_eq!(met, expected[..taken].iter().map(|one| one.as_ptr()).collect::<Vec<_>>());
        assert_eq!(counts(expected), before);
    }

    #[test]
    fn items_come_in_order_and_uncounted() {
        Python::initialize();
        Python::attach(|py| {
            for count in COUNTS {
                let items: Vec<_> = dicts(py, count).into_iter().map(Bound::into_any).collect();
                let (list, tuple) = (PyList::new(py, &items).unwrap(), PyTuple::new(py, &items).unwrap());
                for stop in [0, 1, count / 2, count] {
                    // SAFETY: the functions note addresses.
                    expect_walk(&items, stop, |take| unsafe { items_while(&list, take) });
                    // SAFETY: as above.
                    expect_walk(&items, stop, |take| unsafe { parts_while(&tuple, take) });
                }
            }
        });
    }

    #[test]
    fn entries_come_in_order_and_uncounted() {
        Python::initialize();
        Python::attach(|py| {
            for count in COUNTS {
                let values: Vec<_> = dicts(py, 2 * count).into_iter().map(Bound::into_any).collect();
                let dict = PyDict::new(py);
                values.iter().enumerate().for_each(|(key, value)| dict.set_item(key, value).unwrap());
                // Holes in the dict's table.
                (0..count).for_each(|key| dict.del_item(2 * key).unwrap());
                let left: Vec<_> = values.into_iter().skip(1).step_by(2).collect();
                for stop in [0, 1, count / 2, count] {
                    let mut keys = Vec::new();
                    expect_walk(&left, stop, |take| {
                        let both = |key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>| {
                            keys.push(key.extract::<usize>().unwrap());
                            take(value)
                        };
                        // SAFETY: reading an int runs no code of the program.
                        unsafe { entries_while(&dict, both) }
                    });
                    let asked = (stop + 1).min(count); // the one at which it stopped, too
                    assert_eq!(keys, (0..asked).map(|number| 2 * number + 1).collect::<Vec<_>>());
                }
            }
        });
    }
}
