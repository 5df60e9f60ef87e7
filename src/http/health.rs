//! Liveness and readiness. Both are public, so they contain names and "ok" or "failed", nothing more.

use std::time::Duration;

use actix_web::{HttpResponse, get, web};
use serde::Serialize;

use crate::app::App;
use crate::error::Error;

/// A probe has given up by then.
const PING_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    Ok,
    Failed,
}

impl Health {
    fn from_result<T, E>(result: Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Ok,
            Err(_) => Self::Failed,
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct HealthResponse {
    pub status: Health,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ReadyResponse {
    /// Whether this node accepts requests. Without Redis it does, with fewer features.
    pub status: Health,
    pub dependencies: Dependencies,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Dependencies {
    pub postgres: Health,
    pub redis: Health,
}

/// Check that the process answers.
#[utoipa::path(
    operation_id = "get_health",
    tag = "service",
    security(()),
    responses((status = 200, description = "Alive", body = HealthResponse))
)]
#[get("/healthz")]
pub async fn get_health() -> HttpResponse {
    HttpResponse::Ok().json(HealthResponse { status: Health::Ok })
}

/// Check that the node accepts requests: Postgres answers, and the node is not shutting down.
#[utoipa::path(
    operation_id = "get_readiness",
    tag = "service",
    security(()),
    responses(
        (status = 200, description = "Ready", body = ReadyResponse),
        (status = 503, description = "Not ready", body = ReadyResponse)
    )
)]
#[get("/readyz")]
pub async fn get_readiness(app: web::Data<App>) -> HttpResponse {
    let postgres = tokio::time::timeout(PING_TIMEOUT, app.db.ping());
    let (postgres, redis) = tokio::join!(postgres, app.redis.ping());
    let postgres = Health::from_result(postgres.unwrap_or_else(|late| Err(Error::internal(late))));
    let ready = postgres == Health::Ok && !app.shutdown.is_draining();
    let body = ReadyResponse {
        status: if ready { Health::Ok } else { Health::Failed },
        dependencies: Dependencies {
            postgres,
            redis: Health::from_result(redis),
        },
    };
    if ready {
        HttpResponse::Ok().json(body)
    } else {
        HttpResponse::ServiceUnavailable().json(body)
    }
}
