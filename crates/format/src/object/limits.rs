//! Limits one value, so that a small file cannot take a disproportionate amount of memory or time.

/// Largest encoding of one value, in bytes.
pub const BYTES_MAX: u64 = 1 << 30;

/// Most items of one value: the items of its lists, the keys and the values of its dicts, all the way down.
pub const ITEMS_MAX: u64 = 1 << 24;

/// Most lists, dicts and tagged values in one value. Each may be one byte in a file and hundreds in memory.
pub const CONTAINERS_MAX: u64 = 1 << 21;

/// Numbers of items and containers in a value, counted as for [`ITEMS_MAX`] and [`CONTAINERS_MAX`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Items of lists, and keys and values of dicts.
    pub items: u64,
    /// Lists, dicts and tagged values.
    pub containers: u64,
}

impl Counts {
    /// Counts a list or dict of `items` items; a key and its value are two.
    #[inline]
    pub(super) fn enter(&mut self, items: u64) {
        self.items = self.items.saturating_add(items);
        self.containers += 1;
    }

    /// Counts a tagged value.
    #[inline]
    pub(super) fn tag(&mut self) {
        self.containers += 1;
    }

    pub(super) fn add(&mut self, other: Counts) {
        self.items = self.items.saturating_add(other.items);
        self.containers += other.containers;
    }
}

/// Returns a message about the limit that a value of `bytes` encoded bytes with `counts` exceeds, if any.
pub fn excess(bytes: u64, counts: Counts) -> Option<String> {
    let Counts { items, containers } = counts;
    let beyond = |what: &str, found: u64, most: u64| {
        (found > most).then(|| format!("a value of {found} {what} or more: expected at most {most}"))
    };
    beyond("encoded bytes", bytes, BYTES_MAX)
        .or_else(|| beyond("items", items, ITEMS_MAX))
        .or_else(|| beyond("lists, dicts and other containers", containers, CONTAINERS_MAX))
}
