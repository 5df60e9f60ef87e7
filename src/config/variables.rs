//! The table of the environment variables: one row each, with the default that `Config` parses and the meaning that
//! docs/reference/configuration.md shows.

/// An environment variable of the service.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Without the prefix.
    pub name: &'static str,
    pub default: DefaultValue,
    /// The value that `dev` sets instead of the default.
    pub in_dev: Option<&'static str>,
    pub scope: Scope,
    pub meaning: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultValue {
    Required,
    /// The feature is off.
    Unset,
    /// Parsed as if it were set.
    Text(&'static str),
    /// Found out on the machine.
    Computed(&'static str),
}

/// Who reads a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every command.
    Logs,
    /// Commands that run or need a node's configuration; equal on all nodes of a cluster.
    Cluster,
    /// The same commands, and `migrate`.
    ClusterAndMigrate,
    /// Commands that run or need a node's configuration; each node has its own value.
    Node,
    Migrate,
    /// `dev`, and the tests.
    Dev,
}

impl Scope {
    /// The commands that read the variable.
    pub const fn commands(self) -> &'static str {
        match self {
            Self::Logs => "all",
            Self::Cluster | Self::Node => "`serve`, `dev`, `tenant`, `audit`, `secrets`",
            Self::ClusterAndMigrate => "`serve`, `migrate`, `tenant`, `audit`, `secrets`",
            Self::Migrate => "`migrate`",
            Self::Dev => "`dev` and the tests",
        }
    }

    /// Whether two nodes of one cluster agree on the value.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Cluster | Self::ClusterAndMigrate)
    }
}

macro_rules! variables {
    ($($name:ident, $scope:ident, $default:expr, $in_dev:expr, $meaning:literal;)+) => {
        $(
            pub const $name: Variable = Variable {
                name: stringify!($name),
                default: $default,
                in_dev: $in_dev,
                scope: Scope::$scope,
                meaning: $meaning,
            };
        )+

        /// Every variable, in the order of the reference.
        pub const ALL: &[Variable] = &[$($name),+];
    };
}

// sqlx is at WARN in the default of LOG because it logs notices of Postgres, such as "already exists, skipping".
use DefaultValue::{Computed, Required, Text, Unset};

variables! {
    DATABASE_URL, ClusterAndMigrate, Required, None,
        "URL of Postgres with the role that the service runs as: `postgres://user:password@host:5432/database`. `dev` sets it";
    MIGRATE_DATABASE_URL, Migrate, Required, None,
        "URL of Postgres with the role that owns the database";
    DATABASE_POOL, Cluster, Text("16"), None,
        "Postgres connections of a node, 1 to 1000";
    REDIS_URL, Cluster, Required, None,
        "URL of Redis, without TLS: `redis://:password@host:6379/0`. `dev` sets it";
    LISTEN, Node, Text("0.0.0.0:8080"), None,
        "Address of the API. `dev` has `--port`";
    OPERATOR_LISTEN, Node, Unset, None,
        "Address of the operator's endpoints. If set, `LISTEN` no longer serves them. `dev` ignores it";
    PUBLIC_URL, Node, Unset, None,
        "URL at which browsers find this service, such as `https://chat.example`. Pages from there (`/docs`) may call the API without being on a tenant's list of origins, as pages opened by an IP address or as `localhost` always may";
    METRICS_LISTEN, Node, Text("127.0.0.1:9464"), None,
        "Address of `/metrics`, which has no credential. `dev` takes a free port";
    OPERATOR_KEY, Cluster, Required, None,
        "Keys of 32 characters or more, separated by commas; each of them is the operator. `dev` generates one";
    SECRET_KEY, Cluster, Required, None,
        "Keys of 32 characters or more, separated by commas. The first encrypts and signs; all decrypt and verify. `dev` generates one";
    DRAIN_MS, Cluster, Text("5000"), None,
        "How long a node goes on serving after the signal to stop, while `/readyz` is 503: 0 to 600000. `dev` does not drain";
    SHUTDOWN_GRACE_MS, Cluster, Text("25000"), None,
        "How long running requests may take after the drain, 0 to 600000";
    HTTP_WORKERS, Node, Computed("number of processors, 8 at most"), None,
        "Threads that serve requests of one listener, 1 to 256";
    LOG, Logs, Text("info,actix_server=warn,sqlx=warn"), None,
        "Filter of the log, such as `info` or `throughline=debug,info`. Health probes are `debug`";
    LOG_FORMAT, Logs, Text("auto"), None,
        "`json`, `text` or `auto`. `auto` is readable on a terminal and JSON otherwise; in `dev` it is one short line a request";
    ALLOW_PRIVATE_UPSTREAMS, Cluster, Text("false"), Some("true"),
        "Whether URLs of tenants (`base_url` of an agent, `jwks_url` of an issuer) may lead to private addresses, then with http too: `false`, `true`, or networks such as `10.0.0.0/8,fd00::/8`";
    INTERNAL_LISTEN, Node, Unset, None,
        "Address for other nodes; reserved (1). URLs of tenants may not lead to its port on any node";
    INTERNAL_ADVERTISE, Node, Unset, None,
        "URL under which other nodes reach this node, such as `http://10.0.0.5:8081`; stored in the list of nodes, otherwise reserved (1). URLs of tenants may not lead to its port";
    TURN_LEASE_MS, Cluster, Text("15000"), None,
        "Lease of a turn, 500 to 600000: how long a turn can stand still after its node is lost";
    WORKER_LEASE_MS, Cluster, Text("15000"), None,
        "Lease of a user's tool servers, 500 to 600000; reserved (1)";
    MCP_ISOLATION, Cluster, Text("bubblewrap"), Some("none"),
        "Isolation of tool servers: `bubblewrap`, `uid` or `none`; reserved (1)";
    MCP_BIN_DIRS, Cluster, Unset, None,
        "Absolute directories from which tool servers may be started, separated by colons; reserved (1)";
    POSTGRES_BIN_DIR, Dev, Computed("`PATH`, then `/usr/lib/postgresql/*/bin`; the newest version"), None,
        "Directory with `initdb` and `postgres`";
    REDIS_SERVER, Dev, Computed("`redis-server` or `valkey-server` on the `PATH`"), None,
        "The program of the Redis server";
}
