//! Holds the payloads of a whole subtree as one value: each distinct payload once, with ranks by their order.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use prost::bytes::Bytes;

/// Bytes of either end of a payload that are hashed to find equal payloads; only those with equal ends are compared.
const HASHED_BYTES: usize = 256;

/// Payloads of consecutive ranks, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// Payloads that differ, each once.
    pub(crate) distinct: Vec<Bytes>,
    /// Index of each rank's payload among the distinct ones. Empty if all are the same, and if all differ.
    pub(crate) which: Vec<u32>,
}

impl Bundle {
    /// Makes a bundle of payloads in the order of their ranks.
    pub fn new(payloads: impl IntoIterator<Item = Bytes>) -> Bundle {
        let mut collector = Collector::default();
        payloads.into_iter().for_each(|payload| collector.push(payload));
        collector.finish()
    }

    /// Makes a bundle of the parts of a message.
    ///
    /// # Errors
    /// A message that names the contradiction.
    pub(crate) fn from_parts(ranks: u32, distinct: Vec<Bytes>, which: Vec<u32>) -> Result<Bundle, String> {
        let count = distinct.len();
        let fits = if which.is_empty() {
            count == ranks as usize || (count == 1 && ranks > 0)
        } else {
            which.len() == ranks as usize && which.iter().all(|&place| (place as usize) < count)
        };
        if !fits {
            let places = which.len();
            return Err(format!("a bundle of {count} payloads and {places} places that does not suit {ranks} ranks"));
        }
        Ok(Bundle { ranks, distinct, which })
    }

    /// Makes a bundle of empty payloads.
    pub(crate) fn empty(ranks: u32) -> Bundle {
        Bundle { ranks, distinct: vec![Bytes::new(); ranks.min(1) as usize], which: Vec::new() }
    }

    /// Cuts each payload behind that many bytes.
    pub(crate) fn cut(&mut self, bytes: usize) {
        self.distinct.iter_mut().for_each(|payload| payload.truncate(bytes));
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the payload of the `index`-th rank; `None` beyond the last.
    pub fn get(&self, index: u32) -> Option<&Bytes> {
        if index >= self.ranks {
            return None;
        }
        self.distinct.get(self.place(index as usize))
    }

    /// Returns the payloads in the order of their ranks.
    pub fn payloads(&self) -> impl Iterator<Item = &Bytes> {
        (0..self.ranks).filter_map(|index| self.get(index))
    }

    /// Returns the payloads of some of the ranks, by their indices; those beyond the last are left out.
    pub fn slice(&self, indices: Range<u32>) -> Bundle {
        let (start, end) = (indices.start.min(self.ranks) as usize, indices.end.min(self.ranks) as usize);
        if start >= end {
            return Bundle { ranks: 0, distinct: Vec::new(), which: Vec::new() };
        }
        if self.distinct.len() == 1 {
            return Bundle { ranks: (end - start) as u32, distinct: self.distinct.clone(), which: Vec::new() };
        }
        if self.which.is_empty() {
            let distinct = self.distinct[start..end].to_vec();
            return Bundle { ranks: (end - start) as u32, distinct, which: Vec::new() };
        }
        let mut renumbered: HashMap<u32, u32> = HashMap::new();
        let mut distinct = Vec::new();
        let which = self.which[start..end].iter().map(|&place| {
            *renumbered.entry(place).or_insert_with(|| {
                distinct.push(self.distinct[place as usize].clone());
                distinct.len() as u32 - 1
            })
        });
        let which: Vec<u32> = which.collect();
        Bundle { ranks: which.len() as u32, distinct, which }.tersely()
    }

    fn place(&self, index: usize) -> usize {
        match self.which.get(index) {
            Some(&place) => place as usize,
            None if self.distinct.len() == 1 => 0,
            None => index,
        }
    }

    fn tersely(mut self) -> Bundle {
        // Indices are given in the order of their first use: with as many payloads as ranks they are all in order.
        if self.distinct.len() == 1 || self.distinct.len() == self.ranks as usize {
            self.which = Vec::new();
        }
        self
    }
}

/// Concatenates payloads and bundles.
#[derive(Default)]
pub(crate) struct Collector {
    distinct: Vec<Bytes>,
    which: Vec<u32>,
    places: HashMap<Alike, u32>,
}

impl Collector {
    pub(crate) fn push(&mut self, payload: Bytes) {
        let place = self.place(payload);
        self.which.push(place);
    }

    /// Appends the ranks of `bundle`.
    pub(crate) fn append(&mut self, bundle: &Bundle) {
        let places: Vec<u32> = bundle.distinct.iter().map(|payload| self.place(payload.clone())).collect();
        self.which.extend((0..bundle.ranks as usize).map(|index| places[bundle.place(index)]));
    }

    pub(crate) fn finish(self) -> Bundle {
        Bundle { ranks: self.which.len() as u32, distinct: self.distinct, which: self.which }.tersely()
    }

    fn place(&mut self, payload: Bytes) -> u32 {
        *self.places.entry(Alike(payload)).or_insert_with_key(|payload| {
            self.distinct.push(payload.0.clone());
            self.distinct.len() as u32 - 1
        })
    }
}

/// A payload that is hashed by its ends only.
#[derive(PartialEq, Eq)]
struct Alike(Bytes);

impl Hash for Alike {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let bytes = &self.0;
        bytes.len().hash(state);
        bytes[..bytes.len().min(HASHED_BYTES)].hash(state);
        bytes[bytes.len().saturating_sub(HASHED_BYTES)..].hash(state);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bundle(payloads: &[&'static str]) -> Bundle {
        Bundle::new(payloads.iter().map(|payload| Bytes::from_static(payload.as_bytes())))
    }

    #[test]
    fn equal_payloads_stand_once_and_places_only_where_they_say_something() {
        let same = bundle(&["a", "a", "a"]);
        assert_eq!((same.distinct.len(), same.which.len()), (1, 0));
        let own = bundle(&["a", "b", "c"]);
        assert_eq!((own.distinct.len(), own.which.len()), (3, 0));
        let mixed = bundle(&["a", "b", "a"]);
        assert_eq!((mixed.distinct.len(), &mixed.which[..]), (2, &[0, 1, 0][..]));
        assert_eq!(mixed.slice(2..3), bundle(&["a"]));
        // Long payloads that differ only in the middle are different.
        let long = |middle: u8| Bytes::from([vec![0; 1000], vec![middle], vec![0; 1000]].concat());
        assert_eq!(Bundle::new([long(1), long(2), long(1)]).which, [0, 1, 0]);
    }

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        let payload = || Bytes::from_static(b"a");
        for (ranks, distinct, which) in
            [(2, 0, vec![]), (0, 1, vec![]), (3, 2, vec![]), (2, 2, vec![0]), (2, 2, vec![0, 2]), (0, 0, vec![0])]
        {
            let refused = Bundle::from_parts(ranks, vec![payload(); distinct], which);
            assert!(refused.unwrap_err().contains(&format!("does not suit {ranks} ranks")));
        }
        assert!(Bundle::from_parts(0, vec![], vec![]).is_ok());
    }

    proptest! {
        #[test]
        fn what_is_bundled_comes_out_as_it_was(
            groups in prop::collection::vec(prop::collection::vec(0_u8..5, 0..9), 0..5),
        ) {
            let group = |group: &Vec<u8>| Bundle::new(group.iter().map(|&payload| Bytes::from(vec![payload; 3])));
            let mut collector = Collector::default();
            groups.iter().for_each(|payloads| collector.append(&group(payloads)));
            let whole = collector.finish();
            let flat = groups.concat();
            let found: Vec<u8> = whole.payloads().map(|payload| payload[0]).collect();
            prop_assert_eq!(&found, &flat);
            let mut start = 0;
            for payloads in &groups {
                let end = start + payloads.len() as u32;
                let part: Vec<u8> = whole.slice(start..end).payloads().map(|payload| payload[0]).collect();
                prop_assert_eq!(&part, payloads);
                start = end;
            }
            let again = Bundle::from_parts(whole.ranks, whole.distinct.clone(), whole.which.clone());
            prop_assert_eq!(again, Ok(whole));
        }
    }
}
