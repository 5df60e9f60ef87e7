//! `GET /v1/users/{id}/export`: everything of a user, written while it is read.

use actix_web::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use actix_web::web::Bytes;
use actix_web::{HttpResponse, get, web};

use crate::app::App;
use crate::domain::transfer::user_document::UserDocument;
use crate::error::Result;
use crate::http::auth::conversation::UserExporter;
use crate::http::auth::credential::RawCredential;
use crate::http::request::extract::PathId;
use crate::http::response::download::{self, Pages};
use crate::ids::UserId;
use crate::people::{self, UserExport};

/// Export everything of a user as one document.
///
/// It has the user's identities, session keys, grants, deliveries and usage, their conversations, each in the form
/// of `/v1/sessions/{id}/export`, and their messages in conversations of others. Rows that are created or deleted
/// during the export may be in it or not. An interrupted document is incomplete.
#[utoipa::path(
    operation_id = "export_user",
    tag = "people",
    security(("api_key" = ["admin"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the token's user, or the tenant"))),
    params(("id" = UserId, Path, description = "The person")),
    responses((status = 200, description = "Everything", body = UserDocument))
)]
#[get("/users/{id}/export")]
pub async fn export_user(
    app: web::Data<App>,
    caller: UserExporter,
    credential: RawCredential,
    PathId(id): PathId<UserId>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let pages = Pages::open(app, context, credential).await?;
    let app = &pages.app;
    let context = &pages.context;
    let actor = context.actor();
    let access = &context.access;
    let mut tx = context.begin(&app.db).await?;
    let user = context.find_user(&mut tx, id).await?;
    let file = format!("attachment; filename=\"person-{}.json\"", user.id);
    let (export, unsent) = people::export(app, &mut tx, &actor, access, user).await?;
    tx.commit().await?;
    let credential = pages.credential.clone();
    let download = Download {
        pages,
        export,
        unsent,
    };
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, "application/json"))
        .insert_header((CONTENT_DISPOSITION, file))
        .streaming(download::stream(credential, download, Download::chunk)))
}

/// An export that a client reads at its own pace.
struct Download {
    pages: Pages,
    export: UserExport,
    /// Bytes that are written and not sent.
    unsent: Vec<u8>,
}

impl Download {
    async fn chunk(mut self) -> Result<(Bytes, Option<Self>)> {
        match self.read().await {
            Ok((bytes, true)) => Ok((bytes.into(), None)),
            Ok((bytes, false)) => Ok((bytes.into(), Some(self))),
            Err(error) => {
                self.pages.log_broken_off(&error);
                Err(error)
            }
        }
    }

    /// Reads in a transaction of its own, which ends before the client reads on.
    async fn read(&mut self) -> Result<(Vec<u8>, bool)> {
        let app = self.pages.app.clone();
        let _turn = Pages::turn(&app).await?;
        let mut tx = self.pages.begin().await?;
        let access = &self.pages.context.access;
        let (bytes, last) = self.export.next(&app, &mut tx, access).await?;
        tx.commit().await?;
        let mut out = std::mem::take(&mut self.unsent);
        out.extend(bytes);
        Ok((out, last))
    }
}
