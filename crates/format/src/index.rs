//! Writes the index with which the Hugging Face stack opens a key's directory.

use std::collections::BTreeMap;

use crate::manifest::{LeafKind, Manifest};

/// Returns `model.safetensors.index.json` for a key: which of the directory's files holds which tensor. Aliases have no
/// data; the model ties them. Returns `None` when the key holds no tensor, an object, or a tensor that is cut or lies
/// outside the key's directory.
pub fn hugging_face_index(manifest: &Manifest, key: &str) -> Option<Vec<u8>> {
    let mut total_size = 0u64;
    let mut weight_map = BTreeMap::new();
    for i in 0..manifest.len() {
        let leaf = manifest.leaf(i);
        if leaf.key != key {
            continue;
        }
        let shape = match leaf.kind {
            LeafKind::Tensor { shape, .. } => shape,
            LeafKind::Alias { .. } => continue,
            LeafKind::Object => return None,
        };
        let mut regions = manifest.regions(i);
        // A tensor without elements may be stored nowhere.
        let Some((region, extent)) = regions.next() else { continue };
        if regions.len() > 0 || !region.is_whole(shape) {
            return None;
        }
        let path = manifest.files()[extent.file as usize].path.as_str();
        let file = path.strip_prefix(key)?.strip_prefix('/')?;
        total_size = total_size.checked_add(extent.bytes)?;
        weight_map.insert(leaf.name, file);
    }
    if weight_map.is_empty() {
        return None;
    }
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    let mut text = serde_json::to_vec_pretty(&index).expect("strings and numbers are always JSON");
    text.push(b'\n');
    Some(text)
}
