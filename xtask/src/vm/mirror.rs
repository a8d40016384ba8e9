//! Where this machine gets its Debian packages from.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::bail;

/// Suites that only Debian's own archive has.
const SUITES: [&str; 10] =
    ["bullseye", "bookworm", "trixie", "forky", "sid", "oldoldstable", "oldstable", "stable", "testing", "unstable"];
/// Debian's keys where the sources name no others.
const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];

/// A Debian archive, and the keys that sign it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mirror {
    pub(super) url: String,
    pub(super) keyring: PathBuf,
}

impl Mirror {
    /// `url`, or what the sources of this machine's apt name.
    pub(super) fn find(url: Option<&str>) -> anyhow::Result<Self> {
        let found = in_sources(&sources(Path::new("/etc/apt")));
        let signed_by = found.as_ref().and_then(|(_, keyring)| keyring.clone());
        let url = match (url, found) {
            (Some(url), _) => url.trim_end_matches('/').to_owned(),
            (None, Some((url, _))) => url,
            (None, None) => bail!(
                "the apt sources of this machine (/etc/apt/sources.list, /etc/apt/sources.list.d) name no Debian \
                 archive to fetch kernels from: name one by --mirror URL"
            ),
        };
        let keyring = signed_by.into_iter().chain(KEYRINGS.map(PathBuf::from)).find(|file| file.is_file());
        match keyring {
            Some(keyring) => Ok(Self { url, keyring }),
            None => bail!("Debian's keys are missing: install the package debian-archive-keyring"),
        }
    }
}

/// The texts of apt's source lists.
fn sources(etc: &Path) -> Vec<String> {
    let mut files = vec![etc.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc.join("sources.list.d")) {
        files.extend(
            entries
                .flatten()
                .map(|e| e.path())
                .filter(|p| p.extension().is_some_and(|e| e == "list" || e == "sources")),
        );
    }
    files.sort();
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}

/// The first archive that has a suite of Debian and the component main, less those for security updates, which have few
/// packages; and its keyring.
fn in_sources(texts: &[String]) -> Option<(String, Option<PathBuf>)> {
    let all = texts.iter().flat_map(|text| stanzas(text).into_iter().chain(text.lines().filter_map(one_line)));
    all.into_iter().find_map(|source| {
        let debian = source.suites.iter().any(|suite| SUITES.contains(&suite.as_str()));
        let wanted = debian && source.binary && source.components.iter().any(|c| c == "main");
        let uri = source.uris.iter().find(|uri| wanted && !uri.contains("security"))?;
        Some((uri.trim_end_matches('/').to_owned(), source.signed_by.map(PathBuf::from)))
    })
}

/// One source, however it is written.
#[derive(Default)]
struct Source {
    binary: bool,
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// The deb822 style of sources.list(5).
fn stanzas(text: &str) -> Vec<Source> {
    let mut all = Vec::new();
    let mut source = Source::default();
    for line in text.lines().filter(|line| !line.starts_with('#')).chain([""]) {
        if line.trim().is_empty() {
            all.push(std::mem::take(&mut source));
        }
        let Some((key, value)) = line.split_once(':') else { continue };
        let words = || value.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
        match key.to_ascii_lowercase().as_str() {
            "types" => source.binary = words().iter().any(|w| w == "deb"),
            "uris" => source.uris = words(),
            "suites" => source.suites = words(),
            "components" => source.components = words(),
            "signed-by" => source.signed_by = Some(value.trim().to_owned()).filter(|v| v.starts_with('/')),
            _ => {}
        }
    }
    all
}

/// The style of one line: `deb [options] uri suite component…`.
fn one_line(line: &str) -> Option<Source> {
    let rest = line.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_ascii_whitespace().map(str::to_owned);
    Some(Source {
        binary: true,
        uris: vec![words.next()?],
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: options.split_ascii_whitespace().find_map(|o| o.strip_prefix("signed-by=")).map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<(String, Option<PathBuf>)> {
        in_sources(&[text.to_owned()])
    }

    #[test]
    fn both_styles_are_read() {
        let stanza = "# old\nTypes: deb deb-src\nURIs: http://a.example/debian/\nSuites: bookworm bookworm-updates\n\
                      Components: main\nSigned-By: /k.gpg\n";
        assert_eq!(found(stanza), Some(("http://a.example/debian".into(), Some("/k.gpg".into()))));
        let line = "deb [arch=amd64 signed-by=/k.gpg] https://b.example/debian trixie main contrib\n";
        assert_eq!(found(line), Some(("https://b.example/debian".into(), Some("/k.gpg".into()))));
        assert_eq!(found("deb http://c.example/debian sid main"), Some(("http://c.example/debian".into(), None)));
    }

    #[test]
    fn other_archives_are_passed_over() {
        let others = "deb http://x.example/node nodistro main\n\
                      deb-src http://x.example/debian trixie main\n\
                      #deb http://x.example/debian trixie main\n\
                      deb http://x.example/debian trixie contrib\n";
        assert_eq!(found(others), None);
        let security =
            "Types: deb\nURIs: http://s.example/debian-security\nSuites: bookworm-security\nComponents: main\n";
        assert_eq!(found(security), None);
        let both =
            format!("{security}\nTypes: deb\nURIs: http://d.example/debian\nSuites: bookworm\nComponents: main\n");
        assert_eq!(found(&both), Some(("http://d.example/debian".into(), None)));
    }
}
