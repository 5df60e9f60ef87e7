//! Every table with data of users is listed with what erasing makes of it.

use sqlx::PgConnection;

use crate::support::data::erasure::PERSON_TABLES;
use crate::support::servers::cluster::cluster;

/// What names a person, or something a person wrote, wherever it is a column.
const PERSON_COLUMNS: [&str; 24] = [
    "actor",
    "chat_ref",
    "claimed_by",
    "consumed_by",
    "display_name",
    "external_id",
    "from_user",
    "identity",
    "identity_id",
    "identity_ids",
    "merged_ids",
    "minted_by",
    "namespace",
    "old_id",
    "origin_identity_id",
    "participant",
    "principal",
    "profile",
    "raw",
    "sender",
    "sender",
    "subject",
    "to_user",
    "user_id",
];

/// Tables that name a person, or lead to one by foreign keys.
async fn tables_of_people(superuser: &mut PgConnection) -> Vec<String> {
    sqlx::query_scalar(
        "with recursive led as (
           select 'users'::regclass::oid as id
            union
           select 'identities'::regclass::oid
            union
           select k.conrelid
             from led l
             join pg_constraint k on k.confrelid = l.id and k.contype = 'f'
         )
         select distinct c.relname::text
           from pg_class c
          where c.relnamespace = 'public'::regnamespace
            and c.relkind in ('r', 'p')
            and (c.oid in (select id from led)
                 or exists (select 1
                              from pg_attribute a
                             where a.attrelid = c.oid
                               and a.attnum > 0
                               and not a.attisdropped
                               and a.attname = any ($1)))
          order by 1",
    )
    .bind(PERSON_COLUMNS.as_slice())
    .fetch_all(superuser)
    .await
    .unwrap()
}

/// Fails with what to do.
fn check_listed(found: &[String]) -> Result<(), String> {
    let listed = |table: &String| PERSON_TABLES.iter().any(|(name, _, _)| name == table);
    match found.iter().find(|table| !listed(table)) {
        None => Ok(()),
        Some(table) => Err(format!(
            "the table {table} can hold a person's data: let people::erase remove it and people::export \
             write it, fill it in support::data::whole_user, and say so in PERSON_TABLES"
        )),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_with_data_of_users_is_listed() {
    let database = cluster().new_database().await;
    let mut superuser = cluster().superuser(&database).await;
    let found = tables_of_people(&mut superuser).await;
    check_listed(&found).unwrap();
    for (table, _, _) in PERSON_TABLES {
        assert!(found.contains(&table.to_owned()), "{table} is no more");
    }
    for made in [
        "create table notes (tenant_id uuid not null, id uuid, user_id uuid, primary key (tenant_id, id))",
        "create table notes (tenant_id uuid not null, session_id uuid, primary key (tenant_id, session_id),
           foreign key (tenant_id, session_id) references sessions (tenant_id, id))",
    ] {
        sqlx::raw_sql(made).execute(&mut superuser).await.unwrap();
        let unlisted = check_listed(&tables_of_people(&mut superuser).await).unwrap_err();
        assert!(unlisted.contains("the table notes"), "{unlisted}");
        sqlx::raw_sql("drop table notes")
            .execute(&mut superuser)
            .await
            .unwrap();
    }
}
