//! One optimization at a time left out, for the benchmark that tells what each is worth. Builds for users have none of
//! it.

/// Whether `optimization` is left out: with the feature `ablation`, when `SHARDFAST_ABLATE` is its name.
#[cfg(feature = "ablation")]
pub(crate) fn is_off(optimization: &str) -> bool {
    static OFF: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    OFF.get_or_init(|| std::env::var("SHARDFAST_ABLATE").ok()).as_deref() == Some(optimization)
}

/// Nothing is left out.
#[cfg(not(feature = "ablation"))]
pub(crate) const fn is_off(_optimization: &str) -> bool {
    false
}
