//! One running node: its listeners, its background loops, and an orderly shutdown.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::{HttpResponse, HttpServer, web};
use anyhow::Context;
use metrics_exporter_prometheus::PrometheusHandle;
use socket2::SockRef;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::App;
use crate::clock::Clock;
use crate::config::Config;
use crate::descriptors;
use crate::http::{self, Shared, Surface};
use crate::jobs;
use crate::notifications;
use crate::secrets;
use crate::telemetry;

/// Enough for the handful of scrapers a node has.
const METRICS_WORKERS: usize = 1;
/// Enough for the accepting thread to receive the pause.
const PAUSE_TIME: Duration = Duration::from_millis(20);
/// How long the last writes of a stopping node may take.
const LAST_WRITES_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Node {
    pub app: App,
    pub address: SocketAddr,
    pub metrics_address: Option<SocketAddr>,
    servers: Vec<Server>,
    /// Runs until the very end, so that the metrics show the shutdown.
    metrics: JoinSet<()>,
    /// The open connections, without those of the metrics.
    connections: TaskTracker,
    /// Tasks that run until the node stops.
    tasks: JoinSet<()>,
    /// Tasks that end last, after all others.
    background: JoinSet<()>,
    ended: CancellationToken,
}

struct Server {
    handle: ServerHandle,
    /// The same socket as the server's own.
    socket: TcpListener,
}

impl Node {
    /// Binds and starts to serve. `metrics` is the process's recorder, if it has one.
    pub async fn start(app: App, metrics: Option<PrometheusHandle>) -> anyhow::Result<Self> {
        let listener = listen("LISTEN", app.config.listen)?;
        Self::start_on(listener, app, metrics).await
    }

    /// Serves on a bound listener.
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
            metrics: JoinSet::new(),
            connections: TaskTracker::new(),
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
        node.spawn_loops();
        Ok(node)
    }

    fn spawn_loops(&mut self) {
        let app = &self.app;
        let stop = app.shutdown.stop_token();
        self.tasks.spawn(jobs::run(app.clone(), stop.clone()));
        self.tasks
            .spawn(jobs::recover_turns::run(app.clone(), stop));
        self.tasks.spawn(secrets::warn_of_missing_keys(app.clone()));
        // As long as there are requests, streams and turns, they need these loops.
        let background = &mut self.background;
        let ended = &self.ended;
        background.spawn(jobs::heartbeat::run(app.clone(), ended.clone()));
        background.spawn(jobs::flush_usage::run(app.clone(), ended.clone()));
        background.spawn(jobs::watch_streams::poll_events(app.clone(), ended.clone()));
        background.spawn(jobs::watch_streams::check_rights(
            app.clone(),
            ended.clone(),
        ));
        let notifications = &app.notifications;
        let redis = &app.redis;
        background.spawn(notifications::publish_loop(
            notifications.clone(),
            redis.clone(),
            ended.clone(),
        ));
        background.spawn(notifications::subscribe_loop(
            notifications.clone(),
            redis.clone(),
            ended.clone(),
        ));
    }

    fn serve(&mut self, listener: TcpListener, surface: Surface) -> anyhow::Result<SocketAddr> {
        let address = listener.local_addr()?;
        self.app.upstream.add_own_port(address.port());
        let shared = Shared::new(self.app.clone(), surface);
        let grace = self.app.config.shutdown_grace.as_secs().max(1);
        let socket = listener.try_clone()?;
        let connections = self.connections.clone();
        let server = HttpServer::new(move || http::application(shared.clone()))
            // Lives as long as its connection.
            .on_connect(move |_, connection| drop(connection.insert(connections.token())))
            .listen(listener)?
            .workers(self.app.config.http_workers)
            .max_connections(descriptors::limit() / 4 * 3 / self.app.config.http_workers)
            // Each chunk is sent at once, however small the packet.
            .tcp_nodelay(true)
            // A request whose client left is dropped: its place goes to the next one in the queue.
            .h1_allow_half_closed(false)
            .shutdown_timeout(grace)
            .disable_signals()
            .run();
        self.servers.push(Server {
            handle: server.handle(),
            socket,
        });
        self.tasks.spawn(run(server));
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
        self.metrics.spawn(run(server));
        Ok(address)
    }

    /// Reports not ready and goes on serving, so that balancers and clients can notice; until `hurry`.
    pub async fn drain(&self, hurry: impl Future<Output = ()>) {
        let shutdown = &self.app.shutdown;
        shutdown.begin_draining();
        tokio::select! {
            () = sleep_until(shutdown.drained_at()) => {}
            () = hurry => {}
        }
    }

    /// Stops accepting, finishes running work, releases connections.
    pub async fn stop(mut self) {
        let app = self.app.clone();
        let was_drained = app.shutdown.is_draining();
        self.close_sockets().await;
        app.shutdown.begin_stopping();
        let finish = async {
            // A client that was answered before the drain may send one more request on its connection.
            self.connections.close();
            if was_drained {
                let open_connections = self.connections.wait();
                drop(timeout_at(app.shutdown.turns_end_at(), open_connections).await);
            }
            // Turns run on the listeners' threads and would end with them: they end, or are released, first.
            app.turn_tasks.close();
            app.turn_tasks.wait().await;
            for server in &self.servers {
                server.handle.stop(true).await;
            }
            while self.tasks.join_next().await.is_some() {}
        };
        if timeout_at(app.shutdown.deadline(), finish).await.is_err() {
            tracing::warn!("shutdown grace period exceeded");
        }
        self.end().await;
    }

    /// Closes the listening sockets: a new connection is refused at once, and not kept waiting.
    async fn close_sockets(&self) {
        for server in &self.servers {
            server.handle.pause().await;
        }
        sleep(PAUSE_TIME).await;
        for server in &self.servers {
            // The server holds its socket until its threads end: this closes it for both.
            if let Err(error) = SockRef::from(&server.socket).shutdown(Shutdown::Both) {
                tracing::warn!(%error, "listener close failed");
            }
        }
    }

    /// The end, when no request and no turn is left.
    async fn end(mut self) {
        self.ended.cancel();
        let loops = async { while self.background.join_next().await.is_some() {} };
        if timeout(LAST_WRITES_TIMEOUT, loops).await.is_err() {
            self.background.abort_all();
        }
        let finished = timeout(LAST_WRITES_TIMEOUT, jobs::finish(&self.app)).await;
        if !matches!(finished, Ok(Ok(()))) {
            tracing::warn!("final flush failed");
        }
        self.app.db.close().await;
    }
}

async fn run(server: actix_web::dev::Server) {
    if let Err(error) = server.await {
        tracing::error!(%error, "listener failed");
    }
}

fn listen(variable: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    bind(address).with_context(|| format!("THROUGHLINE_{variable}: cannot listen on {address}"))
}

/// A listener for `Node::start_on`.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// `throughline serve`: runs until SIGTERM or SIGINT.
pub async fn serve(config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let metrics = telemetry::init_metrics()?;
    descriptors::raise_limit();
    let app = App::build(config, Clock::system()).await?;
    let node = Node::start(app, Some(metrics)).await?;
    tracing::info!(address = %node.address, "serving");
    signals.wait().await;
    tracing::info!("draining");
    // A second signal ends the wait.
    node.drain(signals.wait()).await;
    tracing::info!("shutting down");
    node.stop().await;
    Ok(())
}

/// The signals that end the process. After `listen`, none is missed.
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
