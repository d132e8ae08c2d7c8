//! A small checkpoint whose contents the test knows: a file of several parts, a file of one, and a value.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use shardfast_engine::{
    Destination, Engine, Pending, Prove, Provider, Result, Sink, State, ValueRef, Want, checkpoint, row_major_strides,
    save_to,
};
use shardfast_format::object::encode;
use shardfast_format::{Catalog, DType, Dims, Int, Leaf, LeafBody, LeafKind, LeafName, Owner, Region, Value};
use shardfast_store::{Shared, Store, open_on};
use shardfast_tools::verify_in;

const MIB: u64 = 1 << 20;

/// Two parts that are sent at a time, and one that waits for a header.
const STAGING_BYTES: u64 = 24 * MIB;

/// A leaf with its bytes.
type Held = (LeafName, LeafBody, Arc<Vec<u8>>);

/// Leaves that are saved, in order of the names.
static LEAVES: LazyLock<Vec<Held>> = LazyLock::new(|| {
    let tensor = |key: &str, name: &str, bytes: u64, seed: u64| {
        let shape = [bytes / 1024, 256];
        let body =
            LeafBody::Tensor { dtype: DType::F32, shape: Dims::from_slice(&shape), parts: vec![Region::whole(&shape)] };
        (LeafName::new(key, name), body, Arc::new(random(bytes, seed)))
    };
    let value = encode(&Value::Int(Int::Small(7))).unwrap();
    vec![
        (LeafName::new("extra", "step"), LeafBody::Object { owner: Owner::Job }, Arc::new(value)),
        tensor("model", "a", 6 * MIB, 1),
        tensor("model", "b", 3 * MIB, 2),
        tensor("optimizer", "m", MIB / 4, 3),
    ]
});

fn random(bytes: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).take(bytes as usize / 8).flatten().collect()
}

/// Memory that all saves read.
struct Common(Arc<Vec<u8>>);

impl Provider for Common {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn fill(&self, at: u64, out: &mut [u8], _: &mut shardfast_engine::Fences) -> Result<()> {
        out.copy_from_slice(&self.0[at as usize..][..out.len()]);
        Ok(())
    }
}

fn engine() -> Arc<Engine> {
    Engine::new(shardfast_coord::solo(), STAGING_BYTES).unwrap()
}

/// A store with connections of its own, which cuts a request in which nothing moves for so long.
pub(crate) fn store(url: &str, still_max: Duration) -> Arc<dyn Store> {
    open_on(url, &Arc::new(Shared::impatient(still_max))).unwrap()
}

/// A store at the server itself.
pub(crate) fn direct(url: &str) -> Arc<dyn Store> {
    static SHARED: LazyLock<Arc<Shared>> = LazyLock::new(Arc::default);
    open_on(url, &SHARED).unwrap()
}

/// Saves the leaves.
pub(crate) fn save(store: &Arc<dyn Store>, deadline: Duration) -> Result<()> {
    begin(store, deadline).committed(None)
}

/// Begins to save the leaves.
pub(crate) fn begin(store: &Arc<dyn Store>, deadline: Duration) -> Pending {
    let leaf = |(name, body, _): &Held| Leaf { name: name.clone(), body: body.clone(), layout: String::new() };
    let provider = |(_, _, bytes): &Held| vec![Arc::new(Common(Arc::clone(bytes))) as Arc<dyn Provider>];
    let state = State {
        catalog: Arc::new(Catalog { leaves: LEAVES.iter().map(leaf).collect() }),
        providers: LEAVES.iter().map(provider).collect(),
        ..State::default()
    };
    let url = store.url().to_owned();
    let destination = Destination { url, step: None, user: BTreeMap::new(), prove: Prove::default(), blocking: true };
    save_to(&engine(), Ok(Arc::clone(store)), destination, state, deadline)
}

/// Loads all leaves, and compares them with what was saved.
///
/// # Panics
/// When the load succeeds with other bytes.
pub(crate) fn load(store: &Arc<dyn Store>, deadline: Duration) -> Result<()> {
    let opened = checkpoint::open_from(&engine(), Ok(Arc::clone(store)), store.url(), deadline)?;
    let manifest = opened.manifest();
    assert_eq!(manifest.len(), LEAVES.len());
    let (mut memory, mut wants, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for (leaf, (name, body, bytes)) in LEAVES.iter().enumerate() {
        let found = manifest.leaf(leaf);
        assert_eq!((found.key, found.name), (name.key.as_str(), name.name.as_str()));
        let LeafBody::Tensor { dtype, shape, .. } = body else {
            assert!(matches!(found.kind, LeafKind::Object));
            values.push((ValueRef { leaf, value: 0 }, bytes));
            continue;
        };
        let strides: Vec<i64> = row_major_strides(shape, dtype.size_bytes()).iter().map(|&s| s as i64).collect();
        let mut found = vec![0_u8; bytes.len()];
        let address = found.as_mut_ptr() as usize;
        memory.push((found, bytes));
        // SAFETY: the vector's memory stays in place during the load, and no other thread reads or writes it.
        #[allow(unsafe_code)]
        let sink = unsafe { Sink::new(address, shape, &strides, dtype.size_bytes()) }?;
        wants.push(Want { leaf, region: Region::whole(shape), sink });
    }
    let refs: Vec<ValueRef> = values.iter().map(|(value, _)| *value).collect();
    let loaded = opened.load(&wants, &refs, deadline)?;
    drop(wants);
    assert!(memory.iter().all(|(found, expected)| *found == ***expected), "a load returned wrong bytes");
    assert!(loaded.iter().eq(values.iter().map(|(_, expected)| &***expected)), "a load returned a wrong value");
    Ok(())
}

/// Reads all of a checkpoint: `Ok(false)` if none is visible there.
///
/// # Errors
/// The difference that was found.
pub(crate) fn is_whole(url: &str) -> std::result::Result<bool, String> {
    is_whole_in(&direct(url))
}

/// [`is_whole`] in a store that is open.
pub(crate) fn is_whole_in(store: &Arc<dyn Store>) -> std::result::Result<bool, String> {
    match verify_in(&engine(), Arc::clone(store), store.url(), &|_, _| ()) {
        Ok(report) if report.is_sound() => Ok(true),
        Ok(report) => Err(format!("it is visible and not sound: {:?}", report.findings)),
        Err(error) if error.kind == shardfast_engine::Kind::NotFound => Ok(false),
        Err(error) => Err(format!("it cannot be verified: {error}")),
    }
}
