//! Conversations as documents: `GET /v1/sessions/{id}/export`, written while it is read, and
//! `POST /v1/sessions/import`.

use actix_web::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use actix_web::web::Bytes;
use actix_web::{HttpResponse, get, post, web};
use serde::Deserialize;

use super::sessions::{SessionResponse, session_response};
use crate::app::App;
use crate::domain::conversation::session_name::{SessionKey, SessionRef};
use crate::domain::transfer::document::{Document, DocumentSignature};
use crate::domain::transfer::export::{JsonWriter, Piece};
use crate::domain::transfer::import;
use crate::domain::transfer::markdown;
use crate::error::{Error, Result};
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::auth::credential::RawCredential;
use crate::http::request::extract::{PathSession, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{LargeJsonBody, MAX_LARGE_JSON_BYTES};
use crate::http::response::download::{self, Pages};
use crate::idempotency::Answer;
use crate::sessions::{self, Export};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// For `POST /v1/sessions/import`.
    #[default]
    Json,
    /// For reading.
    Markdown,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExportParams {
    #[serde(default)]
    #[param(inline)]
    format: ExportFormat,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ImportParams {
    /// The session key of the conversation. A new key is created.
    #[param(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    session_key: Option<String>,
}

/// Export a whole conversation, whichever of its ids is named.
///
/// Messages after the beginning of the export are not in it. An interrupted document is incomplete: its
/// `signature` comes last.
#[utoipa::path(
    operation_id = "export_session",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), ExportParams),
    responses((status = 200, description = "The conversation", content(
        (Document = "application/json"),
        (String = "text/markdown")
    )))
)]
#[get("/sessions/{id}/export")]
pub async fn export_session(
    app: web::Data<App>,
    caller: ConversationReader,
    credential: RawCredential,
    PathSession(id): PathSession,
    Query(params): Query<ExportParams>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let pages = Pages::open(app, context, credential).await?;
    let app = &pages.app;
    let context = &pages.context;
    let actor = context.actor();
    let access = &context.access;
    let mut tx = context.begin(&app.db).await?;
    let export = sessions::export(app, &mut tx, &actor, access, &id).await?;
    tx.commit().await?;
    let (content_type, ending) = match params.format {
        ExportFormat::Json => ("application/json", "json"),
        ExportFormat::Markdown => ("text/markdown; charset=utf-8", "md"),
    };
    let file = format!(
        "attachment; filename=\"conversation-{}.{ending}\"",
        export.head.id
    );
    let download = Download {
        pages,
        export,
        format: params.format,
        writer: None,
    };
    let credential = download.pages.credential.clone();
    let chunks = download::stream(credential, download, Download::chunk);
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, content_type))
        .insert_header((CONTENT_DISPOSITION, file))
        .streaming(chunks))
}

/// An export that a client reads at its own pace.
struct Download {
    pages: Pages,
    export: Export,
    format: ExportFormat,
    /// `None` before the first chunk.
    writer: Option<Writer>,
}

enum Writer {
    Json(JsonWriter),
    Markdown,
}

impl Download {
    /// The next bytes, and the rest of the download, if there is one. An error aborts the answer.
    async fn chunk(mut self) -> Result<(Bytes, Option<Self>)> {
        match self.write().await {
            Ok((bytes, true)) => Ok((bytes, None)),
            Ok((bytes, false)) => Ok((bytes, Some(self))),
            Err(error) => {
                self.pages.log_broken_off(&error);
                Err(error)
            }
        }
    }

    /// The next bytes, and whether they are the last.
    async fn write(&mut self) -> Result<(Bytes, bool)> {
        let mut out = Vec::new();
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => self.begin(&mut out)?,
        };
        let pieces = self.read().await?;
        match &mut writer {
            Writer::Json(json) => {
                for piece in &pieces {
                    json.piece(piece, &mut out)?;
                }
            }
            Writer::Markdown => {
                let mut text = String::new();
                for piece in &pieces {
                    markdown::write_piece(piece, &mut text)?;
                }
                out.extend_from_slice(text.as_bytes());
            }
        }
        let last = pieces.is_empty();
        match (writer, last) {
            (writer, false) => self.writer = Some(writer),
            (Writer::Json(json), true) => {
                let Pages { app, context, .. } = &self.pages;
                let keyring = &app.keyring;
                let tenant_id = context.tenant_id();
                let sign = |digest: &[u8; 32]| DocumentSignature::make(keyring, tenant_id, digest);
                json.end(sign, &mut out)?;
            }
            (Writer::Markdown, true) => {}
        }
        Ok((out.into(), last))
    }

    fn begin(&self, out: &mut Vec<u8>) -> Result<Writer> {
        let head = &self.export.head;
        match self.format {
            ExportFormat::Json => JsonWriter::begin(head, out).map(Writer::Json),
            ExportFormat::Markdown => {
                let mut text = String::new();
                markdown::write_head(head, &mut text);
                out.extend_from_slice(text.as_bytes());
                Ok(Writer::Markdown)
            }
        }
    }

    /// Reads in a transaction of its own, which ends before the client reads on.
    async fn read(&mut self) -> Result<Vec<Piece>> {
        let app = self.pages.app.clone();
        let _turn = Pages::turn(&app).await?;
        let mut tx = self.pages.begin().await?;
        let access = &self.pages.context.access;
        let now = app.clock.now();
        let pieces = self.export.next(&mut tx, access, now).await?;
        tx.commit().await?;
        Ok(pieces)
    }
}

/// Import an exported conversation with new ids. The caller owns it.
///
/// The body may have 16 MiB, 1000 links and 20000 messages, and with its copies 64 MiB. Every member but `links`
/// is optional. Ids, identities, platforms and times are accepted and ignored. Only admin and chat keys may import
/// other roles than `user`, notices and handoffs; other callers may if the `signature` proves that this service
/// exported exactly this document for this tenant. If the agent does not exist, the conversation belongs to `main`.
#[utoipa::path(
    operation_id = "import_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(ImportParams),
    request_body = Document,
    responses((status = 201, description = "Created; the tip of the new chain", body = SessionResponse))
)]
#[post("/sessions/import")]
pub async fn import_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    Query(params): Query<ImportParams>,
    retryable: IdempotencyKey,
    body: LargeJsonBody<Document>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let parse = |key: &String| SessionKey::parse(key, "/query/session_key");
    let session_key = params.session_key.as_ref().map(parse).transpose()?;
    // The key is part of the request.
    let named = params.session_key.unwrap_or_default();
    let hash = body.hash.with(named.as_bytes());
    let document = body.value;
    let document = web::block(move || import::check(document))
        .await
        .map_err(Error::internal)??;
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), hash, async |tx| {
            let access = &context.access;
            let now = app.clock.now();
            let key = session_key.as_ref();
            let tip = sessions::import(&app, tx, access, &document, key, now).await?;
            Answer::new(201, &session_response(tx, access, tip).await?)
        })
        .await
}

const _: () = assert!(MAX_LARGE_JSON_BYTES == 16 * 1024 * 1024);
const _: () = assert!(import::MAX_LINKS == 1000 && import::MAX_MESSAGES == 20_000);
