//! Modules of kernels by their handles, and launches.

use std::ffi::CString;
use std::sync::Arc;

use crate::answer::{self, Answer, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NOT_FOUND, get, put};
use crate::ptx::Kernel;
use crate::state::{current, state};
use crate::stream;

/// Loads a module. The text of the error says what was refused.
pub(crate) fn load(place: usize, text: &str) -> Answer {
    let device = current()?;
    let kernel = Kernel::parse(text).map_err(|why| {
        answer::refuse(CString::new(format!("a PTX JIT compilation failed: {why}")).unwrap_or_default());
        INVALID_PTX
    })?;
    // A driver may wait for the device's work before it changes what code the device has.
    stream::synchronize_all(device)?;
    let mut state = state();
    let handle = state.handle();
    state.kernels.modules.insert((handle, device), Arc::new(kernel));
    put(place, handle)
}

pub(crate) fn unload(module: usize) -> Answer {
    let device = current()?;
    let kernels = &mut state().kernels;
    kernels.modules.remove(&(module, device)).ok_or(INVALID_HANDLE)?;
    kernels.functions.retain(|(_, of), (from, _)| (*from, *of) != (module, device));
    Ok(())
}

pub(crate) fn function(place: usize, module: usize, name: &str) -> Answer {
    let (device, mut state) = (current()?, state());
    let kernel = Arc::clone(state.kernels.modules.get(&(module, device)).ok_or(INVALID_HANDLE)?);
    if kernel.name != name {
        return Err(NOT_FOUND);
    }
    let handle = state.handle();
    state.kernels.functions.insert((handle, device), (module, kernel));
    put(place, handle)
}

/// How a kernel is launched.
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    /// Where the addresses of the arguments are.
    pub(crate) arguments: usize,
    pub(crate) extra: usize,
}

/// Gives a stream a kernel to run. The arguments are read at once.
pub(crate) fn launch(function: usize, launch: &Launch, handle: usize) -> Answer {
    const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 1];
    const THREADS_MAX: u32 = 1024;
    let (grid, threads) = (launch.grid, launch.block[0]);
    let fits = grid.iter().zip(GRID_MAX).all(|(&blocks, most)| (1..=most).contains(&blocks));
    let is_plain = launch.block[1..] == [1, 1] && launch.shared_bytes == 0 && launch.extra == 0;
    if !fits || !is_plain || !(1..=THREADS_MAX).contains(&threads) {
        return Err(INVALID_VALUE);
    }
    let key = (function, current()?);
    let kernel = state().kernels.functions.get(&key).map(|(_, kernel)| Arc::clone(kernel)).ok_or(INVALID_HANDLE)?;
    let argument = |number: usize| get::<usize>(launch.arguments + number * size_of::<usize>()).and_then(get::<u64>);
    let arguments: Vec<u64> = (0..kernel.parameters.len()).map(argument).collect::<Result<_, _>>()?;
    stream::begin(handle, move |state| {
        if !state.kernels.functions.contains_key(&key) {
            return Err(ILLEGAL_ADDRESS);
        }
        kernel.run([grid[0], grid[1]], threads, &arguments, &mut state.memory)
    })
}
