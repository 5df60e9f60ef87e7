//! `/v1/link-codes`: a user links two identities by carrying a code from one to the other.

use actix_web::{HttpResponse, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::identity_links::MergeCounts;
use crate::domain::people::access::Access;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::identity::{Claim, IdentityCaller};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::JsonBody;
use crate::idempotency::Answer;
use crate::ids::UserId;
use crate::people::{self, RedeemRequest, RedeemResult};

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateLinkCodeRequest {
    /// The identity that mints the code; else that of the header `X-Throughline-Identity`, else the token's own.
    pub identity: Option<IdentityName>,
    /// The chat that shows the code: a direct chat.
    pub chat: Option<Chat>,
    /// The platform on which the code must be redeemed.
    pub platform: Option<PlatformScope>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct LinkCodeResponse {
    /// Shown once; a retry shows it again for ten minutes.
    pub code: Option<String>,
    pub expires_at: DateTime<Utc>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RedeemLinkCodeRequest {
    #[schema(min_length = 1, max_length = 64)]
    pub code: String,
    /// The redeeming identity; else that of the header `X-Throughline-Identity`, else the token's own.
    pub identity: Option<IdentityName>,
    /// The chat of the redeeming identity: a direct chat.
    pub chat: Option<Chat>,
    /// Report who would be merged, and leave the code unused.
    #[serde(default)]
    pub dry_run: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct RedeemedResponse {
    /// The merged user.
    pub user_id: UserId,
    /// The previous user id of the redeeming identity. It still answers.
    pub merged_user_id: UserId,
    /// The identities that were moved.
    #[schema(value_type = Vec<IdentityName>)]
    pub identities: Vec<String>,
    /// What was moved.
    pub moved: MergeCounts,
    /// The key of the redeeming identity's direct chat with `main`; null in a dry run.
    pub session_key: Option<String>,
    /// The current session of that key; null if there is none yet.
    pub session_id: Option<String>,
    pub conversation_id: Option<String>,
    pub dry_run: bool,
}

impl RedeemedResponse {
    fn new(redeemed: RedeemResult, access: &Access, dry_run: bool) -> Self {
        let names = redeemed
            .merge
            .identities
            .iter()
            .map(|one| one.name.to_string());
        let session = redeemed.session.as_ref();
        Self {
            user_id: redeemed.merge.into,
            merged_user_id: redeemed.merge.from,
            identities: names.collect(),
            moved: redeemed.merge.counts,
            session_key: redeemed.session_key,
            session_id: session.map(|session| session.public_id(access)),
            conversation_id: session.map(|session| session.name.public_id(access)),
            dry_run,
        }
    }
}

/// Create a code that links this identity with another one of the same user.
///
/// It is valid for ten minutes, once, and only in a direct chat.
#[utoipa::path(
    operation_id = "create_link_code",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named identity, or the token's user"))),
    request_body = CreateLinkCodeRequest,
    responses((status = 201, description = "The code, shown once", body = LinkCodeResponse))
)]
#[post("/link-codes")]
pub async fn create_link_code(
    app: web::Data<App>,
    caller: IdentityCaller,
    retryable: IdempotencyKey,
    body: JsonBody<CreateLinkCodeRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let verified = caller.vouch(Claim {
        identity: request.identity,
        chat: request.chat.as_ref(),
        display_name: None,
    })?;
    request.chat.unwrap_or(Chat::DM).require_private()?;
    let known = verified.contact(&app).await?;
    let tx = verified.begin(&app.db).await?;
    retryable
        .answer(&app, tx, verified.principal(), body.hash, async |tx| {
            let platform = request.platform.as_ref();
            let actor = verified.actor();
            let (code, expires_at) = people::mint(&app, tx, &actor, &known, platform).await?;
            let response = LinkCodeResponse {
                code: Some(code.as_str().to_owned()),
                expires_at,
            };
            Ok(Answer::new(201, &response)?.with_secret("code"))
        })
        .await
}

/// Redeem a code: the user of the redeeming identity and the user of the code become one.
///
/// Wrong codes are counted, and lock the identity, the key and the tenant for a while.
#[utoipa::path(
    operation_id = "redeem_link_code",
    tag = "people",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named identity, or the token's user"))),
    request_body = RedeemLinkCodeRequest,
    responses(
        (status = 200, description = "Merged, or the changes of a dry run", body = RedeemedResponse),
        (status = 409, description = "Already one user, or only an admin may merge them", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/link-codes/redeem")]
pub async fn redeem_link_code(
    app: web::Data<App>,
    caller: IdentityCaller,
    retryable: IdempotencyKey,
    body: JsonBody<RedeemLinkCodeRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    if !(1..=64).contains(&request.code.chars().count()) {
        let error = FieldError::new("/code", "must have 1 to 64 characters");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    }
    let verified = caller.vouch(Claim {
        identity: request.identity,
        chat: request.chat.as_ref(),
        display_name: None,
    })?;
    if let Err(refusal) = request.chat.as_ref().map_or(Ok(()), Chat::require_private) {
        let mut tx = verified.begin(&app.db).await?;
        people::void(&app, &mut tx, &request.code).await?;
        tx.commit().await?;
        return Err(refusal);
    }
    let known = verified.contact(&app).await?;
    let redeem = RedeemRequest {
        code: &request.code,
        identity: &verified.identity(&known),
        namespace: verified.namespace(),
        dry_run: request.dry_run,
    };
    people::with_charged_attempt(&app, verified.credential(), known.id, async || {
        let mut tx = verified.begin(&app.db).await?;
        let actor = verified.actor();
        let access = |user_id| {
            if verified.is_user() {
                Access::of_user(user_id, verified.identity(&known))
            } else {
                Access::of_service(user_id, verified.identity(&known))
            }
        };
        if request.dry_run {
            let redeemed = people::redeem(&app, &mut tx, &actor, &redeem).await?;
            let access = access(redeemed.merge.into);
            let response = RedeemedResponse::new(redeemed, &access, true);
            return Ok(HttpResponse::Ok().json(response));
        }
        retryable
            .answer(&app, tx, verified.principal(), body.hash, async |tx| {
                let redeemed = people::redeem(&app, tx, &actor, &redeem).await?;
                let access = access(redeemed.merge.into);
                Answer::new(200, &RedeemedResponse::new(redeemed, &access, false))
            })
            .await
    })
    .await
}
