//! Lets ranks agree, with deadlines.
