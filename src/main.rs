//! The command line: it parses, calls the library, and prints a failure in one line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use throughline::config::{Config, LogConfig, MigrateConfig, environment};
use throughline::ids::TenantId;
use throughline::{audit, child_guard, dev, http, secrets, server, store, telemetry, tenants};

/// The system's allocator keeps freed memory: after a burst of large bodies a node had three times its memory for
/// good (`cargo bench --bench abuse`). Settings are in .cargo/config.toml.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// One assistant conversation across every platform, for many tenants at once.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a node; configured by THROUGHLINE_… variables
    Serve,
    /// Run everything on this machine: a node, its own Postgres and Redis, a demo tenant
    Dev {
        #[arg(long, default_value_t = 8080)]
        port: u16,
        #[arg(long, default_value = ".throughline")]
        data_dir: PathBuf,
        /// A further path for the ready file, besides ready.json in the data directory
        #[arg(long)]
        ready_file: Option<PathBuf>,
    },
    /// Create the database roles and apply migrations, as the owner
    Migrate,
    /// Print the OpenAPI document
    Openapi,
    /// Create tenants
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// Verify the audit
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Rotate the keys of THROUGHLINE_SECRET_KEY
    #[command(subcommand)]
    Secrets(SecretsCommand),
    #[command(hide = true)]
    Guard { spec: String },
}

#[derive(Subcommand)]
enum TenantCommand {
    /// Create a tenant and print it as JSON, with its first admin key
    Create { name: String },
}

#[derive(Subcommand)]
enum SecretsCommand {
    /// Show which keys stored data needs; fail if one is missing
    Status,
    /// Encrypt and sign long-lived data with the first key; then show what still needs the others
    Reseal,
}

#[derive(Subcommand)]
enum AuditCommand {
    /// Verify the chains of entries; name the first one that was changed or removed, and fail
    Verify {
        /// Only this tenant's chain
        #[arg(long)]
        tenant: Option<TenantId>,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("throughline: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    if let Command::Guard { spec } = &command {
        // Before any thread or log: the guard is as small as it can be.
        return child_guard::run(spec);
    }
    let mut logs = LogConfig::from_lookup(&environment)?;
    if matches!(command, Command::Dev { .. }) {
        logs = logs.for_dev();
    }
    telemetry::init_logs(&logs)?;
    let config = || Config::from_lookup(&environment);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match command {
            Command::Serve => server::serve(config()?).await?,
            Command::Dev {
                port,
                data_dir,
                ready_file,
            } => {
                dev::run(dev::Options {
                    port,
                    data_dir,
                    ready_file,
                })
                .await?;
            }
            Command::Migrate => {
                let config = MigrateConfig::from_lookup(&environment)?;
                println!(
                    "{} migrations applied",
                    store::db::migrate::run(&config).await?
                );
            }
            Command::Openapi => print!("{}", http::openapi::to_text(&http::document()?)?),
            Command::Tenant(TenantCommand::Create { name }) => {
                tenants::create_from_command_line(config()?, &name).await?;
            }
            Command::Audit(AuditCommand::Verify { tenant }) => {
                audit::verify::verify_from_command_line(config()?, tenant).await?;
            }
            Command::Secrets(SecretsCommand::Status) => {
                secrets::status_from_command_line(config()?).await?;
            }
            Command::Secrets(SecretsCommand::Reseal) => {
                secrets::reseal_from_command_line(config()?).await?;
            }
            Command::Guard { spec } => child_guard::run(&spec)?,
        }
        Ok(())
    })
}
