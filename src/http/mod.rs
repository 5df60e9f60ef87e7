//! The HTTP surface. Handlers parse, authorise, call a use case and render; no rule and no SQL is here.
//! This file is the whole route list.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceFactory, ServiceRequest, ServiceResponse};
use actix_web::middleware::from_fn;
use actix_web::web;
use serde_json::Value;
use utoipa::openapi::OpenApi;
use utoipa_actix_web::service_config::ServiceConfig;
use utoipa_actix_web::{AppExt, scope};

use crate::app::App;

mod auth;
mod cors;
mod docs;
mod fallback;
mod health;
mod hops;
mod limits;
mod middleware;
mod openai;
pub mod openapi;
mod request;
mod response;
mod v1;

/// The routes of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// Everything on one listener.
    All,
    /// All but the operator's, which have a listener of their own.
    Tenants,
    /// The operator's listener.
    Operator,
}

fn tenant_routes(routes: &mut ServiceConfig) {
    routes
        // The most frequent first: routes are tried in this order.
        .service(openai::models::list_models)
        .service(openai::models::get_model)
        .service(openai::completions::create_chat_completion)
        .service(v1::bridge::inbound::create_inbound)
        .service(v1::bridge::deliveries::fetch_deliveries)
        .service(v1::bridge::deliveries::stream_deliveries)
        .service(v1::bridge::deliveries::list_dead_deliveries)
        .service(v1::bridge::deliveries::ack_delivery)
        .service(v1::bridge::deliveries::nack_delivery)
        .service(v1::bridge::deliveries::replay_delivery)
        .service(v1::tenant::own_tenant::get_tenant)
        .service(v1::tenant::own_tenant::update_tenant)
        .service(v1::tenant::retention::get_retention)
        .service(v1::tenant::retention::sweep_retention)
        .service(v1::tenant::usage::get_usage)
        .service(v1::tenant::api_keys::create_api_key)
        .service(v1::tenant::api_keys::list_api_keys)
        .service(v1::tenant::api_keys::revoke_api_key)
        .service(v1::tenant::issuers::put_issuer)
        .service(v1::tenant::issuers::list_issuers)
        .service(v1::tenant::issuers::get_issuer)
        .service(v1::tenant::issuers::delete_issuer)
        .service(v1::tenant::agents::put_agent)
        .service(v1::tenant::agents::list_agents)
        .service(v1::tenant::agents::get_agent)
        .service(v1::tenant::agents::delete_agent)
        .service(v1::people::users::create_user)
        .service(v1::people::users::list_users)
        .service(v1::people::users::get_own_user)
        .service(v1::people::users::get_user)
        .service(v1::people::users::update_user)
        .service(v1::people::users::delete_user)
        .service(v1::people::users::merge_users)
        .service(v1::identity_links::document::put_identity_links)
        .service(v1::identity_links::document::get_identity_links)
        .service(v1::people::user_export::export_user)
        .service(v1::people::identities::list_identities)
        .service(v1::people::identities::list_presence)
        .service(v1::people::identities::unlink_identity)
        .service(v1::people::identities::undo_unlink_identity)
        .service(v1::people::home_channels::list_home_channels)
        .service(v1::people::home_channels::put_home_channel)
        .service(v1::people::home_channels::delete_home_channel)
        .service(v1::identity_links::link_codes::create_link_code)
        .service(v1::identity_links::link_codes::redeem_link_code)
        .service(v1::people::resolve::resolve)
        .service(v1::turn::turns::get_turn)
        .service(v1::turn::turns::cancel_turn)
        .service(v1::turn::turns::stream_turn_events)
        .service(v1::turn::turns::list_turns)
        .service(v1::turn::turns::stream_session_events)
        .service(v1::turn::turns::stream_session_key_events)
        .service(v1::conversation::sessions::create_session)
        .service(v1::conversation::sessions::list_sessions)
        .service(v1::conversation::sessions::get_session)
        .service(v1::conversation::sessions::update_session)
        .service(v1::conversation::sessions::delete_session)
        .service(v1::conversation::session_messages::list_messages)
        .service(v1::conversation::session_messages::append_messages)
        .service(v1::conversation::session_chain::get_tip)
        .service(v1::conversation::session_chain::list_lineage)
        .service(v1::conversation::session_chain::branch_session)
        .service(v1::conversation::session_chain::compress_session)
        .service(v1::conversation::session_chain::uncompress_session)
        .service(v1::conversation::session_transfer::export_session)
        .service(v1::conversation::session_transfer::import_session)
        .service(v1::conversation::session_grants::list_grants)
        .service(v1::conversation::session_grants::revoke_grants)
        .service(v1::conversation::session_keys::list_session_keys)
        .service(v1::conversation::session_keys::get_session_key)
        .service(v1::conversation::session_keys::reset_session_key)
        .service(v1::conversation::session_keys::switch_session_key)
        .service(v1::conversation::session_keys::append_to_session_key)
        .service(v1::tenant::audit::list_audit)
        .service(v1::tenant::audit::get_audit_head);
}

fn operator_routes(routes: &mut ServiceConfig) {
    routes
        .service(v1::tenant::tenants::create_tenant)
        .service(v1::tenant::tenants::list_tenants)
        .service(v1::tenant::tenants::view_tenant)
        .service(v1::tenant::tenants::change_tenant)
        .service(v1::tenant::tenants::suspend_tenant)
        .service(v1::tenant::tenants::resume_tenant)
        .service(v1::tenant::tenants::delete_tenant)
        .service(v1::tenant::limits::set_tenant_limits)
        .service(v1::tenant::operator::create_admin_key)
        .service(v1::tenant::operator::list_nodes)
        .service(v1::tenant::operator::list_operator_audit);
}

fn routes(surface: Surface) -> impl FnOnce(&mut ServiceConfig) {
    move |routes: &mut ServiceConfig| {
        routes
            .service(health::get_health)
            .service(health::get_readiness)
            .service(
                scope::scope("/v1")
                    .configure(move |v1: &mut ServiceConfig| {
                        if surface != Surface::Operator {
                            tenant_routes(v1);
                        }
                        if surface != Surface::Tenants {
                            operator_routes(v1);
                        }
                        v1.service(v1::tenant::whoami::whoami);
                    })
                    .wrap(from_fn(auth::middleware::authenticate)),
            );
    }
}

/// The routes as OpenAPI, before `openapi::finish` adds what all operations share.
fn collect(surface: Surface) -> OpenApi {
    let (_, collected) = actix_web::App::new()
        .into_utoipa_app()
        .openapi(openapi::skeleton())
        .configure(routes(surface))
        .split_for_parts();
    collected
}

/// The OpenAPI document of all routes.
pub fn document() -> anyhow::Result<Value> {
    openapi::finish(&collect(Surface::All))
}

/// The state that the worker threads of one listener share; created once.
#[derive(Clone)]
pub struct Shared {
    surface: Surface,
    app: web::Data<App>,
    paths: web::Data<fallback::KnownPaths>,
}

impl Shared {
    pub fn new(app: App, surface: Surface) -> Self {
        Self {
            surface,
            app: web::Data::new(app),
            paths: web::Data::new(fallback::KnownPaths::from_document(&collect(surface))),
        }
    }
}

/// The application one worker thread serves.
pub fn application(
    shared: Shared,
) -> actix_web::App<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<impl MessageBody>,
        Error = actix_web::Error,
        InitError = (),
    >,
> {
    let (app, _) = actix_web::App::new()
        .into_utoipa_app()
        .configure(routes(shared.surface))
        .split_for_parts();
    app.app_data(shared.app)
        .app_data(shared.paths)
        .route("/openapi.json", web::get().to(docs::get_document))
        .route("/docs", web::get().to(docs::redirect_to_docs))
        .route("/docs/{file:.*}", web::get().to(docs::get_docs_file))
        .default_service(web::to(fallback::refuse))
        .wrap(from_fn(middleware::wrap_request))
}
