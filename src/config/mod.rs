//! The configuration, from environment variables: `variables` is their table, `parse` reads their values. This is the
//! only room that reads the environment; a mistake is one line that names the variable and never its value.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

use parse::Parse;
use variables::{DefaultValue, Variable};

mod parse;
pub mod variables;

pub const PREFIX: &str = "THROUGHLINE_";

/// Of the default. Each costs memory, and Postgres is busy long before more of them are.
const MAX_HTTP_WORKERS: usize = 8;

/// A wrong or missing variable, in one line.
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
            database_url: vars.get(&variables::DATABASE_URL, parse::postgres_url)?,
            database_pool: vars.get(&variables::DATABASE_POOL, parse::connections)?,
            redis_url: vars.get(&variables::REDIS_URL, parse::redis_url)?,
            listen: vars.get(&variables::LISTEN, parse::address)?,
            operator_listen: vars.find(&variables::OPERATOR_LISTEN, parse::address)?,
            public_url: vars.find(&variables::PUBLIC_URL, parse::http_url)?,
            internal_listen: vars.find(&variables::INTERNAL_LISTEN, parse::address)?,
            internal_advertise: vars.find(&variables::INTERNAL_ADVERTISE, parse::http_url)?,
            metrics_listen: vars.get(&variables::METRICS_LISTEN, parse::address)?,
            operator_keys: vars.get(&variables::OPERATOR_KEY, parse::secrets)?,
            secret_keys: vars.get(&variables::SECRET_KEY, parse::secrets)?,
            allow_private_upstreams: vars.get(
                &variables::ALLOW_PRIVATE_UPSTREAMS,
                parse::private_upstreams,
            )?,
            turn_lease: vars.get(&variables::TURN_LEASE_MS, parse::lease)?,
            worker_lease: vars.get(&variables::WORKER_LEASE_MS, parse::lease)?,
            mcp_isolation: vars.get(&variables::MCP_ISOLATION, parse::isolation)?,
            mcp_bin_dirs: vars
                .find(&variables::MCP_BIN_DIRS, parse::directories)?
                .unwrap_or_default(),
            drain: vars.get(&variables::DRAIN_MS, parse::grace)?,
            shutdown_grace: vars.get(&variables::SHUTDOWN_GRACE_MS, parse::grace)?,
            http_workers: vars
                .find(&variables::HTTP_WORKERS, parse::threads)?
                .unwrap_or_else(processors),
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
            owner_url: vars.get(&variables::MIGRATE_DATABASE_URL, parse::postgres_url)?,
            service_url: vars.get(&variables::DATABASE_URL, parse::postgres_url)?,
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
        let find = |variable: &Variable| lookup(&variable.full_name()).map(PathBuf::from);
        Self {
            postgres_bin_dir: find(&variables::POSTGRES_BIN_DIR),
            redis_server: find(&variables::REDIS_SERVER),
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
            filter: vars.get(&variables::LOG, parse::any_text)?,
            format: vars.get(&variables::LOG_FORMAT, parse::log_format)?,
        })
    }
}

struct Vars<'a> {
    lookup: Lookup<'a>,
}

impl Vars<'_> {
    /// The parsed value of the environment.
    fn find<T>(
        &self,
        variable: &Variable,
        parse: impl Fn(&str) -> Parse<T>,
    ) -> Result<Option<T>, ConfigError> {
        let text = (self.lookup)(&variable.full_name());
        match text.as_deref().map(str::trim) {
            None | Some("") => Ok(None),
            Some(text) => parse(text)
                .map(Some)
                .map_err(|problem| variable.error(problem)),
        }
    }

    /// The same, or the default of the table.
    fn get<T>(
        &self,
        variable: &Variable,
        parse: impl Fn(&str) -> Parse<T>,
    ) -> Result<T, ConfigError> {
        if let Some(value) = self.find(variable, &parse)? {
            return Ok(value);
        }
        match variable.default {
            DefaultValue::Text(text) => parse(text).map_err(|problem| variable.error(problem)),
            DefaultValue::Required | DefaultValue::Unset | DefaultValue::Computed(_) => {
                Err(variable.error("is not set".to_owned()))
            }
        }
    }
}

impl Variable {
    pub fn full_name(&self) -> String {
        format!("{PREFIX}{}", self.name)
    }

    fn error(&self, problem: String) -> ConfigError {
        ConfigError {
            name: self.name,
            problem,
        }
    }
}

fn processors() -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    all.min(MAX_HTTP_WORKERS)
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
    fn every_default_is_a_value_that_its_parser_takes() {
        LogConfig::from_lookup(&|_| None).unwrap();
        for variable in variables::ALL {
            let default = variable.in_dev.or(match variable.default {
                DefaultValue::Text(text) => Some(text),
                DefaultValue::Required | DefaultValue::Unset | DefaultValue::Computed(_) => None,
            });
            if let Some(text) = default {
                load(&[(variable.full_name().as_str(), text)]).unwrap();
            }
        }
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
