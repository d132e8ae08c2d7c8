//! Defines when a save copies tensors. Python and the binding use the same names.

/// Time at which a save copies the bytes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// In the call that begins the save; the engine gets that copy.
    Inline,
    /// First, while the call waits: the program may change the tensor as soon as the call returns.
    Eager,
    /// While the program goes on, which changes the tensor only after the save is staged. The save succeeds when the
    /// caller has confirmed that the tensor was not modified.
    Lazy,
    /// At any time: the bytes do not change before the save is staged.
    Owned,
}

impl Capture {
    /// Returns the capture called `name`: "inline", "eager", "lazy" or "owned".
    pub fn from_name(name: &str) -> Option<Capture> {
        match name {
            "inline" => Some(Capture::Inline),
            "eager" => Some(Capture::Eager),
            "lazy" => Some(Capture::Lazy),
            "owned" => Some(Capture::Owned),
            _ => None,
        }
    }
}

/// Kinds of capture in a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captures {
    /// `true` if a tensor is captured eagerly: the call waits for it.
    pub eager: bool,
    /// `true` if a tensor is captured lazily: the caller must confirm that it was not modified.
    pub lazy: bool,
}

impl FromIterator<Capture> for Captures {
    fn from_iter<I: IntoIterator<Item = Capture>>(captures: I) -> Captures {
        let mut all = Captures::default();
        for capture in captures {
            all.eager |= capture == Capture::Eager;
            all.lazy |= capture == Capture::Lazy;
        }
        all
    }
}
