//! The present addresses of tensors, from their framework in C, many at once: the exchange table of DLPack 1.3
//! (`DLPackExchangeAPI` in `dlpack.h` of <https://github.com/dmlc/dlpack>).

#![allow(unsafe_code)] // the table is one of function pointers

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

/// Name of the capsule, and of the type's attribute that holds it.
const CAPSULE: &std::ffi::CStr = c"dlpack_exchange_api";
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";

/// The major version whose structures are those below.
const MAJOR: u32 = 1;

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    older: *const c_void,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object: *const c_void,
    managed_tensor_to_py_object: *const c_void,
    /// SAFETY: to be called with an object of the type whose table this is, and the interpreter attached.
    tensor_from_py_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_work_stream: *const c_void,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *const c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    /// Code, bits and lanes.
    dtype: [u8; 4],
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Device, address, type (of its elements and in Python), shape and strides of every tensor, as bytes that are equal
/// exactly while all of these are.
///
/// Raises `TypeError` when a tensor's type has no exchange table of a known version, and what the table's function
/// raises about a tensor that it cannot describe.
pub(crate) fn places_of<'py>(py: Python<'py>, tensors: &[Bound<'py, PyAny>]) -> PyResult<Vec<u8>> {
    let mut out = Vec::with_capacity(tensors.len() * 64);
    let mut known: Vec<(Bound<'py, PyType>, &Exchange)> = Vec::new();
    for tensor in tensors {
        let kind = tensor.get_type_ptr();
        let exchange = match known.iter().find(|(of, _)| of.as_type_ptr() == kind) {
            Some((_, exchange)) => exchange,
            None => {
                let kind = tensor.get_type();
                let exchange = exchange(&kind)?;
                known.push((kind, exchange));
                exchange
            }
        };
        place(py, tensor, exchange, &mut out)?;
    }
    Ok(out)
}

fn exchange<'py>(kind: &Bound<'py, PyType>) -> PyResult<&'py Exchange> {
    let capsule = kind.getattr(ATTRIBUTE)?.cast_into::<PyCapsule>()?;
    let pointer = capsule.pointer_checked(Some(CAPSULE))?.cast::<Exchange>();
    // SAFETY: a capsule of that name holds the table, which lives as long as the process; the version stands in front
    // in every version of it.
    let exchange = unsafe { pointer.as_ref() };
    if exchange.major != MAJOR {
        return Err(PyTypeError::new_err(format!("expected DLPack {MAJOR}, found {}", exchange.major)));
    }
    Ok(exchange)
}

fn place(py: Python<'_>, tensor: &Bound<'_, PyAny>, exchange: &Exchange, out: &mut Vec<u8>) -> PyResult<()> {
    let function = exchange.tensor_from_py_object;
    let function =
        function.ok_or_else(|| PyTypeError::new_err("this DLPack table does not tell tensors' addresses"))?;
    let mut found = std::mem::MaybeUninit::<Tensor>::zeroed();
    // SAFETY: the object is of the type whose table this is, the interpreter is attached, and `found` has room.
    if unsafe { function(tensor.as_ptr().cast(), found.as_mut_ptr()) } != 0 {
        return Err(PyErr::take(py).unwrap_or_else(|| PyTypeError::new_err("DLPack cannot describe a tensor")));
    }
    // SAFETY: the function filled it; and zeros would be valid, too.
    let found = unsafe { found.assume_init() };
    out.extend_from_slice(&(tensor.get_type_ptr() as usize).to_ne_bytes());
    out.extend_from_slice(&(found.data as u64).wrapping_add(found.byte_offset).to_ne_bytes());
    for number in [found.device_type, found.device_id, found.ndim] {
        out.extend_from_slice(&number.to_ne_bytes());
    }
    out.extend_from_slice(&found.dtype);
    for numbers in [found.shape, found.strides] {
        if !numbers.is_null() && found.ndim > 0 {
            // SAFETY: `ndim` numbers that stay while the tensor is not changed, which needs the interpreter.
            let numbers = unsafe { std::slice::from_raw_parts(numbers, found.ndim as usize) };
            for number in numbers {
                out.extend_from_slice(&number.to_ne_bytes());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    static NUMBERS: [i64; 4] = [2, 3, 12, 4];

    /// Describes an object with an attribute `data`; refuses any other.
    ///
    /// # Safety
    /// `object` is a live object, the interpreter is attached, and `out` has room for a tensor.
    unsafe extern "C" fn tell(object: *mut c_void, out: *mut Tensor) -> c_int {
        Python::attach(|py| {
            // SAFETY: the caller's promise.
            let object = unsafe { Bound::from_borrowed_ptr(py, object.cast()) };
            let Ok(data) = object.getattr("data").and_then(|data| data.extract::<usize>()) else {
                PyTypeError::new_err("no data").restore(py);
                return -1;
            };
            let found = Tensor {
                data: data as *const c_void,
                device_type: 1,
                device_id: 0,
                ndim: 2,
                dtype: [2, 32, 1, 0],
                shape: NUMBERS.as_ptr(),
                strides: NUMBERS[2..].as_ptr(),
                byte_offset: 16,
            };
            // SAFETY: there is room for one, as the caller promises.
            unsafe { out.write(found) };
            0
        })
    }

    /// A type with such a table.
    fn kind(py: Python<'_>, major: u32) -> Bound<'_, PyAny> {
        let nothing = std::ptr::null();
        let table = Exchange {
            major,
            minor: 3,
            older: nothing,
            managed_tensor_allocator: nothing,
            managed_tensor_from_py_object: nothing,
            managed_tensor_to_py_object: nothing,
            tensor_from_py_object: Some(tell),
            current_work_stream: nothing,
        };
        let table = std::ptr::NonNull::from(Box::leak(Box::new(table))).cast(); // such tables live as long as a process
        // SAFETY: it is such a table.
        let capsule = unsafe { PyCapsule::new_with_pointer(py, table, CAPSULE) }.unwrap();
        let kind = py.eval(c"type('Tensor', (), {})", None, None).unwrap();
        kind.setattr(ATTRIBUTE, capsule).unwrap();
        kind
    }

    #[test]
    fn places_differ_where_tensors_do() {
        Python::initialize();
        Python::attach(|py| {
            let tensor = |kind: &Bound<'_, PyAny>, data: usize| {
                let tensor = kind.call0().unwrap().unbind();
                tensor.setattr(py, "data", data).unwrap();
                tensor.into_bound(py)
            };
            let (one, other) = (kind(py, MAJOR), kind(py, MAJOR));
            let places = places_of(py, &[tensor(&one, 4096), tensor(&other, 4096), tensor(&one, 4096)]).unwrap();
            let each: Vec<_> = places.chunks(places.len() / 3).collect();
            assert_eq!(each[0], each[2]);
            assert_ne!(each[0], each[1], "the type in Python counts");
            assert_ne!(places_of(py, &[tensor(&one, 8192)]).unwrap(), each[0]);
            assert_eq!(each[0][8..16], (4096u64 + 16).to_ne_bytes());
            assert_eq!(each[0][32..], NUMBERS.map(i64::to_ne_bytes).concat());
        });
    }

    #[test]
    fn what_cannot_be_told_is_an_error() {
        Python::initialize();
        Python::attach(|py| {
            let error = |tensor| places_of(py, &[tensor]).unwrap_err().value(py).to_string();
            assert_eq!(error(kind(py, MAJOR).call0().unwrap()), "no data");
            assert_eq!(error(kind(py, MAJOR + 1).call0().unwrap()), "expected DLPack 1, found 2");
            assert!(error(py.None().into_bound(py)).contains(ATTRIBUTE));
        });
    }
}
