//! What the driver's functions answer: a code, and results where the caller wants them.

use std::ffi::{CStr, CString};
use std::sync::{Mutex, PoisonError};

/// A `CUresult`.
pub(crate) type Code = u32;

/// What a function says.
pub(crate) type Answer = Result<(), Code>;

/// Name, number and text of the results that this driver gives by itself.
const RESULTS: [(&CStr, Code, &CStr); 17] = [
    (c"CUDA_ERROR_INVALID_VALUE", INVALID_VALUE, c"invalid argument"),
    (c"CUDA_ERROR_OUT_OF_MEMORY", 2, c"out of memory"),
    (c"CUDA_ERROR_NOT_INITIALIZED", NOT_INITIALIZED, c"initialization error"),
    (c"CUDA_ERROR_INVALID_CONTEXT", INVALID_CONTEXT, c"invalid device context"),
    (c"CUDA_ERROR_ECC_UNCORRECTABLE", 214, c"uncorrectable ECC error encountered"),
    (c"CUDA_ERROR_INVALID_PTX", INVALID_PTX, c"a PTX JIT compilation failed"),
    (c"CUDA_ERROR_INVALID_HANDLE", INVALID_HANDLE, c"invalid resource handle"),
    (c"CUDA_ERROR_NOT_READY", NOT_READY, c"device not ready"),
    (c"CUDA_ERROR_NOT_FOUND", NOT_FOUND, c"named symbol not found"),
    (c"CUDA_ERROR_ILLEGAL_ADDRESS", ILLEGAL_ADDRESS, c"an illegal memory access was encountered"),
    (c"CUDA_ERROR_LAUNCH_TIMEOUT", LAUNCH_TIMEOUT, c"the launch timed out and was terminated"),
    (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", ALREADY_REGISTERED, c"part or all of the memory is registered"),
    (c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", NOT_REGISTERED, c"pointer does not correspond to registered memory"),
    (c"CUDA_ERROR_MISALIGNED_ADDRESS", MISALIGNED_ADDRESS, c"misaligned address"),
    (c"CUDA_ERROR_LAUNCH_FAILED", 719, c"unspecified launch failure"),
    (c"CUDA_ERROR_NOT_PERMITTED", 800, c"operation not permitted"),
    (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", CAPTURE_UNSUPPORTED, c"not permitted when stream is capturing"),
];

pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_PTX: Code = 218;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const LAUNCH_TIMEOUT: Code = 702;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;
pub(crate) const MISALIGNED_ADDRESS: Code = 716;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;

/// Why the last text of a module was refused.
static REFUSAL: Mutex<Option<&'static CStr>> = Mutex::new(None);

/// Says why a module's text was refused, as the text of `INVALID_PTX`. It is never freed, as all texts of errors.
pub(crate) fn refuse(why: CString) {
    *REFUSAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::leak(why.into_boxed_c_str()));
}

/// Writes a result where the caller wants it.
#[allow(unsafe_code)]
pub(crate) fn put<T>(address: usize, value: T) -> Answer {
    if address == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the driver's functions are given places for results of these types.
    unsafe { (address as *mut T).write(value) };
    Ok(())
}

/// Reads an argument that is given by its address.
#[allow(unsafe_code)]
pub(crate) fn get<T: std::marker::Copy>(address: usize) -> Result<T, Code> {
    // SAFETY: the driver's functions are given arguments of these types.
    if address == 0 { Err(INVALID_VALUE) } else { Ok(unsafe { (address as *const T).read() }) }
}

pub(crate) fn error_name(code: Code, name: usize) -> Answer {
    let found = RESULTS.iter().find(|(_, number, _)| *number == code).ok_or(INVALID_VALUE)?;
    put(name, found.0.as_ptr() as usize)
}

pub(crate) fn error_text(code: Code, text: usize) -> Answer {
    let found = RESULTS.iter().find(|(_, number, _)| *number == code).ok_or(INVALID_VALUE)?;
    let refusal = *REFUSAL.lock().unwrap_or_else(PoisonError::into_inner);
    put(text, refusal.filter(|_| code == INVALID_PTX).unwrap_or(found.2).as_ptr() as usize)
}
