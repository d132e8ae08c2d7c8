//! CUDA devices: sources and destinations of tensors' bytes.
//!
//! The driver is loaded when a device is first asked for, so one program serves machines with and without it. Copies
//! run on streams of our own. Each save or load has one per device, a [`CopyStream`], made on the thread that calls
//! `save` or `load`; its copies begin after all work that was submitted before to the given stream (the training's). So
//! no stale byte is staged, nothing is overwritten that is still being read, and saves do not wait for each other. The
//! host waits for copies, asleep, before it reads a slot or returns it. So when a save is staged or a load has
//! returned, no copy is under way, and the training's stream never has to wait for one of ours.

mod device;
mod driver;
mod memory;
mod rows;

pub use device::Moment;
pub use device::{CopyStream, Device, Devices, ForeignStream, PageLock};
pub use memory::{DeviceMemory, DeviceSink};
