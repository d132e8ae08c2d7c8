//! The present addresses of tensors, from their framework in C, many at once: the exchange table of DLPack 1.3
//! (`DLPackExchangeAPI` in `dlpack.h` of <https://github.com/dmlc/dlpack>). For types without a table a function of the
//! framework's adapter returns the same.

#![allow(unsafe_code)] // the table is one of function pointers

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use shardfast_multistep::Dtype;

/// Name of the capsule, and of the type's attribute that holds it.
const CAPSULE: &std::ffi::CStr = c"dlpack_exchange_api";
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";

/// The major version whose structures are those below.
const MAJOR: u32 = 1;

/// Codes of element types, `DLDataTypeCode`: floating point, `bfloat16`, complex.
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;

/// Kinds of devices, `DLDeviceType`.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// Layout of `DLPackExchangeAPI`.
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

/// Layout of `DLTensor`.
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

/// A description whose arrays belong to a tensor, and stay while that is not changed, which needs the interpreter.
struct Described<'a> {
    of: Tensor,
    tensor: PhantomData<&'a ()>,
}

impl std::ops::Deref for Described<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.of
    }
}

impl Described<'_> {
    fn address(&self) -> u64 {
        (self.data as u64).wrapping_add(self.byte_offset)
    }

    /// Returns each as long as the tensor has axes, or empty if the table gives none.
    fn shape_and_strides(&self) -> [&[i64]; 2] {
        [self.shape, self.strides].map(|numbers| match numbers.is_null() || self.ndim <= 0 {
            true => &[][..],
            // SAFETY: `ndim` numbers of the tensor's, which is borrowed.
            false => unsafe { std::slice::from_raw_parts(numbers, self.ndim as usize) },
        })
    }
}

/// Source of the places of a type's tensors.
#[derive(Clone, Copy)]
enum Origin<'a> {
    Table(&'a Exchange),
    Function(&'a Py<PyAny>),
}

/// The places of tensors: the type in Python, device, address, element type, shape and strides of each.
#[derive(Default)]
pub(crate) struct Places {
    /// Type of each tensor, and the table's result for it.
    bytes: Vec<u8>,
    /// Results of the function, in order.
    objects: Vec<Py<PyAny>>,
}

impl Places {
    /// Adds tensors. `function` returns the place of a tensor whose type has no exchange table of a known version. It
    /// is also called for tensors that may be conjugate or negative views, since a table does not distinguish these.
    ///
    /// Raises `TypeError` or `AttributeError` for a tensor without table where `function` is missing, and what a table
    /// or `function` raises about a tensor that it cannot describe.
    pub(crate) fn add<'py>(&mut self, tensors: &[Bound<'py, PyAny>], function: Option<&Py<PyAny>>) -> PyResult<()> {
        let mut known: Vec<(Bound<'py, PyType>, Origin<'_>)> = Vec::new();
        self.bytes.reserve(tensors.len() * 64);
        for tensor in tensors {
            let (py, kind) = (tensor.py(), tensor.get_type_ptr());
            let origin = match known.iter().find(|(of, _)| of.as_type_ptr() == kind) {
                Some((_, origin)) => *origin,
                None => {
                    let kind = tensor.get_type();
                    let origin = match exchange(&kind) {
                        Ok(exchange) => Origin::Table(exchange),
                        Err(error) => Origin::Function(function.ok_or(error)?),
                    };
                    known.push((kind, origin));
                    origin
                }
            };
            self.bytes.extend_from_slice(&(kind as usize).to_ne_bytes());
            let function = match origin {
                Origin::Table(exchange) => {
                    let may_be_view = place(tensor, exchange, &mut self.bytes)?;
                    function.filter(|_| may_be_view)
                }
                Origin::Function(function) => Some(function),
            };
            if let Some(function) = function {
                self.objects.push(function.call1(py, (tensor,))?);
            }
        }
        Ok(())
    }

    /// Returns whether all places are equal.
    pub(crate) fn is_equal(&self, py: Python<'_>, other: &Places) -> PyResult<bool> {
        if self.bytes != other.bytes || self.objects.len() != other.objects.len() {
            return Ok(false);
        }
        for (one, other) in self.objects.iter().zip(&other.objects) {
            if !one.bind(py).eq(other)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A tensor whose elements lie in one run, in row-major order.
pub(crate) struct Dense {
    pub(crate) address: usize,
    pub(crate) numel: u64,
    pub(crate) dtype: Dtype,
    /// The CUDA device that has it; `None` for the host.
    pub(crate) device: Option<u32>,
}

/// Looks up dense tensors, most of which have the same type.
#[derive(Default)]
pub(crate) struct Lookup<'py>(Option<(Bound<'py, PyType>, Option<&'py Exchange>)>);

impl<'py> Lookup<'py> {
    /// Returns the place of the tensor; `None` if its type has no exchange table of a known version, or if the table
    /// does not describe a dense tensor of a `Dtype` on a CPU or a CUDA device.
    pub(crate) fn dense(&mut self, tensor: &Bound<'py, PyAny>) -> Option<Dense> {
        let exchange = match &self.0 {
            Some((kind, exchange)) if kind.as_type_ptr() == tensor.get_type_ptr() => *exchange,
            _ => {
                let kind = tensor.get_type();
                let exchange = exchange(&kind).ok();
                self.0 = Some((kind, exchange));
                exchange
            }
        };
        let found = describe(tensor, exchange?).ok()?;
        let [shape, strides] = found.shape_and_strides();
        let mut numel = 1;
        for (axis, &length) in shape.iter().enumerate().rev() {
            if length > 1 && strides.get(axis).is_some_and(|&stride| stride != numel) {
                return None;
            }
            numel *= length;
        }
        let dtype = match found.dtype {
            [FLOAT, 32, 1, 0] => Dtype::F32,
            [BFLOAT, 16, 1, 0] => Dtype::Bf16,
            _ => return None,
        };
        let device = match found.device_type {
            CPU => None,
            CUDA => Some(found.device_id as u32),
            _ => return None,
        };
        Some(Dense { address: found.address() as usize, numel: numel as u64, dtype, device })
    }
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

/// Returns the table's result for a tensor of its type.
fn describe<'a>(tensor: &'a Bound<'_, PyAny>, exchange: &Exchange) -> PyResult<Described<'a>> {
    let function = exchange.tensor_from_py_object;
    let function =
        function.ok_or_else(|| PyTypeError::new_err("this DLPack table does not describe tensors' addresses"))?;
    let mut found = std::mem::MaybeUninit::<Tensor>::zeroed();
    // SAFETY: the object is of the type whose table this is, the interpreter is attached, and `found` has room.
    if unsafe { function(tensor.as_ptr().cast(), found.as_mut_ptr()) } != 0 {
        let unknown = || PyTypeError::new_err("DLPack cannot describe a tensor");
        return Err(PyErr::take(tensor.py()).unwrap_or_else(unknown));
    }
    // SAFETY: the function filled it; and zeros would be valid, too.
    Ok(Described { of: unsafe { found.assume_init() }, tensor: PhantomData })
}

/// Appends what the table returns, and whether the tensor may be a conjugate view, which is complex, or a negative one:
/// the imaginary parts of a conjugate view, whose strides are even.
fn place(tensor: &Bound<'_, PyAny>, exchange: &Exchange, out: &mut Vec<u8>) -> PyResult<bool> {
    let found = describe(tensor, exchange)?;
    out.extend_from_slice(&found.address().to_ne_bytes());
    for number in [found.device_type, found.device_id, found.ndim] {
        out.extend_from_slice(&number.to_ne_bytes());
    }
    out.extend_from_slice(&found.dtype);
    let both = found.shape_and_strides();
    both.iter().copied().flatten().for_each(|number| out.extend_from_slice(&number.to_ne_bytes()));
    let [shape, strides] = both;
    let shortest = shape.iter().zip(strides).filter(|(length, _)| **length > 1).map(|(_, stride)| *stride).min();
    Ok(found.dtype[0] == COMPLEX || shortest.is_some_and(|stride| stride != 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shape 2 × 3, its strides by rows, and by columns.
    static NUMBERS: [i64; 6] = [2, 3, 3, 1, 1, 2];

    fn places_of(tensors: &[Bound<'_, PyAny>], function: Option<&Py<PyAny>>) -> PyResult<Places> {
        let mut places = Places::default();
        places.add(tensors, function)?;
        Ok(places)
    }

    /// Describes an object with an attribute `data`, with `code` if its type is not float, and with `by_columns` if its
    /// elements lie so; refuses any other.
    ///
    /// # Safety
    /// `object` is a live object, the interpreter is attached, and `out` has room for a tensor.
    unsafe extern "C" fn describe(object: *mut c_void, out: *mut Tensor) -> c_int {
        Python::attach(|py| {
            // SAFETY: the caller's promise.
            let object = unsafe { Bound::from_borrowed_ptr(py, object.cast()) };
            let Ok(data) = object.getattr("data").and_then(|data| data.extract::<usize>()) else {
                PyTypeError::new_err("no data").restore(py);
                return -1;
            };
            let code = object.getattr("code").and_then(|code| code.extract()).unwrap_or(2);
            let strides = if object.hasattr("by_columns").unwrap_or(false) { 4 } else { 2 };
            let found = Tensor {
                data: data as *const c_void,
                device_type: 1,
                device_id: 0,
                ndim: 2,
                dtype: [code, 32, 1, 0],
                shape: NUMBERS.as_ptr(),
                strides: NUMBERS[strides..].as_ptr(),
                byte_offset: 16,
            };
            // SAFETY: there is room for one, as the caller promises.
            unsafe { out.write(found) };
            0
        })
    }

    /// Makes a type with such a table.
    fn kind(py: Python<'_>, major: u32) -> Bound<'_, PyAny> {
        let nothing = std::ptr::null();
        let table = Exchange {
            major,
            minor: 3,
            older: nothing,
            managed_tensor_allocator: nothing,
            managed_tensor_from_py_object: nothing,
            managed_tensor_to_py_object: nothing,
            tensor_from_py_object: Some(describe),
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
            let places = places_of(&[tensor(&one, 4096), tensor(&other, 4096), tensor(&one, 4096)], None).unwrap();
            let each: Vec<_> = places.bytes.chunks(places.bytes.len() / 3).collect();
            assert_eq!(each[0], each[2]);
            assert_ne!(each[0], each[1], "the type in Python counts");
            assert_ne!(places_of(&[tensor(&one, 8192)], None).unwrap().bytes, each[0]);
            assert_eq!(each[0][8..16], (4096u64 + 16).to_ne_bytes());
            assert_eq!(each[0][32..], NUMBERS[..4].iter().flat_map(|one| one.to_ne_bytes()).collect::<Vec<_>>());
            assert!(places.objects.is_empty());
        });
    }

    #[test]
    fn the_function_serves_types_without_a_table() {
        Python::initialize();
        Python::attach(|py| {
            let function = py.eval(c"lambda tensor: [tensor.data]", None, None).unwrap().unbind();
            let tensor = |kind: &Bound<'_, PyAny>, data: usize| {
                let tensor = kind.call0().unwrap().unbind();
                tensor.setattr(py, "data", data).unwrap();
                tensor.into_bound(py)
            };
            let bare = || py.eval(c"type('Tensor', (), {})", None, None).unwrap();
            let (one, other, newer, known) = (bare(), bare(), kind(py, MAJOR + 1), kind(py, MAJOR));
            let places = |kinds: [&Bound<'_, PyAny>; 3], data: usize| {
                places_of(&[tensor(kinds[0], data), tensor(kinds[1], 4096), tensor(kinds[2], 4096)], Some(&function))
                    .unwrap()
            };
            let first = places([&one, &newer, &known], 4096);
            assert_eq!(first.objects.len(), 2, "a table of a known version is used");
            assert!(first.is_equal(py, &places([&one, &newer, &known], 4096)).unwrap());
            assert!(!first.is_equal(py, &places([&one, &newer, &known], 8192)).unwrap());
            assert!(!first.is_equal(py, &places([&other, &newer, &known], 4096)).unwrap(), "the type in Python counts");
            assert!(!first.is_equal(py, &places([&one, &newer, &one], 4096)).unwrap());
            let complex = tensor(&known, 4096);
            complex.setattr("code", COMPLEX).unwrap();
            let views = places_of(&[complex, tensor(&known, 4096)], Some(&function)).unwrap();
            assert_eq!(views.objects.len(), 1, "a complex tensor may be a conjugate view");
            let error = places_of(&[one.call0().unwrap()], Some(&function)).err().unwrap();
            assert!(error.value(py).to_string().contains("data"), "what is raised is passed on: {error}");
        });
    }

    #[test]
    fn a_tensor_in_one_run_is_found_by_its_table() {
        Python::initialize();
        Python::attach(|py| {
            let known = kind(py, MAJOR);
            let tensor = |attributes: &[(&str, usize)]| {
                let tensor = known.call0().unwrap();
                attributes.iter().for_each(|(name, value)| tensor.setattr(*name, value).unwrap());
                tensor
            };
            let mut lookup = Lookup::default();
            let Dense { address, numel, dtype, device } = lookup.dense(&tensor(&[("data", 4096)])).unwrap();
            assert_eq!((address, numel, dtype, device), (4096 + 16, 6, Dtype::F32, None));
            assert!(lookup.dense(&tensor(&[("data", 4096), ("by_columns", 1)])).is_none(), "not in one run");
            assert!(lookup.dense(&tensor(&[("data", 4096), ("code", 4)])).is_none(), "bfloat of 32 bits");
            assert!(lookup.dense(&tensor(&[])).is_none(), "the table raises");
            assert!(!PyErr::occurred(py));
            let other = py.eval(c"type('Tensor', (), {})()", None, None).unwrap();
            assert!(lookup.dense(&other).is_none(), "it has no table");
            assert!(lookup.dense(&kind(py, MAJOR + 1).call0().unwrap()).is_none(), "its table is not known");
        });
    }

    #[test]
    fn what_cannot_be_described_is_an_error() {
        Python::initialize();
        Python::attach(|py| {
            let error = |tensor| places_of(&[tensor], None).err().unwrap().value(py).to_string();
            assert_eq!(error(kind(py, MAJOR).call0().unwrap()), "no data");
            assert_eq!(error(kind(py, MAJOR + 1).call0().unwrap()), "expected DLPack 1, found 2");
            assert!(error(py.None().into_bound(py)).contains(ATTRIBUTE));
        });
    }
}
