//! One running node: its listeners, its background loops, and an orderly end.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::{HttpResponse, HttpServer, web};
use anyhow::Context;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::clock::Clock;
use crate::config::Config;
use crate::http::{self, Shared, Surface};
use crate::jobs;
use crate::live;
use crate::secrets;
use crate::telemetry;

/// Enough for the handful of scrapers a node has.
const METRICS_WORKERS: usize = 1;
/// How long the last writes of an ending node may take.
const FINISH: Duration = Duration::from_secs(2);

pub struct Node {
    pub app: App,
    pub address: SocketAddr,
    pub metrics_address: Option<SocketAddr>,
    servers: Vec<ServerHandle>,
    tasks: JoinSet<()>,
    /// What goes on until nothing else does.
    background: JoinSet<()>,
    ended: CancellationToken,
}

impl Node {
    /// Listens and starts to serve. `metrics` is the process's recorder, where it has one.
    pub async fn start(app: App, metrics: Option<PrometheusHandle>) -> anyhow::Result<Self> {
        let listener = listen("LISTEN", app.config.listen)?;
        Self::start_on(listener, app, metrics).await
    }

    /// Serves on a listener that is bound already.
    pub async fn start_on(
        listener: TcpListener,
        app: App,
        metrics: Option<PrometheusHandle>,
    ) -> anyhow::Result<Self> {
        let surface = match app.config.operator_listen {
            Some(_) => Surface::Tenants,
            None => Surface::All,
        };
        let mut node = Self {
            address: app.config.listen,
            metrics_address: None,
            app,
            servers: Vec::new(),
            tasks: JoinSet::new(),
            background: JoinSet::new(),
            ended: CancellationToken::new(),
        };
        node.address = node.serve(listener, surface)?;
        if let Some(address) = node.app.config.operator_listen {
            let listener = listen("OPERATOR_LISTEN", address)?;
            node.serve(listener, Surface::Operator)?;
        }
        if let Some(metrics) = metrics {
            node.metrics_address = Some(node.serve_metrics(metrics)?);
        }
        let (app, stop) = (&node.app, &node.app.draining);
        node.tasks.spawn(jobs::run(app.clone(), stop.clone()));
        node.tasks
            .spawn(jobs::heartbeat::run(app.clone(), stop.clone()));
        node.tasks
            .spawn(jobs::flush_usage::run(app.clone(), stop.clone()));
        node.tasks
            .spawn(jobs::recover_turns::run(app.clone(), stop.clone()));
        node.tasks
            .spawn(jobs::watch_streams::find_news(app.clone(), stop.clone()));
        node.tasks
            .spawn(jobs::watch_streams::check_rights(app.clone(), stop.clone()));
        node.tasks.spawn(secrets::warn_of_missing_keys(app.clone()));
        // Pokes are told until the last turn has ended.
        let (live, redis) = (&app.live, &app.redis);
        node.background.spawn(live::tell_others(
            live.clone(),
            redis.clone(),
            node.ended.clone(),
        ));
        node.background.spawn(live::hear_others(
            live.clone(),
            redis.clone(),
            node.ended.clone(),
        ));
        Ok(node)
    }

    fn serve(&mut self, listener: TcpListener, surface: Surface) -> anyhow::Result<SocketAddr> {
        let address = listener.local_addr()?;
        self.app.upstream.add_own_port(address.port());
        let shared = Shared::new(self.app.clone(), surface);
        let grace = self.app.config.shutdown_grace.as_secs().max(1);
        let server = HttpServer::new(move || http::application(shared.clone()))
            .listen(listener)?
            .workers(self.app.config.http_workers)
            // A word that is said is on its way, however small the packet.
            .tcp_nodelay(true)
            // Who has left is waited for no longer: what they waited for is given to the next who asks.
            .h1_allow_half_closed(false)
            .shutdown_timeout(grace)
            .disable_signals()
            .run();
        self.spawn(server);
        Ok(address)
    }

    fn serve_metrics(&mut self, metrics: PrometheusHandle) -> anyhow::Result<SocketAddr> {
        let listener = listen("METRICS_LISTEN", self.app.config.metrics_listen)?;
        let address = listener.local_addr()?;
        self.app.upstream.add_own_port(address.port());
        let render = move || {
            let metrics = metrics.clone();
            async move {
                metrics.run_upkeep();
                HttpResponse::Ok()
                    .content_type("text/plain; version=0.0.4")
                    .body(metrics.render())
            }
        };
        let server = HttpServer::new(move || {
            actix_web::App::new().route("/metrics", web::get().to(render.clone()))
        })
        .listen(listener)?
        .workers(METRICS_WORKERS)
        .disable_signals()
        .run();
        self.spawn(server);
        Ok(address)
    }

    fn spawn(&mut self, server: actix_web::dev::Server) {
        self.servers.push(server.handle());
        self.tasks.spawn(async move {
            if let Err(error) = server.await {
                tracing::error!(%error, "a listener failed");
            }
        });
    }

    /// Stops accepting, finishes what runs, gives connections back.
    pub async fn stop(mut self) {
        self.app.begin_draining();
        let grace = self.app.config.shutdown_grace + Duration::from_secs(1);
        let finish = async {
            // A listener's thread takes the turns that run on it along: they end, or are given back, first.
            for server in &self.servers {
                server.pause().await;
            }
            self.app.turn_tasks.close();
            self.app.turn_tasks.wait().await;
            for server in &self.servers {
                server.stop(true).await;
            }
            while self.tasks.join_next().await.is_some() {}
        };
        if tokio::time::timeout(grace, finish).await.is_err() {
            tracing::warn!("some requests did not finish within the grace period");
        }
        self.ended.cancel();
        let finished = tokio::time::timeout(FINISH, jobs::finish(&self.app)).await;
        if !matches!(finished, Ok(Ok(()))) {
            tracing::warn!("the database did not take what this node had left");
        }
        self.app.db.close().await;
    }
}

fn listen(variable: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    bind(address).with_context(|| format!("THROUGHLINE_{variable}: cannot listen on {address}"))
}

/// A listener as `Node::start_on` takes it.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// `throughline serve`: runs until SIGTERM or SIGINT.
pub async fn serve(config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let metrics = telemetry::init_metrics()?;
    let app = App::build(config, Clock::system()).await?;
    let node = Node::start(app, Some(metrics)).await?;
    tracing::info!(address = %node.address, "serving");
    signals.wait().await;
    tracing::info!("shutting down");
    node.stop().await;
    Ok(())
}

/// The signals that ask the process to end; one that comes after `listen` is never missed.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
