//! Every environment variable of the service, typed, checked and documented. This is the only room
//! that reads the environment; a mistake is one line that names the variable and never its value.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

pub const PREFIX: &str = "THROUGHLINE_";

/// What `serve` reads besides its own listen addresses: two nodes of one cluster agree on these.
pub const CLUSTER_VARIABLES: [&str; 12] = [
    "DATABASE_URL",
    "DATABASE_POOL",
    "REDIS_URL",
    "OPERATOR_KEY",
    "SECRET_KEY",
    "ALLOW_PRIVATE_UPSTREAMS",
    "TURN_LEASE_MS",
    "WORKER_LEASE_MS",
    "MCP_ISOLATION",
    "MCP_BIN_DIRS",
    "DRAIN_MS",
    "SHUTDOWN_GRACE_MS",
];

/// By default; each costs memory, and Postgres is busy long before more of them are.
const MOST_HTTP_WORKERS: usize = 8;
/// Postgres sends notices such as "already exists, skipping", which sqlx logs as INFO.
const DEFAULT_LOG: &str = "info,actix_server=warn,sqlx=warn";
/// Shorter keys can be guessed.
const MIN_SECRET_CHARS: usize = 32;

/// A wrong or missing variable, told in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{PREFIX}{name}: {problem}")]
pub struct ConfigError {
    pub name: &'static str,
    pub problem: String,
}

/// Whether tenants' URLs may lead to private addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrivateUpstreams {
    Refused,
    Allowed,
    Only(Vec<IpNet>),
}

/// How tool servers are kept apart from the service and from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum McpIsolation {
    Bubblewrap,
    Uid,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Readable on a terminal, JSON otherwise.
    Auto,
    Json,
    Text,
    /// One short line a request; what `dev` writes unless another format is set.
    Short,
}

#[derive(Debug, Clone)]
pub struct Config {
    pub database_url: SecretString,
    pub database_pool: u32,
    pub redis_url: SecretString,
    pub listen: SocketAddr,
    /// When set, operator endpoints are served here and nowhere else.
    pub operator_listen: Option<SocketAddr>,
    /// Where browsers find this service: pages from there are its own.
    pub public_url: Option<Url>,
    pub internal_listen: Option<SocketAddr>,
    pub internal_advertise: Option<Url>,
    pub metrics_listen: SocketAddr,
    pub operator_keys: Vec<SecretString>,
    pub secret_keys: Vec<SecretString>,
    pub allow_private_upstreams: PrivateUpstreams,
    pub turn_lease: Duration,
    pub worker_lease: Duration,
    pub mcp_isolation: McpIsolation,
    pub mcp_bin_dirs: Vec<PathBuf>,
    /// How long a node goes on serving after the signal, so that balancers notice.
    pub drain: Duration,
    /// After that.
    pub shutdown_grace: Duration,
    /// Threads that serve requests.
    pub http_workers: usize,
}

/// What logging needs; read apart, because it comes before everything else.
#[derive(Debug, Clone)]
pub struct LogConfig {
    pub filter: String,
    pub format: LogFormat,
}

/// Where variables come from: the environment, or a map in tests and in `dev`.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

#[allow(clippy::disallowed_methods, reason = "the home of the environment")]
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Config {
    pub fn from_lookup(lookup: Lookup) -> Result<Self, ConfigError> {
        let vars = Vars { lookup };
        Ok(Self {
            database_url: vars.required("DATABASE_URL", postgres_url)?,
            database_pool: vars.or("DATABASE_POOL", 16, |text| bounded(text, 1, 1000))?,
            redis_url: vars.required("REDIS_URL", redis_url)?,
            listen: vars.or("LISTEN", SocketAddr::from(([0, 0, 0, 0], 8080)), address)?,
            operator_listen: vars.optional("OPERATOR_LISTEN", address)?,
            public_url: vars.optional("PUBLIC_URL", http_url)?,
            internal_listen: vars.optional("INTERNAL_LISTEN", address)?,
            internal_advertise: vars.optional("INTERNAL_ADVERTISE", http_url)?,
            metrics_listen: vars.or(
                "METRICS_LISTEN",
                SocketAddr::from(([127, 0, 0, 1], 9464)),
                address,
            )?,
            operator_keys: vars.required("OPERATOR_KEY", secrets)?,
            secret_keys: vars.required("SECRET_KEY", secrets)?,
            allow_private_upstreams: vars.or(
                "ALLOW_PRIVATE_UPSTREAMS",
                PrivateUpstreams::Refused,
                private_upstreams,
            )?,
            turn_lease: vars.or("TURN_LEASE_MS", Duration::from_secs(15), lease)?,
            worker_lease: vars.or("WORKER_LEASE_MS", Duration::from_secs(15), lease)?,
            mcp_isolation: vars.or("MCP_ISOLATION", McpIsolation::Bubblewrap, isolation)?,
            mcp_bin_dirs: vars.or("MCP_BIN_DIRS", Vec::new(), directories)?,
            drain: vars.or("DRAIN_MS", Duration::from_secs(5), grace)?,
            shutdown_grace: vars.or("SHUTDOWN_GRACE_MS", Duration::from_secs(25), grace)?,
            http_workers: vars.or("HTTP_WORKERS", cores(), |text| {
                bounded(text, 1, 256).map(|workers| workers as usize)
            })?,
        })
    }
}

/// The URLs that `migrate` needs: the owner's, and the service's for the role to make.
pub struct MigrateConfig {
    pub owner_url: SecretString,
    pub service_url: SecretString,
}

impl MigrateConfig {
    pub fn from_lookup(lookup: Lookup) -> Result<Self, ConfigError> {
        let vars = Vars { lookup };
        Ok(Self {
            owner_url: vars.required("MIGRATE_DATABASE_URL", postgres_url)?,
            service_url: vars.required("DATABASE_URL", postgres_url)?,
        })
    }
}

/// Where `dev` and the tests find the programs they start, if not on the PATH.
#[derive(Debug, Clone, Default)]
pub struct ProgramDirs {
    pub postgres_bin_dir: Option<PathBuf>,
    pub redis_server: Option<PathBuf>,
    pub path: Vec<PathBuf>,
}

impl ProgramDirs {
    pub fn from_lookup(lookup: Lookup) -> Self {
        let path = lookup("PATH").unwrap_or_default();
        Self {
            postgres_bin_dir: lookup("THROUGHLINE_POSTGRES_BIN_DIR").map(PathBuf::from),
            redis_server: lookup("THROUGHLINE_REDIS_SERVER").map(PathBuf::from),
            path: std::env::split_paths(&path).collect(),
        }
    }
}

impl LogConfig {
    /// As `dev` logs: for the person who started it, also into a file.
    pub fn for_dev(self) -> Self {
        let format = match self.format {
            LogFormat::Auto => LogFormat::Short,
            chosen @ (LogFormat::Json | LogFormat::Text | LogFormat::Short) => chosen,
        };
        Self { format, ..self }
    }

    pub fn from_lookup(lookup: Lookup) -> Result<Self, ConfigError> {
        let vars = Vars { lookup };
        Ok(Self {
            filter: vars.or("LOG", DEFAULT_LOG.to_owned(), |text| Ok(text.to_owned()))?,
            format: vars.or("LOG_FORMAT", LogFormat::Auto, |text| match text {
                "auto" => Ok(LogFormat::Auto),
                "json" => Ok(LogFormat::Json),
                "text" => Ok(LogFormat::Text),
                _ => Err("must be auto, json or text".to_owned()),
            })?,
        })
    }
}

struct Vars<'a> {
    lookup: Lookup<'a>,
}

type Parse<T> = Result<T, String>;

impl Vars<'_> {
    fn optional<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> Parse<T>,
    ) -> Result<Option<T>, ConfigError> {
        let text = (self.lookup)(&format!("{PREFIX}{name}"));
        match text.as_deref().map(str::trim) {
            None | Some("") => Ok(None),
            Some(text) => parse(text)
                .map(Some)
                .map_err(|problem| ConfigError { name, problem }),
        }
    }

    fn or<T>(
        &self,
        name: &'static str,
        default: T,
        parse: impl Fn(&str) -> Parse<T>,
    ) -> Result<T, ConfigError> {
        Ok(self.optional(name, parse)?.unwrap_or(default))
    }

    fn required<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> Parse<T>,
    ) -> Result<T, ConfigError> {
        self.optional(name, parse)?.ok_or_else(|| ConfigError {
            name,
            problem: "is not set".to_owned(),
        })
    }
}

fn cores() -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    all.min(MOST_HTTP_WORKERS)
}

fn url_of(text: &str, schemes: &[&str], example: &str) -> Parse<Url> {
    let wrong = || format!("must be a URL like {example}");
    let url = Url::parse(text).map_err(|_| wrong())?;
    if schemes.contains(&url.scheme()) && url.has_host() {
        Ok(url)
    } else {
        Err(wrong())
    }
}

fn postgres_url(text: &str) -> Parse<SecretString> {
    let example = "postgres://user:password@host:5432/database";
    let url = url_of(text, &["postgres", "postgresql"], example)?;
    if url.username().is_empty() {
        return Err(format!("names no user; must be a URL like {example}"));
    }
    Ok(text.into())
}

fn redis_url(text: &str) -> Parse<SecretString> {
    url_of(text, &["redis"], "redis://:password@host:6379/0").map(|_| text.into())
}

fn http_url(text: &str) -> Parse<Url> {
    url_of(text, &["http", "https"], "http://10.0.0.5:8081")
}

fn address(text: &str) -> Parse<SocketAddr> {
    text.parse()
        .map_err(|_| "must be an address and port like 127.0.0.1:8080".to_owned())
}

fn bounded(text: &str, least: u32, most: u32) -> Parse<u32> {
    text.parse()
        .ok()
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("must be a whole number from {least} to {most}"))
}

fn lease(text: &str) -> Parse<Duration> {
    bounded(text, 500, 600_000).map(|ms| Duration::from_millis(ms.into()))
}

fn grace(text: &str) -> Parse<Duration> {
    bounded(text, 0, 600_000).map(|ms| Duration::from_millis(ms.into()))
}

fn secrets(text: &str) -> Parse<Vec<SecretString>> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    if parts
        .iter()
        .any(|part| part.chars().count() < MIN_SECRET_CHARS)
    {
        return Err(format!(
            "each key must have {MIN_SECRET_CHARS} characters or more (several are parted by commas)"
        ));
    }
    Ok(parts.into_iter().map(SecretString::from).collect())
}

fn private_upstreams(text: &str) -> Parse<PrivateUpstreams> {
    match text {
        "false" => Ok(PrivateUpstreams::Refused),
        "true" => Ok(PrivateUpstreams::Allowed),
        list => list
            .split(',')
            .map(|part| part.trim().parse())
            .collect::<Result<Vec<IpNet>, _>>()
            .map(PrivateUpstreams::Only)
            .map_err(|_| "must be false, true, or networks like 10.0.0.0/8,fd00::/8".to_owned()),
    }
}

fn isolation(text: &str) -> Parse<McpIsolation> {
    match text {
        "bubblewrap" => Ok(McpIsolation::Bubblewrap),
        "uid" => Ok(McpIsolation::Uid),
        "none" => Ok(McpIsolation::None),
        _ => Err("must be bubblewrap, uid or none".to_owned()),
    }
}

fn directories(text: &str) -> Parse<Vec<PathBuf>> {
    let dirs: Vec<PathBuf> = text.split(':').map(PathBuf::from).collect();
    if dirs.iter().all(|dir| dir.is_absolute()) {
        Ok(dirs)
    } else {
        Err("must be absolute directories parted by colons".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use secrecy::ExposeSecret;

    use super::*;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn load(changes: &[(&str, &str)]) -> Result<Config, String> {
        let mut vars = BTreeMap::from([
            (
                "THROUGHLINE_DATABASE_URL",
                "postgres://app:pw@db/throughline",
            ),
            ("THROUGHLINE_REDIS_URL", "redis://:pw@cache:6379/0"),
            ("THROUGHLINE_OPERATOR_KEY", KEY),
            ("THROUGHLINE_SECRET_KEY", KEY),
        ]);
        vars.extend(changes.iter().copied());
        Config::from_lookup(&|name| vars.get(name).map(|text| (*text).to_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn four_variables_are_enough() {
        let config = load(&[]).unwrap();
        assert_eq!(config.listen.port(), 8080);
        assert!(config.metrics_listen.ip().is_loopback());
        assert_eq!(config.operator_keys[0].expose_secret(), KEY);
    }

    #[test]
    fn a_mistake_is_one_line_that_names_the_variable_and_hides_the_value() {
        for (name, value) in [
            ("DATABASE_URL", ""),
            ("DATABASE_URL", "hunter2"),
            ("DATABASE_URL", "mysql://hunter2@db/x"),
            ("DATABASE_URL", "postgres://db/hunter2"),
            ("REDIS_URL", "http://hunter2"),
            ("OPERATOR_KEY", "hunter2"),
            ("SECRET_KEY", "hunter2,0123456789abcdef0123456789abcdef"),
            ("LISTEN", "hunter2"),
            ("METRICS_LISTEN", "hunter2:1"),
            ("INTERNAL_ADVERTISE", "hunter2"),
            ("PUBLIC_URL", "hunter2"),
            ("ALLOW_PRIVATE_UPSTREAMS", "hunter2"),
            ("ALLOW_PRIVATE_UPSTREAMS", "10.0.0.0/33"),
            ("TURN_LEASE_MS", "hunter2"),
            ("WORKER_LEASE_MS", "1"),
            ("MCP_ISOLATION", "hunter2"),
            ("MCP_BIN_DIRS", "hunter2"),
            ("DATABASE_POOL", "0"),
            ("SHUTDOWN_GRACE_MS", "hunter2"),
            ("DRAIN_MS", "600001"),
        ] {
            let variable = format!("THROUGHLINE_{name}");
            let message = load(&[(variable.as_str(), value)]).unwrap_err();
            assert!(message.starts_with(&variable), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn several_keys_and_networks_are_lists() {
        let two = format!("{KEY}, {KEY}x");
        let config = load(&[
            ("THROUGHLINE_SECRET_KEY", two.as_str()),
            (
                "THROUGHLINE_ALLOW_PRIVATE_UPSTREAMS",
                "10.0.0.0/8, fd00::/8",
            ),
        ])
        .unwrap();
        assert_eq!(config.secret_keys.len(), 2);
        assert!(matches!(
            config.allow_private_upstreams,
            PrivateUpstreams::Only(networks) if networks.len() == 2
        ));
    }
}
