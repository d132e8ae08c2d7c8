//! Where tensors lie now, asked of their framework in C, many at once: the exchange table of DLPack 1.3
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
/// raises about a tensor that cannot be told.
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
    let function = exchange.tensor_from_py_object.ok_or_else(|| PyTypeError::new_err("this DLPack tells no places"))?;
    let mut told = std::mem::MaybeUninit::<Tensor>::zeroed();
    // SAFETY: the object is of the type whose table this is, the interpreter is attached, and `told` has room.
    if unsafe { function(tensor.as_ptr().cast(), told.as_mut_ptr()) } != 0 {
        return Err(PyErr::take(py).unwrap_or_else(|| PyTypeError::new_err("a tensor that DLPack cannot tell")));
    }
    // SAFETY: the function filled it; and zeros would be valid, too.
    let told = unsafe { told.assume_init() };
    out.extend_from_slice(&(tensor.get_type_ptr() as usize).to_ne_bytes());
    out.extend_from_slice(&(told.data as u64).wrapping_add(told.byte_offset).to_ne_bytes());
    for number in [told.device_type, told.device_id, told.ndim] {
        out.extend_from_slice(&number.to_ne_bytes());
    }
    out.extend_from_slice(&told.dtype);
    for numbers in [told.shape, told.strides] {
        if !numbers.is_null() && told.ndim > 0 {
            // SAFETY: `ndim` numbers that stay while the tensor is not changed, which needs the interpreter.
            let numbers = unsafe { std::slice::from_raw_parts(numbers, told.ndim as usize) };
            for number in numbers {
                out.extend_from_slice(&number.to_ne_bytes());
            }
        }
    }
    Ok(())
}
