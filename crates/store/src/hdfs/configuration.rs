//! Reads Hadoop's own configuration, for settings that the client library does not tell.

use std::collections::HashMap;
use std::path::PathBuf;

use quick_xml::Reader;
use quick_xml::events::Event;

/// Length of a block unless the configuration has another one, as in Hadoop's own client.
pub(super) const BLOCK_BYTES: u64 = 128 << 20;

/// Files that are read, in this order.
const FILES: [&str; 2] = ["core-site.xml", "hdfs-site.xml"];

/// Settings of the files in `HADOOP_CONF_DIR`.
#[derive(Default)]
pub(super) struct Configuration {
    values: HashMap<String, String>,
}

impl Configuration {
    /// Reads the files in `HADOOP_CONF_DIR`, or in `HADOOP_HOME/etc/hadoop`; without both there are no settings.
    ///
    /// # Errors
    /// The reason why a file cannot be read.
    pub(super) fn read() -> Result<Configuration, String> {
        let of_home = || std::env::var_os("HADOOP_HOME").map(|home| PathBuf::from(home).join("etc/hadoop"));
        let Some(dir) = std::env::var_os("HADOOP_CONF_DIR").map(PathBuf::from).or_else(of_home) else {
            return Ok(Configuration::default());
        };
        let mut found = Configuration::default();
        for file in FILES.map(|name| dir.join(name)) {
            match std::fs::read_to_string(&file) {
                Ok(text) => found.add(&text).map_err(|error| format!("{}: {error}", file.display()))?,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(format!("{}: {error}", file.display())),
            }
        }
        Ok(found)
    }

    /// Adds the settings of a file's text.
    fn add(&mut self, text: &str) -> Result<(), String> {
        let mut reader = Reader::from_str(text);
        let (mut name, mut value, mut element) = (String::new(), String::new(), Vec::new());
        loop {
            match reader.read_event().map_err(|error| error.to_string())? {
                Event::Start(tag) | Event::Empty(tag) if tag.name().as_ref().ends_with(b"include") => {
                    return Err("expected the settings themselves, found xi:include, which is not followed".to_owned());
                }
                Event::Start(start) => {
                    element = start.name().as_ref().to_vec();
                    if element == b"property" {
                        (name, value) = (String::new(), String::new());
                    }
                }
                Event::Text(text) => {
                    let text = text.decode().map_err(|error| error.to_string())?;
                    match element.as_slice() {
                        b"name" => name.push_str(&text),
                        b"value" => value.push_str(&text),
                        _ => {}
                    }
                }
                Event::End(end) if end.name().as_ref() == b"property" => {
                    self.values.insert(name.trim().to_owned(), value.trim().to_owned());
                }
                Event::End(_) => element.clear(),
                Event::Eof => return Ok(()),
                _ => {}
            }
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns a number with one of Hadoop's units behind it, such as `128m`.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        let text = self.text(name)?.to_ascii_lowercase();
        let power = text.chars().last().and_then(|last| "kmgtpe".find(last)).map(|at| 10 * (at as u32 + 1));
        let digits = if power.is_some() { &text[..text.len() - 1] } else { &text };
        digits.trim().parse::<u64>().ok()?.checked_mul(1 << power.unwrap_or(0))
    }

    /// Returns all settings as one text.
    pub(super) fn fingerprint(&self) -> String {
        let mut all: Vec<String> = self.values.iter().map(|(name, value)| format!("{name}={value}")).collect();
        all.sort_unstable();
        all.join("\n")
    }

    /// Returns the permissions that new files and directories lack, as octal digits or in words (`u=rwx,g=rx,o=`).
    ///
    /// # Errors
    /// A message for a setting that is neither.
    pub(super) fn umask(&self) -> Result<u32, String> {
        let Some(text) = self.text("fs.permissions.umask-mode") else { return Ok(0o022) };
        let of_words = || {
            let mut kept = 0;
            for word in text.split(',') {
                let (who, what) = word.trim().split_once('=')?;
                let bit = |letter: char| "xwr".find(letter).map(|at| 1_u32 << at);
                let bits = what.chars().map(bit).sum::<Option<u32>>()?;
                for who in who.chars() {
                    kept |= match who {
                        'u' => bits << 6,
                        'g' => bits << 3,
                        'o' => bits,
                        'a' => bits << 6 | bits << 3 | bits,
                        _ => return None,
                    };
                }
            }
            Some(0o777 & !kept)
        };
        let found = u32::from_str_radix(text, 8).ok().filter(|mask| *mask <= 0o777).or_else(of_words);
        found.ok_or_else(|| {
            format!("fs.permissions.umask-mode: expected octal digits, or words as u=rwx,g=rx,o=; found {text:?}")
        })
    }

    /// Returns the length of a new file's blocks.
    pub(super) fn block_size(&self) -> u64 {
        self.number("dfs.blocksize").filter(|bytes| *bytes > 0).unwrap_or(BLOCK_BYTES)
    }

    pub(super) fn is(&self, name: &str, value: &str) -> bool {
        self.text(name).is_some_and(|found| found.eq_ignore_ascii_case(value))
    }

    /// Returns the links of a cluster's mount table, sorted.
    pub(super) fn links(&self, cluster: &str) -> Vec<&str> {
        let prefix = format!("fs.viewfs.mounttable.{cluster}.link.");
        let mut links: Vec<&str> = self.values.keys().filter_map(|name| name.strip_prefix(&prefix)).collect();
        links.sort_unstable();
        links
    }

    /// Returns the path below which a path of a cluster's mount table lies, with the place that is mounted there,
    /// `hdfs://authority/path`.
    pub(super) fn mount(&self, cluster: &str, path: &str) -> Option<(&str, &str)> {
        let holds = |link: &&str| path.strip_prefix(*link).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let link = self.links(cluster).into_iter().filter(holds).max_by_key(|link| link.len())?;
        Some((link, self.text(&format!("fs.viewfs.mounttable.{cluster}.link.{link}"))?))
    }

    /// Returns the addresses at which the NameNodes of an authority answer over HTTP, `http://host:port`.
    pub(super) fn http_addresses(&self, authority: &str) -> Vec<String> {
        let (scheme, name, port) = match self.is("dfs.http.policy", "HTTPS_ONLY") {
            true => ("https", "dfs.namenode.https-address", 9871),
            false => ("http", "dfs.namenode.http-address", 9870),
        };
        if let Some(nodes) = self.text(&format!("dfs.ha.namenodes.{authority}")) {
            let of_node = |node: &str| self.text(&format!("{name}.{authority}.{}", node.trim()));
            return nodes.split(',').filter_map(of_node).map(|address| format!("{scheme}://{address}")).collect();
        }
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let here = self.text("fs.defaultFS").and_then(|url| url.strip_prefix("hdfs://"));
        let is_here = here.is_some_and(|here| here.trim_end_matches('/') == authority);
        let is_its = |address: &&str| {
            is_here || self.is("dfs.namenode.rpc-address", authority) || address.starts_with(&format!("{host}:"))
        };
        match self.text(name).filter(is_its).and_then(|address| address.rsplit_once(':')) {
            // A server that listens everywhere is reached where its other calls go.
            Some(("0.0.0.0" | "", port)) => vec![format!("{scheme}://{host}:{port}")],
            Some((named, port)) => vec![format!("{scheme}://{named}:{port}")],
            None => vec![format!("{scheme}://{host}:{port}")],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Configuration {
        let property = |(name, value): &(&str, &str)| {
            format!("<property>\n <name>{name}</name><value> {value} </value><final>true</final></property>")
        };
        let text: String = pairs.iter().map(property).collect();
        let mut found = Configuration::default();
        found.add(&format!("<?xml version=\"1.0\"?><configuration><!-- x -->{text}</configuration>")).unwrap();
        found
    }

    #[test]
    fn sizes_have_units() {
        let found = of(&[("dfs.blocksize", "64M"), ("a", "1k"), ("b", "x"), ("c", "99999999999g")]);
        assert_eq!(found.block_size(), 64 << 20);
        assert_eq!((found.number("a"), found.number("b"), found.number("c")), (Some(1024), None, None));
        assert_eq!(of(&[]).block_size(), BLOCK_BYTES);
    }

    #[test]
    fn a_umask_is_octal_or_in_words() {
        let umask = |text| of(&[("fs.permissions.umask-mode", text)]).umask();
        assert_eq!((of(&[]).umask(), umask("077"), umask("u=rwx,g=rx,o=")), (Ok(0o022), Ok(0o077), Ok(0o027)));
        assert!(umask("1777").is_err() && umask("u+x").is_err() && umask("x=r").is_err());
        let included = Configuration::default().add("<configuration><xi:include href=\"a.xml\"/></configuration>");
        assert!(included.unwrap_err().contains("xi:include"));
    }

    #[test]
    fn an_address_is_that_of_the_namenode() {
        let ha = of(&[
            ("dfs.ha.namenodes.ns", "a, b"),
            ("dfs.namenode.http-address.ns.a", "one:50070"),
            ("dfs.namenode.http-address.ns.b", "two:50070"),
        ]);
        assert_eq!(ha.http_addresses("ns"), ["http://one:50070", "http://two:50070"]);
        let one = of(&[("fs.defaultFS", "hdfs://nn:8020"), ("dfs.namenode.http-address", "0.0.0.0:5070")]);
        assert_eq!(one.http_addresses("nn:8020"), ["http://nn:5070"]);
        assert_eq!(one.http_addresses("other:8020"), ["http://other:9870"]);
        let mounted = of(&[("fs.defaultFS", "viewfs://c"), ("dfs.namenode.http-address", "nn:5070")]);
        assert_eq!(mounted.http_addresses("nn:8020"), ["http://nn:5070"]);
    }

    #[test]
    fn the_longest_mount_counts() {
        let found = of(&[
            ("fs.viewfs.mounttable.c.link./a", "hdfs://x:1/p"),
            ("fs.viewfs.mounttable.c.link./a/b", "hdfs://y:1/q"),
        ]);
        assert_eq!(found.mount("c", "/a/b/run"), Some(("/a/b", "hdfs://y:1/q")));
        assert_eq!(found.mount("c", "/a/bc"), Some(("/a", "hdfs://x:1/p")));
        assert_eq!(found.mount("c", "/z"), None);
    }
}
