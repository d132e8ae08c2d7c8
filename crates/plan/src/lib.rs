//! Who moves which bytes, given what each rank holds or wants. Pure and deterministic.
