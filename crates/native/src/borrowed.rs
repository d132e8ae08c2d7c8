//! What stands in lists and dicts, looked at without counting references: under the stable interface each count is a
//! call, which costs more than looking.

#![allow(unsafe_code)] // a reference that is not counted is vouched for here

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{Borrowed, ffi};

use crate::near;

/// So many items ahead of the one that is looked at, an item of a list is fetched into the cache; if it is a dict, half
/// as many ahead its table, and a quarter as many ahead its values.
const ITEMS_AHEAD: usize = 32;

/// So many entries ahead of the one that is looked at, the key and the value of an entry of a dict are fetched.
const ENTRIES_AHEAD: usize = 16;

/// Gives `take` the items of a list from the front on, as long as it says `true`. Returns how many it took.
///
/// # Safety
/// `take` runs no code of the program and lets no other thread run it: nothing that stands in the list may go.
pub(crate) unsafe fn items_while<'py>(
    list: &Bound<'py, PyList>,
    mut take: impl FnMut(&Bound<'py, PyAny>) -> bool,
) -> usize {
    let count = list.len();
    let mut ring = [std::ptr::null_mut(); ITEMS_AHEAD];
    let mut next = 0; // to be asked of the list: asking costs more than keeping
    for index in 0..count {
        while next < count.min(index + ITEMS_AHEAD) {
            // SAFETY: the list has such an item, and keeps it, as the caller vouches.
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

/// Gives `take` the keys and values of a dict in order, as long as it says `true`. Returns how many it took.
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
            // SAFETY: it is a dict, which does not change meanwhile, as the caller vouches.
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
