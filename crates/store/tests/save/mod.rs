//! Simulates a save: objects are written, synced, and then proven by one published name.

use std::path::Path;

use shardfast_store::local::LocalStore;
use shardfast_store::testing::conformance::{pattern, write_object};
use shardfast_store::testing::simdisk::SimDisk;
use shardfast_store::{Kind, Result, Store};

/// Objects that every save writes besides its commit; lengths on both sides of sectors and pages.
const OBJECTS: [(&str, usize); 3] = [("model/0", 9000), ("model/1", 4096), ("extra/0", 700)];

/// Opens the store at `/mnt/runs/gpt`, as a new process does.
pub(crate) fn mount(disk: &SimDisk) -> Result<LocalStore<SimDisk>> {
    LocalStore::on(disk.clone(), Path::new("/mnt/runs/gpt").to_owned())
}

/// Writes the objects of step `step`, syncs them, replaces `latest` and publishes the step's `COMMIT`.
pub(crate) fn save(store: &dyn Store, step: u64) -> Result<()> {
    let names = OBJECTS.map(|(name, _)| format!("step-{step}/{name}"));
    for (name, (_, length)) in names.iter().zip(OBJECTS) {
        write_object(store, name, &pattern(step, length))?;
    }
    store.sync(&[&names[0], &names[1], &names[2]])?;
    store.put(&format!("step-{step}/manifest"), &pattern(step + 100, 5000))?;
    store.publish(&format!("step-{step}/COMMIT"), &pattern(step + 200, 1300))
}

/// Returns whether step `step` is committed; an error describes how it is neither committed nor invisible.
pub(crate) fn committed(store: &dyn Store, step: u64) -> std::result::Result<bool, String> {
    let expect = |name: &str, expected: Vec<u8>| match store.read(&format!("step-{step}/{name}"), 1 << 20) {
        Ok(found) if found == expected => Ok(()),
        Ok(found) => Err(format!("{name} has wrong bytes ({} of {})", found.len(), expected.len())),
        Err(error) => Err(error.to_string()),
    };
    match store.open(&format!("step-{step}/COMMIT")) {
        Err(error) if error.kind == Kind::NotFound => return Ok(false),
        Err(error) => return Err(error.to_string()),
        Ok(_) => {}
    }
    expect("COMMIT", pattern(step + 200, 1300))?;
    expect("manifest", pattern(step + 100, 5000))?;
    OBJECTS.iter().try_for_each(|(name, length)| expect(name, pattern(step, *length)))?;
    Ok(true)
}
