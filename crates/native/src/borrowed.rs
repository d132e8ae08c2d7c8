//! What stands in lists and dicts, looked at without counting references: under the stable interface each count is a
//! call, which costs more than looking.

#![allow(unsafe_code)] // a reference that is not counted is vouched for here

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{Borrowed, ffi};

/// Gives `take` the items of a list from the front on, as long as it says `true`. Returns how many it took.
///
/// # Safety
/// `take` runs no code of the program and lets no other thread run it: nothing that stands in the list may go.
pub(crate) unsafe fn items_while<'py>(
    list: &Bound<'py, PyList>,
    mut take: impl FnMut(&Bound<'py, PyAny>) -> bool,
) -> usize {
    for index in 0..list.len() {
        // SAFETY: the list has such an item, and keeps it while `take` looks, as the caller vouches.
        let item = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
            Borrowed::from_ptr(list.py(), item)
        };
        if !take(&item) {
            return index;
        }
    }
    list.len()
}

/// Gives `take` the keys and values of a dict in order, as long as it says `true`. Returns how many it took.
///
/// # Safety
/// As of [`items_while`].
pub(crate) unsafe fn entries_while<'py>(
    dict: &Bound<'py, PyDict>,
    mut take: impl FnMut(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> bool,
) -> usize {
    let (mut at, mut taken) = (0, 0);
    let (mut key, mut value) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: it is a dict, which does not change meanwhile, as the caller vouches.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut at, &mut key, &mut value) } != 0 {
        // SAFETY: an entry's key and value are there, and the dict keeps both while `take` looks.
        let (key, value) = unsafe { (Borrowed::from_ptr(dict.py(), key), Borrowed::from_ptr(dict.py(), value)) };
        if !take(&key, &value) {
            break;
        }
        taken += 1;
    }
    taken
}
