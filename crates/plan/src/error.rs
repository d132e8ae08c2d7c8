//! Defines the errors of planning.

use std::fmt;

/// A reason why there is no plan. Names every offender, not only the first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The ranks' holdings, claims or wants contradict each other: correct the call.
    #[error("{0}")]
    Invalid(Problems),
    /// The manifest does not describe whole tensors: use another checkpoint.
    #[error("{0}")]
    Corrupt(Problems),
}

impl Error {
    /// Returns every problem, each naming its leaf, what was expected and what was found.
    pub fn problems(&self) -> &[String] {
        match self {
            Error::Invalid(Problems(problems)) | Error::Corrupt(Problems(problems)) => problems,
        }
    }
}

/// At least one problem, each a sentence of its own. Formats a single one as it is, several as a list, one a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [problem] => f.write_str(problem),
            problems => {
                write!(f, "{} problems:", problems.len())?;
                problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}
