//! Runs real servers for tests: `scripts/servers.sh` installs and starts them, and they end with the test.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A storage server on this machine, with an empty bucket; the bucket of an HDFS is a directory.
#[derive(Clone, Debug)]
pub struct Server {
    values: HashMap<String, String>,
}

/// Variable with the server's description, set for a test that runs with its credentials.
const GIVEN: &str = "SHARDFAST_TEST_SERVER";

/// Variable that names another server for tests that any S3 server suits: a campaign sets `minio`.
const USUAL: &str = "SHARDFAST_TEST_S3";

/// Prefix of the keys of variables of the test's environment.
const VARIABLE: &str = "variable:";

fn run(arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/servers.sh");
    let done = Command::new(script).args(arguments).stderr(Stdio::inherit()).output();
    done.expect("scripts/servers.sh runs")
}

fn usual() -> String {
    std::env::var(USUAL).unwrap_or_else(|_| "versitygw".to_owned())
}

/// Prints why a test does nothing. In CI, which has all that tests need, it panics.
fn skip(test: &str, why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{test} cannot run: {why}");
    eprintln!("SKIPPED {test}: {why}");
}

impl Server {
    /// Runs the test `test` (its whole name) with a new server of that name, whose credentials are in the environment:
    /// this process starts the server and runs the test again in a process of its own. If the server cannot be
    /// installed, it does nothing, and prints that on standard error.
    ///
    /// # Panics
    /// When the test fails, or the server does not start although it is installed; in CI, instead of doing nothing.
    pub fn with(name: &str, test: &str, body: impl FnOnce(&Server)) {
        Server::started(name, test, &[], |_| (), body);
    }

    /// Runs [`with`](Server::with) the server for tests that any S3 server suits.
    ///
    /// # Panics
    /// As [`with`](Server::with).
    pub fn any(test: &str, body: impl FnOnce(&Server)) {
        Server::with(&usual(), test, body);
    }

    /// Runs with [`any`](Server::any) server whose data have `mib` MiB of space. Does nothing without root, as without
    /// the server.
    ///
    /// # Panics
    /// As [`with`](Server::with).
    pub fn any_with_space(mib: u32, test: &str, body: impl FnOnce(&Server)) {
        match rustix::process::geteuid().is_root() {
            true => Server::started(&usual(), test, &["--space", &mib.to_string()], |_| (), body),
            false => skip(test, "a file system of its own takes root"),
        }
    }

    /// Runs [`with`](Server::with) a server that is prepared before the test runs again.
    ///
    /// # Panics
    /// As [`with`](Server::with).
    pub fn prepared(name: &str, test: &str, prepare: impl FnOnce(&mut Server), body: impl FnOnce(&Server)) {
        Server::started(name, test, &[], prepare, body);
    }

    fn started(
        name: &str,
        test: &str,
        options: &[&str],
        prepare: impl FnOnce(&mut Server),
        body: impl FnOnce(&Server),
    ) {
        if std::env::var(GIVEN).is_ok() {
            return Server::given("").again(test, body);
        }
        if !run(&["install", name]).status.success() {
            return skip(test, &format!("{name} cannot be installed on this machine"));
        }
        let process = std::process::id().to_string();
        let started = run(&[&["start", "--with", &process], options, &[name]].concat());
        assert!(started.status.success(), "{name} did not start");
        let mut server = Server::given(&String::from_utf8(started.stdout).expect("UTF-8"));
        prepare(&mut server);
        // The server ends with this process in any case.
        server.again(test, body);
        run(&["stop", server.value("pid")]);
    }

    /// Parses a server from its line of `scripts/servers.sh`.
    pub fn given(line: &str) -> Server {
        let values = line.split_whitespace().filter_map(|pair| pair.split_once('='));
        Server { values: values.map(|(key, value)| (key.to_owned(), value.to_owned())).collect() }
    }

    /// Runs the test `test` again in a process with the credentials of this server; there it runs `body`.
    ///
    /// # Panics
    /// If the test fails.
    pub fn again(&self, test: &str, body: impl FnOnce(&Server)) {
        if let Ok(given) = std::env::var(GIVEN) {
            return body(&Server::given(&given));
        }
        let line: Vec<String> = self.values.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let done = Command::new(std::env::current_exe().expect("this test"))
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env(GIVEN, line.join(" "))
            .envs(self.environment())
            .envs(self.values.iter().filter_map(|(key, value)| Some((key.strip_prefix(VARIABLE)?, value))))
            .status()
            .expect("this test runs");
        assert!(done.success(), "{test} failed with the server {:?}: its output stands above", self.values);
    }

    /// Kills the server. It starts again `seconds` later, with its data and at the same address.
    ///
    /// # Panics
    /// If the server does not run.
    pub fn crash(&self, seconds: u32) {
        assert!(
            run(&["crash", self.value("dir"), &seconds.to_string()]).status.success(),
            "the server cannot be killed"
        );
    }

    /// Returns the server's folder, which is removed with it.
    pub fn dir(&self) -> &Path {
        Path::new(self.value("dir"))
    }

    /// Gives the test its credentials from the default profile of this file of AWS's tools.
    pub fn has_profile_in(&mut self, config: &Path) {
        self.values.insert("config".to_owned(), config.display().to_string());
    }

    /// Sets this variable in the test's environment; its value must have no blanks.
    pub fn has_variable(&mut self, name: &str, value: &str) {
        self.values.insert(format!("{VARIABLE}{name}"), value.to_owned());
    }

    fn value(&self, key: &str) -> &str {
        self.values.get(key).unwrap_or_else(|| panic!("the server says no {key}: {:?}", self.values))
    }

    /// Returns the server's URL.
    pub fn endpoint(&self) -> &str {
        self.value("url")
    }

    /// Returns the server's bucket.
    pub fn bucket(&self) -> &str {
        self.value("bucket")
    }

    /// Returns the server's access key and secret.
    pub fn keys(&self) -> (&str, &str) {
        (self.value("key"), self.value("secret"))
    }

    /// Returns the server's process id.
    pub fn process(&self) -> &str {
        self.value("pid")
    }

    /// Returns the URL of a prefix of the bucket, for a server that speaks S3.
    pub fn s3(&self, prefix: &str) -> String {
        format!("s3://{}/{prefix}?endpoint={}", self.bucket(), self.endpoint())
    }

    /// Returns the URL of a prefix of the container, for a server that speaks Azure's protocol.
    pub fn az(&self, prefix: &str) -> String {
        format!("az://{}/{prefix}?endpoint={}", self.bucket(), self.endpoint())
    }

    /// Returns the URL of a directory below the one that stands for the bucket, for an HDFS.
    pub fn hdfs(&self, prefix: &str) -> String {
        format!("{}/{}/{prefix}", self.endpoint(), self.bucket())
    }

    /// Returns host and port at which the NameNode of an HDFS takes calls.
    pub fn namenode(&self) -> &str {
        self.value("namenode")
    }

    /// Returns host and port of the NameNode's REST interface.
    pub fn http(&self) -> &str {
        self.value("http")
    }

    /// Returns host and port at which a DataNode of an HDFS takes and gives blocks; the first one is `datanode0`.
    pub fn datanode(&self, node: &str) -> &str {
        self.value(node)
    }

    /// Kills a node of an HDFS, `namenode` or `datanode0` to `datanode2`. It stays dead until it is
    /// [restarted](Server::restart).
    ///
    /// # Panics
    /// If the node does not run.
    pub fn kill(&self, node: &str) {
        let process = std::fs::read_to_string(self.dir().join(format!("{node}.pid"))).expect("the node's process id");
        let process = process.trim().parse().ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(process, Signal::KILL).unwrap_or_else(|error| panic!("{node} cannot be killed: {error}"));
    }

    /// Starts a node of an HDFS again, with its data and its ports, and returns when it answers. Kills it before,
    /// unless it is dead.
    ///
    /// # Panics
    /// If the node does not start.
    pub fn restart(&self, node: &str) {
        assert!(run(&["restart", self.value("dir"), node]).status.success(), "{node} does not start again");
    }

    /// Runs a tool of Hadoop's with this HDFS, named by its class, and returns what it printed, as in
    /// `tool(&["org.apache.hadoop.hdfs.tools.DFSck", "/"])`.
    ///
    /// # Panics
    /// If the tool fails.
    pub fn tool(&self, arguments: &[&str]) -> String {
        let done = run(&[&["hadoop", self.value("dir")], arguments].concat());
        let printed = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success(), "{arguments:?} failed: {printed}");
        printed
    }

    /// Returns the variables that give a program access to the server.
    fn environment(&self) -> Vec<(&'static str, String)> {
        if let Some(config) = self.values.get("config") {
            return vec![("AWS_CONFIG_FILE", config.clone()), ("AWS_SHARED_CREDENTIALS_FILE", String::new())];
        }
        // An HDFS has no keys, but variables in its line.
        if !self.values.contains_key("key") {
            return Vec::new();
        }
        vec![
            ("AWS_ACCESS_KEY_ID", self.value("key").to_owned()),
            ("AWS_SECRET_ACCESS_KEY", self.value("secret").to_owned()),
            // A service account that needs no token.
            (
                "GOOGLE_SERVICE_ACCOUNT_KEY",
                r#"{"client_email":"","private_key":"","private_key_id":"","disable_oauth":true}"#.to_owned(),
            ),
            ("AZURE_STORAGE_ACCOUNT_NAME", self.value("key").to_owned()),
            ("AZURE_STORAGE_ACCOUNT_KEY", self.value("secret").to_owned()),
        ]
    }
}
