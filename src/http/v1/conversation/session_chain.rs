//! The chain of a session: its tip, its lineage, and the branch, compress and uncompress operations.

use actix_web::{HttpResponse, get, post, web};
use serde::{Deserialize, Serialize};

use super::sessions::{SessionResponse, session_response};
use crate::app::App;
use crate::domain::conversation::compression::plan::MAX_KEEP_LAST;
use crate::domain::conversation::session::{CompressionRecord, Permission};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::display_name::DisplayName;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::request::extract::{PathSession, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{JsonBody, LargeJsonBody};
use crate::http::request::paging::{ListName, ListResponse, PageParams};
use crate::idempotency::Answer;
use crate::sessions::{self, Branch, Compress};
use crate::store;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct TipResponse {
    pub requested_id: String,
    /// The newest session of the chain: the only one that accepts new messages.
    pub session_id: String,
    pub conversation_id: String,
    /// The number of links between the two.
    pub hops: i32,
}

/// One link of a chain.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct LinkResponse {
    #[serde(flatten)]
    pub session: SessionResponse,
    /// The compression that created this link; null for the first link.
    pub compression: Option<CompressionRecord>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BranchRequest {
    /// The last message to copy. Without it, all messages but those of a running or queued turn are copied. A tool
    /// call whose result is not copied gets a result that says so.
    #[schema(minimum = 1)]
    pub from_seq: Option<i64>,
    pub title: Option<DisplayName>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompressRequest {
    /// The summary that replaces all messages that are not kept.
    #[schema(min_length = 1, max_length = 1_000_000)]
    pub summary: Option<String>,
    /// How many of the last messages stay as they are. A tool call is never separated from its result. The last user
    /// message always stays, and so do images since then and calls at the end that wait for their results.
    #[schema(minimum = 0, maximum = 1000)]
    pub keep_last: Option<u32>,
    /// An instruction for a summary that the service writes: not together with `summary`.
    #[schema(min_length = 1, max_length = 1000)]
    pub focus: Option<String>,
    /// Report the result, and change nothing.
    #[serde(default)]
    pub preview: bool,
}

const _: () = assert!(MAX_KEEP_LAST == 1000);

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct CompressedResponse {
    /// The new tip; null for a preview.
    pub session_id: Option<String>,
    pub parent_id: String,
    pub conversation_id: String,
    /// The number of messages that stay as they are.
    pub kept: i64,
    pub tokens_before: i64,
    pub tokens_after: i64,
}

/// Get the tip of a session's chain.
#[utoipa::path(
    operation_id = "get_tip",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    responses((status = 200, description = "The tip", body = TipResponse))
)]
#[get("/sessions/{id}/tip")]
pub async fn get_tip(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &id, Permission::Participate, now).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(TipResponse {
        requested_id: id.to_string(),
        session_id: tip.name.public_session_id(tip.session_id, access),
        conversation_id: tip.name.public_id(access),
        hops: tip.hops(),
    }))
}

/// List the links of a chain, oldest first.
#[utoipa::path(
    operation_id = "list_lineage",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), PageParams),
    responses((status = 200, description = "A page", body = ListResponse<LinkResponse>))
)]
#[get("/sessions/{id}/lineage")]
pub async fn list_lineage(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
    Query(params): Query<PageParams>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &id, Permission::Participate, now).await?;
    let chain = tip.name.conversation_id;
    let name = ListName::for_context(&context, format!("lineage/{chain}"));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let page = store::conversation::sessions::list_lineage(&mut tx, access, chain, &page).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, |link| LinkResponse {
        compression: link.compression.clone(),
        session: SessionResponse::new(link, access),
    })?;
    Ok(HttpResponse::Ok().json(response))
}

/// Branch a conversation: a new one begins with a copy of its messages.
#[utoipa::path(
    operation_id = "branch_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    request_body = BranchRequest,
    responses((status = 201, description = "The branch", body = SessionResponse))
)]
#[post("/sessions/{id}/branch")]
pub async fn branch_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
    retryable: IdempotencyKey,
    body: JsonBody<BranchRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let request = Branch {
        from_seq: body.value.from_seq,
        title: body.value.title.map(|title| title.as_str().to_owned()),
    };
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let access = &context.access;
            let now = app.clock.now();
            let tip = sessions::find(tx, access, &id, Permission::Manage, now).await?;
            let branch = sessions::branch(tx, access, &id, request, now).await?;
            let response = session_response(tx, access, branch).await?;
            sessions::audit_read(&app, tx, &context.actor(), access, &tip).await?;
            Answer::new(201, &response)
        })
        .await
}

/// Compress a session: a summary replaces all but the last messages.
#[utoipa::path(
    operation_id = "compress_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    request_body = CompressRequest,
    responses(
        (status = 201, description = "The new tip", body = CompressedResponse),
        (status = 200, description = "A concurrent request compressed first, or it was a preview", body = CompressedResponse)
    )
)]
#[post("/sessions/{id}/compress")]
pub async fn compress_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
    retryable: IdempotencyKey,
    body: LargeJsonBody<CompressRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let request = read_compress(body.value)?;
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let access = &context.access;
            let now = app.clock.now();
            let result = sessions::compress(tx, access, &id, &request, now).await?;
            let name = &result.tip.name;
            let response = CompressedResponse {
                session_id: result
                    .child
                    .map(|child| name.public_session_id(child, access)),
                parent_id: name.public_session_id(result.parent, access),
                conversation_id: name.public_id(access),
                kept: result.record.kept,
                tokens_before: result.record.tokens_before,
                tokens_after: result.record.tokens_after,
            };
            Answer::new(if result.made { 201 } else { 200 }, &response)
        })
        .await
}

const MAX_SUMMARY_CHARS: usize = 1_000_000;

fn read_compress(request: CompressRequest) -> Result<Compress> {
    let Some(summary) = request.summary else {
        let detail = "the service does not write summaries yet: give one";
        let error = FieldError::new("/summary", detail);
        return Err(Error::fields(Code::SummaryRequired, vec![error]));
    };
    let mut errors = Vec::new();
    if summary.trim().is_empty() || summary.chars().count() > MAX_SUMMARY_CHARS {
        let detail = format!("must have 1 to {MAX_SUMMARY_CHARS} characters, and not only spaces");
        errors.push(FieldError::new("/summary", detail));
    }
    if request.focus.is_some() {
        let detail = "is for a summary written by the service: leave it out when you give one";
        errors.push(FieldError::new("/focus", detail));
    }
    Error::check(errors)?;
    Ok(Compress {
        summary,
        keep_last: request.keep_last,
        preview: request.preview,
    })
}

/// Undo the newest compression, if no message was added since.
#[utoipa::path(
    operation_id = "uncompress_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    responses(
        (status = 200, description = "The session that is the tip again", body = SessionResponse),
        (status = 409, description = "It is not compressed, or has new messages", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/sessions/{id}/uncompress")]
pub async fn uncompress_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let parent = sessions::uncompress(&mut tx, access, &id, app.clock.now()).await?;
    let response = session_response(&mut tx, access, parent).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(response))
}
