//! Interprets the errors of HDFS for the caller: exceptions of the NameNode by their classes.

use std::time::Duration;

use hdfs_native::HdfsError;

use crate::{Error, Kind};

/// Classes of exceptions by the caller's reaction, without their packages.
const CLASSES: &[(&str, Kind)] = &[
    ("FileAlreadyExistsException", Kind::Conflict),
    ("FileNotFoundException", Kind::NotFound),
    ("NSQuotaExceededException", Kind::Exhausted),
    ("DSQuotaExceededException", Kind::Exhausted),
    ("QuotaByStorageTypeExceededException", Kind::Exhausted),
    ("QuotaExceededException", Kind::Exhausted),
    ("AccessControlException", Kind::Invalid),
    ("AuthorizationException", Kind::Invalid),
    ("SecretManager$InvalidToken", Kind::Invalid),
    ("SnapshotAccessControlException", Kind::Invalid),
    ("HadoopIllegalArgumentException", Kind::Invalid),
    ("IllegalArgumentException", Kind::Invalid),
    ("InvalidPathException", Kind::Invalid),
    ("ParentNotDirectoryException", Kind::Invalid),
    ("SnapshotException", Kind::Invalid),
    ("PathIsNotDirectoryException", Kind::Invalid),
    ("FSLimitException$PathComponentTooLongException", Kind::Invalid),
    ("FSLimitException$MaxDirectoryItemsExceededException", Kind::Exhausted),
    ("RpcNoSuchMethodException", Kind::Unsupported),
    ("UnsupportedOperationException", Kind::Unsupported),
];

/// Beginning of the client library's text about a block that no DataNode gives; all it knows of them follows.
const ALL_FAILED: &str = "All DataNodes failed";

/// Text of the client library about a connection that ended.
const DISCONNECTED: &str = "RPC listener disconnected";

/// Text of the NameNode about blocks that are shorter than it takes.
const SHORT_BLOCK: &str = "is less than configured minimum";

/// Text of the NameNode about more replicas than it allows.
const MANY_REPLICAS: &str = "Requested replication factor of";

/// Directory that is not empty.
const NOT_EMPTY: &str = "PathIsNotEmptyDirectoryException";

/// Text of the NameNode about a directory that was opened as a file.
const NO_FILE: &str = "is not a file";

/// Text of the client library about a file in an encryption zone, if the configuration does not say where the keys are.
const NO_KEYS: &str = "no KMS provider is configured";

/// Returns the error of a call.
pub(super) fn of(error: &HdfsError, op: &'static str, place: String) -> Error {
    let kind = kind_of(error);
    let message = match error {
        HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text) => {
            format!("the NameNode answered {}: {}", short(class), first_line(text))
        }
        HdfsError::SASLError(_) | HdfsError::GSSAPIError(..) | HdfsError::NoSASLMechanism => {
            format!("{error}; get a ticket with kinit, or name a token file in HADOOP_TOKEN_FILE_LOCATION")
        }
        HdfsError::InvalidArgument(text) if text.starts_with("No NameNode") => {
            "expected host:port, or a name service of the configuration in HADOOP_CONF_DIR; found no NameNode of this \
             name there"
                .to_owned()
        }
        HdfsError::DataTransferError(text) if text.starts_with(ALL_FAILED) => {
            let nodes = nodes(text);
            let none = "the NameNode knows none that has them".to_owned();
            let which = if nodes.is_empty() { none } else { nodes.join(", ") };
            format!(
                "no DataNode gave these bytes: {which}; they cannot be reached, or all replicas of the block are gone \
                 or damaged: `hdfs fsck` of the file tells, and `hdfs debug verifyMeta`"
            )
        }
        HdfsError::OperationFailed(text) if text.contains(DISCONNECTED) => {
            format!("{text}: the NameNode is gone, or this is not its RPC port (8020, not that of its web pages)")
        }
        other => first_line(&other.to_string()).to_owned(),
    };
    // A NameNode in safe mode, or a standby, may stay so for a while.
    let wait = (kind == Kind::Unavailable).then_some(Duration::ZERO);
    Error { wait, ..Error::new(kind, op, place, message) }
}

/// Returns whether a directory was not deleted since it is not empty.
pub(super) fn is_not_empty(error: &HdfsError) -> bool {
    matches!(error, HdfsError::RPCError(class, _) | HdfsError::FatalRPCError(class, _) if class.ends_with(NOT_EMPTY))
}

fn kind_of(error: &HdfsError) -> Kind {
    match error {
        HdfsError::AlreadyExists(_) => Kind::Conflict,
        HdfsError::FileNotFound(text) if text.contains(NO_FILE) => Kind::Corrupt,
        HdfsError::FileNotFound(_) => Kind::NotFound,
        HdfsError::IsADirectoryError(_) => Kind::Corrupt,
        HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text) => match class_kind(class) {
            Some(Kind::NotFound) if text.contains(NO_FILE) => Kind::Corrupt,
            Some(kind) => kind,
            None if text.contains(SHORT_BLOCK) || text.contains(MANY_REPLICAS) => Kind::Invalid,
            None => Kind::Unavailable,
        },
        HdfsError::InvalidPath(_)
        | HdfsError::InvalidArgument(_)
        | HdfsError::UrlParseError(_)
        | HdfsError::XmlParseError(_)
        | HdfsError::SASLError(_)
        | HdfsError::GSSAPIError(..)
        | HdfsError::NoSASLMechanism => Kind::Invalid,
        HdfsError::UnsupportedErasureCodingPolicy(_) | HdfsError::UnsupportedFeature(_) => Kind::Unsupported,
        HdfsError::OperationFailed(text) if text.contains(NO_KEYS) => Kind::Invalid,
        HdfsError::InternalError(_) => Kind::Internal,
        _ => Kind::Unavailable,
    }
}

/// Returns the caller's reaction to a class of exceptions; `None` for one that may pass, and for other text.
pub(super) fn class_kind(class: &str) -> Option<Kind> {
    CLASSES.iter().find(|(known, _)| short(class) == *known).map(|(_, kind)| *kind)
}

/// Returns the addresses in what the client library knows of DataNodes.
fn nodes(text: &str) -> Vec<String> {
    let of = |rest: &str| {
        let host = rest.split('"').next()?;
        let (_, port) = rest.split_once("xfer_port: ")?;
        let digits = port.find(|c: char| !c.is_ascii_digit()).unwrap_or(port.len());
        Some(format!("{host}:{}", &port[..digits]))
    };
    text.split("ip_addr: \"").skip(1).filter_map(of).collect()
}

/// Returns the name of a class without its package.
fn short(class: &str) -> &str {
    class.rsplit('.').next().unwrap_or(class)
}

/// Returns a text without the traces of the NameNode's stack.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_has_the_kind_of_its_class() {
        let of = |class: &str, text: &str| of(&HdfsError::RPCError(class.into(), text.into()), "open", "x".into());
        let hdfs = "org.apache.hadoop.hdfs.protocol";
        assert_eq!(of(&format!("{hdfs}.DSQuotaExceededException"), "").kind, Kind::Exhausted);
        assert_eq!(of("java.io.FileNotFoundException", "File does not exist: /a").kind, Kind::NotFound);
        assert_eq!(of("java.io.FileNotFoundException", "Path is not a file: /a").kind, Kind::Corrupt);
        let safe = of("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot create /a.\nat x\nat y");
        assert_eq!((safe.kind, safe.wait), (Kind::Unavailable, Some(Duration::ZERO)));
        assert_eq!(safe.message, "the NameNode answered SafeModeException: Cannot create /a.");
        let zone = HdfsError::OperationFailed(format!("the file is in a zone but {NO_KEYS}"));
        assert_eq!(super::of(&zone, "create", "x".into()).kind, Kind::Invalid);
    }
}
