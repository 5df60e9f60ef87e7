//! `throughline dev`: the service with a Postgres and a Redis of its own and a demo tenant, in one
//! directory, for one developer. It is the same node that `serve` runs.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use secrecy::ExposeSecret;

use crate::app::App;
use crate::auth::{OperatorCaller, ServiceCaller};
use crate::clock::Clock;
use crate::config::{Config, MigrateConfig, PREFIX, ProgramDirs, environment, variables};
use crate::descriptors;
use crate::domain::people::display_name::DisplayName;
use crate::domain::tenant::api_key::{NewApiKey, Scope};
use crate::domain::values::paging::{MAX_LIMIT, PageRequest};
use crate::ids::TenantId;
use crate::server::{self, Node, Signals};
use crate::store;
use crate::telemetry;
use crate::tenants::{self, api_keys};

pub mod directory;
pub mod programs;
mod ready;
pub mod servers;
mod state;
mod supervisor;

use ready::{Ready, ReadyFiles};
use servers::{PostgresServer, RedisServer, Setup};
use state::{DataDir, Demo, State};
use supervisor::Supervisor;

const DATABASE: &str = "throughline";
const OWNER: &str = "throughline_owner";
const SERVICE_LOGIN: &str = "throughline";
const DEMO_NAME: &str = "Demo";

pub struct Options {
    pub port: u16,
    pub data_dir: PathBuf,
    /// A further path for the ready file.
    pub ready_file: Option<PathBuf>,
}

/// Runs until a signal ends it, or one of its servers cannot be kept running.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let data_dir = DataDir::open(&options.data_dir)?;
    let ready_files = ReadyFiles::new(data_dir.path(), options.ready_file);
    let listener = bind(options.port)?;
    let setup = setup(&data_dir)?;
    let mut state = data_dir.load(&setup.dir)?;
    let postgres = PostgresServer::start(&setup, &state.superuser_password).await?;
    let redis = RedisServer::start(&setup, &state.redis_password).await?;
    let env = cluster_environment(&state, &postgres, &redis);
    migrate(&state, &postgres, &env).await?;
    let metrics = telemetry::init_metrics()?;
    descriptors::raise_limit();
    let config = node_config(&env, listener.local_addr()?)?;
    let app = App::build(config, Clock::system()).await?;
    let demo = ensure_demo(&app, &data_dir, &mut state).await?;
    let node = Node::start_on(listener, app, Some(metrics)).await?;
    let ready = Ready {
        url: format!("http://{}", node.address),
        metrics_url: node
            .metrics_address
            .map(|address| format!("http://{address}/metrics"))
            .unwrap_or_default(),
        operator_key: first_key(&env[&variable("OPERATOR_KEY")]),
        tenant_id: demo.tenant_id,
        api_key: demo.api_key,
        database_url: env[&variable("DATABASE_URL")].clone(),
        redis_url: redis.url.clone(),
        env,
    };
    announce(&ready, data_dir.path(), &setup.dir);
    ready_files.write(&ready)?;
    let mut supervisor = Supervisor::new(setup, &state, postgres, redis);
    let outcome = tokio::select! {
        () = signals.wait() => Ok(()),
        error = supervisor.run() => Err(error),
    };
    drop(ready_files);
    node.stop().await;
    supervisor.stop();
    if outcome.is_ok() {
        let data_dir = options.data_dir.display();
        // The terminal may be gone: that is a reason to end, and not to fail.
        let _ = writeln!(std::io::stdout(), "Stopped. Data is kept in {data_dir}.");
    }
    outcome
}

/// Binds before anything is started: a port in use is the most usual mistake.
fn bind(port: u16) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    server::bind(address).map_err(|error| {
        if error.kind() == ErrorKind::AddrInUse {
            let other = if port == 9000 { 9001 } else { 9000 };
            anyhow::anyhow!("port {port} is taken: make dev ARGS=\"--port {other}\"")
        } else {
            anyhow::Error::new(error).context(format!("cannot listen on {address}"))
        }
    })
}

fn setup(data_dir: &DataDir) -> anyhow::Result<Setup> {
    let account = directory::account()?;
    Ok(Setup {
        programs: programs::find(&ProgramDirs::from_lookup(&environment))?,
        guard_program: std::env::current_exe()?,
        account,
        dir: directory::server_dir(data_dir.path(), account)?,
        throwaway: false,
    })
}

fn variable(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// The variables with which a second node joins this one; the developer's own settings win where they may.
fn cluster_environment(
    state: &State,
    postgres: &PostgresServer,
    redis: &RedisServer,
) -> BTreeMap<String, String> {
    let own = variables::ALL
        .iter()
        .filter(|row| row.scope.is_shared())
        .filter_map(|row| Some((row.full_name(), environment(&row.full_name())?)))
        // An empty value counts as not set.
        .filter(|(_, value)| !value.trim().is_empty());
    // Developers usually try a model on their own machine first, and their tools are their own.
    let mut env: BTreeMap<String, String> = variables::ALL
        .iter()
        .filter_map(|row| Some((row.full_name(), row.in_dev?.to_owned())))
        .collect();
    env.insert(variable("OPERATOR_KEY"), state.operator_key.clone());
    env.insert(variable("SECRET_KEY"), state.secret_key.clone());
    env.extend(own);
    env.insert(
        variable("DATABASE_URL"),
        postgres.url(SERVICE_LOGIN, &state.service_password, DATABASE),
    );
    env.insert(variable("REDIS_URL"), redis.url.clone());
    env
}

/// Several keys may be set: any is good, the first is printed.
fn first_key(keys: &str) -> String {
    keys.split(',').next().unwrap_or_default().trim().to_owned()
}

async fn migrate(
    state: &State,
    postgres: &PostgresServer,
    env: &BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let superuser = postgres.superuser("postgres");
    store::db::admin::ensure_database(&superuser, OWNER, &state.owner_password, DATABASE).await?;
    let config = MigrateConfig {
        owner_url: postgres.url(OWNER, &state.owner_password, DATABASE).into(),
        service_url: env[&variable("DATABASE_URL")].clone().into(),
    };
    store::db::migrate::run(&config).await?;
    Ok(())
}

fn node_config(env: &BTreeMap<String, String>, listen: SocketAddr) -> anyhow::Result<Config> {
    let mut config =
        Config::from_lookup(&|name| env.get(name).cloned().or_else(|| environment(name)))?;
    config.listen = listen;
    config.operator_listen = None;
    config.metrics_listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Ok(config)
}

/// Creates the demo tenant once. After a stop between its creation and the save of its key, it gets a new key
/// instead of a twin.
async fn ensure_demo(app: &App, data_dir: &DataDir, state: &mut State) -> anyhow::Result<Demo> {
    if let Some(demo) = &state.demo
        && store::tenant::tenants::find(&app.db, demo.tenant_id)
            .await?
            .is_some()
    {
        return Ok(demo.clone());
    }
    let all = PageRequest {
        limit: MAX_LIMIT,
        after: None,
    };
    let tenants = store::tenant::tenants::list(&app.db, &all).await?.rows;
    let now = app.clock.now();
    let operator = OperatorCaller::local();
    let actor = operator.principal();
    let mut tx = operator.begin(&app.db).await?;
    let demo = match tenants.into_iter().find(|tenant| tenant.name == DEMO_NAME) {
        Some(tenant) => {
            tx.operator_enter(tenant.id).await?;
            let key = NewApiKey {
                name: "demo admin key".parse::<DisplayName>()?,
                scopes: vec![Scope::Admin],
                platforms: Vec::new(),
                expires_at: None,
            };
            let created = api_keys::create(&app.keyring, &mut tx, &actor, &key, now).await?;
            Demo {
                tenant_id: tenant.id,
                api_key: created.text.expose_secret().to_owned(),
            }
        }
        None => {
            let name = DEMO_NAME.parse::<DisplayName>()?;
            let created = tenants::create(&app.keyring, &mut tx, &actor, &name, now).await?;
            Demo {
                tenant_id: created.tenant.id,
                api_key: created.api_key.expose_secret().to_owned(),
            }
        }
    };
    tx.commit().await?;
    state.demo = Some(demo.clone());
    data_dir.save(state)?;
    Ok(demo)
}

fn announce(ready: &Ready, data_dir: &Path, server_dir: &Path) {
    println!(
        "Throughline is running. Its data is in {data}.\n\n  \
         URL           {url}\n  \
         API reference {url}/docs\n  \
         Metrics       {metrics}\n  \
         Tenant        {tenant}\n  \
         Admin key     {key}\n  \
         Operator key  {operator}\n  \
         Ready file    {data}/ready.json\n  \
         Server logs   {servers}/*.log\n\n\
         {upstreams}\
         {isolation}\
         Try it:\n\n  \
         curl -s {url}/v1/inbound -H 'Authorization: Bearer {key}' \
         -H 'Content-Type: application/json' -d '{{\"identity\": \"telegram:42\", \"text\": \"Hello\"}}'\n",
        data = data_dir.display(),
        url = ready.url,
        metrics = ready.metrics_url,
        tenant = ready.tenant_id,
        key = ready.api_key,
        operator = ready.operator_key,
        servers = server_dir.display(),
        upstreams = upstreams_line(&ready.env[&variable("ALLOW_PRIVATE_UPSTREAMS")]),
        isolation = match ready.env[&variable("MCP_ISOLATION")].as_str() {
            "none" => "Tool servers are not isolated in dev (MCP_ISOLATION=none).\n\n",
            _ => "",
        },
    );
}

/// What `ALLOW_PRIVATE_UPSTREAMS` means for models on this machine.
fn upstreams_line(allowed: &str) -> String {
    match allowed {
        "true" => "Agents may call models on this machine and on private networks, such as Ollama \
                   (ALLOW_PRIVATE_UPSTREAMS=true).\n\n"
            .to_owned(),
        "false" => {
            "Agents may not call models on private addresses (ALLOW_PRIVATE_UPSTREAMS=false).\n\n"
                .to_owned()
        }
        networks => format!(
            "Agents may call models on these private networks: {networks} (ALLOW_PRIVATE_UPSTREAMS).\n\n"
        ),
    }
}

/// The service's own caller, for tests and benches: they are another crate and have no request.
pub fn service_caller(tenant_id: TenantId) -> ServiceCaller {
    ServiceCaller::for_tenant(tenant_id)
}
