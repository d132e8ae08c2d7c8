//! Says at which ports a process may listen.

use std::io;
use std::ops::RangeInclusive;

use tokio::net::TcpListener;

/// Ports at which a process may listen: one that the system chooses, or a free one of a range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(Option<RangeInclusive<u16>>);

impl Ports {
    /// Allows these ports only.
    pub fn only(range: RangeInclusive<u16>) -> Ports {
        Ports(Some(range))
    }

    /// Returns the first and the last of the ports; `None` if the system chooses one.
    pub fn range(&self) -> Option<(u16, u16)> {
        self.0.as_ref().map(|range| (*range.start(), *range.end()))
    }

    /// Listens at that host.
    ///
    /// # Errors
    /// The system's; `AddrInUse` if all ports of the range are taken.
    pub(crate) async fn listen(&self, host: &str) -> io::Result<TcpListener> {
        let Some(range) = &self.0 else { return TcpListener::bind((host, 0)).await };
        for port in range.clone() {
            match TcpListener::bind((host, port)).await {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                bound => return bound,
            }
        }
        let (first, last) = (range.start(), range.end());
        Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no port from {first} to {last} is free")))
    }
}
