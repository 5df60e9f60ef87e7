//! Home channels: the chat in which a user wants to be reached, one for each platform.

use chrono::{DateTime, Utc};
use sqlx::types::Json;

use super::identities::read_name;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::home_channel::HomeChannel;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::Identity;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, UserId};
use crate::store::TenantTx;

#[derive(sqlx::FromRow)]
struct Row {
    home_platform: String,
    chat: Json<Chat>,
    updated_at: DateTime<Utc>,
    id: IdentityId,
    platform: String,
    scope: String,
    external_id: String,
}

impl TryFrom<Row> for HomeChannel {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self> {
        Ok(Self {
            platform: row.home_platform.parse().map_err(Error::internal)?,
            identity: Identity {
                id: row.id,
                name: read_name(&row.platform, &row.scope, row.external_id)?,
            },
            chat: row.chat.0,
            updated_at: row.updated_at,
        })
    }
}

/// All home channels of a user, by platform.
pub async fn list(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<HomeChannel>> {
    let rows = sqlx::query_as::<_, Row>(
        "select h.platform as home_platform, h.chat, h.updated_at, i.id, i.platform, i.scope, i.external_id
           from home_channels h
           join identities i
             on i.tenant_id = $1
            and i.id = h.identity_id
          where h.tenant_id = $1
            and h.user_id = $2
          order by h.platform",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?;
    rows.into_iter().map(HomeChannel::try_from).collect()
}

/// Sets a user's home channel on a platform.
pub async fn upsert(
    tx: &mut TenantTx,
    user_id: UserId,
    platform: &PlatformScope,
    identity_id: IdentityId,
    chat: &Chat,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into home_channels (tenant_id, user_id, platform, identity_id, chat, updated_at)
         values ($1, $2, $3, $4, $5, $6)
             on conflict on constraint home_channels_pkey do update
            set identity_id = excluded.identity_id, chat = excluded.chat, updated_at = excluded.updated_at",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(platform.to_string())
    .bind(identity_id)
    .bind(Json(chat))
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Returns false if there was none.
pub async fn delete(tx: &mut TenantTx, user_id: UserId, platform: &PlatformScope) -> Result<bool> {
    let done = sqlx::query(
        "delete from home_channels
          where tenant_id = $1
            and user_id = $2
            and platform = $3",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(platform.to_string())
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}
