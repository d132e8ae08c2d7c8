//! Writes and checks the headers with which a rank joins its parent.

use tonic::Code;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use crate::{Error, Topology};

/// Protocol version: grows with every change of `coord.proto` or of its meaning.
pub(super) const PROTOCOL: u32 = 4;

pub(super) const TOKEN_HEADER: &str = "authorization";
pub(super) const PROTOCOL_HEADER: &str = "shardfast-protocol";
pub(super) const RANK_HEADER: &str = "shardfast-rank";
pub(super) const WORLD_HEADER: &str = "shardfast-world";
pub(super) const LOCAL_WORLD_HEADER: &str = "shardfast-local-world";
pub(super) const FAN_OUT_HEADER: &str = "shardfast-fan-out";

#[derive(Clone)]
pub(super) struct Pass {
    pub(super) protocol: u32,
    pub(super) rank: u32,
    topology: Topology,
    bearer: AsciiMetadataValue,
}

/// Reason why a rank is refused.
#[derive(Debug, PartialEq)]
pub(super) struct Refusal {
    pub(super) code: Code,
    pub(super) reason: String,
    /// Rank of the process, if it belongs to this job and names itself.
    pub(super) rank: Option<u32>,
}

impl Pass {
    pub(super) fn new(rank: u32, topology: &Topology, token: &str) -> Result<Pass, Error> {
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Invalid("a job's token must be visible ASCII characters, at least one".to_owned()));
        }
        if rank >= topology.world() {
            return Err(Error::Invalid(format!("rank {rank} is not below the world's size, {}", topology.world())));
        }
        let mut bearer: AsciiMetadataValue = format!("Bearer {token}")
            .parse()
            .map_err(|error| Error::Invalid(format!("a job's token must be a header's value: {error}")))?;
        bearer.set_sensitive(true);
        Ok(Pass { protocol: PROTOCOL, rank, topology: *topology, bearer })
    }

    pub(super) fn show(&self, headers: &mut MetadataMap) {
        headers.insert(TOKEN_HEADER, self.bearer.clone());
        headers.insert(PROTOCOL_HEADER, self.protocol.into());
        headers.insert(RANK_HEADER, self.rank.into());
        headers.insert(WORLD_HEADER, self.topology.world().into());
        headers.insert(LOCAL_WORLD_HEADER, self.topology.local_world().into());
        headers.insert(FAN_OUT_HEADER, self.topology.fan_out().into());
    }

    /// Returns the rank that asks to join, or why it is refused. The token is checked first: without it, a process
    /// learns nothing else.
    pub(super) fn check(&self, headers: &MetadataMap) -> Result<u32, Refusal> {
        let shown = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("none").to_owned();
        let number = |name: &str| shown(name).parse::<u32>().ok();
        let token = headers.get(TOKEN_HEADER).map_or(&b""[..], |value| value.as_encoded_bytes());
        if !same_secret(token, self.bearer.as_encoded_bytes()) {
            let reason = "the token is not this job's".to_owned();
            return Err(Refusal { code: Code::Unauthenticated, reason, rank: None });
        }
        let (us, rank) = (self.rank, number(RANK_HEADER));
        let refused = |code, reason| Err(Refusal { code, reason, rank });
        if number(PROTOCOL_HEADER) != Some(self.protocol) {
            let (theirs, ours) = (shown(PROTOCOL_HEADER), self.protocol);
            let reason =
                format!("it uses protocol {theirs}, rank {us} uses {ours}: all ranks must run the same version");
            return refused(Code::FailedPrecondition, reason);
        }
        for (name, ours, unit) in [
            (WORLD_HEADER, self.topology.world(), "a world of {} ranks"),
            (LOCAL_WORLD_HEADER, self.topology.local_world(), "a tree with {} ranks on a node"),
            (FAN_OUT_HEADER, self.topology.fan_out(), "a tree with a fan-out of {}"),
        ] {
            if number(name) != Some(ours) {
                let [theirs, ours] = [shown(name), ours.to_string()].map(|number| unit.replace("{}", &number));
                let reason = format!("it belongs to {theirs}, rank {us} to {ours}");
                return refused(Code::FailedPrecondition, reason);
            }
        }
        match rank {
            Some(rank) if rank < self.topology.world() => Ok(rank),
            _ => {
                let (found, world) = (shown(RANK_HEADER), self.topology.world());
                refused(Code::InvalidArgument, format!("its rank is {found}, expected one below {world}"))
            }
        }
    }
}

/// Compares in a time that does not depend on where the two differ.
pub(crate) fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
