//! Prefetches the memory that a walk through Python's objects will read.
//!
//! By the next save the training has evicted the program's objects from the caches. A walk waits for each of them in
//! turn; prefetches do not wait. Addresses are guesses from the layout of CPython's and extension types' objects: a
//! prefetch from an invalid address does nothing.

#![allow(unsafe_code)] // looks into objects

use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{ffi, intern};

const LINE_BYTES: usize = 64;

/// Bytes of a dict's table of keys, and of what an object of an extension points to.
const LINES_BEHIND: usize = 4;

/// Of an object's own fields the first one that may be a pointer: behind the count of references and the type.
const FIELD_AT: usize = 16;

/// Of a dict's fields the one that points to its table: behind two more numbers.
const TABLE_AT: usize = 32;

/// Addresses, a line of the cache each.
#[derive(Default)]
pub(crate) struct Near(Vec<usize>);

impl Near {
    /// Adds an object, and what it points to.
    pub(crate) fn add(&mut self, object: &Bound<'_, PyAny>) {
        let address = object.as_ptr() as usize;
        self.0.push(address);
        let field = if object.is_instance_of::<PyDict>() { TABLE_AT } else { FIELD_AT };
        let bytes = object.get_type().getattr(intern!(object.py(), "__basicsize__")).and_then(|bytes| bytes.extract());
        if bytes.is_ok_and(|bytes: usize| bytes >= field + size_of::<usize>()) {
            // SAFETY: the object is longer than that. Its field is taken as it is, a number, never followed.
            let behind = unsafe { std::ptr::read_unaligned((address + field) as *const usize) };
            self.0.extend((0..LINES_BEHIND).map(|line| behind.wrapping_add(line * LINE_BYTES)));
        }
    }

    /// Begins to fetch everything.
    pub(crate) fn fetch(&self) {
        self.0.iter().for_each(|&address| fetch(address as *const ffi::PyObject));
    }
}

/// Begins to fetch an object.
#[inline]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn fetch(object: *const ffi::PyObject) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the instruction, and no address makes it fail.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(object.cast());
    }
}

/// Begins to fetch the front of a dict's table of keys; nothing of another object.
///
/// # Safety
/// It is a live object.
#[inline]
pub(crate) unsafe fn fetch_table(object: *mut ffi::PyObject) {
    // SAFETY: a dict is longer than that. Its field is taken as it is, a number, never followed.
    let table = unsafe {
        if ffi::Py_TYPE(object) != &raw mut ffi::PyDict_Type {
            return;
        }
        std::ptr::read_unaligned(object.byte_add(TABLE_AT).cast::<usize>())
    };
    fetch(table as *const ffi::PyObject);
    fetch(table.wrapping_add(LINE_BYTES) as *const ffi::PyObject);
}

/// Begins to fetch the first values of a dict; nothing of another object.
///
/// # Safety
/// It is a live object, and nothing changes it meanwhile.
#[inline]
pub(crate) unsafe fn fetch_values(object: *mut ffi::PyObject) {
    // SAFETY: the caller's promise.
    if unsafe { ffi::Py_TYPE(object) } != &raw mut ffi::PyDict_Type {
        return;
    }
    let (mut at, mut value) = (0, std::ptr::null_mut());
    for _ in 0..4 {
        // SAFETY: it is a dict, which does not change meanwhile.
        if unsafe { ffi::PyDict_Next(object, &mut at, std::ptr::null_mut(), &mut value) } == 0 {
            return;
        }
        fetch(value);
        fetch(value.wrapping_byte_add(LINE_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_object_points_to_is_fetched_if_the_object_is_long_enough() {
        Python::initialize();
        Python::attach(|py| {
            let object = |code| py.eval(code, None, None).unwrap();
            let bare = object(c"object()");
            let dict = object(c"{1: 2}");
            let with_field = object(c"[1]");
            let mut near = Near::default();
            near.add(&bare);
            assert_eq!(near.0, [bare.as_ptr() as usize], "nothing stands behind its type");
            for (object, field) in [(&dict, TABLE_AT), (&with_field, FIELD_AT)] {
                let mut near = Near::default();
                near.add(object);
                let address = object.as_ptr() as usize;
                // SAFETY: dicts and lists are longer than that.
                let behind = unsafe { *((address + field) as *const usize) };
                let lines = (0..LINES_BEHIND).map(|line| behind + line * LINE_BYTES);
                assert_eq!(near.0, std::iter::once(address).chain(lines).collect::<Vec<_>>());
                near.fetch();
            }
        });
    }

    #[test]
    fn an_address_that_leads_nowhere_does_nothing() {
        Near(vec![0, 1, LINE_BYTES, usize::MAX, usize::MAX - LINE_BYTES, 1 << 63]).fetch();
    }

    #[test]
    fn only_dicts_have_a_table_to_fetch() {
        Python::initialize();
        Python::attach(|py| {
            for code in [c"{}", c"{n: [n] for n in range(9)}", c"[]", c"None", c"1.5", c"type"] {
                let object = py.eval(code, None, None).unwrap();
                // SAFETY: it is a live object.
                let count = || unsafe { ffi::Py_REFCNT(object.as_ptr()) };
                let before = count();
                // SAFETY: it is a live object that nothing else knows.
                unsafe { fetch_table(object.as_ptr()) };
                // SAFETY: as above.
                unsafe { fetch_values(object.as_ptr()) };
                assert_eq!(count(), before);
            }
        });
    }
}
