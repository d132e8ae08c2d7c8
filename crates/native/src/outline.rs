//! Checks that objects of a framework are unchanged: the same names in the same slots, tensors at the same addresses.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PySet, PyString, PyType, PyWeakrefReference};

use crate::dlpack::Places;
use crate::errors::invalid;

/// The contents of an attribute of an object, and what is compared of them.
#[derive(Clone, Copy)]
enum Kind {
    /// A dict or a set, of which the names are compared.
    Names,
    /// A dict of the outline's objects, or `None`, by name.
    Objects,
    /// One of the outline's objects.
    Object,
    /// A dict of entries by name.
    Entries,
    /// A list of dicts, each with a list of members under the bundle's name for them.
    Groups,
    /// Likewise, and each member is an entry.
    Members,
    /// A list of members, each an entry, too.
    Listed,
    /// A dict by member of dicts of entries by name; or, under a name of its own, of an entry.
    State,
}

impl Kind {
    fn from_name(name: &str) -> PyResult<Kind> {
        Ok(match name {
            "names" => Kind::Names,
            "objects" => Kind::Objects,
            "object" => Kind::Object,
            "entries" => Kind::Entries,
            "groups" => Kind::Groups,
            "members" => Kind::Members,
            "listed" => Kind::Listed,
            "state" => Kind::State,
            other => return Err(invalid(format!("an attribute of unknown kind {other:?}"))),
        })
    }
}

/// An object and its relevant attributes.
struct Part {
    object: Py<PyWeakrefReference>,
    attributes: Vec<(Py<PyString>, Kind)>,
}

/// Record of a walk, in order. Names are held: nothing else can come to stand at their addresses.
#[derive(Default)]
struct Met {
    lengths: Vec<usize>,
    names: Vec<Py<PyAny>>,
    /// Numbers of objects and members.
    links: Vec<Option<usize>>,
}

/// Place of a tensor inside the entry that wraps it.
struct Inside {
    /// Names of attributes: the entry's, that of what stands there, and so on to the tensor.
    path: Vec<Py<PyString>>,
    /// The types of all of these, from the entry to the tensor.
    types: Vec<Py<PyType>>,
    /// The entry's attribute that says how it is sharded, and what stands there: never changed, only replaced.
    layout: Option<(Py<PyString>, Py<PyAny>)>,
}

/// Contents of one bundle's objects.
struct Bundle {
    parts: Vec<Part>,
    met: Met,
    /// The types of all entries that are none of the tensors.
    others: Vec<(usize, Py<PyType>)>,
    /// Which entries are the bundle's tensors.
    tensors: Vec<usize>,
    /// Which entries are parameters; all members are, too.
    parameters: Vec<usize>,
    /// Which entries are wanted beside the tensors.
    wanted: Vec<usize>,
    /// Which of the tensors are inside of their entries, and where.
    inside: Vec<(usize, Inside)>,
    /// The name under which a group lists its members.
    members: Py<PyString>,
    /// Returns the place of a tensor whose type has no exchange table.
    place: Option<Py<PyAny>>,
}

/// The objects of a state's bundles as they were when this was made. Keeps only names and layouts alive.
#[pyclass(frozen, module = "shardfast._native")]
pub(crate) struct Outline {
    bundles: Vec<Bundle>,
    places: Places,
    parameters: Same,
}

/// `(objects, tensors, parameters, others, inside, members, place)`, as [`Outline`] takes a bundle.
type Given<'py> = (
    Vec<(Bound<'py, PyAny>, Vec<(Bound<'py, PyString>, String)>)>,
    Vec<usize>,
    Vec<usize>,
    Vec<usize>,
    Vec<(usize, Vec<Bound<'py, PyString>>, Bound<'py, PyString>)>,
    Bound<'py, PyString>,
    Option<Bound<'py, PyAny>>,
);

#[pymethods]
impl Outline {
    /// From bundles `(objects, tensors, parameters, others, inside, members, place)`:
    ///
    /// - `objects`: `(object, [(attribute, kind)])`, with the kinds "names" (a dict or set of names), "objects" (a dict
    ///   of objects of the bundle, or `None`), "object" (one of them), "entries" (a dict), "groups" (a list of dicts
    ///   that list members), "members" (likewise, each member an entry, too), "listed" (a list of such members) and
    ///   "state" (a dict by member of dicts of entries, or by name of an entry). What is met in them in this order
    ///   numbers the entries.
    /// - `tensors`: numbers of the entries that are the bundle's tensors; of all others the type counts.
    /// - `parameters`: numbers of the entries of which it counts, beside all members', which are one and the same.
    /// - `others`: numbers of the entries that are wanted, too.
    /// - `inside`: `(number among the tensors, path, layout)` of those inside of their entries: the names of the
    ///   attributes that lead there, and that of the entry's for its layout, or an empty text.
    /// - `members`: the name under which a group lists its members.
    /// - `place`: `None`, or a function that returns the place of a tensor whose type has no exchange table: an object
    ///   that equals an earlier one exactly if device, address, element type, shape and strides are the same.
    ///
    /// Raises `TypeError` for what cannot be compared later, and the framework's errors for tensors without a known
    /// address.
    #[new]
    fn new(py: Python<'_>, bundles: Vec<Given<'_>>) -> PyResult<Outline> {
        let bundles = bundles.into_iter().map(Bundle::new).collect::<PyResult<Vec<_>>>()?;
        let mut outline = Outline { bundles, places: Places::default(), parameters: Same::default() };
        let seen = outline.seen(py)?.ok_or_else(unstable)?;
        outline.places = outline.places_of(&seen)?;
        outline.parameters = Same::of(&seen.parameters);
        Ok(outline)
    }

    /// The tensors of all bundles, in order, the entry of each, which is itself or has it inside, and each bundle's
    /// other entries, if nothing has changed: names, types, layouts, addresses and which parameters are the same.
    fn again<'py>(&self, py: Python<'py>) -> PyResult<Option<Again<'py>>> {
        let Some(seen) = self.seen(py)? else { return Ok(None) };
        if !self.parameters.holds_of(&seen.parameters) || !self.places_of(&seen)?.is_equal(py, &self.places)? {
            return Ok(None);
        }
        let tensors = PyList::new(py, seen.tensors)?;
        let entries = if seen.entries.is_empty() { tensors.clone() } else { PyList::new(py, seen.entries)? };
        Ok(Some((tensors, entries, seen.others)))
    }
}

/// Tensors, their entries, and other entries by bundle.
type Again<'py> = (Bound<'py, PyList>, Bound<'py, PyList>, Vec<Vec<Bound<'py, PyAny>>>);

/// Contents of all bundles now.
#[derive(Default)]
struct Seen<'py> {
    tensors: Vec<Bound<'py, PyAny>>,
    /// The entry of each tensor; empty if all are entries themselves.
    entries: Vec<Bound<'py, PyAny>>,
    /// The number of each bundle's tensors.
    lengths: Vec<usize>,
    others: Vec<Vec<Bound<'py, PyAny>>>,
    /// Addresses of the parameters.
    parameters: Vec<usize>,
}

impl Outline {
    /// Returns the contents of all bundles, or `None` if they changed.
    fn seen<'py>(&self, py: Python<'py>) -> PyResult<Option<Seen<'py>>> {
        let mut seen = Seen::default();
        for bundle in &self.bundles {
            let Some(objects) = upgraded(py, &bundle.parts) else { return Ok(None) };
            let mut walk = Walk::new(&objects, bundle.members.bind(py), Some(&bundle.met));
            if !walk.all(&bundle.parts)? || !bundle.tensors(&walk, &mut seen)? {
                return Ok(None);
            }
            seen.lengths.push(bundle.tensors.len());
            seen.others.push(bundle.wanted.iter().map(|&number| walk.entries[number].clone()).collect());
            let entries = bundle.parameters.iter().map(|&number| &walk.entries[number]);
            seen.parameters.extend(entries.chain(&walk.members).map(|parameter| parameter.as_ptr() as usize));
        }
        Ok(Some(seen))
    }

    /// Returns the places of all tensors now.
    fn places_of(&self, seen: &Seen<'_>) -> PyResult<Places> {
        let (mut places, mut tensors) = (Places::default(), &seen.tensors[..]);
        for (bundle, &length) in self.bundles.iter().zip(&seen.lengths) {
            let (own, others) = tensors.split_at(length);
            places.add(own, bundle.place.as_ref())?;
            tensors = others;
        }
        Ok(places)
    }
}

impl Bundle {
    fn new<'py>(given: Given<'py>) -> PyResult<Bundle> {
        let (objects, tensors, parameters, wanted, inside, members, place) = given;
        let part = |(object, attributes): (Bound<'py, PyAny>, Vec<(Bound<'py, PyString>, String)>)| {
            let kinds = attributes.into_iter().map(|(name, kind)| Ok((name.unbind(), Kind::from_name(&kind)?)));
            let part = Part {
                object: PyWeakrefReference::new(&object)?.unbind(),
                attributes: kinds.collect::<PyResult<_>>()?,
            };
            Ok((object, part))
        };
        let parts = objects.into_iter().map(part).collect::<PyResult<Vec<_>>>()?;
        let (objects, parts): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let mut walk = Walk::new(&objects, &members, None);
        if !walk.all(&parts)? {
            return Err(unstable());
        }
        let (entries, met) = (walk.entries, walk.made);
        let numbers = tensors.iter().chain(&parameters).chain(&wanted);
        if numbers.copied().any(|number| number >= entries.len()) {
            return Err(invalid(format!("expected numbers of {} entries", entries.len())));
        }
        if inside.iter().any(|(number, ..)| *number >= tensors.len()) {
            return Err(invalid(format!("expected numbers of {} tensors", tensors.len())));
        }
        let inside = inside
            .into_iter()
            .map(|(number, path, layout)| Ok((number, Inside::new(&entries[tensors[number]], path, layout)?)));
        let inside = inside.collect::<PyResult<_>>()?;
        let mut is_tensor = vec![false; entries.len()];
        tensors.iter().for_each(|&number| is_tensor[number] = true);
        let others = entries.iter().enumerate().filter(|(number, _)| !is_tensor[*number]);
        Ok(Bundle {
            others: others.map(|(number, entry)| (number, entry.get_type().unbind())).collect(),
            parts,
            met,
            tensors,
            parameters,
            wanted,
            inside,
            members: members.unbind(),
            place: place.map(Bound::unbind),
        })
    }

    /// Adds the bundle's tensors to `seen`; `false` if an entry has another type, or other things inside, now.
    fn tensors<'py>(&self, walk: &Walk<'_, 'py>, seen: &mut Seen<'py>) -> PyResult<bool> {
        let is_kept = |(number, kind): &(usize, Py<PyType>)| walk.entries[*number].get_type().is(kind);
        if !self.others.iter().all(is_kept) {
            return Ok(false);
        }
        let first = seen.tensors.len();
        seen.tensors.extend(self.tensors.iter().map(|&number| walk.entries[number].clone()));
        if !self.inside.is_empty() || !seen.entries.is_empty() {
            seen.entries.extend_from_slice(&seen.tensors[seen.entries.len()..]);
        }
        for (number, inside) in &self.inside {
            let tensor = &mut seen.tensors[first + number];
            let Some(inner) = inside.of(tensor)? else { return Ok(false) };
            *tensor = inner;
        }
        Ok(true)
    }
}

impl Inside {
    /// Follows the path from the entry.
    fn new<'py>(
        entry: &Bound<'py, PyAny>,
        path: Vec<Bound<'py, PyString>>,
        layout: Bound<'py, PyString>,
    ) -> PyResult<Inside> {
        let layout =
            if layout.len()? == 0 { None } else { Some((layout.clone().unbind(), entry.getattr(layout)?.unbind())) };
        let (mut at, mut types) = (entry.clone(), vec![entry.get_type().unbind()]);
        for name in &path {
            at = at.getattr(name)?;
            types.push(at.get_type().unbind());
        }
        Ok(Inside { path: path.into_iter().map(Bound::unbind).collect(), types, layout })
    }

    /// The tensor inside of that entry; `None` if the entry is another one in any way that counts.
    fn of<'py>(&self, entry: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if let Some((name, then)) = &self.layout
            && !entry.getattr_opt(name)?.is_some_and(|now| now.is(then))
        {
            return Ok(None);
        }
        let mut at = entry.clone();
        for (name, kind) in self.path.iter().zip(&self.types) {
            match at.getattr_opt(name)? {
                Some(inner) if at.get_type().is(kind) => at = inner,
                _ => return Ok(None),
            }
        }
        Ok(self.types.last().is_some_and(|kind| at.get_type().is(kind)).then_some(at))
    }
}

/// One walk through the objects of a bundle: it records what it meets, or compares it with the record.
struct Walk<'a, 'py> {
    objects: &'a [Bound<'py, PyAny>],
    /// The name under which a group lists its members.
    members_name: &'a Bound<'py, PyString>,
    known: Option<&'a Met>,
    made: Met,
    /// How much of the record was met.
    lengths: usize,
    names: usize,
    links: usize,
    entries: Vec<Bound<'py, PyAny>>,
    members: Vec<Bound<'py, PyAny>>,
    /// Numbers of objects and of members by address, to note them by.
    object_numbers: HashMap<usize, usize>,
    member_numbers: HashMap<usize, usize>,
}

impl<'a, 'py> Walk<'a, 'py> {
    fn new(objects: &'a [Bound<'py, PyAny>], members_name: &'a Bound<'py, PyString>, known: Option<&'a Met>) -> Self {
        let mut object_numbers = HashMap::new();
        if known.is_none() {
            object_numbers
                .extend(objects.iter().enumerate().map(|(number, object)| (object.as_ptr() as usize, number)));
        }
        let (entries, members) = (Vec::with_capacity(known.map_or(0, |met| met.names.len())), Vec::new());
        Walk {
            objects,
            members_name,
            known,
            made: Met::default(),
            lengths: 0,
            names: 0,
            links: 0,
            entries,
            members,
            object_numbers,
            member_numbers: HashMap::new(),
        }
    }

    /// Whether nothing has changed, as far as can be compared.
    fn all(&mut self, parts: &[Part]) -> PyResult<bool> {
        for (object, part) in self.objects.iter().zip(parts) {
            let slots = object.getattr_opt(intern!(object.py(), "__dict__"))?;
            let slots = slots.as_ref().and_then(|slots| slots.cast::<PyDict>().ok());
            for (name, kind) in &part.attributes {
                let name = name.bind(object.py());
                let there = slots.map(|slots| slots.get_item(name)).transpose()?.flatten();
                let there = there.map_or_else(|| object.getattr_opt(name), |there| Ok(Some(there)))?;
                if !there.is_some_and(|there| self.attribute(&there, *kind)) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn attribute(&mut self, there: &Bound<'py, PyAny>, kind: Kind) -> bool {
        match kind {
            Kind::Names => self.names_of(there),
            Kind::Objects => self.dict(there, |walk, name, child| walk.name(name) && walk.object(child)),
            Kind::Object => self.object(there),
            Kind::Entries => self.entries_of(there),
            Kind::Groups => self.groups(there),
            Kind::Members | Kind::Listed => {
                let first = self.members.len();
                let is_same =
                    if matches!(kind, Kind::Members) { self.groups(there) } else { self.listed(there) == Some(true) };
                self.entries.extend_from_slice(&self.members[first..]);
                is_same
            }
            Kind::State => self.dict(there, Self::state),
        }
    }

    /// A dict: whether `look` finds each of its entries unchanged. `look` runs no code of the program.
    fn dict(
        &mut self,
        there: &Bound<'py, PyAny>,
        look: impl Fn(&mut Self, &Bound<'py, PyAny>, &Bound<'py, PyAny>) -> bool,
    ) -> bool {
        let Ok(dict) = there.cast::<PyDict>() else { return false };
        self.length(dict.len()) && dict.iter().all(|(key, value)| look(self, &key, &value))
    }

    fn names_of(&mut self, there: &Bound<'py, PyAny>) -> bool {
        match there.cast::<PySet>() {
            Ok(set) => self.length(set.len()) && (set.is_empty() || set.iter().all(|name| self.name(&name))),
            Err(_) => self.dict(there, |walk, name, _| walk.name(name)),
        }
    }

    fn entries_of(&mut self, there: &Bound<'py, PyAny>) -> bool {
        self.dict(there, |walk, name, entry| {
            walk.entries.push(entry.clone());
            walk.name(name)
        })
    }

    fn groups(&mut self, there: &Bound<'py, PyAny>) -> bool {
        let Ok(groups) = there.cast::<PyList>() else { return false };
        self.length(groups.len()) && groups.iter().all(|group| self.group(&group).unwrap_or(false))
    }

    fn group(&mut self, group: &Bound<'py, PyAny>) -> Option<bool> {
        let members = group.cast::<PyDict>().ok()?.get_item(self.members_name).ok()??;
        self.listed(&members)
    }

    fn listed(&mut self, members: &Bound<'py, PyAny>) -> Option<bool> {
        let members = members.cast::<PyList>().ok()?;
        let first = self.members.len();
        self.members.extend(members.iter());
        if self.known.is_none() {
            for (number, member) in self.members.iter().enumerate().skip(first) {
                self.member_numbers.entry(member.as_ptr() as usize).or_insert(number);
            }
        }
        Some(self.length(members.len()))
    }

    /// The state of a member, or an entry that belongs to none.
    fn state(&mut self, key: &Bound<'py, PyAny>, value: &Bound<'py, PyAny>) -> bool {
        if key.is_exact_instance_of::<PyString>() {
            self.entries.push(value.clone());
            return self.link(None) && self.name(key);
        }
        let address = key.as_ptr() as usize;
        let number = match self.known {
            Some(met) => met.links.get(self.links).copied().flatten(),
            None => self.member_numbers.get(&address).copied(),
        };
        let is_member = number.and_then(|number| self.members.get(number)).is_some_and(|member| member.is(key));
        is_member && self.link(number) && self.entries_of(value)
    }

    fn object(&mut self, there: &Bound<'py, PyAny>) -> bool {
        if there.is_none() {
            return self.link(None);
        }
        let number = match self.known {
            Some(met) => met.links.get(self.links).copied().flatten(),
            None => self.object_numbers.get(&(there.as_ptr() as usize)).copied(),
        };
        number.and_then(|number| self.objects.get(number)).is_some_and(|object| object.is(there)) && self.link(number)
    }

    fn length(&mut self, length: usize) -> bool {
        let Some(met) = self.known else {
            self.made.lengths.push(length);
            return true;
        };
        self.lengths += 1;
        met.lengths.get(self.lengths - 1) == Some(&length)
    }

    fn link(&mut self, number: Option<usize>) -> bool {
        let Some(met) = self.known else {
            self.made.links.push(number);
            return true;
        };
        self.links += 1;
        met.links.get(self.links - 1) == Some(&number)
    }

    /// A name that is a text or a number, of exactly these types: comparing others may run any code.
    fn name(&mut self, name: &Bound<'py, PyAny>) -> bool {
        let Some(met) = self.known else {
            self.made.names.push(name.clone().unbind());
            return name.is_exact_instance_of::<PyString>() || name.is_exact_instance_of::<PyInt>();
        };
        self.names += 1;
        let Some(known) = met.names.get(self.names - 1) else { return false };
        name.is(known) || {
            let known = known.bind(name.py());
            known.get_type().is(name.get_type()) && known.eq(name).unwrap_or(false)
        }
    }
}

/// The objects, if all are still alive.
fn upgraded<'py>(py: Python<'py>, parts: &[Part]) -> Option<Vec<Bound<'py, PyAny>>> {
    parts.iter().map(|part| part.object.bind(py).upgrade()).collect()
}

fn unstable() -> PyErr {
    pyo3::exceptions::PyTypeError::new_err("the objects cannot be compared with what they were")
}

/// Which of some objects are one and the same.
#[derive(Default)]
struct Same {
    /// For each object, the number of the first one that is the same.
    first: Vec<usize>,
    distinct: usize,
}

impl Same {
    fn of(addresses: &[usize]) -> Same {
        let mut numbers = HashMap::new();
        let first = addresses.iter().enumerate().map(|(number, address)| match numbers.entry(*address) {
            Entry::Occupied(first) => *first.get(),
            Entry::Vacant(place) => *place.insert(number),
        });
        Same { first: first.collect(), distinct: numbers.len() }
    }

    /// Whether the same holds for these objects.
    fn holds_of(&self, addresses: &[usize]) -> bool {
        if addresses.len() != self.first.len() {
            return false;
        }
        let mut sorted = addresses.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        sorted.len() == self.distinct
            && self.first.iter().zip(addresses).all(|(&first, address)| addresses[first] == *address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_are_the_same_does_not_depend_on_where_they_are() {
        let same = Same::of(&[10, 20, 10, 30]);
        assert!(same.holds_of(&[10, 20, 10, 30]));
        assert!(same.holds_of(&[7, 9, 7, 8]));
        for other in [&[7, 9, 6, 8][..], &[7, 9, 7, 9], &[7, 7, 7, 8], &[9, 7, 7, 8], &[7, 9, 7], &[7, 9, 7, 8, 7]] {
            assert!(!same.holds_of(other), "{other:?}");
        }
    }
}
