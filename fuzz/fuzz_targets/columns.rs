#![no_main]

#[path = "../../crates/format/tests/hostile/decoders/columns.rs"]
mod decoder;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(value) = decoder::decode(bytes) {
        decoder::hold(bytes, &value);
    }
});
