//! Checkpoints mapped into memory: the same bytes as loaded ones, proven before they are shown.

use shardfast_engine::{Kind, Want};
use shardfast_format::{LeafKind, LeafName};
use shardfast_tools::Mapped;

use crate::checkpoints::{opened, save_ranks, two_ranks};

fn mapped(url: &str) -> Mapped {
    Mapped::new(opened(url).into())
}

#[test]
fn every_tensor_shows_what_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let url = save_ranks(dir.path().to_str().unwrap(), None, two_ranks());
    let mapped = mapped(&url);
    let manifest = mapped.checkpoint().manifest();
    let mut tensors = 0;
    for leaf in 0..manifest.len() {
        let LeafKind::Tensor { dtype, .. } = manifest.leaf(leaf).kind else {
            let error = mapped.tensor(leaf).err().unwrap();
            assert_eq!(error.kind, Kind::Invalid, "{error}");
            continue;
        };
        tensors += 1;
        for view in mapped.tensor(leaf).unwrap() {
            let mut loaded = vec![0u8; view.len()];
            let strides = shardfast_engine::row_major_strides(&view.region.lengths, dtype.size_bytes());
            let strides: Vec<i64> = strides.iter().map(|&stride| stride as i64).collect();
            // SAFETY: `loaded` outlives the load, and nothing else uses it meanwhile.
            #[allow(unsafe_code)]
            let sink = unsafe {
                let address = loaded.as_mut_ptr() as usize;
                shardfast_engine::Sink::new(address, &view.region.lengths, &strides, dtype.size_bytes())
            };
            let want = Want { leaf, region: view.region.clone(), sink: sink.unwrap() };
            mapped.checkpoint().load(&[want], &[], std::time::Duration::from_secs(10)).unwrap();
            assert_eq!(&*view, loaded);
            assert_eq!(
                view.as_ptr(),
                mapped.tensor(leaf).unwrap().iter().find(|v| v.region == view.region).unwrap().as_ptr()
            );
        }
    }
    assert!(tensors >= 5);
    assert_eq!(mapped.tensor(manifest.len()).err().unwrap().kind, Kind::Invalid);
}

#[test]
fn a_damaged_tensor_is_named_and_the_others_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let url = save_ranks(dir.path().to_str().unwrap(), None, two_ranks());
    let whole = mapped(&url);
    let manifest = whole.checkpoint().manifest();
    let embed = manifest.find(&LeafName::new("model", "embed")).unwrap();
    let (_, extent) = manifest.regions(embed).next().unwrap();
    let path = dir.path().join(&manifest.files()[extent.file as usize].path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[extent.offset as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();

    let damaged = mapped(&url);
    let error = damaged.tensor(embed).err().unwrap();
    assert_eq!(error.kind, Kind::Corrupt);
    assert!(error.message.contains("tensor model/embed") && error.message.contains("expected CRC-64"), "{error}");
    let sound = (0..manifest.len()).filter(|&leaf| damaged.tensor(leaf).is_ok()).count();
    assert!(sound > 0, "nothing is shown any more");
}

#[test]
fn what_is_no_file_cannot_be_mapped() {
    let url = save_ranks("memory://mapped", None, two_ranks());
    let mapped = mapped(&url);
    let embed = mapped.checkpoint().manifest().find(&LeafName::new("model", "embed")).unwrap();
    assert_eq!(mapped.tensor(embed).err().unwrap().kind, Kind::Unsupported);
}
