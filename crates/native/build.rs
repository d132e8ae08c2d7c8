//! Lets the unit tests find the library of the Python that they are linked with. A wheel is linked with none.

fn main() {
    pyo3_build_config::add_libpython_rpath_link_args();
}
